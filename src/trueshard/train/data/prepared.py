"""The data of a run: made once, kept in the run's folder, read by every rank.

- The folder `data/` appears complete or not at all: it is written beside its place and renamed.
- Nothing is read again while neither settings nor files have changed. Once a run has a checkpoint, its data are used as
  they are even if the files have changed: they are what it was trained on.
- Streamed data are not kept; the folder then holds the tokenizer, the evaluation data and a fingerprint.
"""

from __future__ import annotations

import shutil
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trueshard.errors import UserError
from trueshard.files import making, replacing
from trueshard.train.config import Config, SourceSection
from trueshard.train.data import tokenizer as tokenizers
from trueshard.train.data.batches import Collate, Mixture, Samples, Stream, StreamMixture
from trueshard.train.data.formats import FORMATS, format_of
from trueshard.train.data.sources import DataSource, find, hash_of
from trueshard.train.data.store import StoredSamples, Summary, build, read_summary
from trueshard.train.data.streams import SourceStream


@dataclass(frozen=True)
class Prepared:
    """The data of a run."""

    folder: Path
    """`data` in the run's folder."""
    summary: Summary
    train: Samples | Stream
    evaluation: Samples | None
    """None without `[evaluation]`."""
    collate: Collate
    """Makes batches of either."""
    tokenizer: Any
    """The tokenizer of the data, with its chat template."""

    def __len__(self) -> int:
        """Return the number of training samples. Raises `TypeError` for a stream."""
        if isinstance(self.train, Samples):
            return len(self.train)
        raise TypeError("how many samples a stream has is not known")


def prepare(config: Config, *, frozen: bool, make: bool) -> Prepared:
    """Return the data of a run, made now unless the run's folder has them. Raises `UserError`, and leaves nothing.

    ``frozen``: the run has a checkpoint, so existing data are right whatever the files are now. ``make``: this process
    may make them.
    """
    folder, streaming, evaluation = config.run.folder / "data", config.data.streaming, config.evaluation
    summary = read_summary(folder)
    kept = summary is not None and summary.identity == _identity(config) and frozen
    sources, held_out, state = [], [], None
    if not kept or streaming:
        sources = find(config.data)
        held_out = [] if evaluation is None or evaluation.path is None else find(config.data, evaluation.path)
        state = _fingerprint(config, sources + held_out)
        kept = kept or (summary is not None and (summary.identity, summary.fingerprint) == (_identity(config), state))
    is_vision = config.images
    processor = tokenizers.load_processor(config.tokenizer, config.model) if is_vision else None
    if not kept:
        if not make:
            raise UserError(f"run.dir: {folder} is not seen by every rank; choose a folder that all machines share")
        for left in folder.parent.glob(f".new-*-{folder.name}"):  # by a process that was killed
            shutil.rmtree(left)
        with making(folder.parent), replacing(folder) as scratch:
            scratch.mkdir()
            _make(config, sources, held_out, processor, scratch)
            _open(config, scratch, sources, processor)
            if folder.exists():
                shutil.rmtree(folder)
    prepared = _open(config, folder, sources, processor)
    if streaming and state is not None:  # the files are read anew, so they count as they are now
        return replace(prepared, summary=replace(prepared.summary, fingerprint=state, crc32=zlib.crc32(state.encode())))
    return prepared


def _make(config: Config, sources: list[DataSource], held_out: list[DataSource], processor: Any, folder: Path) -> None:
    sections = (config.tokenizer, config.model, config.data.format)
    tokenizer = processor.tokenizer if processor is not None else tokenizers.load_tokenizer(*sections)
    _announce(config, sources, tokenizer is None)
    if tokenizer is None:
        assert config.tokenizer.vocab_size is not None
        texts_of = FORMATS[config.data.format].texts
        texts = (text for source in sources for record in source.records() for text in texts_of(config.data, record))
        tokenizer = tokenizers.train_tokenizer(texts, config.tokenizer.vocab_size, config.data.format)
    if config.data.format != "text":
        tokenizers.set_chat_template(config.tokenizer, tokenizer, processor)
    (processor or tokenizer).save_pretrained(str(folder / "tokenizer"))
    length, identity, state = _length(config), _identity(config), _fingerprint(config, sources + held_out)
    form = format_of(config.data, length, tokenizer, processor)
    if held_out:
        place = folder / "evaluation"
        place.mkdir()
        build(held_out, form, place, length=length, fraction=0.0, fingerprint=state, identity={}).write(place)
    if config.data.streaming:
        summary = Summary(None, None, None, zlib.crc32(state.encode()), state, identity)
    else:
        fraction = config.evaluation.fraction if config.evaluation is not None and not held_out else 0.0
        summary = build(sources, form, folder, length=length, fraction=fraction, fingerprint=state, identity=identity)
    summary.write(folder)


def _open(config: Config, folder: Path, sources: list[DataSource], processor: Any) -> Prepared:
    """Open the data in a folder. Raises `UserError` if a part holds no sequence."""
    from transformers import AutoTokenizer

    summary = read_summary(folder)
    assert summary is not None
    if processor is not None:
        tokenizers.set_chat_template(config.tokenizer, processor.tokenizer, processor)
    section, length = config.evaluation, _length(config)
    tokenizer = AutoTokenizer.from_pretrained(str(folder / "tokenizer"), local_files_only=True)
    form = format_of(config.data, length, tokenizer, processor)

    def stored(place: Path, contents: Summary | None, part: str) -> list[StoredSamples]:
        assert contents is not None
        return [StoredSamples(place, contents, form, *ranges[part], length) for ranges in contents.ranges]

    train: Samples | Stream
    if config.data.streaming:
        streams = [SourceStream(source, form, length) for source in sources]
        for stream in streams:
            stream.check()
        train = StreamMixture(streams, [source.weight for source in sources])
    else:
        key, places = "data.sources", config.data.sources
        if config.data.path is not None:
            key, places = "data.path", [SourceSection(path=config.data.path)]
        parts = stored(folder, summary, "train")
        for place, part in zip(places, parts, strict=True):
            if not len(part):
                raise UserError(
                    f"{key}: {place.path}, without what is held out, has fewer tokens than one sequence of "
                    f"train.sequence_length + 1 = {length + 1}; add to it, or lower evaluation.fraction or "
                    "train.sequence_length"
                )
        train = Mixture(parts, [place.weight for place in places])
    if section is None:
        return Prepared(folder, summary, train, None, form.collate, tokenizer)
    if section.path is None:
        held_out = stored(folder, summary, "evaluation")
        share = f"{section.fraction} of the data is less than one sequence"
        problem = f"fraction: {share}; raise it, or set evaluation.path"
    else:
        held_out = stored(folder / "evaluation", read_summary(folder / "evaluation"), "train")
        problem = f"path: {section.path} is less than one sequence of train.sequence_length = {length}; add to it"
    held_out = [part for part in held_out if len(part)]
    if not held_out:
        raise UserError(f"evaluation.{problem}")
    return Prepared(folder, summary, train, Mixture(held_out, [1.0] * len(held_out)), form.collate, tokenizer)


def _length(config: Config) -> int:
    """Return the tokens of a sequence or, for reinforcement learning, of a prompt, at most."""
    return config.train.sequence_length - (config.rollout.tokens if config.rl is not None else 0)


def _identity(config: Config) -> dict[str, Any]:
    settings = config.identity()
    kept = {key: value for key, value in settings.items() if key.startswith(("tokenizer.", "data.", "evaluation."))}
    # Joined text is the same for every length of sequence.
    length = None if config.data.format == "text" else _length(config)
    return {**kept, "model": config.model.path or config.model.config, "train.sequence_length": length}


def _fingerprint(config: Config, sources: list[DataSource]) -> str:
    tokenizer = tokenizers.fingerprint(config.tokenizer, config.model)
    return hash_of([tokenizer, [source.fingerprint() for source in sources]])


def _announce(config: Config, sources: list[DataSource], trains: bool) -> None:
    noun, doing = FORMATS[config.data.format].noun, "training a tokenizer on it" if trains else "reading it"
    sizes = [source.size() for source in sources]
    known = sum(size for size in sizes if size is not None)
    shown = f"{known / 1e6:.1f} MB" if known >= 1e6 else f"{known / 1e3:.1f} kB"
    what = ", ".join(source.name for source in sources) if None in sizes else f"{shown} of {noun}"
    if not config.data.streaming:
        print(f"{what}: {doing}", flush=True)
    elif trains:
        print(f"training a tokenizer on the first {noun}", flush=True)
