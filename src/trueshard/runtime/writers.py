"""Tell methods that write parameters (``reset_parameters``, a momentum update) from those that compute with them.

What a method writes belongs in the shards, what it computes needs the parameters gathered. Its source tells: an
in-place operation, an assignment or an initialiser writes a parameter if it is applied to a parameter or a module of
``self``, to a name that was bound to one, or to one that ``parameters()`` and the like go through.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
from collections.abc import Collection

_LISTS = {"parameters", "named_parameters", "modules", "named_modules", "children", "named_children"}
_LISTS |= {"get_parameter", "get_submodule", "state_dict"}


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
    found: set[str] = set()
    stack = [inspect.unwrap(function).__code__]
    while stack:
        code = stack.pop()
        found.update(code.co_names)
        stack.extend(constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return found


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
            every = (each for target in targets for each in ast.walk(target))
            self._bound |= {each.id for each in every if isinstance(each, ast.Name)}

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
        flat = [each for target in targets for each in (target.elts if isinstance(target, ast.Tuple) else [target])]
        # A plain assignment to a name binds it; an augmented one writes what it stands for.
        kinds = (ast.Attribute, ast.Subscript, *([ast.Name] if isinstance(node, ast.AugAssign) else []))
        return any(isinstance(each, kinds) and self._is_parameter(each) for each in flat)
