"""From responses to pairs: laid out so that the reader sees which response goes where."""

import json
from decimal import Decimal
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from scipy.stats import beta

from oneaxis.config import compose
from oneaxis.config.schema import SamplePairs
from oneaxis.data.pairs import parse_pair
from oneaxis.errors import UserError
from oneaxis.multirun.metric_names import metric_names
from oneaxis.sample.pairs import PAIR_SCHEMA, clustered_share, write_pairs
from oneaxis.sample.prompts import Prompt
from oneaxis.sample.responses import SCHEMA
from oneaxis.sample.rules import Rule
from oneaxis.sources.records import parse_jsonl


def settings(root: Path, **changes: object) -> SamplePairs:
    sample = compose(root / "conf", ["pairs=on_policy"]).sample
    assert isinstance(sample, SamplePairs)
    return sample.model_copy(update={"pairs_per_prompt": 2, "heldout_pairs": 1, **changes})


def ask(name: str, answer: int) -> Prompt:
    return Prompt(name, "sums", f"{name}?", False, Rule("number", Decimal(answer)))


def table(responses: dict[str, list[tuple[str, bool]]]) -> pl.DataFrame:
    """`prompt: [(text, finished), ...]` as the engine's responses."""
    rows = [(name, sample, 100 + sample, text, 5, len(text), finished)
            for name, own in responses.items() for sample, (text, finished) in enumerate(own)]  # fmt: skip
    return pl.DataFrame(rows, schema=SCHEMA, orient="row")


PROMPTS = [ask("one", 1), ask("two", 2), ask("three", 3), ask("four", 4), ask("five", 5)]
RESPONSES = table({
    #         cut: last among the failing    first fail    first pass    said before     second pass
    "one":   [("so 1 and", False), (" 7", True), (" 1", True), (" 1", True), ("= 1", True)],
    "two":   [(" 2", True)] * 5,
    "three": [(" 4", True), ("", True), (" 5", True), (" 6", True), (" 7", True)],
    "four":  [(" 4", True), (" 44", True), (" 4.0", True), (" 40", True), (" 4e", True)],
    "five":  [(" 5", True), ("", True), ("\0", True), (" 5", True), (" 5!", True)],
})  # fmt: skip


def test_passing_responses_are_paired_with_failing_ones_in_the_order_drawn(root: Path, tmp_path: Path) -> None:
    metrics, _ = write_pairs(PROMPTS, RESPONSES, settings(root, heldout_pairs=2), seed=0, out=tmp_path)
    pairs = pl.read_parquet(tmp_path / "pairs.parquet")
    assert sorted(pairs.select("prompt", "chosen", "rejected").iter_rows()) == [
        ("four?", " 4", " 44"), ("four?", " 4.0", " 40"), ("one?", " 1", " 7"), ("one?", "= 1", "so 1 and"),
    ]  # fmt: skip
    assert pairs.schema == PAIR_SCHEMA
    assert pairs.select("prompt", "split").unique().height == 2
    asked = pl.read_parquet(tmp_path / "prompts.parquet")
    assert asked.select("prompt_id", "passed", "pairs", "fate").rows() == [
        ("one", 3, 2, "paired"), ("two", 5, 0, "all pass"), ("three", 0, 0, "all fail"), ("four", 3, 2, "paired"),
        ("five", 3, 0, "no usable text"),
    ]  # fmt: skip
    read = pl.read_parquet(tmp_path / "responses.parquet")
    one = read.filter(pl.col("prompt_id") == "one").select("sample", "seed", "said", "passed", "duplicate", "side")
    assert one.rows() == [
        (0, 100, "cut off at the token limit", False, False, "rejected"),
        (1, 101, "7, not 1", False, False, "rejected"),
        (2, 102, "1, as it is", True, False, "chosen"), (3, 103, "1, as it is", True, True, None),
        (4, 104, "1, as it is", True, False, "chosen"),
    ]  # fmt: skip
    assert set(read["pair_id"].drop_nulls()) == set(pairs["pair_id"])
    assert metrics["pairs"] == 4
    assert metrics["prompts_without_pair"] == metrics["number/prompts_without_pair"] == 3
    assert metrics["duplicate_share"] == 6 / 25
    assert metrics["pass_rate"] == 14 / 25
    assert metrics["cut_share"] == 1 / 25
    named = metric_names(compose(root / "conf", ["pairs=on_policy"]), "sample_pairs")
    assert {f"sample_pairs/{name}" for name in metrics} <= named


def test_pairs_are_held_out_by_prompt_and_read_back_as_pairs_of_the_users(root: Path, tmp_path: Path) -> None:
    prompts = [Prompt(f"p{i}", "sums", json.dumps([{"role": "user", "content": f"{i}?"}]), True,
                      Rule("number", Decimal(i))) for i in range(30)]  # fmt: skip
    own = table({f"p{i}": [(f"{i}", True), (f"{i}.0", True), (f"{i}1", True), (f"{i}2", True)] for i in range(30)})
    _, notes = write_pairs(prompts, own, settings(root, heldout_pairs=10), seed=0, out=tmp_path)
    pairs = pl.read_parquet(tmp_path / "pairs.parquet")
    assert notes["heldout_pairs"] == 10
    splits = pairs.group_by("prompt").agg(pl.col("split").n_unique(), pl.len())
    assert splits.select("split", "len").unique().rows() == [(1, 2)]
    records = parse_jsonl((tmp_path / "pairs.jsonl").read_bytes(), "pairs.jsonl")
    rows = [parse_pair(record, "sums") for record in records]
    assert [(row["prompt"], row["chosen"], row["rejected"]) for row in rows] == pairs.select(
        "prompt", "chosen", "rejected"
    ).rows()
    assert all(row["conversational"] for row in rows)


def test_no_pair_at_all_is_said_with_the_counts(root: Path, tmp_path: Path) -> None:
    prompts = [ask("two", 2), ask("three", 3), ask("six", 6)]
    own = table({"two": [(" 2", True)] * 2, "three": [(" 9", True)] * 2, "six": [(" 9", True), ("6 an", False)]})
    with pytest.raises(UserError) as caught:
        write_pairs(prompts, own, settings(root), seed=0, out=tmp_path)
    assert str(caught.value) == (
        "sample: none of 3 prompts gives a pair (1 all pass, 2 all fail); 2 of 6 responses pass, most often: 9, not 3; "
        "1 were cut off; more pairs come from more or easier prompts, sample.max_tokens over 64, sample.num_samples "
        "over 8"
    )
    assert list(tmp_path.iterdir()) == []


def test_too_few_pairs_to_hold_any_out(root: Path, tmp_path: Path) -> None:
    own = table({"one": [(" 1", True), (" 7", True)]})
    with pytest.raises(UserError) as caught:
        write_pairs([ask("one", 1)], own, settings(root), seed=0, out=tmp_path)
    assert str(caught.value) == (
        "sample: 1 usable pairs of 1 prompts; allowed: more than sample.heldout_pairs=1, of at least 2 prompts (of 1 "
        "prompts 1 paired); 1 of 2 responses pass, most often: 7, not 1; 0 were cut off; more pairs come from more or "
        "easier prompts, sample.num_samples over 8"
    )


def test_the_interval_of_a_share_covers_it_when_responses_of_a_prompt_are_alike() -> None:
    """Oracle: the true share of a beta-binomial, 40 prompts of 8 responses each. Taken as independent, the same
    responses would be covered far less often."""
    draw = np.random.default_rng(11)
    covered = naive = 0
    for _ in range(600):
        a, b = 0.6, 0.9
        hits = draw.binomial(8, beta.rvs(a, b, size=40, random_state=draw))
        found = clustered_share(hits.tolist(), [8] * 40)
        covered += found["low"] <= a / (a + b) <= found["high"]
        alone = clustered_share(hits.tolist() + [0], [8] * 40 + [1])["share"]
        width = 1.96 * np.sqrt(alone * (1 - alone) / 320)
        naive += abs(alone - a / (a + b)) <= width
    assert 0.92 <= covered / 600 <= 0.985
    assert naive / 600 < 0.75


def test_the_interval_of_no_hits_and_of_independent_units() -> None:
    # Wilson of 0 of 20: upper end z^2 / (n + z^2).
    assert clustered_share([0] * 20, [8] * 20)["high"] == pytest.approx(1.959964**2 / (20 + 1.959964**2), rel=1e-5)
    assert clustered_share([8] * 20, [8] * 20)["low"] == pytest.approx(20 / (20 + 1.959964**2), rel=1e-5)
    # Clusters of one are independent units: n = 400, so t and z agree and Wilson's interval of 100 of 400 remains.
    found = clustered_share([1, 0, 0, 0] * 100, [1] * 400)
    assert found["effective"] == pytest.approx(400, rel=0.005)
    assert (found["low"], found["high"]) == (pytest.approx(0.2100, abs=3e-4), pytest.approx(0.2947, abs=3e-4))
