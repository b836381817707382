"""Tokenizers of every kind, trained in a moment on text of theirs, and texts that are hard to cut for them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
FROM_THE_RIGHT = r"\d{1,3}(?=(?:\d{3})*(?:\D|$))|[^\d\s]+|\s+"  # digits in groups of three, as a number is read
PARTS = (
    *(
        "the",
        "shard",
        "of",
        "naïve",
        "cafe\u0301",
        "x_1",
        "It's",
        "WE'LL",
        "don't",
        "Straße",
        "\ufb01n",
        "\uff57\uff49de",
    ),
    *(
        "0",
        "12",
        "123456",
        "3.14159",
        "1,234",
        "٣٤",
        "漢字",
        "東京都",
        "。",
        "\uff0c",
        "ไทย",
        "Ω",
        "한국어",
        "👩‍👩‍👧",
        "🇩🇪",
    ),
    *(" ", "  ", "    ", "\n", "\n\n", "\r\n", "\t", "\u00a0", "\u3000", "\u200b", "\u0301", "\u0323"),
    *(".", ",", "--", "...", "!?", "(", ")", "'", '"', "</", "<s>", "<mask>", " <mask> ", "<|end|>", "▁", "Ġ", "##"),
)


def hard_text(seed: int, parts: int = 1500) -> str:
    """A text of words, digits, whitespace, marks and special tokens, and of long runs of each."""
    chosen = random.Random(seed)
    texts = []
    for _ in range(parts):
        part = chosen.choice(PARTS)
        texts.append(part * chosen.randrange(50, 400) if chosen.random() < 0.01 else part)
        if chosen.random() < 0.5:
            texts.append(" ")
    return "".join(texts)


def bpe(pre_tokenizer: Any, normalizer: Any = None, **settings: Any) -> Tokenizer:
    return _trained(models.BPE(**settings), trainers.BpeTrainer, pre_tokenizer, normalizer)


def byte_level(regex: str | None = None, normalizer: Any = None, **settings: Any) -> Tokenizer:
    """Of GPT-2 or, with a ``regex``, of those after it."""
    level = pre_tokenizers.ByteLevel(add_prefix_space=settings.pop("prefix", False), use_regex=regex is None)
    splits = [pre_tokenizers.Split(Regex(regex), "isolated")] if regex else []
    tokenizer = bpe(pre_tokenizers.Sequence([*splits, level]), normalizer, **settings)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def word_piece() -> Tokenizer:
    tokenizer = models.WordPiece(unk_token="[UNK]")
    normalizer = normalizers.BertNormalizer()
    return _trained(tokenizer, trainers.WordPieceTrainer, pre_tokenizers.BertPreTokenizer(), normalizer)


def unigram(pre_tokenizer: Any, normalizer: Any = None) -> Tokenizer:
    return _trained(models.Unigram(), trainers.UnigramTrainer, pre_tokenizer, normalizer)


def _trained(model: Any, trainer: Any, pre_tokenizer: Any, normalizer: Any) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizer
    unknown = {"unk_token": "[UNK]"} if trainer is trainers.UnigramTrainer else {}
    made = trainer(vocab_size=1200, special_tokens=["[UNK]", "<s>", "<|end|>"], show_progress=False, **unknown)
    tokenizer.train_from_iterator([hard_text(1000 + seed, 200) for seed in range(8)], made)
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True, rstrip=True)])
    tokenizer.add_tokens([AddedToken("    ", normalized=False), "shard of"])
    return tokenizer


def _spaces(prepend: bool = False) -> Any:
    parts = [normalizers.Prepend("▁")] if prepend else []
    return normalizers.Sequence([*parts, normalizers.Replace(" ", "▁")])


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "GPT-2": byte_level,
    "Llama 3": lambda: byte_level(LLAMA_3),
    "Qwen": lambda: byte_level(LLAMA_3.replace("{1,3}", ""), normalizers.NFC()),
    "digits from the right": lambda: byte_level(FROM_THE_RIGHT),
    "RoBERTa": lambda: byte_level(prefix=True),
    "BERT": word_piece,
    "T5": lambda: unigram(
        pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]),
        normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]),
    ),
    "ALBERT": lambda: unigram(
        pre_tokenizers.Metaspace(),
        normalizers.Sequence([normalizers.NFKD(), normalizers.StripAccents(), normalizers.Strip()]),
    ),
    "Metaspace, first": lambda: unigram(pre_tokenizers.Metaspace(prepend_scheme="first")),
    "digits apart": lambda: bpe(
        pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.Metaspace()])
    ),
    "Mistral": lambda: bpe(pre_tokenizers.Metaspace(prepend_scheme="first", split=False)),
    "Gemma": lambda: bpe(pre_tokenizers.Split(" ", "merged_with_previous"), _spaces()),
    "Llama 2": lambda: bpe(None, _spaces(prepend=True)),
    "Unigram without words": lambda: unigram(None, _spaces()),
}
"""Name → a tokenizer as that model has one."""
