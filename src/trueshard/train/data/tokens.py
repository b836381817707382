"""Tokens: the text of a run, encoded once and kept in the run's folder as one memory-mapped array.

- Documents follow each other with an end-of-text token between, and are cut into sequences without padding.
- The folder `data/` appears complete or not at all: it is written beside its place and renamed.
- Once a run has a checkpoint its tokens are what it was trained on: they are used as they are, even if the text
  has changed since.
- Memory stays small: text streams through the tokenizer, tokens stream to disk.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trueshard.errors import UserError
from trueshard.train.config import Config
from trueshard.train.data.text import Source

END_OF_TEXT = "<|endoftext|>"
DOCUMENTS_AT_ONCE = 256
TOKENIZER_TEXT = 256 * 2**20
"""Characters that a tokenizer is trained on at most: its vocabulary changes little beyond, its memory grows."""


@dataclass(frozen=True)
class Summary:
    """What `data.json` says of the tokens beside it."""

    tokens: int
    documents: int
    unigram_entropy: float
    """Nats a token: the loss of a model that knows how often each token occurs and nothing else."""
    dtype: str
    crc32: int
    """Of the tokens' bytes."""
    source: str
    """Fingerprint of the files read."""
    identity: dict[str, Any]
    """The `[model]`, `[tokenizer]` and `[data]` settings they were made with."""


@dataclass(frozen=True)
class TokenData:
    """The tokens of a run."""

    folder: Path
    summary: Summary
    sequence_length: int

    @property
    def sequences(self) -> int:
        """How many sequences there are; the last target of one is the first input of the next."""
        return (self.summary.tokens - 1) // self.sequence_length

    def array(self) -> npt.NDArray[Any]:
        """All tokens, `[tokens]`, unsigned, memory-mapped."""
        return np.memmap(self.folder / "tokens.bin", mode="r", dtype=self.summary.dtype, shape=(self.summary.tokens,))

    def batch(self, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The sequences at `indices`: inputs and the last target, int64 `[len(indices), sequence_length + 1]`."""
        tokens, length = self.array(), self.sequence_length
        return np.stack([tokens[i * length : i * length + length + 1] for i in indices]).astype(np.int64)

    def tokenizer(self) -> Any:
        """The transformers tokenizer that made them."""
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(str(self.folder / "tokenizer"), local_files_only=True)


def prepare(config: Config, source: Source, tokenizer: Any, frozen: bool, make: bool) -> TokenData:
    """The tokens of a run, from its folder if they are there, else made now.

    `tokenizer`: the one to use; None: train one first. `frozen`: the run has been trained on what is there, which is
    therefore right whatever the text is now. `make`: whether this process may make them.
    Raises `UserError` if the text is shorter than one sequence; nothing is left on disk then.
    """
    folder = Path(config.run.dir).expanduser() / "data"
    summary = read_summary(folder)
    current = summary is not None and summary.identity == _identity(config)
    if summary is not None and current and (frozen or summary.source == source.fingerprint()):
        return _checked(TokenData(folder, summary, config.train.sequence_length), config)
    if not make:
        raise UserError(f"run.dir: {folder} is not seen by every rank; choose a folder that all machines share")
    made = "reading it" if tokenizer is not None else "training a tokenizer on it"
    size = source.size()
    print(f"{f'{size / 1e6:.1f} MB' if size >= 1e6 else f'{size / 1e3:.1f} kB'} of text: {made}", flush=True)
    with _new_folder(folder) as scratch:
        summary = _make(config, source, tokenizer, Path(scratch))
        _checked(TokenData(Path(scratch), summary, config.train.sequence_length), config)
        if folder.exists():
            shutil.rmtree(folder)
        Path(scratch).rename(folder)
    return TokenData(folder, summary, config.train.sequence_length)


def read_summary(folder: Path) -> Summary | None:
    """What stands in `data.json`, or None where there is none (or one of another make)."""
    try:
        return Summary(**json.loads((folder / "data.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


class _new_folder:
    """A folder beside `target` to write into; on failure it and the parents made for it are gone again."""

    def __init__(self, target: Path) -> None:
        self.parents = [parent for parent in target.parents if not parent.exists()]
        self.target = target

    def __enter__(self) -> str:
        self.target.parent.mkdir(parents=True, exist_ok=True)
        self.scratch = tempfile.mkdtemp(prefix=".data-", dir=self.target.parent)
        return self.scratch

    def __exit__(self, kind: Any, *_: Any) -> None:
        shutil.rmtree(self.scratch, ignore_errors=True)
        if kind is not None:
            for parent in self.parents:
                parent.rmdir()


def _checked(data: TokenData, config: Config) -> TokenData:
    if data.sequences < 1:
        raise UserError(
            f"data.path: {config.data.path} is {data.summary.tokens} tokens, fewer than one sequence of "
            f"train.sequence_length + 1 = {data.sequence_length + 1}; add text or lower train.sequence_length"
        )
    return data


def _identity(config: Config) -> dict[str, Any]:
    return {key: value for key, value in config.identity().items() if key.startswith(("tokenizer.", "data."))} | {
        "model": config.model.path or config.model.config
    }


def _make(config: Config, source: Source, tokenizer: Any, folder: Path) -> Summary:
    if tokenizer is None:
        assert config.tokenizer.vocab_size is not None
        tokenizer = _train_tokenizer(source.documents(), config.tokenizer.vocab_size)
    tokenizer.save_pretrained(str(folder / "tokenizer"))
    end = tokenizer.eos_token_id
    size = len(tokenizer)
    dtype = "uint16" if size <= 2**16 else "uint32"
    counts = np.zeros(size, dtype=np.int64)
    documents = crc = 0
    with (folder / "tokens.bin").open("wb") as out:
        for group in _batched(source.documents(), DOCUMENTS_AT_ONCE):
            documents += len(group)
            for ids in tokenizer(group, add_special_tokens=False)["input_ids"]:
                piece = np.asarray([*ids, end], dtype=dtype)
                counts += np.bincount(piece, minlength=size)
                crc = zlib.crc32(piece.tobytes(), crc)
                piece.tofile(out)
    share = counts[counts > 0] / max(1, counts.sum())
    entropy = float(-(share * np.log(share)).sum())
    summary = Summary(int(counts.sum()), documents, entropy, dtype, crc, source.fingerprint(), _identity(config))
    (folder / "data.json").write_text(json.dumps(asdict(summary), indent=1), encoding="utf-8")
    return summary


def load_tokenizer(config: Config) -> Any:
    """The tokenizer that the configuration names, or None if one is to be trained on the text.

    Raises `UserError` if there is none at that place, or it cannot end a document.
    """
    if config.tokenizer.vocab_size is not None:
        return None
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    key = "tokenizer.path" if config.tokenizer.path else "model.path" if config.model.path else "model.config"
    path = Path(config.tokenizer.path or config.model.path or config.model.config or "").expanduser()
    if key != "tokenizer.path" and path.is_file():
        path = path.parent
    remedy = "set tokenizer.path, or tokenizer.vocab_size to train one on the text"
    try:
        if path.is_file():
            tokenizer: Any = PreTrainedTokenizerFast(tokenizer_file=str(path), eos_token=_end_token(path))
        elif any((path / name).exists() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
            tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
        else:
            raise UserError(f"{key}: {path} holds no tokenizer; {remedy}")
    except UserError:
        raise
    except Exception as error:  # transformers and tokenizers raise whatever the damage leads to
        detail = " ".join(str(error).split())[:200]
        raise UserError(f"{key}: the tokenizer in {path} cannot be read ({detail}); {remedy}") from None
    if tokenizer.eos_token_id is None:
        raise UserError(f"{key}: the tokenizer in {path} has no end-of-text token (eos_token); {remedy}")
    return tokenizer


def _end_token(file: Path) -> str | None:
    """The end-of-text token of a bare `tokenizer.json`, which does not say which of its special tokens that is."""
    added = [token["content"] for token in json.loads(file.read_text(encoding="utf-8")).get("added_tokens", [])]
    return next((token for token in (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>") if token in added), None)


def _train_tokenizer(documents: Iterator[str], vocab_size: int) -> Any:
    """A byte-level BPE tokenizer: any text round-trips, and no token is unknown."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_first(documents, TOKENIZER_TEXT), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT)


def _first(documents: Iterator[str], characters: int) -> Iterator[str]:
    for document in documents:
        yield document
        characters -= len(document)
        if characters <= 0:
            return


def _batched(documents: Iterable[str], size: int) -> Iterator[list[str]]:
    remaining = iter(documents)
    while group := list(islice(remaining, size)):
        yield group
