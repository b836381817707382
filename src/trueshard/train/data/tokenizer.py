"""The tokenizer of a run: the configured one, or one trained on the run's own data.

- A trained tokenizer is byte-level BPE: any text round-trips, and no token is unknown.
- The chat template is, in this order, `tokenizer.chat_template`, the tokenizer's own, ChatML. It is saved with the
  tokenizer, so that an exported model is prompted as it was trained.
"""

from __future__ import annotations

import copy
import json
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from trueshard.errors import UserError, cut_line, explained
from trueshard.train.data.addresses import state_of
from trueshard.train.data.cutting import Cutter
from trueshard.train.data.sources import TextFile
from trueshard.train.models.config import ModelSection, TokenizerSection, own_code

END_OF_TEXT = "<|endoftext|>"
TURN_BEGINS, TURN_ENDS = "<|im_start|>", "<|im_end|>"
IMAGE = "<image>"
TRAINING_TEXT = 64 * 2**20
"""Maximum characters to train a tokenizer on: more changes the vocabulary little, and costs memory, 1 KB a word."""

TRIAL = " The café, 1,234 times:\n\n\tdef f(x):  return x['y']  # 漢字 <s></s> [CLS]\n"
"""A text that shows what a tokenizer's own code does before or after its backend."""

_BACKENDS: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""Tokenizer → its ``fast_backend``."""

CHATML = (Path(__file__).parent / "chatml.jinja").read_text(encoding="utf-8")


def load_tokenizer(section: TokenizerSection, model: ModelSection, data_format: str) -> Any:
    """Load the configured tokenizer; return None if one is to be trained. Raises `UserError` if it cannot be used."""
    if section.vocab_size is not None:
        return None
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    key, path = _place(section, model)
    remedy = "set tokenizer.path, or tokenizer.vocab_size to train one on the text"
    if not path.exists():
        raise UserError(f"{key}: {path} does not exist; correct the path")
    files = [path / name for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")]
    if not path.is_file() and not any(file.exists() for file in files):
        raise UserError(f"{key}: {path} holds no tokenizer; {remedy}")
    with explained(f"{key}: the tokenizer in {path} cannot be read", remedy, detail=cut_line):
        if path.is_file():
            tokenizer: Any = PreTrainedTokenizerFast(tokenizer_file=str(path), eos_token=_end_token(path))
        else:
            with own_code(model, path) as options:
                tokenizer = AutoTokenizer.from_pretrained(str(path), **options)
        tokenizer("?")  # some of what is wrong is found by use
    if tokenizer.eos_token_id is None:
        raise UserError(f"{key}: the tokenizer in {path} has no end-of-text token (eos_token); {remedy}")
    if data_format != "text" and not tokenizer.is_fast:
        raise UserError(
            f"{key}: the tokenizer in {path} does not tell where in the text a token stands, which data.format = "
            f'"{data_format}" needs; convert it to a tokenizer.json'
        )
    return with_tokens(section, tokenizer)


def with_tokens(section: TokenizerSection, tokenizer: Any) -> Any:
    """Return the tokenizer, to which `tokenizer.add_tokens` are added: special, if the chat template writes them."""
    from transformers import AddedToken

    for text in section.add_tokens or ():
        special = text in _template(section, tokenizer)[0]
        tokenizer.add_tokens([AddedToken(text, normalized=False, special=special)], special_tokens=special)
    return tokenizer


def load_processor(section: TokenizerSection, model: ModelSection) -> Any:
    """Load the processor of images and text beside the tokenizer. Raises `UserError` if there is none."""
    from transformers import AutoProcessor

    key, path = _place(section, model)
    if section.vocab_size is not None:
        raise UserError(
            "tokenizer.vocab_size: images need a processor that knows their tokens, which cannot be trained; set "
            "tokenizer.path to a directory with a processor instead"
        )
    remedy = "give a directory of a vision-language model"
    problem = f"{key}: no processor can be read from {path}"
    with explained(problem, remedy, detail=cut_line), own_code(model, path) as options:
        processor = AutoProcessor.from_pretrained(str(path), **options)
    if not hasattr(processor, "image_processor") or not hasattr(processor, "tokenizer"):
        raise UserError(f"{key}: {path} has no processor of images (preprocessor_config.json); {remedy}")
    with_tokens(section, processor.tokenizer)
    return processor


def train_tokenizer(texts: Iterable[str | TextFile], vocab_size: int, data_format: str) -> Any:
    """Train a byte-level BPE tokenizer of at most ``vocab_size`` tokens; for conversations with ChatML's own tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT] if data_format == "text" else [END_OF_TEXT, TURN_BEGINS, TURN_ENDS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # Of the same pre-tokens, which are what is counted: so a piece of a text counts like the text.
    bytewise = Tokenizer(models.BPE({letter: number for number, letter in enumerate(trainer.initial_alphabet)}, []))
    bytewise.pre_tokenizer = tokenizer.pre_tokenizer
    cutter = Cutter(bytewise, "the tokenizer to be trained")
    pieces = (piece for text in texts for piece in cutter.pieces(text, "[tokenizer]"))
    tokenizer.train_from_iterator(_first(pieces, TRAINING_TEXT), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT)


def fast_backend(tokenizer: Any) -> Any:
    """Return a `tokenizers.Tokenizer` that alone makes the tokens of a text; None if there is none.

    It is a copy, as the tokenizer was when it was first asked for, which the formats of several sources share.
    """
    if tokenizer not in _BACKENDS:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        ids = tokenizer(TRIAL, add_special_tokens=False)["input_ids"]  # also leaves truncation and padding off
        fitting = (one for one in (_unprocessed(backend), backend) if one is not None)
        same = (one for one in fitting if one.encode(TRIAL, add_special_tokens=False).ids == ids)
        _BACKENDS[tokenizer] = next(same, None)
    return _BACKENDS[tokenizer]


def _unprocessed(backend: Any) -> Any:
    """Return a tokenizer that leaves out the last stage; None if it cannot be copied.

    Where no special tokens are added, that stage sets offsets and types of tokens alone, which nothing here reads.
    """
    try:
        result = copy.deepcopy(backend)
    except Exception:  # of a stage that is written in Python
        return None
    if result is not None:
        result.post_processor = None
        result.encode_special_tokens = backend.encode_special_tokens
    return result


def pad_token(tokenizer: Any) -> int:
    """Return the token that stands where a row has ended: the tokenizer's own, or its end of text."""
    return int(tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id)


def set_chat_template(section: TokenizerSection, tokenizer: Any, processor: Any = None) -> None:
    """Set the chat template of the tokenizer (and the processor). Raises `UserError` if its file cannot be read."""
    template, place = _template(section, tokenizer, processor)
    for target in (tokenizer, processor):
        if target is not None:
            target.chat_template, target.template_place = template, place


def _template(section: TokenizerSection, tokenizer: Any, processor: Any = None) -> tuple[str, str]:
    """Return the chat template, and where it is from, in words."""
    template = getattr(processor, "chat_template", None) or tokenizer.chat_template
    # Some have several by name; the one for tools is for calls, which data brings in its own form.
    template = template.get("default") if isinstance(template, dict) else template
    place = f" of {tokenizer.name_or_path}" if template and tokenizer.name_or_path else ""
    template = template or CHATML.replace(IMAGE, getattr(processor, "image_token", IMAGE))
    if (name := section.chat_template) is not None:
        with explained(f"tokenizer.chat_template: {name} cannot be read", "give a Jinja file", detail=str):
            template = Path(name).expanduser().read_text(encoding="utf-8")
        if not template.strip():
            raise UserError(f"tokenizer.chat_template: {name} is empty; give a Jinja file")
        place = f" in {name}"
    return template, place


def fingerprint(section: TokenizerSection, model: ModelSection) -> list[list[Any]]:
    """Return names, sizes and modification times of the tokenizer's files: equal means unchanged."""
    files: list[Path] = []
    if section.vocab_size is None:
        _, path = _place(section, model)
        patterns = ("*token*", "*.model", "vocab*", "merges*", "chat_template*")
        files = [path] if path.is_file() else sorted({file for pattern in patterns for file in path.glob(pattern)})
    if section.chat_template is not None:
        files.append(Path(section.chat_template).expanduser())
    return [state_of(str(file)) for file in files if file.exists()]


def _place(section: TokenizerSection, model: ModelSection) -> tuple[str, Path]:
    if section.path:
        return "tokenizer.path", Path(section.path).expanduser()
    path = model.place()
    return "model.path" if model.path else "model.config", path.parent if path.is_file() else path


def _end_token(file: Path) -> str | None:
    """Return the end-of-text token of a bare `tokenizer.json`, which does not say which special token that is."""
    added = [token["content"] for token in json.loads(file.read_text(encoding="utf-8")).get("added_tokens", [])]
    return next((token for token in (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>") if token in added), None)


def _first(texts: Iterable[str], characters: int) -> Iterator[str]:
    for text in texts:
        yield text
        characters -= len(text)
        if characters <= 0:
            return
