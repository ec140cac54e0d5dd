"""The measures of an answer by name, and the parts of the answers over which metrics are means.

`extract/<part>/<measure>` is the name of a metric: `extract/illegible/label_forced`.

    exact                      every field is right
    parse_failed, truncated    no whole JSON object; cut off at the token limit (which then does not parse either)
    key_drift, quote_drift     a key that is not the schema's; other quotation marks than JSON's
    loop                       a degenerate loop, in the answer or in a string of it (`oneaxis.lint.loops`)
    tokens                     generated, free reasoning included
    <field>_right              of evidence, label and amount: the truth, or that it is not there
    <field>_unknown            said to be missing
    <field>_forced             a value, though there is none
    <field>_kept, _guess       least kept mass over the value's positions; whether that is under 0.5
    label_confidence           probability of the label after the mask
    rows_right                 share of a list's rows in which everything is right
    early_stop                 a list ended before its last row
    wrong_enum                 a row that is there has another kind than the document says
    dropped_optional           a row that is there lacks the note that the document has
    kind_kept, kind_guess      of the kinds of a list's rows, the least
"""

import polars as pl

from oneaxis.config.schema import ExtractDocuments
from oneaxis.structured.documents import ILLEGIBLE, LEGIBLE
from oneaxis.structured.reading import RECORD_FIELDS

FORM = ("exact", "parse_failed", "truncated", "key_drift", "quote_drift", "loop", "tokens")
"""Measures of every answer."""
RECORD_MEASURES = (
    *(f"{name}_{what}" for name in RECORD_FIELDS for what in ("right", "unknown", "forced", "guess", "kept")),
    "label_confidence",
)
LIST_MEASURES = ("rows_right", "early_stop", "wrong_enum", "dropped_optional", "kind_guess", "kind_kept")
MEASURES = (*FORM, *RECORD_MEASURES, *LIST_MEASURES)


def conditions_of(settings: ExtractDocuments) -> dict[str, tuple[str, ...]]:
    """The parts over which metrics are means, and the conditions of each: `records` and `lists` hold all of theirs."""
    found: dict[str, tuple[str, ...]] = {}
    if settings.records:
        found |= {"records": (LEGIBLE, ILLEGIBLE), LEGIBLE: (LEGIBLE,), ILLEGIBLE: (ILLEGIBLE,)}
    if settings.lists:
        lengths = tuple(f"n{rows}" for rows in settings.lengths)
        found |= {"lists": lengths} | {length: (length,) for length in lengths}
    return found


def measure_names(part: str) -> tuple[str, ...]:
    """The measures of a part of `conditions_of`."""
    return (*FORM, *(RECORD_MEASURES if part in ("records", LEGIBLE, ILLEGIBLE) else LIST_MEASURES))


def of_part(answers: pl.DataFrame, part: str) -> pl.DataFrame:
    """The answers of a part of `conditions_of`."""
    if part in ("records", "lists"):
        return answers.filter((pl.col("kind") == "list") == (part == "lists"))
    return answers.filter(pl.col("condition") == part)
