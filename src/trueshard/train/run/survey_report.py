"""Show a survey of the data: in the terminal, coloured by whether a token is a target, and as a page."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from trueshard.errors import UserError, explained, one_line, written_to
from trueshard.files import replace_text
from trueshard.planner.report.frame import framed
from trueshard.train.config import Config
from trueshard.train.data.prepared import prepare
from trueshard.train.models.build import quiet_transformers
from trueshard.train.run import checks, resuming
from trueshard.train.run.survey import survey

SHOWN = 700
"""Tokens of a sample in the terminal; the page has all."""
WIDTH = 40
"""Characters of the longest bar."""


def survey_of(config: Config, samples: int, *, keep: bool = False) -> dict[str, Any]:
    """Return the survey of a configuration's data, which are prepared unless the run's folder has them.

    With ``keep`` they stay there, for training; else nothing does. Raises `UserError` as training would.
    """
    quiet_transformers()
    config = resuming.located(config)
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        if keep:
            stack.enter_context(checks.held(config.run.folder))
            stack.enter_context(written_to(config.run.folder))
            return survey(
                config, prepare(config, frozen=bool(checks.checkpoints_of(config).steps()), make=True), samples
            )
        with contextlib.suppress(UserError):  # the folder does not have them
            return survey(config, prepare(config, frozen=False, make=False), samples)
        place = stack.enter_context(tempfile.TemporaryDirectory())
        config = resuming.with_settings(config, {"run.dir": place})
        return survey(config, prepare(config, frozen=False, make=True), samples)


def show(data: dict[str, Any]) -> None:
    """Print a survey: targets in colour or, where there is none, between ⟦ and ⟧."""
    console = Console(highlight=False, soft_wrap=True)
    for line in _lines(data):
        console.print(line)
    for sample in data["samples"]:
        console.print(Text(f"\n{sample['where']}", style="bold"))
        console.print(_tokens(sample["parts"], console.is_terminal))


def write_page(data: dict[str, Any], file: Path) -> None:
    """Write a survey as a page that holds all it needs. Raises `UserError` if the file cannot be written."""
    samples = [f"{sample['where']}\n{_tokens(sample['parts'], False)}" for sample in data["samples"]]
    text = "\n".join([*map(str, _lines(data)), *samples])
    files = ("survey.html", "survey.css", "survey.js")
    with explained(f"--html: {file} cannot be written", "choose another", OSError, one_line):
        replace_text(file, framed(f"{data['headline']}: data", text, data, __package__, *files))


def _lines(data: dict[str, Any]) -> Iterator[str | Text]:
    """Yield the lines before the samples: files, counts, lengths, warnings."""
    counts = data["counts"]
    yield f"{data['headline']}: {data['noun']}, sequences of {data['length']:,} tokens"
    for name, count, place in data["files"]:
        yield f"  {count:,} file{'s' if count > 1 else ''} of format {name} (first: {place})"
    yield ", ".join(f"{count:,} {noun}" for noun, count in counts.items()) or "streamed: not counted"
    if counts.get("targets"):
        yield f"{counts['targets'] / counts['tokens']:.1%} of the tokens are targets"
    most = max((count for *_, count in data["lengths"]), default=0)
    for first, last, count in data["lengths"]:
        yield f"{first:>9,} to {last:>9,} tokens {count:>9,} {'█' * -(-count * WIDTH // most)}"
    for warning in data["warnings"]:
        yield Text(f"! {warning}", style="yellow")


def _tokens(parts: list[dict[str, Any]], coloured: bool) -> Text:
    """Return the documents of a sample as text, a border between two, and a line for each turn."""
    result, left = Text(), SHOWN
    for number, part in enumerate(parts):
        result.append("\n── next document ──\n" if number and part["pieces"] else "", style="cyan")
        was_target = False
        for at, (piece, mark) in enumerate(zip(part["pieces"][:left], part["counts"], strict=False)):
            is_target = mark == "1"
            if not coloured and is_target != was_target:
                result.append("⟦" if is_target else "⟧")
            result.append("\n" if at in part["breaks"] and not result.plain.endswith("\n") else "")
            safe = "".join(one if one.isprintable() or one in "\n\t" else repr(one)[1:-1] for one in piece)
            result.append(safe, style="bold green" if is_target else "dim")
            was_target = is_target
        result.append("⟧" if was_target and not coloured else "")
        hidden, left = len(part["pieces"]) - left, max(0, left - len(part["pieces"]))
        result.append(f" … {hidden:,} more tokens" if hidden > 0 else "", style="cyan")
        result.append("\n── cut at train.sequence_length ──" if part["cut"] else "", style="cyan")
        result.append(f"\n── padding × {part['padding']} ──" if part["padding"] else "", style="cyan")
    return result
