"""Which rows a table takes: distinct by content, in an order that depends on content and seed alone.

Rows are ordered by SHA-256 of (seed, table, content). The order is as good as random, does not depend on the order of
the input, and a larger sample contains the smaller one. A row's id is the start of its content's hash.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from oneaxis.sources.records import Drop, Record

Row = dict[str, Any]


def digest(*parts: str) -> str:
    """Hex SHA-256 of `parts`, told apart by a separator that no usable text holds (NUL)."""
    return hashlib.sha256("\0".join(parts).encode("utf-8")).hexdigest()


def drawn(rows: Iterable[Row], content: Callable[[Row], str], *, seed: int, table: str) -> list[Row]:
    """`rows` in the order of the hash of their content."""
    return sorted(rows, key=lambda row: digest(str(seed), table, content(row)))


def interleaved(rows: Iterable[Row], group: Callable[[Row], str]) -> list[Row]:
    """Take turns between groups (sorted by name), each in its given order, so that any head is balanced."""
    ranks: Counter[str] = Counter()
    keyed = []
    for row in rows:
        name = group(row)
        keyed.append((ranks[name], name, row))
        ranks[name] += 1
    return [row for _, _, row in sorted(keyed, key=lambda entry: entry[:2])]


def parsed(records: Iterable[Record], parse: Callable[[Record], Row]) -> tuple[list[Row], Counter[str]]:
    """Rows of the records that `parse` accepts, and why the others were dropped.

    Raises:
        UserError: from `parse`, for a record of the wrong form.
    """
    rows, dropped = [], Counter[str]()
    for record in records:
        try:
            rows.append(parse(record))
        except Drop as drop:
            dropped[str(drop)] += 1
    return rows, dropped


def distinct(rows: Iterable[Row], content: Callable[[Row], str]) -> tuple[list[Row], Counter[str]]:
    """The first row of each content, and how many later ones were dropped."""
    first: dict[str, Row] = {}
    total = 0
    for row in rows:
        first.setdefault(content(row), row)
        total += 1
    return list(first.values()), Counter({"duplicate": total - len(first)} if total > len(first) else {})
