"""Writes docs/reference/commands.md from the command line itself: `make tables`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from trueshard.cli.commands import app

FILE = Path(__file__).parents[1] / "docs" / "reference" / "commands.md"
HEAD = """# The command line

Every command ends with exit code 0, or with 2 after one line that says what is wrong with what it was given. What else
a command says by its exit code stands with it. `python -m trueshard` is the same program, for launchers: `torchrun
--nproc-per-node 8 -m trueshard train CONFIG.toml`. This page is written by `make tables`.
"""


def reference() -> str:
    """The page."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    return "\n".join([HEAD, *(section(name, command) for name, command in commands.items())])


def section(name: str, command: Any) -> str:
    """A heading, the usage, what the command does, and a row for each argument and option."""
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    usage = " ".join(["trueshard", name, *map(shown, arguments), "[OPTIONS]"])
    does = "\n\n".join(" ".join(part.split()) for part in (command.help or "").split("\n\n"))
    rows = [row(each) for each in command.params if not getattr(each, "hidden", False) and each.name != "help"]
    return "\n".join(
        [
            f"## `trueshard {name}`\n",
            f"```text\n{usage}\n```\n",
            f"{does}\n",
            "| | default | |",
            "|---|---|---|",
            *rows,
            "",
        ]
    )


def row(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        called, default = f"`{shown(parameter)}`", "needed" if parameter.required else "none"
    else:
        value = "" if parameter.is_flag else f" {parameter.metavar or 'WORD'}"
        called = " ".join(f"`{each}{value}`" for each in parameter.opts)
        default = "no" if parameter.is_flag else "none" if parameter.default in (None, ()) else f"`{parameter.default}`"
    return f"| {called} | {default} | {' '.join((parameter.help or '').split())} |"


def shown(argument: Any) -> str:
    """An argument as the usage has it: ``CONFIG.toml``, ``[OTHER]``, ``RUN…``."""
    name = (argument.metavar or argument.name.upper()).strip("[]")
    return name if argument.required else f"[{name}]"


if __name__ == "__main__":
    FILE.write_text(reference(), encoding="utf-8")
