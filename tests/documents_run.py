"""Runs the blocks of one page: ``python documents_run.py PAGE``, in the folder where the page shall leave its files.

A program of its own, since a page's Python may make a process group, and its commands start processes.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import forks
from documents_blocks import ROOT, Block, blocks, commands, is_parsed, shortened

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

#: As the page's commands find it, whatever its Python sets meanwhile.
ENVIRONMENT = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
#: Python programs: started without a shell, so that the process can be a fork (see forks.py).
PROGRAMS = ("trueshard", "torchrun", "python")


def run(page: str) -> None:
    """Do with each block what its language says; an exception is the page's."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(page):
        print(f"--- {block.place}", flush=True)
        if block.title and block.language != "text":
            file = Path(block.title)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block.text, encoding="utf-8")
        if block.language == "python":
            code = compile("\n" * (block.line - 1) + block.text, block.page, "exec")
            if not block.title:
                exec(code, namespace)
        elif block.language == "bash" and not block.title:
            for command in commands(block.text):
                run_command(command)
        elif block.language in PARSERS:
            PARSERS[block.language](block)


def run_command(command: str) -> None:
    if is_parsed(command):
        parse(shlex.split(command, comments=True))
        return
    command = shortened(command)
    print(f"$ {command}", flush=True)
    words, variables = shlex.split(command), dict(ENVIRONMENT)
    while re.match(r"\w+=", words[0]):
        name, _, variables[name] = words.pop(0).partition("=")
    if words[0] in PROGRAMS and not re.search(r"[|&;<>$*?]", command):
        script = [] if words[0] == "python" else [str(Path(sys.executable).with_name(words[0]))]
        forks.run([sys.executable, *script, *words[1:]], check=True, env=variables, timeout=200)
    else:
        subprocess.run(["bash", "-ec", command], check=True, env=ENVIRONMENT, timeout=200)


def parse(words: list[str]) -> None:
    """Hold the words of a command against the program's own parser."""
    if words[0] == "torchrun":
        from torch.distributed.run import get_args_parser

        options = get_args_parser().parse_args(words[1:])
        if options.module and options.training_script == "trueshard":
            parse(["trueshard", *options.training_script_args])
    elif words[0] in ("srun", "sbatch"):
        rest = [word for word in words[1:] if not word.startswith("-")]
        if words[0] == "srun":
            parse(words[words.index(rest[0]) :])
        else:
            assert Path(rest[0]).is_file(), rest[0]
    elif words[0] == "trueshard":
        import typer

        from trueshard.cli.commands import app

        command = typer.main.get_command(app).commands[words[1]]  # type: ignore[attr-defined]
        command.make_context(words[1], words[2:])
    elif words[0] == "pip":
        known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        extras = [each for word in words for each in re.findall(r"\[(.*)\]", word)]
        assert {name for extra in extras for name in extra.split(",")} <= set(known), extras
    else:
        assert words[0] == "python", words


def read_toml(block: Block) -> None:
    """A whole configuration, or a part put over one: a table's keys replace those of the same table there."""
    from trueshard.train.config import Config
    from trueshard.train.parse import load_config

    if block.title:
        load_config(Path(block.title))
        return
    part = tomllib.loads(block.text)
    around = "grpo.toml" if {"rollout", "reward"} & part.keys() and "rl" not in part else "pretrain.toml"
    tree = tomllib.loads((ROOT / "examples" / around).read_text())
    for name, table in part.items():
        tree[name] = {**tree.get(name, {}), **table}
    Config.model_validate(tree)


def read_yaml(block: Block) -> None:
    import yaml

    assert yaml.safe_load(block.text)


PARSERS = {"toml": read_toml, "json": lambda block: json.loads(block.text), "yaml": read_yaml}


if __name__ == "__main__":
    run(sys.argv[1])
