"""Models by their name on the Hugging Face hub: read from its cache, or fetched into it first.

`huggingface_hub`'s own variables decide where the cache is (`HF_HOME`), who asks (`HF_TOKEN`), and whether the network
is used at all (`HF_HUB_OFFLINE=1`).
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

from trueshard.checkpoint.exporting import COMPANIONS
from trueshard.errors import explained

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_hub_name(path: str) -> bool:
    """True for `owner/name`, unless something is there on this machine."""
    return _NAME.fullmatch(path) is not None and not Path(path).exists()


@functools.cache
def fetch(name: str, revision: str | None) -> Path:
    """Return the local folder of a model's files at a `revision`; its name is the commit. Raises `UserError`."""
    from huggingface_hub import snapshot_download

    patterns = [f"*{suffix}" for suffix in (".safetensors", *COMPANIONS)]
    remedy = f"correct it, or run `hf download {name}` where there is a network, and copy its cache (HF_HOME)"
    with explained(f"model.path: {name!r} does not exist here, and is not to be had from the hub", remedy):
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
        if not any(folder.glob("*.safetensors")):
            snapshot_download(name, revision=folder.name, allow_patterns=["*.bin"])
    return folder
