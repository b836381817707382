"""Make an exported model ready for the hub: a card beside its files, and, unless that is left out, the upload.

Figures and settings of the card are read from what the run itself wrote: `config.json`, `metrics.jsonl`, `plan.json`,
`data/data.json`, and the checkpoint's manifest. What is not there is said to be not there.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import Any

import trueshard
from trueshard.checkpoint.catalogue import resolve_latest
from trueshard.errors import UserError, cut_line, explained
from trueshard.train.config import Config
from trueshard.train.data.store import read_summary
from trueshard.train.metrics.step_metrics import read_metrics
from trueshard.train.models.config import is_hub_name
from trueshard.train.parse import to_toml
from trueshard.train.run.resuming import read_settings

_SECRET = re.compile(r"secret|password|credential|api_?key|_token$", re.IGNORECASE)
FOLDERS = ("hf", "adapter", "merged")
"""Forms of `trueshard export` that the hub's libraries read."""


def check_name(repository: str, form: str) -> None:
    """Raise `UserError` for a name that the hub cannot have, or a form that nobody could load from there."""
    from huggingface_hub.utils import validate_repo_id

    with explained(f"--push {repository!r}: the hub has no such names", "give owner/name", detail=cut_line):
        validate_repo_id(repository)
        if "/" not in repository:
            raise ValueError("there is no owner")
    if form not in FOLDERS:
        raise UserError(f"--push goes with --to {', '.join(FOLDERS)}, which are folders for the hub, not {form}")


def publish(folder: Path, checkpoint: str, repository: str, form: str, *, send: bool, private: bool) -> str:
    """Write the card of what was exported to ``folder``, send both, and return a line that says where they are.

    Without ``send``, or offline (`HF_HUB_OFFLINE`), nothing leaves this machine. Raises `UserError` if the hub refuses.
    """
    from huggingface_hub import HfApi, constants

    (folder / "README.md").write_text(card(folder, checkpoint, repository, form), encoding="utf-8")
    later = f"hf upload {repository} {folder}"
    if not send or constants.HF_HUB_OFFLINE:
        why = "HF_HUB_OFFLINE is set" if send else "--no-send"
        return f"{folder} is ready for {repository}, and nothing was sent ({why}); `{later}` sends it"
    remedy = f"{folder} is ready: after `hf auth login`, `{later}` sends it"
    with explained(f"--push {repository}: it was not sent", remedy, detail=cut_line):
        api = HfApi()
        api.create_repo(repository, private=private or None, exist_ok=True)
        return str(api.upload_folder(repo_id=repository, folder_path=folder, commit_message="Upload by TrueShard"))


def card(folder: Path, checkpoint: str, repository: str, form: str) -> str:
    """Return the model card, Markdown, of what was exported to ``folder``."""
    path = resolve_latest(checkpoint)
    found: Any = trueshard.inspect(path)
    run = Path(path).absolute().parent.parent
    record = read_settings(run) if (run / "checkpoints").is_dir() else {}
    absent = "No run of `trueshard train` is beside the checkpoint, so it is not known."
    words = dict.fromkeys(("recipe", "data", "metrics", "plan"), absent) | {"base": ""}
    if "given" in record:
        config = Config.model_validate(_without_places(record["given"]))
        words["recipe"] = f"```toml\n{to_toml(config)}```"
        if config.model.path is not None and is_hub_name(config.model.path):
            words["base"] = f"base_model: {config.model.path}\n"
        rows = [record for record in read_metrics(run / "metrics.jsonl") if record["step"] == found.step]
        words["metrics"] = _table(rows[-1]) if rows else "The run kept none of it."
        summary = read_summary(run / "data")
        counts = ("documents", "tokens", "unigram_entropy", "crc32", "fingerprint")
        words["data"] = _table({key: getattr(summary, key, None) for key in counts})
        words["plan"] = _table(json.loads((run / "plan.json").read_text(encoding="utf-8")).get("plan", {}))
    files = sorted(file for file in folder.rglob("*") if file.is_file() and file.name != "README.md")
    hashes = {file.relative_to(folder).as_posix(): _sha256(file) for file in files}
    done = {"hf": "The model", "adapter": "The adapter alone", "merged": "The model, with its adapter merged into it"}
    auto = "peft import AutoPeftModelForCausalLM" if form == "adapter" else "transformers import AutoModelForCausalLM"
    words |= {
        "library": "peft" if form == "adapter" else "transformers",
        "name": repository.partition("/")[2],
        "what": f"{done[form]}, of step {found.step} of a run with fully-sharded data parallelism.",
        "made": _table(found.about),
        "use": f'```python\nfrom {auto}\n\nmodel = {auto.split()[-1]}.from_pretrained("{repository}")\n```',
        "hashes": _table(hashes),
    }
    return Template((Path(__file__).parent / "card.md").read_text(encoding="utf-8")).substitute(words)


def _without_places(value: Any) -> Any:
    """Return settings without places of this machine, passwords, and keys of services."""
    if isinstance(value, dict):
        return {key: "(left out)" if _SECRET.search(key) else _without_places(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_without_places(each) for each in value]
    if not isinstance(value, str):
        return value
    return os.path.basename(value.rstrip("/")) if value[:1] in ("/", "~") else re.sub(r"//[^/@]*@", "//", value)


def _table(values: Mapping[str, Any]) -> str:
    rows = [f"| {key} | {value} |" for key, value in values.items() if not isinstance(value, dict | list | None)]
    return "\n".join(["| | |", "|---|---|", *rows])


def _sha256(file: Path) -> str:
    result = hashlib.sha256()
    with file.open("rb") as opened:
        while block := opened.read(2**20):
            result.update(block)
    return result.hexdigest()
