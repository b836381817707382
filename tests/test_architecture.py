"""The house: imports run one way, downwards, and `import trueshard` loads nothing before it is used."""

from __future__ import annotations

import ast
import functools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import trueshard
from architecture_floors import FLOORS
from trueshard.parallel.tp_styles import STYLES

SOURCE = Path(trueshard.__file__).parent

FLOOR = {name: depth for depth, names in enumerate(reversed(FLOORS)) for name in names}


def module_of(file: Path) -> str:
    """`train/loop.py` → `train.loop`; a package is called by its folder, the root package `__init__`."""
    parts = file.relative_to(SOURCE).with_suffix("").parts
    if len(parts) > 1 and parts[-1] == "__init__":
        parts = parts[:-1]
    return ".".join(parts)


FILES = {module_of(file): file for file in sorted(SOURCE.rglob("*.py"))}


@functools.cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


@functools.cache
def nodes(file: Path) -> list[ast.AST]:
    """Every node of a file, in the order of ``ast.walk``."""
    return list(ast.walk(parsed(file)))


def imported(file: Path) -> Iterator[str]:
    """The modules of this package that `file` imports when it runs, wherever in the file that is."""
    tree = parsed(file)
    for node in runtime_nodes(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            package, _, inside = name.partition(".")
            if package == "trueshard":
                yield nearest_module(inside)


def runtime_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Every node below `node`, less what stands under `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and getattr(child.test, "id", "") == "TYPE_CHECKING":
            continue
        yield child
        yield from runtime_nodes(child)


def nearest_module(dotted: str) -> str:
    """`checkpoint.writer.mine` → `checkpoint.writer`; a name of the root package → `__init__`."""
    while dotted and dotted not in FILES:
        dotted = dotted.rpartition(".")[0]
    return dotted or "__init__"


def test_every_file_has_its_floor() -> None:
    assert {name.partition(".")[0] for name in FILES} == set(FLOOR)


def test_imports_run_downwards() -> None:
    upwards = []
    for name, file in FILES.items():
        own = name.partition(".")[0]
        targets = [(other, other.partition(".")[0]) for other in imported(file)]
        upwards += [f"{name}: {other}" for other, target in targets if target != own and FLOOR[target] >= FLOOR[own]]
    assert upwards == [], "imports of what stands above or beside a file"


def test_no_file_imports_itself_by_a_detour() -> None:
    # A file of a package runs after the package's own __init__, which may therefore import it.
    graph = {name: {other for other in imported(file) if other != name} for name, file in FILES.items()}
    assert list(TopologicalSorter(graph).static_order())


def test_fully_shard_is_called_in_one_file() -> None:
    callers = {
        name
        for name, file in FILES.items()
        for node in nodes(file)
        if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) == "fully_shard"
    }
    assert callers == {"sharding.apply"}


def test_private_modules_of_torch_are_imported_in_one_package() -> None:
    users = set()
    for name, file in FILES.items():
        for node in nodes(file):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if any(m.startswith("torch.") and "._" in m for m in modules):
                users.add(name.partition(".")[0])
    assert users == {"_torch"}


#: Private names that are not torch's: Python's own, and what transformers and accelerate put on models.
OF_OTHERS = {
    "_build_model_optimizer",  # of verl's engine, which its subclasses call
    "_exit",
    "_getframe",
    "_current_frames",
    "_fields",
    "_from_config",
    "_keys_to_ignore_on_load_unexpected",
    "_init_weights",
    "_name_or_path",
    "_no_split_modules",
}
OF_OTHERS |= {"_gradient_checkpointing_func", "_attn_implementation", "_experts_implementation"}
OF_OTHERS |= {"_can_record_outputs", "_CAN_RECORD_REGISTRY", "_is_accelerate_prepared"}
OF_OTHERS |= {"_load_model_state_pre_hook", "_save_model_state_pre_hook"}  # of accelerate's Accelerator

OF_OTHERS |= {"_compiler_ctx", "_device", "_layer_sync"}  # of Lightning's modules and strategies

#: A name that torch keeps on modules or tensors is torch's even where a class of ours has one of the same name.
OF_TORCH = {"_parameters", "_buffers", "_modules", "_version", "_cdata", "_spec", "_local_tensor", "_backward_hooks"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def defined_names(tree: ast.AST) -> set[str]:
    """What a file defines: functions, classes, variables, and attributes of `self`."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            found.add(node.attr)
    return found


def private_names(tree: ast.AST) -> Iterator[tuple[str, str, int]]:
    """(object, private name, line) for each `object._name`, and each `getattr(object, "_name")` and its kin."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            yield ast.unparse(node.value), node.attr, node.lineno
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr", "hasattr", "delattr"):
            name = node.args[1]
            if isinstance(name, ast.Constant) and is_private(name.value):
                yield ast.unparse(node.args[0]), name.value, node.lineno


def test_private_attributes_of_torch_are_reached_in_one_package() -> None:
    trees = {name: parsed(file) for name, file in FILES.items()}
    inside = {name: tree for name, tree in trees.items() if name.partition(".")[0] == "_torch"}
    outside = {name: tree for name, tree in trees.items() if name not in inside}
    assert {attribute for tree in inside.values() for _, attribute, _ in private_names(tree)} >= OF_TORCH
    ours = set().union(*map(defined_names, outside.values()))
    found = []
    for name, tree in outside.items():
        here = defined_names(tree)
        for holder, attribute, line in private_names(tree):
            is_ours = attribute in (ours if holder in ("self", "cls", "super()") else here)
            operator = holder.lower().endswith("aten")
            is_torchs = attribute in OF_TORCH and holder != "self"
            if is_torchs or not (is_ours or operator or attribute in OF_OTHERS):
                found.append(f"{name}:{line}: {holder}.{attribute}")
    assert found == []


#: A docstring has a verb or a subject of its own: these words refer to something else.
REFERRING = re.compile(
    r"((of|in|on|at|by|for|from|with|without|to|as|over|under|between|beside|below|above|after|before|until|since"
    r"|instead|likewise)|(it|they|them|those|these|that|what|which|who|whose|how|why|whether|where|when|both|the same))"
    r"\b(?!-)",
    re.IGNORECASE,
)


def docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, text) of every docstring, those of attributes included."""
    for node in ast.walk(tree):
        for statement in getattr(node, "body", None) if isinstance(getattr(node, "body", None), list) else ():
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield statement.lineno, value.value.strip()


def test_docstrings_begin_with_a_verb_or_a_subject() -> None:
    texts = [(name, *found) for name, file in FILES.items() for found in docstrings(parsed(file))]
    assert [f"{name}:{line}: {text[:60]}" for name, line, text in texts if REFERRING.match(text)] == []


#: Files that say what words mean; other code asks them. `convert` reads the words of other frameworks.
TABLES = {"options", "plans", "model.policies", "parallel.tp_styles"}
WORDS = {*STYLES, "always", "never", "last_layer", "bf16", "fp16"} - {"replicate", "all_reduce"}


def test_words_of_styles_resharding_and_precision_are_compared_in_their_tables_alone() -> None:
    others = {name: file for name, file in FILES.items() if name not in TABLES and "convert" not in name}
    compared = [(name, node) for name, file in others.items() for node in nodes(file) if isinstance(node, ast.Compare)]
    sides = [(name, node, side) for name, node in compared for side in (node.left, *node.comparators)]
    constants = {
        f"{name}: {ast.unparse(node)}"
        for name, node, side in sides
        for inner in ast.walk(side)
        if isinstance(inner, ast.Constant) and isinstance(inner.value, str) and inner.value in WORDS
    }
    assert constants == set()


#: The command line, and what `trueshard train` and `trueshard doctor` show on a terminal.
TERMINAL = {
    *("doctor.processes", "train.data.building", "train.data.cutting", "train.data.prepared"),
    *("train.run.checks", "train.run.incidents", "train.run.launcher"),
    *("train.run.replay", "train.run.session", "train.run.worker"),
    *("train.metrics.step_metrics", "train.metrics.terminal", "train.metrics.trackers"),
}


def test_the_library_logs_and_does_not_print() -> None:
    printing = {
        name
        for name, file in FILES.items()
        for node in nodes(file)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("print", "sys.stdout.write", "sys.stderr.write")
    }
    assert {name for name in printing if not name.startswith("cli")} == TERMINAL


def test_few_files_stand_at_the_top_and_public_names_alone_are_shown() -> None:
    assert len(list(SOURCE.glob("*.py"))) <= 13
    assert sorted(dir(trueshard)) == sorted(trueshard.__all__)
    assert all(hasattr(trueshard, name) for name in trueshard.__all__)


ADDED = """
import json, sys
import torch
before = set(sys.modules)
import trueshard
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def test_importing_it_loads_nothing_but_itself_beside_torch() -> None:
    done = subprocess.run([sys.executable, "-c", ADDED], check=True, capture_output=True, text=True, timeout=120)
    assert json.loads(done.stdout) == ["trueshard"]
