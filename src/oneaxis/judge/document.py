"""A document of another tool, read value by value: what is asked for is there as asked, or one line says where not.

The readers (`vllm_bench`, `guidellm`, `aiperf`) take out of a file only what a verdict rests on. Anything else in it
may be of any shape, so that a later release of a tool with more in its files is still read.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from oneaxis.errors import UserError
from oneaxis.judge.foreign import FORMATS

MOST = 1e12
"""Of any number in a file: more is no time, rate or count of a load."""
MOST_TOKENS = 10_000_000
"""Tokens or chunks of one request."""
LONGEST_S = 7 * 86_400.0
"""One request takes less."""
LEAST_RPS = 1e-9


def text_of(path: Path) -> str:
    """Of a file in UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8: {error}; allowed: {FORMATS}") from error


def parse(text: str, where: str) -> Any:
    """JSON of a file, or of a part of it.

    Raises:
        UserError: where it is broken.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        cut = " (cut off?)" if error.pos >= len(text.rstrip()) - 1 else ""
        raise UserError(
            f"{where}: not whole JSON: {error.msg} at character {error.pos}{cut}; allowed: {FORMATS}"
        ) from error
    except (ValueError, RecursionError) as error:
        # A number of thousands of digits; brackets in thousands of brackets.
        raise UserError(f"{where}: no JSON that can be read: {_shown(error)}; allowed: {FORMATS}") from error


def digest(value: Any) -> str | None:
    """What tells a prompt or an answer from another; None of none."""
    return hashlib.sha256(str(value).encode("utf-8", "surrogatepass")).hexdigest()[:16] if value else None


# --- single values ----------------------------------------------------------------------------------------------------


def number(value: Any, where: str, *, least: float | None = 0.0, most: float = MOST) -> float:
    """A finite number within bounds.

    Raises:
        UserError: it is none, saying where.
    """
    # (An integer of hundreds of digits is a finite number in JSON, and no float.)
    if isinstance(value, bool) or not isinstance(value, int | float) or (
        isinstance(value, float) and not math.isfinite(value)
    ):  # fmt: skip
        refuse(value, where, "a finite number")
    least = -most if least is None else least
    if value < least:
        refuse(value, where, f"{least:g} or more")
    if value > most:
        refuse(value, where, f"at most {most:g}")
    return float(value)


def whole(value: Any, where: str, *, most: int = MOST_TOKENS) -> int:
    """A whole number from 0 on, exactly.

    Raises:
        UserError: it is none, saying where.
    """
    number(value, where, most=most)
    if value != int(value):
        refuse(value, where, "a whole number")
    return int(value)


def numbers(values: Any, where: str, *, most: float = LONGEST_S) -> list[float]:
    """A list of finite numbers, none under 0.

    Raises:
        UserError: it is none, saying where.
    """
    if not isinstance(values, list):
        refuse(values, where, "a list of numbers")
    # Millions of gaps: one look at all of them, and one at each only where something is wrong.
    # (A sum keeps a NaN, where min and max may pass it by.)
    if all(type(value) is float for value in values) and sum(values) <= most and min(values, default=0.0) >= 0:
        return values
    return [number(value, where, most=most) for value in values]


def text(value: Any, where: str) -> str | None:
    """A text, or null.

    Raises:
        UserError: it is neither.
    """
    if value is None:
        return None
    if not isinstance(value, str):
        refuse(value, where, "a text")
    try:
        value.encode()
    except UnicodeEncodeError:
        refuse(value, where, "a text of whole characters")
    return value


def refuse(value: Any, where: str, allowed: str) -> NoReturn:
    """Raise the one line on a value."""
    raise UserError(f"{where} is {_shown(value)}; allowed: {allowed}")


def _shown(value: Any) -> str:
    """A value in one short line."""
    if value is None:
        return "null"
    line = " ".join(str(value).split())
    return (line if len(line) <= 40 else f"{line[:40]}...").encode("utf-8", "backslashreplace").decode()


# --- objects ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Node:
    """An object in a document, and where it stands there. What is absent or null is None, or an empty object or list;
    what is there has to be of the kind that is asked for (else UserError)."""

    value: Mapping[str, Any]
    source: str
    """Path, or path:line."""
    place: str = ""

    def at(self, key: str) -> str:
        """Where a value stands, for messages."""
        return f"{self.source}: {self.place}.{key}" if self.place else f"{self.source}: {key}"

    def raw(self, key: str) -> Any:
        """Of any shape: only to be compared, or shown."""
        return self.value.get(key)

    def node(self, key: str) -> "Node":
        """An object in this one."""
        return self._node(self.raw(key), key)

    def nodes(self, key: str) -> list["Node"]:
        """A list of objects."""
        found = self.raw(key)
        if found is not None and not isinstance(found, list):
            refuse(found, self.at(key), "a list")
        return [self._node(each, f"{key}[{place}]") for place, each in enumerate(found or [])]

    def _node(self, found: Any, key: str) -> "Node":
        if found is not None and not isinstance(found, dict):
            refuse(found, self.at(key), "an object")
        return Node(found or {}, self.source, f"{self.place}.{key}" if self.place else key)

    def number(self, key: str, *, least: float | None = 0.0, most: float = MOST) -> float | None:
        """A finite number within bounds."""
        found = self.raw(key)
        return None if found is None else number(found, self.at(key), least=least, most=most)

    def whole(self, key: str, *, most: int = MOST_TOKENS) -> int | None:
        """A whole number from 0 on."""
        found = self.raw(key)
        return None if found is None else whole(found, self.at(key), most=most)

    def text(self, key: str) -> str | None:
        """A text."""
        return text(self.raw(key), self.at(key))

    def flag(self, key: str) -> bool:
        """True or false; false where absent."""
        found = self.raw(key)
        if found is not None and not isinstance(found, bool):
            refuse(found, self.at(key), "true or false")
        return bool(found)


def as_node(value: Any, source: str) -> Node:
    """The object that a document, or a line of it, is.

    Raises:
        UserError: it is none.
    """
    if not isinstance(value, dict):
        raise UserError(f"{source}: holds no object; allowed: {FORMATS}")
    return Node(value, source)
