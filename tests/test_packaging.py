"""What `pip install` brings: a wheel with all of the library and nothing else, which works away from its source."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from running import CONFIG, environment

ROOT = Path(__file__).parent.parent
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}


def run(*command: str | Path, where: Path, code: int = 0, **variables: str) -> str:
    """What a command says on both streams, after it has ended with `code`."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=where,
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == code, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is built from, without anything that an earlier build may have left."""
    copy = tmp_path_factory.mktemp("tree")
    shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def wheel(tree: Path) -> Path:
    return wheel_of(tree)


def wheel_of(source: Path) -> Path:
    """The wheel that pip builds of a folder or a source distribution."""
    where = source.parent / f"{source.name}-dist"
    pip = (sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index")
    run(*pip, "--wheel-dir", where, source, where=source.parent)
    (built,) = where.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of a fresh environment with the wheel, which sees what this one has, but not the source tree."""
    place = tmp_path_factory.mktemp("fresh")
    run(sys.executable, "-m", "venv", "--without-pip", place / "venv", where=place)
    python = place / "venv" / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index")
    run(*pip, wheel, where=place)
    own = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", where=place).strip()
    # A folder that is named in a .pth file has no .pth files of its own read: the editable install is not seen.
    (Path(own) / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python.parent


def library_files(folder: Path) -> set[str]:
    """What lies in `src/`, but what Python and pip leave there."""
    files = {file.relative_to(folder) for file in folder.rglob("*") if file.is_file()}
    left = {file for file in files if "__pycache__" in file.parts or ".egg-info" in file.parts[0]}
    return {file.as_posix() for file in files - left}


def packed_files(wheel: Path) -> set[str]:
    """What a wheel puts beside other packages, its own metadata aside."""
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if ".dist-info/" not in name}


@pytest.mark.rest
def test_the_wheel_holds_the_library_and_nothing_else(wheel: Path) -> None:
    packed = packed_files(wheel)
    assert packed == library_files(ROOT / "src")
    assert {"trueshard/py.typed", "trueshard/planner/hardware.toml", "trueshard/train/demo.toml"} <= packed


@pytest.mark.rest
def test_the_source_distribution_builds_the_same_wheel(tree: Path, wheel: Path) -> None:
    code = "import setuptools.build_meta as build; print(build.build_sdist('sdist'))"
    name = run(sys.executable, "-c", code, where=tree).splitlines()[-1]
    unpacked = tree.parent / "unpacked"
    with tarfile.open(tree / "sdist" / name) as archive:
        archive.extractall(unpacked, filter="data")
    (source,) = unpacked.iterdir()
    assert packed_files(wheel_of(source)) == packed_files(wheel)
    assert {"LICENSE", "README.md", "pyproject.toml"} <= {each.name for each in source.iterdir()}


@pytest.mark.rest
def test_what_is_imported_is_the_wheel(installed: Path, tmp_path: Path) -> None:
    code = "import trueshard, importlib.metadata as m; print(trueshard.__file__, m.version('trueshard'))"
    file, version = run(installed / "python", "-c", code, where=tmp_path).split()
    assert Path(file).is_relative_to(installed.parent)
    assert (Path(file).parent / "py.typed").exists()
    assert version == re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]  # type: ignore[index]


def test_the_version_stands_in_one_form_everywhere() -> None:
    import trueshard

    (version,) = re.findall(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    newest = re.findall(r"^## \[?([0-9][^\] ]*)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0]
    assert version == newest == trueshard.__version__


@pytest.mark.rest
def test_the_command_helps(installed: Path, tmp_path: Path) -> None:
    said = run(installed / "trueshard", "--help", where=tmp_path)
    for command in ("train", "plan", "doctor", "check", "inspect", "export"):
        assert re.search(rf"\b{command}\b", said)


@pytest.mark.rest
def test_the_command_plans_and_draws(installed: Path, tmp_path: Path) -> None:
    """The catalogue of hardware and the parts of the page are files beside the code."""
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    options = ("--hardware", "h100", "--ranks", "4", "--sequence", "32", "--html", "plan.html")
    said = run(installed / "trueshard", "plan", "config.json", *options, where=tmp_path)
    assert "on 4 × h100" in said
    page = (tmp_path / "plan.html").read_text()
    assert "<style>" in page
    assert "<script" in page


@pytest.mark.rest
def test_the_doctor_finds_nothing_wrong(installed: Path, tmp_path: Path) -> None:
    said = run(installed / "trueshard", "doctor", "--nproc", "2", where=tmp_path, CUDA_VISIBLE_DEVICES="")
    lines = [line.split() for line in said.splitlines()]
    assert ["ok", "trueshard", "0.1.0"] in lines
    assert not [line for line in lines if line[:1] == ["problem"]]
    assert said.splitlines()[-1].startswith("Training works")


@pytest.mark.rest
def test_what_an_extra_would_bring_is_one_line(installed: Path, tmp_path: Path) -> None:
    code = "import sys; sys.modules['psutil'] = None; from trueshard.cli import main; sys.exit(main(['demo']))"
    said = run(installed / "python", "-c", code, where=tmp_path, code=2)
    assert said.splitlines() == [said.strip()]
    assert "psutil" in said
    assert "pip install 'trueshard[train]'" in said


WITHOUT_EXTRAS = """
import sys
for name in ("cloudpickle", "networkx", "packaging", "psutil", "pydantic", "rich", "tomlkit", "transformers", "typer"):
    sys.modules[name] = None
import torch, trueshard
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
optimizer = torch.optim.AdamW(model.parameters())
trueshard.shard(model, optimizer)
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
trueshard.save("saved", model=model, optimizer=optimizer)
trueshard.load("saved", model=model, optimizer=optimizer)
print(trueshard.check("saved"))
for use in (
    lambda: trueshard.plan,
    lambda: trueshard.shard(torch.nn.Linear(4, 4), memory="1GiB"),
    lambda: trueshard.verify(torch.nn.Linear(4, 4)),
):
    try:
        use()
    except ModuleNotFoundError as error:
        print("missing:", error)
from trueshard.cli import main
sys.exit(main(["--help"]))
"""


@pytest.mark.rest
def test_the_library_alone_shards_saves_and_loads_and_names_the_extra_of_the_rest(
    installed: Path, tmp_path: Path
) -> None:
    said = run(installed / "python", "-W", "ignore", "-c", WITHOUT_EXTRAS, where=tmp_path, code=2).splitlines()
    assert [line for line in said if "saved" in line]
    missing = [line for line in said if line.startswith("missing: ")]
    assert len(missing) == 3
    assert all("pip install 'trueshard[plan]'" in line for line in missing)
    assert "typer" in said[-1]
    assert "pip install 'trueshard[cli]'" in said[-1]


@pytest.mark.rest
def test_the_command_trains_with_two_processes(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("To shard or not to shard, that is the question.\n" * 200)
    (tmp_path / "train.toml").write_text(CONFIG.replace("steps = 40", "steps = 4"))
    run(installed / "trueshard", "train", "train.toml", "--nproc", "2", where=tmp_path, CUDA_VISIBLE_DEVICES="")
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 4
