"""Structured output on the page: what the answers to documents of known truth were worth, and what the grammar removed.

Pure functions of `Results`; no rows where no document was asked.
"""

from typing import Any

import polars as pl

from oneaxis.report import text
from oneaxis.report.results import Results
from oneaxis.report.tables import Table
from oneaxis.structured.positions import GUESS
from oneaxis.structured.reading import RECORD_FIELDS

RECORDS = ("records", "legible", "illegible")
LONGEST = 110
SHOWN = 12


def tables(results: Results) -> list[Table]:
    """Form of the answers, fields of records, the two renderings compared, what is not so; empty without any."""
    answers, fields = (results.table("extract", f"{name}.parquet") for name in ("answers", "fields"))
    summary = results.document("extract", "summary.json")
    if answers is None or fields is None or not summary:
        return []
    found = [_form(results, summary)]
    if summary["unknown"]:
        found += [_fields(results, summary), *_twins(summary)]
    if "lists" in summary["known"]:
        found.append(_lists(results, summary))
    return [*found, *_forced(answers, fields)]


def words(results: Results) -> str:
    """What to keep in mind: the settings, and enum values that their first token does not tell apart."""
    settings, summary = results.section("extract"), results.document("extract", "summary.json") or {}
    said = [f"Grammar: {settings.get('grammar')}, white space {settings.get('whitespace')}, "
            f"{settings.get('first')} first, temperature {text.number(settings.get('temperature'))}."]  # fmt: skip
    shared = [f"{', '.join(group)} ({name})" for name, groups in summary.get("shared_first_tokens", {}).items()
              for group in groups]  # fmt: skip
    if shared:
        said.append(f"Labels that begin with the same token: {'; '.join(shared)}; their confidence is read where they "
                    "part.")  # fmt: skip
    return " ".join(said)


def _parts(summary: dict[str, Any]) -> list[str]:
    """In the order of a reader: the whole of each task before its conditions, lists by their lengths."""
    lengths = sorted((part for part in summary["known"] if part[1:].isdigit()), key=lambda part: int(part[1:]))
    return [part for part in (*RECORDS, "lists", *lengths) if part in summary["known"]]


def _form(results: Results, summary: dict[str, Any]) -> Table:
    m = results.metrics
    rows = [
        [part, text.count(m.get(f"extract/{part}/n")),
         *(text.percent(m.get(f"extract/{part}/{name}"))
           for name in ("exact", "parse_failed", "truncated", "loop", "key_drift", "quote_drift")),
         text.number(m.get(f"extract/{part}/tokens"))]
        for part in _parts(summary)
    ]  # fmt: skip
    note = "An answer that was cut off is no JSON either. Tokens: mean, free reasoning included."
    heads = ("Documents", "n", "all right", "no JSON", "cut off", "loop", "other keys", "other quotes", "tokens")
    return Table(heads, rows, "lrrrrrrrr", caption="Answers in JSON", note=note)  # fmt: skip


def _fields(results: Results, summary: dict[str, Any]) -> Table:
    m, rows = results.metrics, []
    for part in ("legible", "illegible"):
        for name in RECORD_FIELDS:
            at = f"extract/{part}/{name}"
            rows.append([part, name, text.percent(m.get(f"{at}_right")), text.percent(m.get(f"{at}_unknown")),
                         text.percent(m.get(f"{at}_forced")), text.percent(m.get(f"{at}_guess")),
                         text.number(m.get(f"{at}_kept")),
                         text.count(summary["known"][part][f"{name}_kept"])])  # fmt: skip
    shares = "; ".join(f"{name} {text.percent(facts['said'], 0)} of {text.percent(facts['true'], 0)}"
                       for name, facts in summary["unknown"].items())  # fmt: skip
    confidence = ", ".join(f"{outcome} {text.number(facts['mean'])} (n {facts['n']})"
                           for outcome, facts in summary["confidence"].items())  # fmt: skip
    note = (f"Forced: a value where the document has none. Guess: at some token of the value the grammar kept less "
            f"than {text.percent(GUESS, 0)} of the model's probability; the mean of the least is beside it, over the "
            f"answers in which it is known. Said to be missing, of what is missing: {shares}.")  # fmt: skip
    if confidence:
        note += f" Mean probability of the label after the mask: {confidence}."
    return Table(("Documents", "field", "right", "said unknown", "forced", "guess", "kept mass", "known"), rows,
                 "llrrrrrr", caption="Fields", note=note)  # fmt: skip


def _twins(summary: dict[str, Any]) -> list[Table]:
    rows = []
    for name, facts in summary["twins"].items():
        if facts:
            effect, interval = text.effect(facts["effect"], facts["low"], facts["high"])
            rows.append([name, effect, interval, text.number(facts["p_value"], 2), text.count(facts["n"])])
    if not rows:
        return []
    return [Table(("Field", "kept mass", "95% interval", "p", "pairs"), rows, "lrrrr",
                  caption="Legible less illegible, by document", note="p: sign-flip test.")]  # fmt: skip


def _lists(results: Results, summary: dict[str, Any]) -> Table:
    m = results.metrics
    rows = [
        [part, *(text.percent(m.get(f"extract/{part}/{name}"))
                 for name in ("rows_right", "early_stop", "wrong_enum", "dropped_optional", "kind_guess"))]
        for part in _parts(summary) if part not in RECORDS
    ]  # fmt: skip
    return Table(("Rows", "rows right", "ended early", "wrong kind", "note dropped", "guess"), rows, "lrrrrr",
                 caption="Lists", note="All but the first are shares of lists with at least one such row.")  # fmt: skip


def _forced(answers: pl.DataFrame, fields: pl.DataFrame) -> list[Table]:
    """Some values that no document holds, beside what was asked."""
    forced = fields.filter(pl.col("outcome").is_in(["forced", "wrong"]) & (pl.col("kind") != "list"))
    both = forced.join(answers.select("document_id", "condition", "document"), on=["document_id", "condition"])
    rows = [
        [text.shorten(row["document"], LONGEST), row["field"], row["value"], row["truth"] or "not there",
         text.number(row["kept"])]
        for row in both.sort("kept", "document_id", "field", nulls_last=True).head(SHOWN).iter_rows(named=True)
    ]  # fmt: skip
    if not rows:
        return []
    return [Table(("Document", "field", "said", "truth", "kept mass"), rows, "wlllr",
                  caption="Values that are not so, those the model was least free in first", folded=True)]  # fmt: skip
