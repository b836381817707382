"""The documents hold: every code block runs, every link leads somewhere, every quoted message is one of the code's."""

from __future__ import annotations

import ast
import functools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import documents_commands
import documents_pictures
import forks
import trueshard
import versions
from architecture_floors import FLOORS
from documents_blocks import FENCE, LANGUAGES, ROOT, blocks, pages
from documents_models import make_models
from running import environment
from trueshard.machine import TESTED_TORCH

#: What pages name of the repository, and find where they run.
FOLDERS = ("examples", "src", "tests", "docs", "benchmarks")
LINK = re.compile(r"\]\((?!\w+:|#)([^)#\s]+)")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny models under the names that the pages give to large ones."""
    folder = tmp_path_factory.mktemp("models")
    make_models(folder)
    return folder


def run_page(page: str, folder: Path, models: Path) -> subprocess.CompletedProcess[str]:
    for name in FOLDERS:
        (folder / name).symlink_to(ROOT / name)
    for model in models.iterdir():
        (folder / model.name).symlink_to(model)
    return forks.run(
        [sys.executable, Path(__file__).with_name("documents_run.py"), page],
        cwd=folder,
        env=environment(HF_HUB_OFFLINE="1", NO_COLOR="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
    )


#: What the rest holds: commands that start several processes each, and a page that runs a test file.
LONG = re.compile(r"^(trueshard (train|demo|verify|doctor|plan|export worker)|torchrun|.*pytest) ", flags=re.MULTILINE)


def runnable_pages() -> Iterator[Any]:
    for page in pages():
        code = [block for block in blocks(page) if block.language != "text"]
        is_long = any(block.language == "bash" and LONG.search(block.text) for block in code)
        if code:
            yield pytest.param(page, id=page, marks=pytest.mark.rest if is_long else ())


@pytest.mark.timeout(500)
@pytest.mark.parametrize("runnable", runnable_pages())
def test_every_block_of_a_page_runs(runnable: str, models: Path, tmp_path: Path) -> None:
    found = run_page(runnable, tmp_path, models)
    assert found.returncode == 0, found.stdout[-6000:]
    printed = {line.rstrip() for line in found.stdout.splitlines()}
    shown = [line for block in blocks(runnable) if block.title == "output" for line in block.text.splitlines() if line]
    assert [line for line in shown if line not in printed] == []


@pytest.mark.parametrize("page", pages())
def test_every_block_says_what_it_is(page: str) -> None:
    for block in blocks(page):
        assert block.language in LANGUAGES, f"{block.place}: a block of {block.language or 'no language'}"
    fences = re.findall(r"^ *```", (ROOT / page).read_text(), flags=re.MULTILINE)
    assert len(fences) == 2 * len(blocks(page))


@pytest.mark.parametrize("page", pages())
def test_links_lead_to_files_of_the_repository(page: str) -> None:
    for link in LINK.findall(FENCE.sub("", (ROOT / page).read_text())):
        assert (ROOT / page).parent.joinpath(link).is_file(), link


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; a warning fails it."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    variables = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    found = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr
    return folder


@pytest.mark.rest
def test_the_site_builds_without_a_warning_and_has_every_page(site: Path) -> None:
    for page in pages():
        shown = {"README.md": "index.md", "CHANGELOG.md": "changelog.md"}.get(page, page.removeprefix("docs/"))
        assert (site / shown).with_suffix(".html").is_file(), page


@pytest.mark.rest
def test_the_reference_has_every_public_name(site: Path) -> None:
    text = "".join(file.read_text() for file in (site / "reference").glob("*.html"))
    headings = set(re.findall(r'<h2 id="trueshard\.([\w.]+)"', text))
    assert headings == set(trueshard.__all__) - {"rl"} | {f"rl.{name}" for name in trueshard.rl.__all__}


@pytest.mark.rest
def test_the_built_pages_load_nothing_from_elsewhere(site: Path) -> None:
    for file in [*site.rglob("*.html"), *site.rglob("*.css"), *site.rglob("*.svg")]:
        text = file.read_text()
        loaded = re.findall(r'<(?:script|img|iframe|source)[^>]* src="?([^" >]+)', text)
        loaded += re.findall(r'<link[^>]* rel="?(?:stylesheet|icon|preload|preconnect)"?[^>]* href="?([^" >]+)', text)
        loaded += re.findall(r"url\(['\"]?(https?:[^)]+)\)", text)
        assert [each for each in loaded if "//" in each] == [], file


def test_the_page_of_commands_is_what_the_command_line_says() -> None:
    assert documents_commands.FILE.read_text() == documents_commands.reference(), "run `make tables`"


def test_the_picture_of_the_house_is_what_its_program_draws() -> None:
    assert documents_pictures.HOUSE.read_text() == documents_pictures.house(), "run `make tables`"


def test_the_page_of_versions_has_the_releases_that_are_tested() -> None:
    page = (ROOT / "docs" / "versions.md").read_text()
    rows = re.findall(r"^\| (\d+\.\d+)\.\S+ \| [\d-]+ \| \d+ \| (\d+) \| (\d+) \|", page, flags=re.MULTILINE)
    assert [release for release, *_ in rows] == list(versions.TORCH)
    assert {tuple(numbers) for _, *numbers in rows} == {("0", "0")}
    assert (versions.TORCH[0], versions.TORCH[-1]) == TESTED_TORCH


def test_the_architecture_names_every_floor() -> None:
    tree = (ROOT / "docs" / "architecture.md").read_text()
    files = {name for floor in FLOORS for name in floor if not name.startswith("__main__") and "_command" not in name}
    missing = [name for name in files if not re.search(rf"^ +{name}(\.py|/) ", tree, flags=re.MULTILINE)]
    assert missing == []


@functools.cache
def literals() -> dict[str, str]:
    """Every string of the sources, with ``…`` where a value is put in, and its file and line."""
    found: dict[str, str] = {}
    for file in sorted((ROOT / "src" / "trueshard").rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        documentation = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if node in documentation:
                continue
            place = f"{file.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.JoinedStr):
                text = "".join(each.value if isinstance(each, ast.Constant) else "…" for each in node.values)
                found[text] = place
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found[node.value] = place
    return found


def nearest(fragment: str) -> str:
    """The string of the sources that has most words of `fragment`, and where it is: where the words were changed."""
    words = set(fragment.split())
    text, place = max(literals().items(), key=lambda said: (len(words & set(said[0].split())), -len(said[0])))
    return f"{place}: {text!r}"


@functools.cache
def functions_in(file: str) -> set[str]:
    tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


THREAD = re.compile(r"\[([\w.-]+/[\w.-]+)#(\d+)\]\(https://github\.com/([\w.-]+/[\w.-]+)/(?:issues|pull)/(\d+)\)")


def test_what_is_reported_elsewhere_is_held_by_tests_that_are_there() -> None:
    text = (ROOT / "docs" / "complaints.md").read_text(encoding="utf-8")
    headers = ("| reported ", "| wrong without a word ")
    rows = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith(headers)]
    assert len(rows) > 80
    by_trial = text.splitlines().index("## Silent where nobody reported it")
    for row in rows:
        reported, _, held = row.strip("| ").split(" | ")
        named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", held)
        assert named, row
        assert len(named) == len(held.split(", ")), row
        assert [f"{file}::{name}" for file, name in named if name not in functions_in(file)] == []
        threads = THREAD.findall(reported)
        assert len(threads) == reported.count("]("), row
        assert bool(threads) is (text.splitlines().index(row) < by_trial), row
        assert all((repository, number) == tuple(link) for repository, number, *link in threads), row


FRAGMENTS = re.findall(r"^#### `(.*)`$", (ROOT / "docs" / "troubleshooting.md").read_text(), flags=re.MULTILINE)


@pytest.mark.parametrize("fragment", FRAGMENTS)
def test_an_entry_of_troubleshooting_is_found_by_words_of_a_message(fragment: str) -> None:
    pattern = re.compile(".*".join(map(re.escape, fragment.split("…"))))
    said = any(pattern.search(text) for text in literals())
    assert said, f"docs/troubleshooting.md: no message has `{fragment}`; nearest is {nearest(fragment)}"


def test_the_entries_of_troubleshooting_are_short_and_many() -> None:
    assert len(FRAGMENTS) == len(set(FRAGMENTS)) > 25
    assert [fragment for fragment in FRAGMENTS if len(fragment) > 60] == []
