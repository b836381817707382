"""Counts of how many example configurations of another framework `trueshard convert` makes one that a run accepts.

    .venv/bin/python tests/convert_examples.py torchtune ~/torchtune/recipes/configs

Models and data are tiny stand-ins of the same format. All else of `trueshard train --dry-run` but its forecast is done:
settings are checked together, the model is built with its adapter, and the data are read.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from documents_models import make_models
from trueshard.convert.converting import Converted, convert
from trueshard.errors import UserError
from trueshard.text import tomllib
from trueshard.train.config import Config
from trueshard.train.parse import set_key
from trueshard.train.run.checks import check_settings, count_samples
from trueshard.train.run.resuming import resolved, with_settings

SAYS = [{"role": "user", "content": "two and two?"}, {"role": "assistant", "content": "four"}]
RECORDS: dict[str, dict[str, Any]] = {
    "text": {"text": "two and two are four " * 9},
    "chat": {"messages": SAYS},
    "instruction": {"instruction": "Add.", "input": "2 2", "output": "4"},
    "completion": {"prompt": "two and two", "completion": " are four"},
    "preference": {"prompt": "two and two", "chosen": " are four", "rejected": " are five"},
    "prompt": {"prompt": "two and two"},
}
"""Format → a record of it."""
ON_THE_HUB = ("path", "sources", "subset", "split", "streaming", "include", "field", "transform")
"""Keys of [data] that name what the stand-ins take the place of."""


def stand_ins(folder: Path) -> Path:
    """Write a tiny Llama with long positions, and data of each format; return the folder."""
    make_models(folder)
    file = folder / "Llama-3.2-1B" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"max_position_embeddings": 1 << 20}))
    for form, record in RECORDS.items():
        (folder / f"{form}.jsonl").write_text(f"{json.dumps(record)}\n" * 400)
    (folder / "rewards.py").write_text("def score(answer, **record):\n    return 0.0\n")
    return folder


def check(result: Converted, folder: Path, ranks: int) -> None:
    """Raise `UserError`, or ValueError, if a run of what was converted would be refused before it starts."""
    tree = tomllib.loads(result.toml)
    for line in result.toml.splitlines():  # what is left to the user stands there with an example
        name, equals, rest = line.removeprefix("# ").partition(" = ")
        keys = [key for key in result.missing if key.endswith(f".{name}")] if line.startswith("# ") and equals else []
        for key in keys:
            set_key(tree, f"{key}={rest.partition('  # yours:')[0]}")
    tree["run"]["dir"] = str(folder / "run")
    tree["model"] = {key: tree["model"][key] for key in ("dtype", "quantize") if key in tree["model"]}
    tree["model"]["path"] = str(folder / "Llama-3.2-1B")
    tree.pop("tokenizer", None)
    tree.get("log", {}).pop("to", None)  # of packages that need not be here
    tree.get("evaluation", {}).pop("path", None)
    if "reward" in tree:
        tree["reward"] = {"function": f"{folder}/rewards.py:score"}
    if "adapter" in tree:  # its modules are those of the model that is not here
        tree["adapter"] = {key: value for key, value in tree["adapter"].items() if key in ("method", "rank", "alpha")}
    form = tree["data"].get("format", "text")
    data = {key: value for key, value in tree["data"].items() if key not in ON_THE_HUB}
    tree["data"] = data | {"path": str(folder / f"{form}.jsonl")}
    config = Config.model_validate(tree)
    if not config.images:  # a processor is of its model
        config = resolved(config, ranks)
        check_settings(config, ranks)
        count_samples(config if config.rl else with_settings(config, {"train.sequence_length": 64}))  # enough for these


def outcomes(source: str, paths: list[Path], ranks: int = 8) -> Iterator[tuple[Path, str, str]]:
    """Yield (path, "accepted", "something dropped" or "refused", what was dropped or why) of each configuration."""
    with tempfile.TemporaryDirectory() as scratch, contextlib.redirect_stderr(io.StringIO()):
        folder = stand_ins(Path(scratch))
        for path in paths:
            try:
                result = convert(path, source, ranks=ranks)
                check(result, folder, ranks)
            except (UserError, ValueError) as error:
                yield path, "refused", str(error).replace(f"{path}: ", "").replace(str(folder), "")
            else:
                yield path, "something dropped" if result.dropped else "accepted", ", ".join(result.dropped)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("source", help="a framework, as of `trueshard convert --from`")
    parser.add_argument("folder", type=Path, help="with YAML files, in subfolders too")
    arguments = parser.parse_args()
    paths = sorted(path for suffix in ("yaml", "yml") for path in arguments.folder.rglob(f"*.{suffix}"))
    found = list(outcomes(arguments.source, paths))
    kinds = Counter(kind for _, kind, _ in found)
    print(f"{len(found)} configurations: " + ", ".join(f"{count} {kind}" for kind, count in kinds.most_common()))
    for (kind, why), count in Counter((kind, why) for _, kind, why in found if why).most_common():
        print(f"{count:4}  {kind}: {why}")


if __name__ == "__main__":
    main()
