"""The data of a run: made once, kept in the run's folder, read by every rank.

- The folder `data/` appears complete or not at all: it is written beside its place and renamed. A stop leaves the other
  one, with which the next start goes on.
- Nothing is read again while neither settings nor files have changed. Once a run has a checkpoint, its data are used as
  they are even if the files have changed: they are what it was trained on.
- Streamed data are read during training; the folder then holds the tokenizer, the evaluation data and a fingerprint.
"""

from __future__ import annotations

import contextlib
import shutil
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import trueshard
from trueshard.errors import UserError
from trueshard.files import making, replacing
from trueshard.train.config import Config
from trueshard.train.data import tokenizer as tokenizers
from trueshard.train.data.batches import (
    Collate,
    Mixture,
    Samples,
    Stream,
    StreamMixture,
)
from trueshard.train.data.building import build
from trueshard.train.data.config import EvaluationSection, SourceSection
from trueshard.train.data.formats import FORMATS, Format
from trueshard.train.data.sources import DataSource, find, hash_of
from trueshard.train.data.store import StoredSamples, Summary, damage_named, read_summary
from trueshard.train.data.streams import SourceStream
from trueshard.train.models.config import own_code

Stored = Callable[[Path, str, int], list[StoredSamples]]
"""Folder, part and number of sources → the samples of each."""


@dataclass(frozen=True)
class Prepared:
    """The data of a run."""

    folder: Path  # `data` in the run's folder
    summary: Summary
    train: Samples | Stream
    evaluation: dict[str, Samples]  # sets by name, "" for that of the data or of `evaluation.path`
    form: Format
    tokenizer: Any  # with its chat template
    opening: str | None  # text that `[sample]` continues; None: nothing is sampled

    def __len__(self) -> int:
        """Return the number of training samples. Raises `TypeError` for a stream."""
        if isinstance(self.train, Samples):
            return len(self.train)
        raise TypeError("how many samples a stream has is not known")

    @property
    def collate(self) -> Collate:
        """Makes batches of samples."""
        return self.form.collate


def prepare(config: Config, *, frozen: bool, make: bool) -> Prepared:
    """Return the data of a run, made now unless the run's folder has them. Raises `UserError`, and leaves nothing.

    ``frozen``: the run has a checkpoint, so existing data are right whatever the files are now. ``make``: this process
    may make them.
    """
    folder, streaming, evaluation = config.run.folder / "data", config.data.streaming, config.evaluation
    summary, identity = read_summary(folder), _identity(config)
    is_kept = summary is not None and summary.identity == identity and frozen
    sources, held_out, state = [], dict[str, list[DataSource]](), None
    if not is_kept or streaming:
        sources = find(config.data)
        for name, (key, path) in evaluation.paths.items() if evaluation is not None else ():
            held_out[name] = find(config.data, path, key)
        tokenizer_state = tokenizers.fingerprint(config.tokenizer, config.model)
        state = hash_of([tokenizer_state, [source.fingerprint() for source in sum(held_out.values(), sources)]])
        is_kept |= summary is not None and (summary.identity, summary.fingerprint) == (identity, state)
    processor = tokenizers.load_processor(config.tokenizer, config.model) if config.images else None
    if not is_kept:
        if not make:
            raise UserError(f"run.dir: {folder} is not seen by every rank; choose a folder that all machines share")
        assert state is not None
        scratch = folder.with_name(f".new-{hash_of([identity, state, trueshard.__version__])[:16]}-{folder.name}")
        for left in folder.parent.glob(f".new-*-{folder.name}"):  # by a process that was stopped
            if left != scratch:  # made from other files or settings
                shutil.rmtree(left)
        with making(folder.parent):
            scratch.mkdir(exist_ok=True)
            try:
                _make(config, sources, held_out, state, processor, scratch)
                _open(config, scratch, sources, processor)
            except Exception:  # not by a stop: the next start goes on with it
                shutil.rmtree(scratch)
                raise
            if folder.is_symlink():
                folder.unlink()
            elif folder.exists():
                shutil.rmtree(folder)
            scratch.replace(folder)
    prepared = _open(config, folder, sources, processor)
    if streaming and state is not None:  # the files are read anew, so they count as they are now
        return replace(prepared, summary=replace(prepared.summary, fingerprint=state, crc32=zlib.crc32(state.encode())))
    return prepared


def _make(
    config: Config,
    sources: list[DataSource],
    held_out: dict[str, list[DataSource]],
    state: str,
    processor: Any,
    folder: Path,
) -> None:
    from transformers import AutoTokenizer

    data, sections = config.data, (config.tokenizer, config.model, config.data.format)
    tokenizer = processor.tokenizer if processor is not None else tokenizers.load_tokenizer(*sections)
    goes_on = (folder / "tokenizer").is_dir()
    if tokenizer is None and goes_on:
        tokenizer = AutoTokenizer.from_pretrained(str(folder / "tokenizer"))
    _announce(config, sources, tokenizer is None, goes_on)
    if tokenizer is None:
        assert config.tokenizer.vocab_size is not None
        texts_of = FORMATS[data.format].texts
        texts = (text for source in sources for record in source.records() for text in texts_of(data, record))
        tokenizer = tokenizers.train_tokenizer(texts, config.tokenizer.vocab_size, data.format)
        tokenizers.with_tokens(config.tokenizer, tokenizer)
    if data.format != "text":
        tokenizers.set_chat_template(config.tokenizer, tokenizer, processor)
    if not goes_on:
        with replacing(folder / "tokenizer") as place:
            (processor or tokenizer).save_pretrained(str(place))
    form = FORMATS[data.format](data, _length(config), tokenizer, processor)
    with contextlib.nullcontext() if data.format == "text" else form.template.bounded():
        for name, sources_of_set in held_out.items():
            if read_summary(place := _place(folder, name)) is None:
                place.mkdir(exist_ok=True)
                build(sources_of_set, form, place, 0.0, state, {}).write(place)
        for source in sources if data.streaming else ():
            next(form.documents(source, folder), None)  # for its notes
        if data.streaming:
            summary = Summary(None, None, None, zlib.crc32(state.encode()), state, _identity(config))
        else:
            fraction = (
                config.evaluation.fraction if config.evaluation is not None and config.evaluation.holds_out else 0.0
            )
            summary = build(sources, form, folder, fraction, state, _identity(config))
    for note in form.notes():
        print(note, flush=True)
    replace(summary, conversational=form.conversational, notes=form.notes()).write(folder)


def _open(config: Config, folder: Path, sources: list[DataSource], processor: Any) -> Prepared:
    """Open the data in a folder. Raises `UserError` if a part holds no sequence."""
    from transformers import AutoTokenizer

    if processor is not None:
        tokenizers.set_chat_template(config.tokenizer, processor.tokenizer, processor)
    data, section, length = config.data, config.evaluation, _length(config)
    place = folder / "tokenizer"
    with damage_named(place), own_code(config.model, place) as options:
        tokenizer = AutoTokenizer.from_pretrained(str(place), **options)
        if tokenizer.eos_token_id is None:
            raise ValueError("it has no end-of-text token")
    form = FORMATS[data.format](data, length, tokenizer, processor)

    def stored(place: Path, part: str, count: int) -> list[StoredSamples]:
        with damage_named(place):
            summary = read_summary(place)
            if summary is None or len(summary.ranges) != count:
                raise ValueError(f"data.json has no ranges of {count} sources")
        return [StoredSamples(place, summary, form, source, part) for source in range(count)]

    train: Samples | Stream
    if data.streaming:
        # A format each, as what one has found of its texts decides how further ones are cut.
        streams = [SourceStream(source, FORMATS[data.format](data, length, tokenizer, processor)) for source in sources]
        for stream in streams:
            stream.check()
        train = StreamMixture(streams, [source.weight for source in sources])
    else:
        sections = data.sources or [SourceSection(path=data.path or "")]
        parts = stored(folder, "train", len(sections))
        for source, part in zip(sections, parts, strict=True):
            if not len(part):
                raise UserError(
                    f"data.{'sources' if data.sources else 'path'}: {source.path}, without what is held out, has fewer "
                    f"tokens than one sequence of train.sequence_length + 1 = {length + 1}; add to it, or lower "
                    "evaluation.fraction or train.sequence_length"
                )
        train = Mixture(parts, [source.weight for source in sections])
    evaluation = {} if section is None else _evaluation(section, stored, len(data.sources) or 1, folder, length)
    summary = read_summary(folder)
    assert summary is not None
    form.conversational |= summary.conversational
    opening = form.opening(config.sample.prompt) if config.sample.tokens else None
    return Prepared(folder, summary, train, evaluation, form, tokenizer, opening)


def _place(folder: Path, name: str) -> Path:
    """Return the folder of an evaluation set of that name."""
    return folder / f"evaluation-{name}".removesuffix("-")


def _evaluation(
    section: EvaluationSection, stored: Stored, sources: int, folder: Path, length: int
) -> dict[str, Samples]:
    """Return the evaluation sets by name. Raises `UserError` if one holds no sequence."""
    places = {"": (folder, "evaluation", sources)} if section.holds_out else {}
    result = dict[str, Samples]()
    for name, place in (places | {name: (_place(folder, name), "train", 1) for name in section.paths}).items():
        parts = [part for part in stored(*place) if len(part)]
        if not parts and name in places:
            share = f"{section.fraction} of the data is less than one sequence"
            raise UserError(f"evaluation.fraction: {share}; raise it, or set evaluation.path")
        if not parts:
            key, path = section.paths[name]
            raise UserError(f"{key}: {path} is less than one sequence of train.sequence_length = {length}; add to it")
        result[name] = Mixture(parts, [1.0] * len(parts))
    return result


def _length(config: Config) -> int:
    """Return the tokens of a sequence or, for reinforcement learning, of a prompt, at most."""
    return config.train.sequence_length - (config.rollout.tokens if config.rl is not None else 0)


def _identity(config: Config) -> dict[str, Any]:
    settings = config.identity()
    kept = {key: value for key, value in settings.items() if key.startswith(("tokenizer.", "data.", "evaluation."))}
    if kept["data.long"] is None:  # data that were made before there was this key are the same
        del kept["data.long"]
    # Joined text is the same for every length of sequence.
    length = None if config.data.format == "text" else _length(config)
    return {**kept, "model": config.model.path or config.model.config, "train.sequence_length": length}


def _announce(config: Config, sources: list[DataSource], trains: bool, goes_on: bool) -> None:
    noun, reading = FORMATS[config.data.format].noun, "going on reading it" if goes_on else "reading it"
    doing = "training a tokenizer on it" if trains else reading
    sizes = [source.size() for source in sources]
    total = sum(size for size in sizes if size is not None)
    shown = f"{total / 1e6:.1f} MB" if total >= 1e6 else f"{total / 1e3:.1f} kB"
    what = ", ".join(source.name for source in sources) if None in sizes else f"{shown} of {noun}"
    if not config.data.streaming:
        print(f"{what}: {doing}", flush=True)
    elif trains:
        print(f"training a tokenizer on the first {noun}", flush=True)
