"""Hold the contract on several releases of torch, of Python and of packages, and write ``docs/versions.md``.

python tests/versions.py                 # everything below, one after another: an hour, and 30 GB under build/
python tests/versions.py torch-2.11      # this one alone; the page keeps what the others gave when they last ran

- Each release of torch has a virtual environment of its own, ``build/versions/torch-2.11``, which is reused. In it are
  the newest patch release of that torch, this checkout, and what its tests import, at the versions of
  requirements.lock; what torch itself brings is left as torch chose it.
- The tests run in their short form. A test that holds something else on some release says so with the fixture
  ``differs``: that text is in the last column. Nothing is skipped for a release.
- Each interpreter found under ~/.pyenv or on the path runs ``versions_training.py`` on two ranks. Its environment, of
  several GB, is removed after that.
- With each set of packages that program tries what they add. They lie over one environment that has torch.
"""

from __future__ import annotations

import datetime
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Iterator
from pathlib import Path

from added_environment import Added, make

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "versions"
PAGE = ROOT / "docs" / "versions.md"

TORCH = ("2.11", "2.12", "2.13", "2.14", "2.15")
PYTHON = ("3.10", "3.11", "3.12", "3.13", "3.14")
TORCH_OF_PYTHON = "2.13"
TRANSFORMERS = {"4.57": "transformers==4.57.*", "5": "transformers==5.*"}
BESIDE = {"nothing": ()} | {
    f"transformers-{release}{''.join(f'-{each}' for each in more)}": (transformers, *more)
    for release, transformers in TRANSFORMERS.items()
    for more in ((), ("peft",), ("accelerate", "datasets"), ("peft", "datasets"))
}
"""Packages beside torch and what TrueShard itself needs; PEFT brings accelerate."""
# fmt: off
TESTS = (
    "contract", "parity", "access", "additions", "accumulation", "averaging", "clip", "copies", "methods", "names",
    "optimizers", "passes", "scaling", "steps", "undone", "checkpoint_folder", "checkpoint_worlds", "torch_private",
)
PACKAGES = (
    "einops", "hypothesis", "pytest", "pytest-timeout", "pytest-xdist", "pytorch_optimizer", "safetensors", "tomlkit",
)
# fmt: on
EXTRAS = ".[cli,plan,peft]"
"""What the tests need of the package's own extras, beside PACKAGES."""

INTRODUCTION = f"""\
# Versions

Written by `make versions`. For each release of torch it makes an environment and runs the tests that hold
[the contract](concepts/contract.md) on real processes (gloo, CPU), in their short form. No test is skipped because a
release is old: where something is refused or differs there, its test expects exactly that, and the last column says
so. `pip install trueshard` takes any torch from {TORCH[0]} on. On one that is newer than the last row, the first
`shard()` gives a warning that names the version; `trueshard doctor` tells before. Everything else (the planner, the
trainer, other frameworks' checkpoints) is tested on the release that `make test` installs, torch 2.13.

"""
PACKAGE_SETS = """
With other packages beside it, or none, the same program also trains what each of them brings, and gets what one process
gets: a Llama of transformers, read again from the directory that it is saved as; an adapter of PEFT; by `Accelerator`;
and by `ShardedTrainer`, which takes a `Dataset` if there is one and refuses transformers 4.

"""
PYTHONS = f"""
Each interpreter imports TrueShard, shards a model on two ranks, trains it, saves it and loads it into another
(`tests/versions_training.py`), with torch {TORCH_OF_PYTHON}.

"""


def run(*command: str | Path, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, text=True, **{"check": True, **options})  # type: ignore[call-overload]


def installed(python: Path) -> dict[str, str]:
    """Return what an environment has: name of a distribution → version."""
    code = "from importlib.metadata import distributions as d; print(*(f'{e.name}=={e.version}' for e in d()))"
    said = run(python, "-c", code, stdout=subprocess.PIPE).stdout
    return {normal(name): version for name, _, version in (each.partition("==") for each in said.split())}


def normal(name: str) -> str:
    return name.lower().replace("_", "-")


def environment(name: str, interpreter: str | Path, torch: str, *packages: str) -> Path:
    """Return the Python of an environment with torch and this checkout; it is made if it is not there.

    ``packages`` and this checkout, with extras if there are packages, come at the versions of requirements.lock.
    """
    folder = FOLDER / name
    python, ready, constraints = folder / "bin" / "python", folder / "ready", folder / "constraints.txt"
    made_from = [ROOT / "requirements.lock", ROOT / "pyproject.toml"]
    if ready.is_file() and all(ready.stat().st_mtime > each.stat().st_mtime for each in made_from):
        return python
    run(interpreter, "-m", "venv", folder)
    pip = (python, "-m", "pip", "--disable-pip-version-check", "install")
    run(*pip, "--no-cache-dir", f"torch=={torch}.*")
    brought = installed(python)
    pins = [
        pin
        for pin in made_from[0].read_text().splitlines()
        if "==" in pin and normal(pin.partition("==")[0]) not in brought
    ]
    constraints.write_text("\n".join([f"torch=={brought['torch']}", *(pins if packages else [])]) + "\n")
    run(*pip, "--constraint", constraints, *packages, "--editable", EXTRAS if packages else ".")
    ready.touch()
    return python


def hold_contract(torch: str) -> None:
    """Run the contract's tests on one release of torch; leave their results in ``torch-<release>.xml``."""
    python = environment(f"torch-{torch}", sys.executable, torch, *PACKAGES)
    results = f"--junitxml={FOLDER / f'torch-{torch}.xml'}"
    options = ["-q", "-p", "no:cacheprovider", "-n", "logical", "--maxprocesses", "8", "--dist", "worksteal", results]
    files = [f"tests/test_{name}.py" for name in TESTS]
    run(python, "-m", "pytest", *options, *files, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)


def train(python: Path, results: Path) -> None:
    """Run ``versions_training.py`` on two ranks; leave what it says in ``results``."""
    launcher = (python, "-m", "torch.distributed.run", "--nproc-per-node", "2")
    with results.open("w") as output:
        run(*launcher, "tests/versions_training.py", stdout=output, timeout=600, check=False)


def train_on_python(release: str) -> None:
    """Train with one release of Python, if it is here."""
    results, name = FOLDER / f"python-{release}.txt", f"python-{release}"
    results.unlink(missing_ok=True)
    places = [*Path.home().glob(f".pyenv/versions/{release}.*/bin/python{release}"), shutil.which(f"python{release}")]
    has_venv = "import ensurepip, venv"
    found = [each for each in places if each and not run(each, "-c", has_venv, check=False).returncode]
    if found:
        train(environment(name, found[0], TORCH_OF_PYTHON), results)
        shutil.rmtree(FOLDER / name)


def train_beside(name: str) -> None:
    """Train with some packages."""
    below = environment("packages", sys.executable, TORCH_OF_PYTHON)
    (site,) = below.parents[1].glob("lib/python*/site-packages")
    added = Added((BESIDE[name],) if BESIDE[name] else ())
    train(make(FOLDER / f"packages-{name}", added, str(site)), FOLDER / f"packages-{name}.txt")


def rows_of_torch() -> Iterator[tuple[str, bool]]:
    """Yield a row of the table for each release of torch, and whether it ran without a failure."""
    for torch in TORCH:
        results = FOLDER / f"torch-{torch}.xml"
        if not results.is_file():
            yield kept(torch) or f"| {torch} | not run | | | | |", bool(kept(torch))
            continue
        (suite,) = ElementTree.parse(results).getroot().iter("testsuite")
        failed, skipped = int(suite.get("failures", 0)) + int(suite.get("errors", 0)), int(suite.get("skipped", 0))
        words = [each.get("value", "") for each in suite.iter("property") if each.get("name") == "differs"]
        cases = [(case.get("name"), {part.tag for part in case}) for case in suite.iter("testcase")]
        words += [f"**fails:** `{name}`" for name, parts in cases if parts & {"failure", "error"}]
        version, day = installed(FOLDER / f"torch-{torch}" / "bin" / "python")["torch"], suite.get("timestamp", "")[:10]
        cells = [version, day, int(suite.get("tests", 0)) - failed - skipped, failed, skipped]
        yield f"| {' | '.join(map(str, cells))} | {'; '.join(dict.fromkeys(words)) or 'nothing'} |", not failed


def rows_of_training(kind: str, names: Iterable[str]) -> Iterator[tuple[str, bool]]:
    """Yield a row for each release of Python or set of packages, and whether it ran as it should."""
    for name in names:
        results = FOLDER / f"{kind}-{name}.txt"
        if not results.is_file():
            yield kept(name) or f"| {name} | | not run: it was not there |", True
            continue
        said = results.read_text().strip()
        day = datetime.date.fromtimestamp(results.stat().st_mtime)
        yield f"| {name} | {day} | {said or '**fails**'} |", bool(said)


def kept(name: str) -> str:
    """Return the page's line of what is not run now."""
    lines = PAGE.read_text().splitlines()
    return next((line for line in lines if re.match(rf"\| {re.escape(name)}(\.| \|)", line)), "")


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    kinds = {"torch": (hold_contract, TORCH), "python": (train_on_python, PYTHON), "packages": (train_beside, BESIDE)}
    every = [f"{kind}-{each}" for kind, (_, names) in kinds.items() for each in names]
    for each in sys.argv[1:] or every:
        if each not in every:
            sys.exit(f"{each}: choose of {', '.join(every)}")
        kind, _, name = each.partition("-")
        kinds[kind][0](name)
    torch, python = list(rows_of_torch()), list(rows_of_training("python", PYTHON))
    packages = list(rows_of_training("packages", BESIDE))
    heads = (
        "| torch | run on | passed | failed | skipped | what is refused or differs there |\n|---|---|---|---|---|---|\n"
    )
    page = INTRODUCTION + heads + "".join(f"{row}\n" for row, _ in torch)
    page += PYTHONS + "| Python | run on | |\n|---|---|---|\n" + "".join(f"{row}\n" for row, _ in python)
    page += PACKAGE_SETS + "| packages | run on | |\n|---|---|---|\n" + "".join(f"{row}\n" for row, _ in packages)
    PAGE.write_text(page)
    print(page)
    sys.exit(not all(fine for _, fine in torch + packages + python))


if __name__ == "__main__":
    main()
