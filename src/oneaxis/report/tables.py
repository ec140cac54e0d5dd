"""A table of the page, before it is HTML."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Link:
    """A cell that leads somewhere: to an anchor, or to a file beside the page."""

    text: str
    href: str


@dataclass(frozen=True)
class Table:
    """Cells as text, to be shown as they are."""

    head: Sequence[str]
    rows: Sequence[Sequence[str | Link]]
    align: str
    """One letter a column: l, r, w for words that need room, or s for a status, which takes the row's tone."""
    caption: str = ""
    note: str = ""
    tones: Sequence[str] = field(default_factory=tuple)
    """One word a row: good, bad, invalid or nothing."""
    folded: bool = False
    """Shown only when the reader opens it."""
    ids: Sequence[str] = ()
    """Anchors of the rows."""
