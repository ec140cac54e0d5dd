"""Structured output on the page, from a payload that the stage's own code wrote of answers laid out by hand."""

import json
from collections.abc import Callable
from pathlib import Path

import polars as pl

from oneaxis.artifacts import write_json
from oneaxis.config import compose
from oneaxis.config.schema import ExtractDocuments
from oneaxis.report.results import read_results
from oneaxis.report.sections import all_sections
from oneaxis.structured.extraction import RAW
from oneaxis.structured.results import flat_metrics, summarise, tables
from tests.structured.test_results import ANSWERS, LIST, PAIR, Characters, said


def test_form_fields_lists_and_what_is_not_so_are_shown(root: Path, artifacts: Callable[..., Path]) -> None:
    own = compose(root / "conf", ["extract=records", "extract.lists=1", "extract.lengths=[2]"]).extract
    assert isinstance(own, ExtractDocuments)
    folder = artifacts(extract=own.model_dump(mode="json"))
    listed = said(LIST, json.dumps({"rows": LIST.truth["rows"][:1]}), {"fruit": [0.4]})
    answers, fields = tables([*PAIR, LIST], pl.DataFrame([*ANSWERS, listed], schema=RAW), Characters(), own)
    answers.write_parquet(folder / "extract" / "answers.parquet")
    fields.write_parquet(folder / "extract" / "fields.parquet")
    write_json(folder / "extract" / "summary.json", summarise(answers, fields, own, Characters()))
    metrics = {f"extract/{name}": value for name, value in flat_metrics(answers, own).items()}
    write_json(folder / "extract.metrics.json", metrics)

    section = next(section for section in all_sections(read_results(folder)) if section.id == "extraction")
    form, of_fields, lists, wrong = section.tables
    assert [row[:4] for row in form.rows] == [
        ["records", "2", "50.0%", "0.0%"], ["legible", "1", "100.0%", "0.0%"], ["illegible", "1", "0.0%", "0.0%"],
        ["lists", "1", "0.0%", "0.0%"], ["n2", "1", "0.0%", "0.0%"],
    ]  # fmt: skip
    assert of_fields.rows[4] == ["illegible", "label", "0.0%", "0.0%", "100.0%", "100.0%", "0.400", "1"]
    assert "amount 50% of 50%" in of_fields.note
    assert lists.rows == [[part, "50.0%", "100.0%", "0.0%", "0.0%", "100.0%"] for part in ("lists", "n2")]
    # The value that the model was least free in comes first.
    assert wrong.rows[0] == ["Total ###", "label", '"cash"', "not there", "0.400"]
    assert "P1, P2, P3, P4 (ticket)" in section.lead


def test_no_section_where_nothing_was_asked(artifacts: Callable[..., Path]) -> None:
    assert "extraction" not in [section.id for section in all_sections(read_results(artifacts()))]
