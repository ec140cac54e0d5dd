"""Where the values of a JSON text stand, character by character, also of one that was cut off.

`json` gives values without their places. Only places are found here; whether the text is JSON at all, `json` says.
"""

import re
from dataclasses import dataclass

Path = tuple[str | int, ...]

_TOKEN = re.compile(
    r'\s*(?:(?P<string>"(?:[^"\\]|\\.)*(?P<closed>")?)|(?P<bare>[-+.\w]+)|(?P<mark>[{}\[\],:]))', re.DOTALL
)


@dataclass(frozen=True)
class Span:
    """A scalar value: its place in the object, and the characters that carry it (of a string, those between quotes)."""

    path: Path
    start: int
    end: int
    closed: bool
    """False: the text ends inside it."""


def value_spans(text: str) -> list[Span]:
    """The scalar values of the first JSON value in `text`, in order, up to where it stops being JSON."""
    found: list[Span] = []
    # Of every open object or array: the key that waits for its value, or the index of the next one.
    open_: list[list[str | int | None]] = []
    place = 0
    while match := _TOKEN.match(text, place):
        place = match.end()
        mark, string, bare = match["mark"], match["string"], match["bare"]
        if mark in ("{", "["):
            open_.append([None] if mark == "{" else [0])
        elif mark in ("}", "]"):
            if not open_:
                break
            open_.pop()
            if not open_:
                break
            _next(open_)
        elif mark == ":":
            continue
        elif mark == ",":
            if not open_:
                break
        elif string is not None and open_ and open_[-1][0] is None:
            if match["closed"] is None:
                break
            open_[-1][0] = string[1:-1]
        elif open_ and open_[-1][0] is not None:
            quoted = string is not None
            closed = match["closed"] is not None if quoted else place < len(text)
            start = match.start("string") + 1 if quoted else match.start("bare")
            end = place - 1 if quoted and closed else place
            found.append(Span(tuple(key for [key] in open_ if key is not None), start, end, closed))
            _next(open_)
        else:
            assert string or bare
            break
    return found


def _next(open_: list[list[str | int | None]]) -> None:
    """A value has ended: what the innermost object or array waits for now."""
    key = open_[-1][0]
    open_[-1][0] = key + 1 if isinstance(key, int) else None
