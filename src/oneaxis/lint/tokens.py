"""Which values of an enum begin with the same token, by a real tokenizer or by a stand-in.

A grammar forces everything up to the value; the first token after that is where the probability of an answer can be
read. Values that share it are told apart only later, after a token that says nothing.

Without a tokenizer the stand-in compares pieces: a run of letters, a single digit, or a single other character, and
takes values as alike whose first piece is the same (`p0` and `p1`, `not_urgent` and `not_sure`) or whose first six
characters are. It errs both ways: a rare word may be split (`mis` of `misread` and `misled`), and a common one is a
single token."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from oneaxis.errors import UserError

SAME = 6
"""Characters from which on the stand-in takes two values as alike."""


class Tokenizer:
    """A tokenizer from a local folder, and what it makes of a value in JSON."""

    def __init__(self, path: Path) -> None:
        """Read `tokenizer.json`, or the one in a folder.

        Raises:
            UserError: there is none, or it cannot be read.
        """
        from tokenizers import Tokenizer as Fast

        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            raise UserError(f"--tokenizer {path}: not found; allowed: a local folder that holds tokenizer.json")
        try:
            self._fast = Fast.from_file(str(file))
        except Exception as error:
            # tokenizers raises bare Exception for a file that it cannot read.
            raise UserError(f"--tokenizer {file}: {error}; allowed: a tokenizer.json") from error

    def first(self, value: Any) -> str:
        """The token with which a value begins, behind a key, a colon and a space, as a model writes JSON.

        It may cover the opening quote as well.
        """
        before = '"key": ' + ('"' if isinstance(value, str) else "")
        text = before + json.dumps(value, ensure_ascii=False)[isinstance(value, str) :]
        encoding = self._fast.encode(text, add_special_tokens=False)
        for token, (_, end) in zip(encoding.tokens, encoding.offsets, strict=True):
            if end > len(before):
                return str(token)
        return ""


def alike(values: Sequence[Any], tokenizer: Tokenizer | None) -> list[tuple[list[Any], str]]:
    """Groups of two or more values that begin alike, each with what they share."""
    groups: dict[str, list[Any]] = {}
    for each in values:
        if isinstance(each, str | int | float):
            first = tokenizer.first(each) if tokenizer else _piece(str(each))
            groups.setdefault(first, []).append(each)
    if tokenizer is None:
        groups = _merged(groups)
    return [(group, shared) for shared, group in groups.items() if len(group) > 1 and shared]


def _piece(text: str) -> str:
    found = re.match(r"[^\W\d_]+|.", text, re.DOTALL)
    return found.group() if found else ""


def _merged(groups: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Join groups whose first piece is long and begins with the same SAME characters."""
    merged: dict[str, list[Any]] = {}
    sizes: dict[str, int] = {}
    for piece in groups:
        sizes[piece[:SAME]] = sizes.get(piece[:SAME], 0) + 1
    for piece, group in groups.items():
        shared = piece[:SAME] if len(piece) >= SAME and sizes[piece[:SAME]] > 1 else piece
        merged.setdefault(shared, []).extend(group)
    return merged
