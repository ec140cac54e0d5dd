"""Sampled pairs on the page, from a payload that the stage's own code wrote of responses laid out by hand."""

from collections.abc import Callable
from decimal import Decimal
from pathlib import Path

import polars as pl

from oneaxis.config import compose
from oneaxis.config.schema import SamplePairs
from oneaxis.report import sampled
from oneaxis.report.results import read_results
from oneaxis.report.sections import preference
from oneaxis.sample.pairs import write_pairs
from oneaxis.sample.prompts import Prompt
from oneaxis.sample.responses import SCHEMA
from oneaxis.sample.rules import Rule


def test_pass_rates_fates_and_pairs_are_shown(root: Path, artifacts: Callable[..., Path]) -> None:
    settings = compose(root / "conf", ["pairs=on_policy", "sample.num_samples=4", "sample.heldout_pairs=1"]).sample
    assert isinstance(settings, SamplePairs)
    folder = artifacts(sample=settings.model_dump(mode="json"))
    prompts = [Prompt(f"p{i}", "sums", f"{i} + 1?", False, Rule("number", Decimal(i + 1))) for i in range(3)]
    prompts.append(Prompt("w", "short", "A <b>word</b>?", False, Rule("words", 1)))
    said = {"p0": [" 1", " 2", " 2", " 9"], "p1": [" 2"] * 4, "p2": [" 3", " 4", " 4", " 4"],
            "w": [" a b", " a", " a b c", " b"]}  # fmt: skip
    rows = [(name, sample, 7, text, 5, 2, not (name == "w" and sample == 2))
            for name, own in said.items() for sample, text in enumerate(own)]  # fmt: skip
    write_pairs(prompts, pl.DataFrame(rows, schema=SCHEMA, orient="row"), settings, seed=0, out=folder / "sample_pairs")
    rates, pairs = sampled.tables(read_results(folder))
    # 6 of 12 numbers are right, 2 of 4 answers are short enough; of p0 one is repeated, of p1 three, of p2 two.
    assert [row[:4] for row in rates.rows] == [
        ["last number right", "3", "12", "50.0%"], ["within the word limit", "1", "4", "50.0%"],
        ["all", "4", "16", "50.0%"],
    ]  # fmt: skip
    assert [row[5:] for row in rates.rows] == [
        ["2", "1", "0", "50.0%", "0.0%"], ["1", "0", "0", "0.0%", "25.0%"], ["3", "1", "0", "37.5%", "6.2%"],
    ]  # fmt: skip
    assert "0.75 pairs a prompt: 2 to train on, 1 held out by whole prompts" in rates.note
    assert sorted(pairs.rows) == [
        ["0 + 1?", "1", "1, as it is", "2", "2, not 1"],
        ["2 + 1?", "3", "3, as it is", "4", "4, not 3"],
        ["A <b>word</b>?", "a", "1 words of 1", "a b", "2 words of 1"],
    ]
    assert rates in preference(read_results(folder)).tables


def test_nothing_is_shown_where_nothing_was_sampled(artifacts: Callable[..., Path]) -> None:
    assert sampled.tables(read_results(artifacts())) == []
