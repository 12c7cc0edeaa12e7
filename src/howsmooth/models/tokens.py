"""Text into token ids: windows of an asked length, special tokens where the tokenizer puts them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from howsmooth.errors import BadInputError
from howsmooth.settings import items, seed_of, shown, whole, words

_SAMPLES = 1_000_000  # windows of one text
_IDS = 2**31  # tokenizers count no further


@dataclass(frozen=True)
class TextPiece:
    """A token as it stands in the text: what comes before it, itself, and whether the tokenizer added it."""

    gap: str
    text: str
    special: bool = False


@dataclass(frozen=True, repr=False)
class Window:
    """Token ids and what they say. `mask` is false at padding."""

    ids: tuple[int, ...]
    pieces: tuple[TextPiece, ...]
    mask: tuple[bool, ...] | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        return f"Window({len(self)} tokens, {shown(' '.join(self.words[:12]))})"

    @property
    def words(self) -> tuple[str, ...]:
        return tuple(p.text for p in self.pieces)


@dataclass(frozen=True, eq=False, repr=False)
class Text:
    """A text in tokens, without special ones, and the special ones that a sequence begins and ends with."""

    text: str
    ids: tuple[int, ...]
    offsets: tuple[tuple[int, int], ...]
    prefix: tuple[tuple[int, str], ...]
    suffix: tuple[tuple[int, str], ...]

    @classmethod
    def of(cls, tokenizer: Any, text: str) -> "Text":
        fix = "pass a string; a file is read with encoding='utf-8'"
        if not words(text, "a text of whole characters", fix).strip():
            raise BadInputError("expected a text with words in it, got an empty one; check the file")
        limit = tokenizer.model_max_length
        try:
            tokenizer.model_max_length = int(1e30)  # windows are cut here, so a long text is no mistake
            plain = _encode(tokenizer, text, special=False)
            whole = _encode(tokenizer, "a", special=True)
        finally:
            tokenizer.model_max_length = limit
        flags = list(whole["special_tokens_mask"])
        first = flags.index(0) if 0 in flags else len(flags)
        last = len(flags) - flags[::-1].index(0) if 0 in flags else len(flags)
        named = list(zip(whole["input_ids"], tokenizer.convert_ids_to_tokens(whole["input_ids"]), strict=True))
        offsets = plain.get("offset_mapping")
        if offsets is None:
            offsets, at = [], 0
            for token in tokenizer.convert_ids_to_tokens(plain["input_ids"]):
                word = tokenizer.convert_tokens_to_string([token]).strip()
                start = text.find(word, at) if word else at
                start = at if start < 0 else start
                at = start + len(word)
                offsets.append((start, at))
        return cls(
            text, tuple(plain["input_ids"]), tuple((a, b) for a, b in offsets), tuple(named[:first]), tuple(named[last:])
        )

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        return f"Text({len(self)} tokens, {shown(self.text[:60])})"

    def window(self, n: int | None = None, start: int = 0) -> Window:
        """`n` tokens, special ones among them, from token `start` of the text; the whole text by default."""
        extra = len(self.prefix) + len(self.suffix)
        start = whole(start, f"a start from 0 to {len(self.ids) - 1}", "count the text's tokens", below=max(1, len(self.ids)))
        n = len(self.ids) - start + extra if n is None else whole(n, "a whole number of tokens n", "ask for one or more")
        content = n - extra
        if content < 1:
            raise BadInputError(f"expected a length above the {extra} special tokens, got {n}; ask for more tokens")
        if start + content > len(self.ids):
            raise BadInputError(
                f"expected a text of at least {n} tokens, got {len(self.ids) - start + extra}; give a longer text, "
                "or a smaller n"
            )
        pieces = [TextPiece("" if not i else " ", t, True) for i, (_, t) in enumerate(self.prefix)]
        end = self.offsets[start][0]
        for a, b in self.offsets[start : start + content]:
            pieces.append(TextPiece(self.text[end:a], self.text[a:b]))
            end = b
        pieces += [TextPiece(" ", t, True) for _, t in self.suffix]
        ids = (*(i for i, _ in self.prefix), *self.ids[start : start + content], *(i for i, _ in self.suffix))
        return Window(ids, tuple(pieces))

    def windows(self, n: int, samples: int, seed: int = 0) -> tuple[Window, ...]:
        """`samples` windows of `n` tokens that start at random places, no two at the same one if the text has that many."""
        n = whole(n, "a whole number of tokens n", "ask for one or more")
        samples = whole(samples, "one sample or more, a whole number", "ask for at least one window", least=1, below=_SAMPLES)
        content = n - len(self.prefix) - len(self.suffix)
        places = len(self.ids) - content + 1
        if content < 1 or places < 1:
            return (self.window(n),)  # says what is wrong
        random = torch.Generator().manual_seed(seed_of(seed))
        order = torch.randperm(places, generator=random).repeat(math.ceil(samples / places))
        return tuple(self.window(n, start) for start in order[:samples].tolist())


def of_ids(ids: Sequence[int], tokenizer: Any | None, mask: Sequence[bool] | None) -> Window:
    """Given ids, as they are; words from the tokenizer where there is one."""
    words = [str(i) for i in ids] if tokenizer is None else tokenizer.convert_ids_to_tokens(list(ids))
    special = set() if tokenizer is None else set(tokenizer.all_special_ids)
    pieces = tuple(TextPiece(" " if j else "", str(w), i in special) for j, (i, w) in enumerate(zip(ids, words, strict=True)))
    return Window(tuple(int(i) for i in ids), pieces, None if mask is None else tuple(bool(m) for m in mask))


def _encode(tokenizer: Any, text: str, special: bool) -> dict[str, Any]:
    return tokenizer(
        text,
        add_special_tokens=special,
        return_special_tokens_mask=True,
        return_offsets_mapping=bool(tokenizer.is_fast),
        truncation=False,
        verbose=False,
    )


def whole_numbers(ids: Sequence[int] | Tensor) -> list[int]:
    """One sequence of token ids."""
    expected, fix = "one list of whole token ids from 0", "pass one sequence at a time"
    return [whole(i, expected, fix, below=_IDS) for i in _one_row(ids, expected, fix)]


def padding_flags(mask: Sequence[bool] | Tensor | None) -> list[bool] | None:
    """One mask of tokens, false at padding."""
    if mask is None:
        return None
    fix = "give True or 1 for a token, False or 0 for padding"
    row = _one_row(mask, "a mask with one entry per id", fix)
    return [bool(m) if type(m).__name__ == "bool" else bool(whole(m, "a mask of flags", fix, below=2)) for m in row]


def _one_row(values: Sequence[Any] | Tensor, expected: str, fix: str) -> list[Any]:
    """A sequence, or the only row of a batch of one, as a list."""
    row = items(values, expected, fix)
    return items(row[0], expected, fix) if len(row) == 1 and isinstance(row[0], list | tuple) else row
