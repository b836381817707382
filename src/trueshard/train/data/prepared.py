"""The data of a run, ready to be learnt from: made once, kept in the run's folder, read by every rank.

- The folder `data/` appears complete or not at all: it is written beside its place and renamed.
- Nothing is read again while neither the settings nor the files have changed. Once a run has a checkpoint its data are
  what it was trained on: they are used as they are, even if the files have changed since.
- What is streamed is not kept; then the folder holds the tokenizer, the data for evaluation, and a fingerprint.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trueshard.errors import UserError
from trueshard.train.config import Config
from trueshard.train.data.build import build, first_texts
from trueshard.train.data.formats import Format, format_of, texts_of
from trueshard.train.data.mixture import Mixture, StreamMixture
from trueshard.train.data.samples import Collate, Samples, Stream
from trueshard.train.data.sources import Source, find
from trueshard.train.data.store import Store, Summary, read_summary, write_summary
from trueshard.train.data.streaming import SourceStream
from trueshard.train.data.tokenizer import (
    fingerprint,
    load_processor,
    load_tokenizer,
    set_chat_template,
    train_tokenizer,
)

NOUNS = {
    "text": "text",
    "chat": "conversations",
    "preference": "preferences",
    "vision": "conversations with images",
}


@dataclass(frozen=True)
class Prepared:
    """The data of a run."""

    folder: Path
    """Where they are kept: `data` in the run's folder."""
    summary: Summary
    train: Samples | Stream
    """What is learnt from."""
    evaluation: Samples | None
    """What is evaluated on; None without `[evaluation]`."""
    collate: Collate
    """Makes batches of either."""

    def __len__(self) -> int:
        """Samples in a pass over what is learnt from. Raises `TypeError` where that is streamed."""
        if isinstance(self.train, Samples):
            return len(self.train)
        raise TypeError("how many samples a stream has is not known")

    def tokenizer(self) -> Any:
        """The transformers tokenizer that made them, with its chat template."""
        return _tokenizer(self.folder)


def prepare(config: Config, *, frozen: bool, make: bool, processor: Any = None) -> Prepared:
    """The data of a run, from its folder if they are there, else made now.

    Args:
        config: of the run.
        frozen: the run has been trained on what is there, which is therefore right whatever the files are now.
        make: whether this process may make them.
        processor: of images and text, for the format "vision"; None: read where the tokenizer is.

    Raises:
        UserError: for what cannot be read, or is too little; nothing is left on disk then.
    """
    folder = Path(config.run.dir).expanduser() / "data"
    summary = read_summary(folder)
    current = summary is not None and summary.identity == _identity(config)
    as_it_is = current and frozen and not config.data.streaming
    sources = [] if as_it_is else find(config.data)
    held = [] if as_it_is else _evaluation_sources(config)
    read = None if as_it_is else _read(config, sources + held)
    if config.data.format == "vision" and processor is None:
        processor = load_processor(config)
    if not current or not (frozen or (summary is not None and summary.fingerprint == read)):
        if not make:
            raise UserError(f"run.dir: {folder} is not seen by every rank; choose a folder that all machines share")
        with _new_folder(folder) as scratch:
            _make(config, sources, held, processor, scratch)
            _open(config, scratch, sources, processor)
            if folder.exists():
                shutil.rmtree(folder)
            scratch.rename(folder)
    prepared = _open(config, folder, sources, processor)
    if config.data.streaming and read is not None:  # it is read anew: what is there now is what is learnt from
        return replace(prepared, summary=replace(prepared.summary, fingerprint=read, crc32=zlib.crc32(read.encode())))
    return prepared


def _make(config: Config, sources: list[Source], held: list[Source], processor: Any, folder: Path) -> None:
    tokenizer = processor.tokenizer if processor is not None else load_tokenizer(config)
    _announce(config, sources, tokenizer is None)
    if tokenizer is None:
        assert config.tokenizer.vocab_size is not None
        texts = first_texts(sources, texts_of(config))
        tokenizer = train_tokenizer(texts, config.tokenizer.vocab_size, config.data.format)
    if config.data.format != "text":
        set_chat_template(config, tokenizer, processor)
    (processor or tokenizer).save_pretrained(str(folder / "tokenizer"))
    form = format_of(config, tokenizer, processor)
    made = _read(config, sources + held)
    vocabulary = None if form.kept else 1 + max(tokenizer.get_vocab().values())
    length = config.train.sequence_length
    common: dict[str, Any] = {"vocabulary": vocabulary, "length": length, "fingerprint": made}
    if held:
        (folder / "evaluation").mkdir()
        write_summary(
            folder / "evaluation",
            build(held, form, folder / "evaluation", fraction=0.0, identity={}, **common),
        )
    if config.data.streaming:
        identity = _identity(config)
        write_summary(folder, Summary(None, None, None, zlib.crc32(made.encode()), made, identity))
        return
    section = config.evaluation
    fraction = section.fraction if section is not None and section.path is None else 0.0
    summary = build(sources, form, folder, fraction=fraction, identity=_identity(config), **common)
    write_summary(folder, summary)


def _open(config: Config, folder: Path, sources: list[Source], processor: Any) -> Prepared:
    """What stands in the folder. Raises `UserError` if it is too little."""
    summary = read_summary(folder)
    assert summary is not None
    tokenizer = _tokenizer(folder)
    if processor is not None:
        set_chat_template(config, processor.tokenizer, processor)
    form = format_of(config, tokenizer, processor)
    train = _streams(config, form, sources) if config.data.streaming else _stored(config, form, folder, summary)
    evaluation = None if config.evaluation is None else _held_out(config, form, folder, summary)
    return Prepared(folder, summary, train, evaluation, form.collate)


def _stored(config: Config, form: Format, folder: Path, summary: Summary) -> Samples:
    places, parts = config.data.places(), _parts(form, folder, summary, "train")
    for place, part, ranges in zip(places, parts, summary.ranges, strict=True):
        if not len(part):
            raise UserError(_too_little(config, place.path, ranges["train"], form.joined))
    return parts[0] if len(parts) == 1 else Mixture(parts, [place.weight for place in places])


def _streams(config: Config, form: Format, sources: list[Source]) -> Stream:
    streams = [SourceStream(source, form, config.train.sequence_length) for source in sources]
    for stream in streams:
        stream.check()
    return streams[0] if len(streams) == 1 else StreamMixture(streams, [source.weight for source in sources])


def _held_out(config: Config, form: Format, folder: Path, summary: Summary) -> Samples:
    if _holds_out(config):
        found = _parts(form, folder, summary, "evaluation")
    else:
        own = read_summary(folder / "evaluation")
        assert own is not None
        found = _parts(form, folder / "evaluation", own, "train")
    kept = [part for part in found if len(part)]
    if not kept:
        raise UserError(_nothing_held_out(config))
    return kept[0] if len(kept) == 1 else Mixture(kept, [1.0] * len(kept))


def _parts(form: Format, folder: Path, summary: Summary, part: str) -> list[Samples]:
    """Of each source, the samples of a part."""
    store = Store(folder, summary)
    return [form.view(store, *ranges[part]) for ranges in summary.ranges]


def _too_little(config: Config, path: str, found: tuple[int, int], joined: bool) -> str:
    key = "data.path" if config.data.path is not None else "data.sources"
    length = config.train.sequence_length
    if joined:
        after = " once what evaluation.fraction holds out is gone" if _holds_out(config) else ""
        return (
            f"{key}: {path} is {found[1] - found[0]} tokens{after}, fewer than one sequence of "
            f"train.sequence_length + 1 = {length + 1}; add text or lower train.sequence_length"
        )
    return f"{key}: {path} leaves nothing to learn from; add records, or lower evaluation.fraction"


def _nothing_held_out(config: Config) -> str:
    section = config.evaluation
    assert section is not None
    if section.path is not None:
        return (
            f"evaluation.path: {section.path} is less than one sequence of train.sequence_length = "
            f"{config.train.sequence_length}; add to it"
        )
    return (
        f"evaluation.fraction: {section.fraction} of the data is less than one sequence; raise it, or set "
        "evaluation.path"
    )


def _holds_out(config: Config) -> bool:
    return config.evaluation is not None and config.evaluation.path is None


def _evaluation_sources(config: Config) -> list[Source]:
    """Where `evaluation.path` is; none without it."""
    if config.evaluation is None or config.evaluation.path is None:
        return []
    return find(config.data, config.evaluation.path)


def _identity(config: Config) -> dict[str, Any]:
    """The settings that decide what the data are."""
    every = config.identity()
    kept = {key: value for key, value in every.items() if key.startswith(("tokenizer.", "data.", "evaluation."))}
    # Joined text is the same for every length of sequence.
    length = None if config.data.format == "text" else config.train.sequence_length
    plain = {**kept, "model": config.model.path or config.model.config, "train.sequence_length": length}
    checked: dict[str, Any] = json.loads(json.dumps(plain))
    return checked


def _read(config: Config, sources: list[Source]) -> str:
    """A fingerprint of all that is read: data and tokenizer."""
    entries = [fingerprint(config), [source.fingerprint() for source in sources]]
    return hashlib.sha256(json.dumps(entries).encode()).hexdigest()


def _announce(config: Config, sources: list[Source], trains: bool) -> None:
    made = "training a tokenizer on it" if trains else "reading it"
    if config.data.streaming:
        if trains:
            print(f"training a tokenizer on the first {NOUNS[config.data.format]}", flush=True)
        return
    sizes = [source.size() for source in sources]
    known = sum(size for size in sizes if size is not None)
    shown = f"{known / 1e6:.1f} MB" if known >= 1e6 else f"{known / 1e3:.1f} kB"
    what = ", ".join(source.name for source in sources) if None in sizes else f"{shown} of {NOUNS[config.data.format]}"
    print(f"{what}: {made}", flush=True)


def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder / "tokenizer"), local_files_only=True)


class _new_folder:
    """A folder beside `target` to write into; on failure it and the parents made for it are gone again."""

    def __init__(self, target: Path) -> None:
        self.parents = [parent for parent in target.parents if not parent.exists()]
        self.target = target

    def __enter__(self) -> Path:
        self.target.parent.mkdir(parents=True, exist_ok=True)
        for left in self.target.parent.glob(".data-*"):  # of a process that was killed
            shutil.rmtree(left)
        self.scratch = Path(tempfile.mkdtemp(prefix=".data-", dir=self.target.parent))
        self.scratch.chmod(self.target.parent.stat().st_mode & 0o777)
        return self.scratch

    def __exit__(self, kind: Any, *_: Any) -> None:
        shutil.rmtree(self.scratch, ignore_errors=True)
        if kind is not None:
            for parent in self.parents:
                parent.rmdir()
