"""From what the engine said to the two tables of the stage, and from these to every number.

`answers.parquet` has a row per answer, `fields.parquet` one per answer and field. The measures of an answer stand in
its row under the names of the metrics: a metric is the mean of one column over the answers of one condition, and a
verdict pairs the same column by document. A measure that does not apply to an answer, or is not known, is null.
"""

import json
import math
from collections.abc import Sequence
from typing import Any

import polars as pl

from oneaxis.config.schema import ExtractDocuments
from oneaxis.judge.paired import paired_difference
from oneaxis.judge.statistics import sign_flip
from oneaxis.lint.loops import answer_loop
from oneaxis.structured.documents import GOODS, ILLEGIBLE, KINDS, LEGIBLE, UNKNOWN, Document
from oneaxis.structured.measures import MEASURES, conditions_of, measure_names, of_part
from oneaxis.structured.positions import (
    GUESS,
    enum_confidence,
    positions_of,
    shared_first_tokens,
    token_ends,
    value_mass,
)
from oneaxis.structured.reading import RECORD_FIELDS, FieldReading, Reading, read_answer, unfenced
from oneaxis.structured.spans import Span, value_spans

READ = pl.Schema(
    {
        "kind": pl.String(),
        "document": pl.String(),
        "truth": pl.String(),  # JSON
        "fenced": pl.Boolean(),  # the JSON stood in a Markdown fence
        "answer_rows": pl.Int64(),  # that the answer to a list has
        **{name: pl.Float64() for name in MEASURES},
    }
)
"""What `answers.parquet` has beside the columns of `extraction.RAW`."""
FIELDS = pl.Schema(
    {
        "document_id": pl.String(),
        "condition": pl.String(),
        "kind": pl.String(),
        "field": pl.String(),
        "row": pl.Int64(),  # of a list; null for a record
        "truth": pl.String(),  # JSON; null where it is not there
        "value": pl.String(),  # JSON; null where the answer has none
        "outcome": pl.String(),  # right | wrong | abstained | forced | absent
        "value_tokens": pl.Int64(),  # value positions whose kept mass is known
        "kept_first": pl.Float64(),  # at the first of them
        "kept": pl.Float64(),  # the least over them
        "moved": pl.Boolean(),  # the likeliest token was not allowed at one of them
        "confidence": pl.Float64(),  # of an enum value, after the mask
    }
)


def tables(
    documents: Sequence[Document], raw: pl.DataFrame, tokenizer: Any, settings: ExtractDocuments
) -> tuple[pl.DataFrame, pl.DataFrame]:
    """`answers.parquet` and `fields.parquet`.

    Args:
        documents: in the order of `raw` (a table of `extraction.RAW`).
        tokenizer: of the model, by which tokens are laid over the text.
    """
    answers, fields = [], []
    for document, said in zip(documents, raw.iter_rows(named=True), strict=True):
        assert (document.document_id, document.condition) == (said["document_id"], said["condition"])
        reading = read_answer(document, said["text"], finished=said["finished"])
        rows = [_field_row(document, each, *_mass(each, said, tokenizer, settings, document))
                for each in reading.fields]  # fmt: skip
        fields += rows
        answers.append({
            "kind": document.kind, "document": document.text, "truth": json.dumps(document.truth),
            "fenced": reading.fenced, "answer_rows": reading.rows, **measures(document, reading, rows, said),
        })  # fmt: skip
    read = pl.DataFrame(answers, schema=READ)
    return pl.concat([raw, read], how="horizontal"), pl.DataFrame(fields, schema=FIELDS)


def _mass(
    reading: FieldReading, said: dict[str, Any], tokenizer: Any, settings: ExtractDocuments, document: Document
) -> tuple[Any, float | None]:
    """The kept mass of a field's value, and of an enum's its confidence."""
    if reading.path is None:
        return None, None
    spans, ends = _placed(said, tokenizer)
    span = spans.get(reading.path)
    if span is None or ends is None:
        return None, None
    mass = value_mass(positions_of(span, ends), said["kept"], said["moved"])
    if reading.name not in ("label", "kind"):
        return mass, None
    values = list(GOODS) if document.kind == "list" else [
        *KINDS[document.kind].labels, *([UNKNOWN] if settings.way_out else [])
    ]  # fmt: skip
    return mass, enum_confidence(span, said["text"], values, ends, after_mask(said, settings))


def _placed(said: dict[str, Any], tokenizer: Any) -> tuple[dict[tuple[str | int, ...], Span], list[int] | None]:
    """The values of an answer in its text, and where its tokens end; found once an answer."""
    if "_placed" not in said:
        inside, begins = unfenced(said["text"])
        spans = {span.path: Span(span.path, span.start + begins, span.end + begins, span.closed)
                 for span in value_spans(inside)}  # fmt: skip
        said["_placed"] = (spans, token_ends(tokenizer, said["token_ids"], said["text"]))
    placed: tuple[dict[tuple[str | int, ...], Span], list[int] | None] = said["_placed"]
    return placed


def after_mask(said: dict[str, Any], settings: ExtractDocuments) -> list[float | None]:
    """Per token the probability that it had after the mask, at temperature 1.

    With the engine's own grammar the log-probabilities are taken after the mask already; with ours before it, and the
    kept mass is what they are to be divided by. Without a grammar nothing is renormalised.
    """
    logps, kept = said["logprobs"], said["kept_at_one"]
    if settings.grammar != "processor":
        return [math.exp(value) for value in logps]
    return [math.exp(logp) / mass if mass else None for logp, mass in zip(logps, kept, strict=True)]


def _field_row(document: Document, reading: FieldReading, mass: Any, confidence: float | None) -> dict[str, Any]:
    return {
        "document_id": document.document_id,
        "condition": document.condition,
        "kind": document.kind,
        "field": reading.name,
        "row": reading.row,
        "truth": None if reading.truth is None else json.dumps(reading.truth),
        "value": None if reading.path is None else json.dumps(reading.value),
        "outcome": reading.outcome,
        "value_tokens": mass.tokens if mass else 0,
        "kept_first": mass.first if mass else None,
        "kept": mass.least if mass else None,
        "moved": mass.moved if mass else None,
        "confidence": confidence,
    }


def measures(
    document: Document, reading: Reading, fields: Sequence[dict[str, Any]], said: dict[str, Any]
) -> dict[str, float | None]:
    """The measures of one answer, by the names of the metrics."""
    found: dict[str, float | None] = dict.fromkeys(MEASURES)
    found |= {
        "exact": float(reading.exact),
        "parse_failed": float(not reading.parsed),
        "truncated": float(reading.truncated),
        "key_drift": float(reading.key_drift),
        "quote_drift": float(reading.quote_drift),
        "loop": float(answer_loop(said["text"]) is not None),
        "tokens": float(len(said["token_ids"]) + said["reasoning_tokens"]),
    }
    if document.kind == "list":
        return found | _list_measures(document, reading, fields)
    for row in fields:
        name, outcome, kept = row["field"], row["outcome"], row["kept"]
        gave_up = outcome == "abstained" or (outcome == "right" and row["truth"] is None)
        found[f"{name}_right"] = float(outcome == "right")
        found[f"{name}_unknown"] = float(gave_up)
        found[f"{name}_forced"] = float(outcome == "forced")
        found[f"{name}_guess"] = None if kept is None else float(kept < GUESS)
        found[f"{name}_kept"] = kept
        if name == "label":
            found["label_confidence"] = row["confidence"]
    return found


def _list_measures(document: Document, reading: Reading, fields: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    rows: dict[int, list[dict[str, Any]]] = {}
    for row in fields:
        rows.setdefault(row["row"], []).append(row)
    right = sum(all(each["outcome"] == "right" for each in row) for row in rows.values())
    kept = [row["kept"] for row in fields if row["field"] == "kind" and row["kept"] is not None]
    # A note of a row that is there at all, and is not said.
    dropped = any(each["field"] == "note" and each["truth"] is not None and each["value"] is None
                  and any(other["field"] == "name" and other["value"] is not None for other in row)
                  for row in rows.values() for each in row)  # fmt: skip
    return {
        "rows_right": right / len(document.rows),
        "early_stop": float(reading.early_stop),
        "wrong_enum": float(any(row["field"] == "kind" and row["outcome"] == "wrong" for row in fields)),
        "dropped_optional": float(dropped),
        "kind_guess": float(min(kept) < GUESS) if kept else None,
        "kind_kept": min(kept) if kept else None,
    }


# --- numbers ----------------------------------------------------------------------------------------------------------


def flat_metrics(answers: pl.DataFrame, settings: ExtractDocuments) -> dict[str, float]:
    """`<part>/<measure>`: means over the answers in which the measure is known; and the counts."""
    found: dict[str, float] = {"answers": float(answers.height)}
    for part in conditions_of(settings):
        own = of_part(answers, part)
        found[f"{part}/n"] = float(own.height)
        for name in measure_names(part):
            known = own[name].drop_nulls()
            if len(known):
                found[f"{part}/{name}"] = float(known.sum()) / len(known)
    return found


def summarise(
    answers: pl.DataFrame, fields: pl.DataFrame, settings: ExtractDocuments, tokenizer: Any
) -> dict[str, Any]:
    """`summary.json`: what stands in no single column.

    Returns:
        `known`: per part and measure in how many answers it is known. `unknown`: per field of a record, the share that
        was said to be missing beside the share that is. `twins`: the kept mass of each field, legible against
        illegible, by document. `confidence`: of right and of wrong labels. `shared_first_tokens`: enum values that
        their first token does not tell apart.
    """
    before = '{"label": "' if settings.whitespace == "free" else '{"label":"'
    enums = {name: [*kind.labels, *([UNKNOWN] if settings.way_out else [])] for name, kind in KINDS.items()}
    enums = {name: values for name, values in enums.items() if settings.records}
    enums |= {"list": list(GOODS)} if settings.lists else {}
    return {
        "known": {
            part: {name: of_part(answers, part)[name].len() - of_part(answers, part)[name].null_count()
                   for name in measure_names(part)}
            for part in conditions_of(settings)
        },
        "unknown": _unknown(fields) if settings.records else {},
        "twins": {name: _twins(answers, f"{name}_kept") for name in RECORD_FIELDS} if settings.records else {},
        "confidence": _confidence(fields),
        "shared_first_tokens": {name: shared for name, values in enums.items()
                                if (shared := shared_first_tokens(tokenizer, values, before))},
    }  # fmt: skip


def _unknown(fields: pl.DataFrame) -> dict[str, dict[str, float]]:
    found = {}
    for name in RECORD_FIELDS:
        own = fields.filter((pl.col("field") == name) & (pl.col("kind") != "list"))
        said = own.filter((pl.col("outcome") == "abstained")
                          | ((pl.col("outcome") == "right") & pl.col("truth").is_null()))  # fmt: skip
        found[name] = {
            "n": own.height,
            "said": said.height / own.height,
            "true": own["truth"].null_count() / own.height,
        }
    return found


def _twins(answers: pl.DataFrame, name: str) -> dict[str, float | int] | None:
    """Legible minus illegible over the documents of which both are known; None under two."""
    one, other = (answers.filter(pl.col("condition") == condition).select("document_id", name).drop_nulls()
                  for condition in (ILLEGIBLE, LEGIBLE))  # fmt: skip
    both = one.join(other, on="document_id", suffix="_legible", validate="1:1").sort("document_id")
    if both.height < 2:
        return None
    effect = paired_difference(both[name].to_numpy(), both[f"{name}_legible"].to_numpy())
    differences = both[f"{name}_legible"].to_numpy() - both[name].to_numpy()
    return {"n": effect.n, "effect": effect.effect, "low": effect.ci_low, "high": effect.ci_high,
            "p_value": sign_flip(differences)}  # fmt: skip


def _confidence(fields: pl.DataFrame) -> dict[str, dict[str, float | int]]:
    enums = fields.filter(pl.col("field").is_in(["label", "kind"]) & pl.col("confidence").is_not_null())
    return {
        outcome: {"n": own.height, "mean": float(own["confidence"].sum()) / own.height}
        for outcome in ("right", "wrong", "abstained", "forced")
        if (own := enums.filter(pl.col("outcome") == outcome)).height
    }
