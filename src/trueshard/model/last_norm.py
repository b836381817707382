"""The norm behind the last block, found by reading the forward of the module that holds the blocks.

A norm computes each token by itself, so it may be given a part of the tokens, if what the blocks return goes into it
and nowhere else. Of a module's children alone that cannot be told; its forward says it, where it is plain::

    for layer in self.layers:
        hidden_states = layer(hidden_states, ...)
    hidden_states = self.norm(hidden_states)

What is written in another way is not found, which is never wrong.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterable, Sequence

from torch import nn

from trueshard import _torch
from trueshard.model import names

_BATCHES = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_OVER_TOKENS = (*_BATCHES, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, nn.GroupNorm)
ASKED = "output_hidden_states"
"""The argument of transformers' models by which they return what lies between blocks."""


def last_norm(root: nn.Module, blocks: Sequence[str]) -> str | None:
    """Return the name of the norm that alone is given what the last of ``blocks`` returns; None if none is found.

    Args:
        root: the model.
        blocks: names of its blocks, in one list.
    """
    listed = blocks[0].rpartition(".")[0]
    above, _, attribute = listed.rpartition(".")
    holder = dict(names.named_modules(root))[above]
    function = _forward_of(holder)
    called = None if function is None else _called_behind(function, attribute)
    norm = _torch.own_modules(holder).get(called) if called else None
    if norm is None or not _is_norm(names.unwrap(norm)):
        return None
    return f"{above}.{called}" if above else called


def _is_norm(module: nn.Module) -> bool:
    """True for vectors alone that scale or shift each token; not for statistics over tokens."""
    sizes = [each.ndim for each in module.parameters()]
    return bool(sizes) and max(sizes) == 1 and not any(isinstance(each, _OVER_TOKENS) for each in module.modules())


def _forward_of(module: nn.Module) -> ast.FunctionDef | None:
    """Return the forward of a module's class, without decorators; None where there is no source."""
    if "forward" in vars(module):
        return None
    try:
        source = inspect.getsource(inspect.unwrap(type(module).forward))
        function = ast.parse(textwrap.dedent(source)).body[0]
    except (OSError, TypeError, SyntaxError):
        return None
    return function if isinstance(function, ast.FunctionDef) else None


def _called_behind(function: ast.FunctionDef, listed: str) -> str | None:
    """Return the attribute of ``self`` that is called with what the loop over ``self.<listed>`` leaves."""
    loops = [each for each in function.body if isinstance(each, ast.For) and _mentions(each.iter, listed)]
    if len(loops) != 1 or _mentions(function, listed) != 1:
        return None
    (loop,) = loops
    behind = [each for each in function.body[function.body.index(loop) + 1 :] if not _is_on_demand(each)]
    hidden = _carried(loop, behind)
    if hidden is None:
        return None
    for number, statement in enumerate(behind):
        if hidden in _names(statement, ast.Store) and hidden not in _names(statement, ast.Load):
            return None
        if hidden in _names(statement, ast.Load):
            return _called_with(hidden, statement, behind[number + 1 :], function)
    return None


def _carried(loop: ast.For, behind: Sequence[ast.stmt]) -> str | None:
    """Return the variable that a loop gives each block and sets to what the block returns, which goes nowhere else."""
    if loop.orelse or any(isinstance(each, (ast.Return, ast.Break, ast.Continue)) for each in ast.walk(loop)):
        return None
    body = [each for each in loop.body if not _is_on_demand(each)]
    given = set(_names(loop.target, ast.Store))
    calls = [each for each in body if isinstance(each, ast.Assign) and _function(each.value) in given]
    if len(calls) != 1 or not isinstance(call := calls[0].value, ast.Call) or not call.args:
        return None
    hidden, returned = (ast.unparse(each) for each in (call.args[0], calls[0].targets[-1]))
    if returned != hidden:  # outputs = layer(hidden, ...); hidden = outputs[0]
        taken = {f"{hidden} = {returned}", f"{hidden} = {returned}[0]"}
        if sum(ast.unparse(each) in taken for each in body) != 1 or _uses([*body, *behind], returned) != 2:
            return None
    # What the block is given is one use, what is set behind it the other.
    alone = len(calls[0].targets) == 1 and _uses(body, hidden) == 2
    return hidden if alone and hidden.isidentifier() and returned.isidentifier() else None


def _called_with(hidden: str, statement: ast.stmt, behind: Sequence[ast.stmt], function: ast.AST) -> str | None:
    """Return the attribute of ``self`` that a statement calls with ``hidden``, if nothing else is done with it."""
    if not isinstance(statement, (ast.Assign, ast.AnnAssign, ast.Return)):
        return None
    calls = [each for each in ast.walk(statement) if isinstance(each, ast.Call) and _is_of_self(each.func)]
    found = [str(_attribute(each.func)) for each in calls if not each.keywords and _is_only(each.args, hidden)]
    if len(found) != 1 or _names(statement, ast.Load).count(hidden) != 1 or _mentions(function, found[0]) != 1:
        return None
    is_set = hidden in _names(statement, ast.Store)
    return found[0] if is_set or not _uses(behind, hidden) else None


def _is_on_demand(statement: ast.stmt) -> bool:
    """True for what is done where hidden states are asked for, which are whole then."""
    return isinstance(statement, ast.If) and not statement.orelse and ast.unparse(statement.test) == ASKED


def _is_of_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"


def _attribute(node: ast.AST) -> str | None:
    return node.attr if isinstance(node, ast.Attribute) and _is_of_self(node) else None


def _is_only(arguments: Sequence[ast.AST], name: str) -> bool:
    return [each.id if isinstance(each, ast.Name) else None for each in arguments] == [name]


def _function(node: ast.AST) -> str | None:
    """Return the variable that an expression calls."""
    return node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else None


def _mentions(node: ast.AST, attribute: str) -> int:
    """Return how often ``self.<attribute>`` is written."""
    return sum(_attribute(each) == attribute for each in ast.walk(node))


def _names(node: ast.AST, context: type[ast.expr_context]) -> list[str]:
    return [each.id for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, context)]


def _uses(statements: Iterable[ast.AST], name: str) -> int:
    return sum(_names(each, ast.expr_context).count(name) for each in statements)
