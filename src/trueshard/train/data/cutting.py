"""Cut a long text into pieces whose tokens, one after the other, are the tokens of the whole text.

- Whether a place separates tokens is tried, not read from the tokenizer's classes: what is before it and what is after
  it must have, each alone, the tokens that both have together. Several extents of both are tried: of digits in groups
  of three, where a group ends follows from where the text begins, and so one extent alone would show nothing.
- The place is one between two words of the pre-tokenizer. Without these, as in Llama 2, it may be one between two
  characters that no token of the vocabulary has side by side, so that no merge of a BPE goes over it.
- The first pieces are also encoded together, as one text. A tokenizer that shows a difference there is not cut at all.
- A text without such places stays whole, and a line says so once: memory grows with its length then.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import chain, islice
from typing import Any

PIECE = 2**16
"""Characters of a piece, at least; the last one may be shorter."""
SEARCH = 2**10
"""Characters in which a place is looked for."""
TRIALS = 64
"""Places that are tried among them."""
EXTENTS = ((128, 128), (127, 127), (125, 126), (16, 16))
"""Characters before and after a place that are tried."""
FIRST = 3
"""Pieces that are also encoded together."""
LARGE = 2**21
"""Characters without a place from which on a line says so; their tokens take some 400 MB while they are made."""


class Cutter:
    """Cuts texts for a tokenizer: a `tokenizers.Tokenizer` without truncation and padding; None cuts nowhere."""

    def __init__(self, backend: Any, name: str) -> None:
        self._backend, self._name = backend, name
        self.cuts: bool | None = None
        """True if the pieces of a text were found to have its tokens; None: not tried yet."""
        self._told = False

    def pieces(self, text: str | Iterable[str], where: str) -> Iterator[str]:
        """Yield the pieces of a text, given whole or in chunks; ``where``: its origin, for a message."""
        chunks = [text[at : at + PIECE] for at in range(0, len(text), PIECE)] if isinstance(text, str) else text
        pieces = self._pieces(chunks, where)
        if self.cuts is None:
            first = list(islice(pieces, FIRST + 1))
            self.cuts = self._agree(first[:-1]) if len(first) > 1 else None
            if self.cuts is False:
                first = ["".join(chain(first, pieces))]
                self._tell(first[0], where)
            pieces = chain(first, pieces)
        yield from pieces

    def _pieces(self, chunks: Iterable[str], where: str) -> Iterator[str]:
        rest, begin = "", PIECE  # text that is not cut yet; where the next search begins
        for chunk in chunks:
            rest += chunk
            while len(rest) >= begin + SEARCH + max(extent for _, extent in EXTENTS):
                place = self._place(rest, begin)
                if place is not None:
                    yield rest[:place]
                    rest, begin = rest[place:], PIECE
                else:
                    begin *= 2
                    self._tell(rest, where)
        yield rest

    def _agree(self, pieces: list[str]) -> bool:
        *apart, whole = self._backend.encode_batch([*pieces, "".join(pieces)], add_special_tokens=False)
        return [token for piece in apart for token in piece.ids] == whole.ids

    def _tell(self, text: str, where: str) -> None:
        if len(text) >= LARGE and not self._told:
            self._told = True
            line = f"{where}: {self._name} shows no place in {len(text):,} characters where they can be cut"
            print(f"{line}; they are encoded together, in some 200 bytes of memory each", flush=True)

    def _place(self, text: str, begin: int) -> int | None:
        """Return a place from ``begin`` on that separates tokens; None if none of those that are tried does."""
        if self._backend is None or self.cuts is False:
            return None
        kinds = [unicodedata.category(character)[0] for character in text[begin - 1 : begin + SEARCH]]
        changes = [begin + number for number in range(SEARCH) if kinds[number] != kinds[number + 1]]
        words = [place for place in changes if text[place] == " " and text[place + 1].isalnum()]
        spread = changes[:: max(1, len(changes) // TRIALS)]
        places = list(dict.fromkeys(words[: TRIALS // 4] + spread))[:TRIALS]  # most tokenizers are cut before a word
        return next((place for place in places if self._separates(text, place)), None)

    def _separates(self, text: str, place: int) -> bool:
        sides = [(text[place - before : place], text[place : place + after]) for before, after in EXTENTS]
        texts = [part for left, right in sides for part in (left, right, left + right)]
        # Not as a batch, which would wait for the cores where others fill them.
        encoded = [self._backend.encode(part, add_special_tokens=False) for part in texts]
        return all(self._apart(*encoded[number : number + 3]) for number in range(0, len(encoded), 3))

    def _apart(self, left: Any, right: Any, both: Any) -> bool:
        last, first = len(left.ids) - 1, len(left.ids)
        if not left.ids or not right.ids or both.ids != left.ids + right.ids:
            return False
        if both.word_ids[last] != both.word_ids[first]:
            return True
        return self._pairs is not None and both.tokens[last][-1] + both.tokens[first][0] not in self._pairs

    @cached_property
    def _pairs(self) -> frozenset[str] | None:
        """Characters that are side by side in a token; None if that does not say what a merge may go over."""
        model = self._backend.model
        if type(model).__name__ != "BPE" or model.continuing_subword_prefix or model.end_of_word_suffix:
            return None
        tokens = self._backend.get_vocab(with_added_tokens=False)
        return frozenset(token[at : at + 2] for token in tokens for at in range(len(token) - 1))
