"""From the text of an answer to what it says: each field against the truth, and how its form went wrong.

An answer that does not parse, or that was cut off at the token limit, is a failure: nothing of it counts as a value,
however much could be picked out of it. A Markdown fence around the JSON is taken off, and noted.

Outcome of a field:

    right      the truth; where it is not there, `unknown` or null
    wrong      another value than the one that is there
    abstained  `unknown` or null, though the value is there
    forced     a value, though none is there
    absent     the answer failed, or has no such key

Of `evidence` any line of the document that holds the label's line is right; copies are compared without outer space.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from oneaxis.structured.documents import UNKNOWN, Document

Outcome = Literal["right", "wrong", "abstained", "forced", "absent"]
RECORD_FIELDS = ("evidence", "label", "amount")
ROW_FIELDS = ("name", "kind", "count", "note")

_FENCE = re.compile(r"\s*```(?:json)?\s*\n(?P<inside>.*?)\n?\s*(?:```\s*)?", re.DOTALL)
_STRING = re.compile(r'"(?:[^"\\\n]|\\.)*"')
_KEY = re.compile(r"""["'“”‘’`]([\w -]{1,40})["'“”‘’`]\s*:""")
_OTHER_QUOTE = re.compile(r"[{\[,:]\s*['‘’“”`´«]")


@dataclass(frozen=True)
class FieldReading:
    """One field of an answer."""

    name: str
    row: int | None
    """In a list."""
    path: tuple[str | int, ...] | None
    """Where its value stands in the answer; None: nowhere."""
    truth: Any
    value: Any
    outcome: Outcome


@dataclass(frozen=True)
class Reading:
    """An answer as a whole."""

    parsed: bool
    """A JSON object, and whole."""
    fenced: bool
    truncated: bool
    key_drift: bool
    """A key that the schema does not have."""
    quote_drift: bool
    """Keys or strings between other quotation marks than JSON's."""
    early_stop: bool
    """The model ended a list before its last row. False for a record."""
    rows: int
    """Rows that a list has; 0 for a record."""
    fields: list[FieldReading] = field(default_factory=list)

    @property
    def exact(self) -> bool:
        """Every field is right."""
        return bool(self.fields) and all(each.outcome == "right" for each in self.fields)


def unfenced(text: str) -> tuple[str, int]:
    """The text inside a Markdown fence, and where it begins; the whole text where there is no fence."""
    match = _FENCE.fullmatch(text)
    return (match["inside"], match.start("inside")) if match else (text, 0)


def read_answer(document: Document, text: str, *, finished: bool) -> Reading:
    """Read an answer to `document`.

    Args:
        finished: the model ended it; False: it was cut off at the token limit.
    """
    inside, begins = unfenced(text)
    try:
        value = json.loads(inside)
    except (ValueError, RecursionError):
        value = None
    answer: Mapping[str, Any] | None = value if isinstance(value, dict) and finished else None
    outside_strings = _STRING.sub('""', inside)
    common: dict[str, Any] = {
        "parsed": answer is not None,
        "fenced": begins > 0,
        "truncated": not finished,
        "quote_drift": _OTHER_QUOTE.search(outside_strings) is not None,
    }
    if document.kind == "list":
        return _read_list(document, answer, inside, finished, common)
    keys = set(answer) if answer is not None else set(_KEY.findall(inside))
    fields = [_record_field(name, document, answer) for name in RECORD_FIELDS]
    drifted = bool(keys - set(RECORD_FIELDS))
    return Reading(**common, key_drift=drifted, early_stop=False, rows=0, fields=fields)


def _record_field(name: str, document: Document, answer: Mapping[str, Any] | None) -> FieldReading:
    truth = document.truth[name]
    if answer is None or name not in answer:
        return FieldReading(name, None, None, truth, None, "absent")
    value = answer[name]
    given_up = value is None or (name == "label" and value == UNKNOWN)
    if truth is None:
        outcome: Outcome = "right" if given_up else "forced"
    elif given_up:
        outcome = "abstained"
    elif name == "evidence":
        outcome = "right" if isinstance(value, str) and _quotes(value, truth, document.text) else "wrong"
    else:
        # In Python true is 1, in JSON it is not.
        outcome = "right" if type(value) is type(truth) and value == truth else "wrong"
    return FieldReading(name, None, (name,), truth, value, outcome)


def _quotes(value: str, truth: str, text: str) -> bool:
    return truth in value and value.strip() in text


def _read_list(
    document: Document, answer: Mapping[str, Any] | None, inside: str, finished: bool, common: dict[str, Any]
) -> Reading:
    given = answer.get("rows") if answer is not None else None
    rows = [row for row in given if isinstance(row, dict)] if isinstance(given, list) else []
    if answer is not None:
        keys = set(answer) | {key for row in rows for key in row}
        num_rows = len(given) if isinstance(given, list) else 0
    else:
        keys = set(_KEY.findall(inside))
        num_rows = len(re.findall(r"""["'“”‘’`]name["'“”‘’`]\s*:""", inside))
    places = {row.get("name"): place for place, row in reversed(list(enumerate(rows))) if _is_name(row.get("name"))}
    fields: list[FieldReading] = []
    for number, truth in enumerate(document.rows):
        place = places.get(truth["name"])
        for name in ROW_FIELDS:
            fields.append(_row_field(name, number, place, truth, None if place is None else rows[place]))
    return Reading(**common, key_drift=bool(keys - {"rows", *ROW_FIELDS}),
                   early_stop=finished and num_rows < len(document.rows), rows=num_rows, fields=fields)  # fmt: skip


def _is_name(value: Any) -> bool:
    return isinstance(value, str)


def _row_field(
    name: str, number: int, place: int | None, truth: Mapping[str, Any], row: Mapping[str, Any] | None
) -> FieldReading:
    """Rows are matched by their names, so that one that is left out does not shift the others."""
    wanted = truth.get(name)
    if row is None or place is None:
        return FieldReading(name, number, None, wanted, None, "absent")
    if name not in row:
        outcome: Outcome = "right" if wanted is None else "absent"
        return FieldReading(name, number, None, wanted, None, outcome)
    value = row[name]
    if wanted is None:
        outcome = "right" if value in (None, "") else "forced"
    else:
        outcome = "right" if type(value) is type(wanted) and value == wanted else "wrong"
    return FieldReading(name, number, ("rows", place, name), wanted, value, outcome)
