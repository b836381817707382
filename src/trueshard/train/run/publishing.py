"""Make an exported model ready for the hub: a card beside its files, and, unless that is left out, the upload.

Settings and figures of the card are read from what the run itself wrote; what is not there is said to be not there.
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
from trueshard.checkpoint.exporting import ADAPTER_CONFIG
from trueshard.errors import UserError, cut_line, explained
from trueshard.text import load_json
from trueshard.train.config import Config
from trueshard.train.data.store import read_summary
from trueshard.train.metrics.step_metrics import read_metrics
from trueshard.train.models.config import is_hub_name
from trueshard.train.parse import to_toml
from trueshard.train.run.resuming import read_settings

LOADERS = dict.fromkeys(("hf", "merged"), "transformers import AutoModelForCausalLM")
LOADERS["adapter"] = "peft import AutoPeftModelForCausalLM"
"""Form of `trueshard export` that can be published → what loads it from the hub."""
_SECRET = re.compile(r"secret|password|credential|api_?key|_token$", re.IGNORECASE)


def check_push(repository: str, form: str) -> None:
    """Raise `UserError` for a name that the hub cannot have, or a form that nobody could load from there."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
        raise UserError(f"--push {repository!r}: the hub has no such names; give owner/name")
    if form not in LOADERS:
        raise UserError(f"--push goes with --to {' or '.join(LOADERS)}, and --to is {form}; change that")


def publish(folder: Path, checkpoint: str, repository: str, form: str, *, send: bool, private: bool) -> str:
    """Write the card of what was exported to ``folder``, send both, and return a line that says where they are.

    Without ``send``, or offline (`HF_HUB_OFFLINE`), nothing leaves this machine. Raises `UserError` if the hub refuses.
    """
    from huggingface_hub import HfApi, constants

    (folder / "README.md").write_text(card(folder, checkpoint, repository, form), encoding="utf-8")
    later = f"`hf upload {repository} {folder}` sends it"
    if not send or constants.HF_HUB_OFFLINE:
        why = "HF_HUB_OFFLINE is set" if send else "--no-send"
        return f"{folder} is ready for {repository}, and nothing was sent ({why}); {later}"
    with explained(
        f"--push {repository}: not sent", f"{folder} is ready: after `hf auth login`, {later}", detail=cut_line
    ):
        api = HfApi()
        api.create_repo(repository, private=private or None, exist_ok=True)
        return str(api.upload_folder(repo_id=repository, folder_path=folder, commit_message="Upload by TrueShard"))


def card(folder: Path, checkpoint: str, repository: str, form: str) -> str:
    """Return the model card, Markdown, of what was exported to ``folder``, where an adapter's base gets its name."""
    path = resolve_latest(checkpoint)
    saved: Any = trueshard.inspect(path)
    run = Path(path).absolute().parent.parent
    given = read_settings(run).get("given") if (run / "checkpoints").is_dir() else None
    tables: dict[str, Any] = {"made": saved.about, "data": {}, "metrics": {}, "plan": {}}
    recipe = base = ""
    named, revision = None, None
    if given is not None:
        config = Config.model_validate(_public(given))
        recipe, revision = to_toml(config), config.model.revision
        named = config.model.path if is_hub_name(config.model.path or "") else None
        base = f"\nbase_model: {named}" if named else ""
        tables["data"] = vars(read_summary(run / "data") or object)
        tables["metrics"] = next((row for row in read_metrics(run / "metrics.jsonl") if row["step"] == saved.step), {})
        tables["plan"] = load_json((run / "plan.json").read_text(encoding="utf-8")).get("plan", {})
    for file in folder.rglob(ADAPTER_CONFIG):  # whose base is where it was on this machine
        adapter = load_json(file.read_text(encoding="utf-8"))
        base_name = named or _public(adapter["base_model_name_or_path"])
        changed = adapter | {"base_model_name_or_path": base_name, "revision": revision}
        file.write_text(json.dumps(changed, indent=2), encoding="utf-8")
    files = sorted(file for file in folder.rglob("*") if file.is_file() and file.name != "README.md")
    tables["hashes"] = {file.relative_to(folder).as_posix(): _sha256(file) for file in files}
    library, _, loader = LOADERS[form].split()
    words = {"repository": repository, "form": form, "step": saved.step, "library": library, "loader": loader}
    words |= {"recipe": recipe, "base": base} | {title: _table(values) for title, values in tables.items()}
    return Template((Path(__file__).parent / "card.md").read_text(encoding="utf-8")).substitute(words)


def _public(value: Any) -> Any:
    """Return settings without places of this machine, passwords, and keys of services."""
    if isinstance(value, dict):
        return {key: "(left out)" if _SECRET.search(key) else _public(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_public(part) for part in value]
    if not isinstance(value, str):
        return value
    return os.path.basename(value.rstrip("/")) if value[:1] in ("/", "~") else re.sub(r"//[^/@]*@", "//", value)


def _table(values: Mapping[str, Any]) -> str:
    rows = [f"| {key} | {value} |" for key, value in values.items() if isinstance(value, str | int | float)]
    return "\n".join(["| | |", "|---|---|", *rows]) if rows else "The run left nothing of it beside the checkpoint."


def _sha256(file: Path) -> str:
    result = hashlib.sha256()
    with file.open("rb") as opened:
        while block := opened.read(2**20):
            result.update(block)
    return result.hexdigest()
