"""The house: imports run one way, downwards, and `import trueshard` loads nothing before it is used."""

from __future__ import annotations

import ast
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import trueshard

SOURCE = Path(trueshard.__file__).parent

#: From the top down. A file imports from floors below its own; files of one package may import each other.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("__main__",),
    ("cli",),
    ("doctor_command", "plan_command", "train_commands", "verify_command"),
    ("verification",),
    ("doctor", "train"),
    ("__init__",),
    ("api", "tokens"),
    ("planner",),
    ("engine",),
    ("sharding",),
    ("carrying", "copying"),
    ("beside",),
    ("runtime",),
    ("checkpoint", "replicated"),
    ("agreement", "groups", "policies", "refusals"),
    ("methods", "activation", "gradients", "optim", "second_backward", "usage"),
    ("units", "intent", "snapshot"),
    ("plans", "names", "distributed"),
    ("errors", "first_values", "forecast", "machine", "replacing", "tables"),
    ("_torch",),
)
FLOOR = {name: depth for depth, names in enumerate(reversed(FLOORS)) for name in names}

#: The library itself must do without these until something that needs them is called.
UNLOADED = (
    "transformers",
    "datasets",
    "tokenizers",
    "peft",
    "tensorboard",
    "pydantic",
    "typer",
    "rich",
    "matplotlib",
    "safetensors",
    "torch.distributed.fsdp",
)


def module_of(file: Path) -> str:
    """`train/loop.py` → `train.loop`; a package is called by its folder, the root package `__init__`."""
    parts = file.relative_to(SOURCE).with_suffix("").parts
    if len(parts) > 1 and parts[-1] == "__init__":
        parts = parts[:-1]
    return ".".join(parts)


FILES = {module_of(file): file for file in sorted(SOURCE.rglob("*.py"))}


def imported(file: Path) -> Iterator[str]:
    """The modules of this package that `file` imports when it runs, wherever in the file that is."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
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


@pytest.mark.parametrize("name", FILES)
def test_imports_run_downwards(name: str) -> None:
    own = name.partition(".")[0]
    for other in imported(FILES[name]):
        target = other.partition(".")[0]
        assert target == own or FLOOR[target] < FLOOR[own], f"{name} imports {other}, which stands above or beside it"


def test_no_file_imports_itself_by_a_detour() -> None:
    # A file of a package runs after the package's own __init__, which may therefore import it.
    graph = {name: {other for other in imported(file) if other != name} for name, file in FILES.items()}
    assert list(TopologicalSorter(graph).static_order())


def test_fully_shard_is_called_in_one_file() -> None:
    callers = {
        name
        for name, file in FILES.items()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) == "fully_shard"
    }
    assert callers == {"sharding"}


def test_private_modules_of_torch_are_imported_in_one_package() -> None:
    users = set()
    for name, file in FILES.items():
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if any(m.startswith("torch.") and "._" in m for m in modules):
                users.add(name.partition(".")[0])
    assert users == {"_torch"}


MEASURE = """
import json, sys, time
import torch
before, began = set(sys.modules), time.process_time()
import trueshard
seconds = time.process_time() - began
print(json.dumps([seconds, sorted(set(sys.modules) - before)]))
"""


def import_in_a_fresh_process() -> tuple[float, list[str]]:
    """CPU seconds that `import trueshard` adds to `import torch`, and the modules that it adds."""
    done = subprocess.run([sys.executable, "-c", MEASURE], check=True, capture_output=True, text=True, timeout=120)
    seconds, modules = json.loads(done.stdout)
    return seconds, modules


def test_importing_it_costs_little_beside_torch_and_loads_no_extra() -> None:
    runs = [import_in_a_fresh_process() for _ in range(3)]
    assert statistics.median(seconds for seconds, _ in runs) < 0.3
    added = {module for _, modules in runs for module in modules}
    assert "trueshard" in added
    loaded = [m for m in added if any(m == each or m.startswith(f"{each}.") for each in UNLOADED)]
    assert not loaded
