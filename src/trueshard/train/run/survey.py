"""Survey the data of a run, before a model is built: what `trueshard data` shows, as plain values.

Counts come from the prepared store, warnings from it and from its preparation, and samples are the first rows of the
batches that the run's own loader makes: nothing is rendered, tokenised or masked a second time. Of streamed data and of
conversations with images, which become tokens with their batch, only samples and preparation's notes are known.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from trueshard.train.config import Config
from trueshard.train.data.batches import IGNORED, Mixture
from trueshard.train.data.formats import firsts, shown
from trueshard.train.data.prepared import Prepared
from trueshard.train.data.sources import find
from trueshard.train.data.store import StoredSamples
from trueshard.train.metrics.answers import pieces_of
from trueshard.train.run.session import loader_of

WIDE = 2**24
"""Tokens that are looked at together."""
ALIKE = 4
"""Equal special tokens in a row, as of an image, from which on they are shown as one."""
MOST_TOKENS = 20_000
"""Maximum tokens of a sample that is shown."""
Numbers = npt.NDArray[np.int64]


def survey(config: Config, data: Prepared, samples: int) -> dict[str, Any]:
    """Return what there is to say of a run's data, with its first ``samples`` samples, as JSON values."""
    summary, counts, lengths = data.summary, dict[str, int](), list[list[int]]()
    warnings = [
        f"{count:,} of {summary.records:,} records {word} (first: {place})"
        for word, (count, place) in summary.done.items()
    ]
    warnings += summary.notes
    if isinstance(data.train, Mixture):
        store: Any = data.train.sources[0]
        sizes = np.diff(store.places[:, 3], prepend=0)
        held_out = sum(map(len, data.evaluation.values()))
        counts = {"records": summary.records or summary.documents or 0, "samples": len(data), "held out": held_out}
        warnings += _repeated(store, sizes, data.form.rows)
        if data.form.vocabulary is not None:
            targets = _targets(store, sizes)
            counts |= {"tokens": int(sizes.sum()), "targets": int(targets.sum())}
            lengths = _histogram(sizes)
            if store.counted is not None and config.data.answers_only:
                whole = (targets == sizes - 1) & store.counted[np.cumsum(sizes) - sizes]
                warnings += _told("every token of {} is a target, the prompt, too", store, whole)
            warnings += _doubled(store, data.tokenizer)
        samples = min(samples, len(data))  # of fewer than a batch, the first step takes some again
    rows = list(itertools.islice(_rows(config, data), samples))
    blank = [
        row["where"] for row in rows if config.rl is None and not any("1" in part["counts"] for part in row["parts"])
    ]
    warnings += [f"no token of a sample is a target: {where}" for where in blank]
    named = ", ".join(source.name for source in find(config.data))
    return {
        "headline": named,
        "format": config.data.format,
        "noun": data.form.noun,
        "length": data.form.length,
        "files": _files(config),
        "counts": counts,
        "lengths": lengths,
        "warnings": list(dict.fromkeys(warnings)),
        "samples": rows,
    }


def _files(config: Config) -> list[list[Any]]:
    """Return of each format that first records show: its name, how many files, and the place of the first."""
    formats, places = Counter[str](), dict[str, str]()
    for record in firsts(config.data):
        name = " or ".join(shown(config.data, record))
        formats[name] += 1
        places.setdefault(name, record.where)
    files = [file for source in find(config.data) for file in source.files]
    if not formats:
        formats["text"], places["text"] = len(files), files[0]
    return [[name, count, places[name]] for name, count in formats.items()]


def _targets(store: StoredSamples, sizes: Numbers) -> Numbers:
    """Return the number of targets of each document; nothing precedes its first token, which is none."""
    if store.counted is None:
        return sizes
    starts = np.cumsum(sizes) - sizes
    return np.asarray(np.add.reduceat(store.counted, starts, dtype=np.int64) - store.counted[starts])


def _histogram(sizes: Numbers) -> list[list[int]]:
    """Return ranges of lengths, whose bounds are powers of two: first, last, documents."""
    bits = np.frexp(sizes.astype(np.float64))[1]
    return [
        [2 ** (bit - 1), 2**bit - 1, int((bits == bit).sum())] for bit in range(int(bits.min()), int(bits.max()) + 1)
    ]


def _told(words: str, store: StoredSamples, which: npt.NDArray[np.bool_]) -> Iterator[str]:
    """Yield a warning with the number of documents that it is of and the place of the first, if there are any."""
    if count := int(which.sum()):
        yield f"{words.format(f'{count:,} of {len(which):,} documents')} (first: {store.origin(int(which.argmax()))})"


def _repeated(store: StoredSamples, sizes: Numbers, rows: int) -> Iterator[str]:
    """Yield a warning if records have the same tokens; ``rows``: documents of a record."""
    ends = np.cumsum(sizes)[rows - 1 :: rows]
    spans = itertools.pairwise([0, *ends.tolist()])
    hashes = np.fromiter((hash(store.tokens[first:last].tobytes()) for first, last in spans), np.int64, len(ends))
    _, first, inverse = np.unique(hashes, return_index=True, return_inverse=True)
    again = first[inverse] != np.arange(len(hashes))
    if again.any():
        at = int(again.argmax())
        pair = f"{store.origin(at * rows)} is {store.origin(int(first[inverse][at]) * rows)}"
        yield f"{int(again.sum()):,} of {len(again):,} records have the tokens of an earlier one (first: {pair})"


def _doubled(store: StoredSamples, tokenizer: Any) -> Iterator[str]:
    """Yield a warning for each special token that follows itself in a document, as two that begin one."""
    ends, special = store.places[:, 3], np.zeros(1 + max(tokenizer.get_vocab().values()), dtype=np.bool_)
    special[[number for number, token in tokenizer.added_tokens_decoder.items() if token.special]] = True
    repeated = dict[int, list[int]]()
    for at in range(0, len(store.tokens), WIDE):
        ids = store.tokens[at : at + WIDE + 1]
        for place in (at + 1 + np.flatnonzero((ids[1:] == ids[:-1]) & special[ids[1:]])).tolist():
            document = int(np.searchsorted(ends, place, side="right"))
            if not document or place > ends[document - 1]:  # not the end of one document and the beginning of the next
                repeated.setdefault(int(store.tokens[place]), []).append(document)
    for token, documents in repeated.items():
        name, first = tokenizer.convert_ids_to_tokens(token), store.origin(documents[0])
        yield f"{name} follows itself {len(documents):,} times (first: {first}), by the template or in the text"


def _rows(config: Config, data: Prepared) -> Iterator[dict[str, Any]]:
    """Yield the samples of the run's first step, in its order: the place of each, and its documents."""
    if config.rl is not None:
        yield from _prompts(data)
        return
    loader, taken = loader_of(config, data, prefetch=0), 0
    sides = ("chosen: ", "rejected: ")[: data.form.rows] if data.form.rows > 1 else ("",)
    while taken * (config.train.batch_size // config.train.accumulation(1)) < config.train.batch_size:
        batch, taken = next(loader), taken + 1
        size = len(batch["input_ids"]) // len(sides)
        places = loader.origins(taken)[(taken - 1) * size :]
        for number, (side, row) in itertools.product(range(size), enumerate(sides)):
            values = {
                key: batch[key][number + side * size].numpy() for key in batch if len(batch[key]) == size * len(sides)
            }
            yield {"where": f"{row}{places[number]}", "parts": _parts(data, values)}


def _prompts(data: Prepared) -> Iterator[dict[str, Any]]:
    """Yield the prompts of `[rl]`, whose answers are sampled: none of their tokens is a target."""
    assert isinstance(data.train, Mixture)
    for index in range(len(data.train)):
        sample = data.train[index]
        prompt, where = sample["prompt"], data.train.where(index)
        text = (
            prompt
            if isinstance(prompt, str)
            else data.form.template.prompt(prompt, where, sample["record"].get("tools"))
        )
        ids = data.tokenizer(text, add_special_tokens=False)["input_ids"]
        yield {"where": where, "parts": [_part(data, ids, [False] * len(ids))]}


def _parts(data: Prepared, row: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the documents of a row of a batch, and its padding; ``row``: the tensors of the batch, a row of each."""
    size = int(row["attention_mask"].sum()) if "attention_mask" in row else len(row["input_ids"])
    inputs, targets = row["input_ids"][:size], row["targets"][:size]
    starts = np.flatnonzero(row["position_ids"][:size] == 0).tolist() if "position_ids" in row else [0]
    parts = []
    for first, last in itertools.pairwise([*starts, size]):
        counts = [False, *(targets[first:last] != IGNORED).tolist()]
        ids = [*inputs[first:last].tolist(), *([int(targets[last - 1])] if counts[-1] else [])]
        if not any(counts) and last == size and len({*ids}) == 1:
            parts.append({"padding": len(ids), "pieces": [], "counts": "", "breaks": [], "cut": False})
            continue
        ends = [
            at + 1
            for at, token in enumerate(ids)
            if token == data.tokenizer.eos_token_id and data.form.layout == "joined"
        ]
        for begin, end in itertools.pairwise(dict.fromkeys([0, *ends, len(ids)])):
            parts.append(_part(data, ids[begin:end], counts[begin:end]))
    return parts


def _part(data: Prepared, ids: list[int], counts: list[bool]) -> dict[str, Any]:
    """Return a document to show: the text of each token, "1" for a target, where turns begin, whether it was cut."""
    special = {number for number, token in data.tokenizer.added_tokens_decoder.items() if token.special}
    is_cut = data.form.masked and len(ids) == data.form.length + 1 and ids[-1] not in special
    texts = pieces_of(data.tokenizer)(ids[:MOST_TOKENS])
    pieces, marks, breaks, follows = list[str](), "", list[int](), False  # follows: a special token, or space after one
    for (token, counted), group in itertools.groupby(zip(ids, counts, strict=False), lambda pair: pair):
        run, texts = texts[: (size := len(list(group)))], texts[size:]
        if token in special and size >= ALIKE and run:
            run = [f"{run[0]} × {size}"]
        for text in run:
            if token in special and follows and pieces:
                breaks.append(len(pieces))
            follows = token in special or (follows and not text.strip())
            pieces.append(text)
            marks += str(int(counted))
    return {"padding": 0, "pieces": pieces, "counts": marks, "breaks": breaks, "cut": is_cut}
