"""Gather for readers other than ``forward``: methods, submodules called from outside, and plain attribute access.

FSDP2 gathers for a unit's ``forward`` alone. A method that calls the unit's layers or reads its parameters (a ``loss``,
an ``encode``) becomes a pass of its own; one that only arranges things (``reset_parameters``, ``set_config``) must not,
since what it writes belongs in the shards. The code of the method tells: it names an attribute that is a parameter or a
module of the unit, and writes none of them. An in-place operation, an assignment or an initialiser writes a parameter
if it is applied to a parameter or a module of ``self``, to a name that was bound to one, or to one that
``parameters()`` and the like go through.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
import types
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from trueshard import _torch
from trueshard._torch import ShardedModule
from trueshard.sharding.hooks import KEY, Runtime, State

#: Classes of these packages use ``forward`` and submodule calls only, which are gathered anyway.
_LIBRARIES = ("torch.", "transformers.", "peft.", "trueshard.")

NO_PASSES = "_trueshard_no_passes"
"""Attribute of a module: names of its methods that are no passes of their own, whatever they read."""

_LISTS = {"parameters", "named_parameters", "modules", "named_modules", "children", "named_children"}
_LISTS |= {"get_parameter", "get_submodule", "state_dict"}


def methods_that_compute(module: nn.Module) -> list[str]:
    """Return the methods of ``module``, without ``forward``, that need its parameters gathered."""
    children = {name for name, child in _torch.own_modules(module).items() if child is not None}
    attributes = children | set(_torch.own_parameters(module))
    left_out = module.__dict__.get(NO_PASSES, ())
    functions = {name: function for name, function in _methods(type(module)).items() if name not in left_out}
    reads = {name for name, function in functions.items() if names_in(function) & attributes}
    while more := {name for name in functions if name not in reads and names_in(functions[name]) & reads}:
        reads |= more
    return sorted(name for name in reads if not writes_parameters(functions[name], attributes))


def _methods(cls: type[nn.Module]) -> dict[str, types.FunctionType]:
    """Return the user's own methods of a module class, as Python functions."""
    functions: dict[str, types.FunctionType] = {}
    bases = cls.__mro__[: cls.__mro__.index(nn.Module)]
    for base in (base for base in bases if not f"{base.__module__}.".startswith(_LIBRARIES)):
        for name, value in vars(base).items():
            hidden = name.startswith("__") or name == "forward" or hasattr(nn.Module, name)
            if not hidden and inspect.isfunction(value) and not inspect.isgeneratorfunction(value):
                functions.setdefault(name, value)
    return functions


def in_a_pass(
    runtime: Runtime, module: nn.Module, function: Callable[..., Any], gathered: Callable[..., Any]
) -> Callable[..., Any]:
    """Wrap ``function``, which reads parameters of ``module``, so that a call outside a pass of it is a pass itself.

    ``gathered``: the same function behind FSDP2's forward hooks.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        in_root = module is runtime.root and runtime.is_in(State.PASS)
        if torch.compiler.is_compiling() or in_root or _torch.in_pass(module):
            return function(*args, **kwargs)
        if module is not runtime.root:
            return gathered(*args, **kwargs)
        try:
            runtime.begin(function.__name__, args, kwargs)
            output = gathered(*args, **kwargs)
            runtime.end(output)
            return output
        finally:
            runtime.leave()

    return call


def gather_in_methods(runtime: Runtime, module: ShardedModule, methods: Iterable[str]) -> None:
    """Make ``methods`` of a unit gather as its forward does."""
    for name in methods:
        function = getattr(module, name)
        register_fsdp_forward_method(module, name)
        gathered = module.__dict__.pop(name)
        module.__dict__[name] = in_a_pass(runtime, module, function, gathered)


def gather_in_submodules(runtime: Runtime) -> None:
    """Make the root's own layers gather when they are called from outside a pass (``model.encoder(x)``)."""
    root: Any = runtime.root
    root.__dict__["_trueshard_call"] = lambda function, *args, **kwargs: function(*args, **kwargs)
    register_fsdp_forward_method(root, "_trueshard_call")
    behind_hooks = root.__dict__["_trueshard_call"]
    mine = {id(p) for p in runtime.units[runtime.root]}
    for module in root.modules():
        direct = {id(p) for p in _torch.own_parameters(module).values()}
        if module is root or not direct & mine:
            continue
        forward = module.forward
        gathered = functools.partial(behind_hooks, forward)
        module.__dict__["forward"] = in_a_pass(runtime, root, forward, gathered)


class GatheredOnAccess(nn.Module):
    """Mixin for the class of a unit that holds parameters itself: reading one of them in a pass gathers it.

    FSDP2's hooks gather for its forward; but ``F.linear(hidden, embedding.weight)`` reads it from outside, and some
    modules are never called at all (the output projection of ``nn.MultiheadAttention``).
    """

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        if isinstance(value, DTensor) and name in _torch.own_parameters(self) and isinstance(self, ShardedModule):
            runtime = self.__dict__.get(KEY + "_root")
            if runtime is None or runtime.is_in(State.READ):
                return value
            if runtime.is_in(State.PASS) or _torch.in_backward():
                runtime.gather_for_reader(self)
                return super().__getattr__(name)
        return value


def after_gathering(unit: nn.Module, function: Callable[[], Any]) -> Any:
    """Call ``function()`` when ``unit`` has gathered, before the user's own forward pre-hooks; return the handle."""
    call = torch.compiler.disable(function)
    hooks = _torch.forward_pre_hooks(unit)
    # FSDP2's own hook is the first; ours comes in before it, and FSDP2's goes back to the front. So the user's hooks
    # see what ours has done.
    gather = next(iter(hooks))
    handle = unit.register_forward_pre_hook(lambda *_: call() and None, prepend=True)
    hooks.move_to_end(gather, last=False)
    return handle


def carry_attributes(unit: nn.Module, module: nn.Module, attribute: str, values: dict[str, Any]) -> None:
    """Give a gathered parameter, at the first pass of ``unit``, the attributes that the user set on the original.

    FSDP2 makes the gathered parameter when it gathers for the first time, and keeps that object.
    """

    def carry() -> None:
        gathered = _torch.own_parameters(module)[attribute]
        if gathered is not None and not isinstance(gathered, DTensor):
            handle.remove()
            gathered.__dict__.update(values)

    handle = after_gathering(unit, carry)


# Methods that write


def writes_parameters(function: types.FunctionType, attributes: Collection[str]) -> bool:
    """True if a method writes parameters: those among ``attributes`` of its module, or of its modules among these.

    Without its source, as of a class that was typed into a shell, any in-place operation counts.
    """
    function = inspect.unwrap(function)
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return any(_is_in_place(word) or word in ("data", "setattr", "init") for word in names_in(function))
    definition = tree.body[0]
    if not isinstance(definition, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return False
    arguments = [*definition.args.posonlyargs, *definition.args.args]
    return _Reader(arguments[0].arg if arguments else "", attributes).finds_write(definition)


def names_in(function: types.FunctionType) -> set[str]:
    """Return every attribute and global that the code of ``function`` names, nested functions included."""
    words: set[str] = set()
    stack = [inspect.unwrap(function).__code__]
    while stack:
        code = stack.pop()
        words.update(code.co_names)
        stack.extend(constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return words


def _is_in_place(word: str) -> bool:
    return word.endswith("_") and not word.endswith("__") and word != "_"


class _Reader:
    """Reads the body of one method; ``this``: what it calls ``self``."""

    def __init__(self, this: str, attributes: Collection[str]) -> None:
        self._this, self._attributes = this, attributes
        self._bound: set[str] = set()
        """Local names that stand for parameters or modules."""

    def finds_write(self, definition: ast.AST) -> bool:
        nodes = list(ast.walk(definition))
        count = -1
        while count != len(self._bound):  # a name may be bound to one that is bound further down, in a loop
            count = len(self._bound)
            for node in nodes:
                self._bind(node)
        return any(map(self._writes, nodes))

    def _bind(self, node: ast.AST) -> None:
        if not isinstance(node, (ast.Assign, ast.AnnAssign, ast.NamedExpr, ast.For, ast.comprehension)):
            return
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        value = node.iter if isinstance(node, (ast.For, ast.comprehension)) else node.value
        if value is not None and self._is_parameter(value):
            parts = (part for target in targets for part in ast.walk(target))
            self._bound |= {part.id for part in parts if isinstance(part, ast.Name)}

    def _is_parameter(self, node: ast.AST) -> bool:
        """True for what may be a parameter, a module, or a collection of them."""
        if isinstance(node, ast.Name):
            return node.id in self._bound
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == self._this:
            return node.attr in self._attributes
        if isinstance(node, (ast.Attribute, ast.Subscript, ast.Starred)):
            return self._is_parameter(node.value)
        if isinstance(node, (ast.Tuple, ast.List)):
            return any(map(self._is_parameter, node.elts))
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute) and node.func.attr in _LISTS:
                return True
            if isinstance(node.func, ast.Attribute) and _is_in_place(node.func.attr):
                return self._is_parameter(node.func.value)  # a chain of them
            passes_on = isinstance(node.func, ast.Name) and node.func.id in ("zip", "enumerate", "list", "reversed")
            return passes_on and any(map(self._is_parameter, node.args))
        return False

    def _writes(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute) and _is_in_place(node.func.attr):
                return any(map(self._is_parameter, [node.func.value, *node.args]))
            if not isinstance(node.func, ast.Name):
                return False
            if node.func.id == "setattr" and node.args:
                first = node.args[0]
                return self._is_parameter(first) or (isinstance(first, ast.Name) and first.id == self._this)
            return _is_in_place(node.func.id) and any(map(self._is_parameter, node.args))
        targets: list[ast.expr] = []
        if isinstance(node, (ast.Assign, ast.Delete)):
            targets = node.targets
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
            targets = [node.target]
        flat = [part for target in targets for part in (target.elts if isinstance(target, ast.Tuple) else [target])]
        # A plain assignment to a name binds it; an augmented one writes what it stands for.
        kinds = (ast.Attribute, ast.Subscript, *([ast.Name] if isinstance(node, ast.AugAssign) else []))
        return any(isinstance(part, kinds) and self._is_parameter(part) for part in flat)
