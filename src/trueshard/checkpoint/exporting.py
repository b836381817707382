"""``export``: a checkpoint as others want it.

- ``hf``: the model part as a Hugging Face directory, with its configuration and tokenizer files.
- ``safetensors``: the model part as one file, under the model's own names.
- ``adapter``, ``merged``: of a PEFT model, the adapters alone, or merged into the base, by PEFT itself (``adapters``).
- ``dcp``: a directory of torch.distributed.checkpoint (``dcp_export``): ``model.<name>``, as Accelerate and torch's
  ``get_model_state_dict`` name it, a tie under each of its names; optimizers as ``get_optimizer_state_dict`` has them.

Tensors go from file to file by blocks; their checksums are compared on the way. What is made gets its name once all of
it is on disk.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from trueshard.checkpoint import layout, tensorfile
from trueshard.checkpoint.source import Source, converted, source_of, write_file
from trueshard.checkpoint.store import is_url
from trueshard.checkpoint.target import sync

KINDS = ("hf", "safetensors", "adapter", "merged", "dcp")
_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


def export(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    to: str = "hf",
    dtype: torch.dtype | str | None = None,
    *,
    model: str | None = None,
    adapter: str | None = None,
) -> Path:
    """Write a checkpoint in another form. Of one process; nothing is changed at ``path``.

    Args:
        path: a checkpoint, or a Hugging Face directory or .safetensors file, which has no optimizer and no adapters.
        out: the directory (for "safetensors", the file) to make; it must not exist, and appears when it is complete.
        to: "hf", "safetensors", "adapter", "merged" or "dcp". Optimizers are part of "dcp" alone, entries of ``save``'s
            ``more`` and random generators of none.
        dtype: what floating-point tensors are converted to, such as ``torch.bfloat16`` or "bfloat16"; None: kept.
        model: which one, of a checkpoint of several: its key.
        adapter: which one is merged, of a PEFT model with several.

    Returns:
        ``out``.

    Raises:
        FileExistsError: something is at ``out`` already.
        FileNotFoundError: no checkpoint is at ``path``.
        ValueError: it does not have what is asked for, or is damaged; the message names file and tensor.
    """
    from trueshard.checkpoint.reader import latest_in

    if to not in KINDS:
        raise ValueError(f"to={to!r}: it is one of {', '.join(KINDS)}")
    if is_url(out):
        raise ValueError(f"{out}: export writes to local directories; export to one, and copy it")
    source = source_of(latest_in(path), model)
    wanted = _dtype(dtype)
    final = Path(os.path.abspath(out))
    if to in ("adapter", "merged") and not source.adapters:
        raise ValueError(f'{path} has no adapter, so to={to!r} has nothing to write; to="hf" writes the model')
    if to == "hf" and source.adapters:
        raise ValueError(
            f'{path} is of a PEFT model, whose base alone is not what was trained: to="merged" writes both as one '
            'model, to="adapter" the adapter alone'
        )
    with _made(final, out) as making:
        _write(to, source, making, wanted, adapter)
    return Path(out)


def _write(to: str, source: Source, making: Path, dtype: torch.dtype | None, adapter: str | None) -> None:
    if to == "hf":
        _write_hf(source, making, dtype)
    elif to == "safetensors":
        entries = converted(source, dtype)
        names = {key: source.name(key) for key in entries}
        header, slots = tensorfile.layout(
            ((names[key], entry.dtype, tuple(entry.shape)) for key, entry in entries.items()), marked=False
        )
        write_file(making, header, {key: slots[names[key]].begin for key in entries}, source.catalogue, entries)
    elif to == "dcp":
        from trueshard.checkpoint.dcp_export import write_dcp

        write_dcp(source, making, dtype)
    else:
        from trueshard.checkpoint import adapters

        write = adapters.write_adapters if to == "adapter" else adapters.write_merged
        write(source, making, dtype, adapter)


def _dtype(given: torch.dtype | str | None) -> torch.dtype | None:
    found: Any = given
    if isinstance(given, str):
        found = getattr(torch, _SHORT.get(given, given).removeprefix("torch."), None)
    if given is not None and not (isinstance(found, torch.dtype) and found.is_floating_point):
        raise ValueError(f"dtype={given!r}: it is a floating-point dtype, such as bfloat16, float16 or float32")
    return found


@contextlib.contextmanager
def _made(final: Path, shown: Any) -> Iterator[Path]:
    """A temporary place beside ``final``, which becomes it in the end."""
    if os.path.lexists(final):
        raise FileExistsError(f"{shown} exists already; export to another name, or remove it first")
    final.parent.mkdir(parents=True, exist_ok=True)
    making = final.with_name(f".{final.name}.exporting-{secrets.token_hex(4)}")
    try:
        yield making
        for place in [*making.rglob("*"), making]:
            sync(place)
        if os.path.lexists(final):
            raise FileExistsError(f"{shown} was made by somebody else meanwhile; nothing was changed")
        os.rename(making, final)
        sync(final.parent)
    except BaseException:
        if making.is_dir():
            shutil.rmtree(making, ignore_errors=True)
        else:
            making.unlink(missing_ok=True)
        raise


def _write_hf(source: Source, directory: Path, dtype: torch.dtype | None) -> None:
    directory.mkdir()
    entries = converted(source, dtype)
    stem = "adapter_model" if source.catalogue.adapter else "model"
    places = {key: layout.Place("", stem, source.name(key)) for key in entries}
    for name, data in layout.files_of(entries, places, marked=False).items():
        begins = {key: entry.pieces[0].begin for key, entry in entries.items() if entry.pieces[0].file == name}
        write_file(directory / name, data, begins, source.catalogue, entries)
    for name, data in source.companions().items():
        if name == "config.json" and dtype is not None:
            data = json.dumps(_with_dtype(json.loads(data), tensorfile.dtype_name(dtype)), indent=2).encode()
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(data)


def _with_dtype(config: Any, dtype: str) -> Any:
    """A model's configuration, and those of its parts, after a conversion."""
    if not isinstance(config, dict):
        return config
    return {
        key: dtype if key in ("dtype", "torch_dtype") and isinstance(value, str) else _with_dtype(value, dtype)
        for key, value in config.items()
    }
