"""The pair filter on the page, from made-up artifacts."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl

from oneaxis.artifacts import read_json, write_json
from oneaxis.report import write_report

Make = Callable[..., Path]
Read = Callable[[Path], Any]


def test_the_filter_says_its_rule_its_overlap_and_what_it_kept_and_dropped(
    artifacts: Make, tmp_path: Path, outline: Read
) -> None:
    """The made-up pairs: 40 by rising score, each fifth held out, the train pairs from p30 on dropped."""
    write_report(artifacts(), tmp_path, "a run")
    page = outline(tmp_path / "report.html")
    rule = page.table("Which pairs were kept")
    assert rule.row("Rule")[1] == "the 75.0% with the lowest ln-CHES are kept"
    assert rule.row("Train pairs")[1] == "32 scored, 24 kept, 8 dropped"
    assert rule.row("Left out unscored")[1] == "2 too long (left out, never cut)"
    overlap = page.table("Had another measure dropped as many")
    assert overlap.row("edit similarity") == ["edit similarity", "6 of 8", "75%", "25%", "0.61"]
    dropped = page.table("The pairs that were dropped, the highest ln-CHES first")
    assert dropped.column(0) == [f"p{i}" for i in range(39, 29, -1) if i % 5]
    assert dropped.row("p39")[5:] == ["Question 39?", "yes 39", "no 39"]
    kept = page.table("The pairs that were kept, the highest ln-CHES first")
    assert kept.column(0) == [f"p{i}" for i in range(29, -1, -1) if i % 5][:20]
    labels = [attributes["aria-label"] for attributes in page.all("svg")]
    assert "Distribution of ln-CHES over 32 training pairs: 24 kept, 8 dropped." in labels
    assert "Distribution of CHES over 32 training pairs: 24 kept, 8 dropped." in labels


def test_a_control_is_named_as_one_and_messages_are_shown_as_text(
    artifacts: Make, tmp_path: Path, outline: Read
) -> None:
    folder = artifacts()
    manifest = read_json(folder / "filter_pairs" / "manifest.json")
    manifest["notes"] |= {"control_seed": 3, "cutoff": None}
    write_json(folder / "filter_pairs" / "manifest.json", manifest)
    path = folder / "filter_pairs" / "pairs.parquet"
    said = json.dumps([{"role": "assistant", "content": "as a message"}])
    pl.read_parquet(path).with_columns(conversational=True, prompt=pl.lit(said), chosen=pl.lit(said),
                                       rejected=pl.lit(said)).write_parquet(path)  # fmt: skip
    write_report(folder, tmp_path, "a run")
    page = outline(tmp_path / "report.html")
    rule = page.table("Which pairs were kept")
    assert rule.row("Rule")[1].endswith("; this is the control: as many are dropped, but at random (seed 3)")
    assert rule.row("Highest that was kept")[1] == "–"
    assert page.table("The pairs that were dropped, the highest ln-CHES first").row("p39")[6] == "as a message"
