"""Which pairs are kept, what is written beside them, and how too few are refused."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from oneaxis.config.schema import PairFilter
from oneaxis.errors import UserError
from oneaxis.preference.filter import at_random, correlation, distribution, filter_pairs, keep, scorable

from .conftest import small_tokenizer


def table(count: int = 12, heldout: int = 3) -> pl.DataFrame:
    """Pairs of random lower-case words; the last `heldout` are held out."""
    random = np.random.default_rng(1)

    def words(number: int) -> str:
        return "".join(" " + "".join(random.choice(list("abcdeot"), size=4)) for _ in range(number))

    return pl.DataFrame([
        {"pair_id": f"p{index:02}", "source": "test", "prompt": f"Goal:{words(2)}\nAnswer:", "chosen": words(3),
         "rejected": words(2 + index % 4), "conversational": False,
         "split": "heldout" if index >= count - heldout else "train"}
        for index in range(count)
    ])  # fmt: skip


def settings(**changes: Any) -> PairFilter:
    values = {"score": "ln_ches", "rule": "quantile", "value": 0.5, "control_seed": None, "max_tokens": 128,
              "batch_tokens": 256}  # fmt: skip
    return PairFilter(**(values | changes))


def test_keep_rules_on_literal_scores() -> None:
    scores = {"d": -3.0, "a": 1.0, "c": 0.5, "b": 0.5, "e": 2.0}
    assert keep(scores, "all", 0) == {"a", "b", "c", "d", "e"}
    assert keep(scores, "count", 2) == {"d", "b"}, "b and c tie: the id decides"
    assert keep(scores, "count", 99) == set(scores)
    assert keep(scores, "threshold", 0.5) == {"d", "b", "c"}
    assert keep(scores, "quantile", 0.79) == {"d", "b", "c"}, "3.95 of 5 rounds down"
    assert keep(scores, "quantile", 0.8) == {"d", "b", "c", "a"}
    assert len(keep({f"p{i:03}": float(i) for i in range(100)}, "quantile", 0.29)) == 29


def test_ties_do_not_depend_on_the_order_of_the_rows() -> None:
    scores = {"b": 0.0, "a": 0.0, "c": 0.0}
    assert keep(scores, "count", 1) == keep(dict(reversed(scores.items())), "count", 1) == {"a"}


@pytest.mark.parametrize("score", ["ches", "ln_ches"])
def test_train_pairs_are_filtered_by_ches_and_heldout_ones_only_scored(
    checkpoint: Path, tmp_path: Path, score: str
) -> None:
    metrics, notes = filter_pairs(checkpoint, table(), settings(score=score), tmp_path)
    result = pl.read_parquet(tmp_path / "pairs.parquet")
    assert result["pair_id"].to_list() == table()["pair_id"].to_list()
    train = result.filter(pl.col("split") == "train")
    kept = train.filter("kept")
    assert kept.height == 4, "half of nine, rounded down"
    assert kept[score].max() <= train.filter(~pl.col("kept"))[score].min()
    assert result.filter(pl.col("split") == "heldout")["kept"].all()
    assert result["ches"].is_finite().all()
    assert notes["dropped_ids"] == train.filter(~pl.col("kept"))["pair_id"].to_list()
    assert metrics["kept"] == 4
    assert metrics["dropped"] == 5
    assert metrics[f"{score}_cutoff"] == kept[score].max()
    assert metrics["ln_ches_median"] == pytest.approx(float(np.median(train["ln_ches"].to_numpy())))


def test_the_same_input_gives_the_same_bytes(checkpoint: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        filter_pairs(checkpoint, table(), settings(), tmp_path / name)
    for name in ("pairs.parquet", "distribution.csv"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_the_control_draws_every_pair_alike() -> None:
    """3 of 10 by 2,000 seeds: each pair 600 times (standard deviation 20.5), whatever the order of the ids."""
    ids = [f"p{number}" for number in range(10)]
    times = Counter(pair_id for seed in range(2000) for pair_id in at_random(ids, 3, seed))
    assert sum(times.values()) == 6000
    assert all(abs(times[pair_id] - 600) < 4 * 20.5 for pair_id in ids)
    assert at_random(ids, 3, 7) == at_random(reversed(ids), 3, 7)


def test_the_control_drops_as_many_as_the_rule_and_others(checkpoint: Path, tmp_path: Path) -> None:
    results = {}
    for name, seed in (("ches", None), ("random", 5), ("other", 6)):
        (tmp_path / name).mkdir()
        changes = {"control_seed": seed, "rule": "count", "value": 5.0}
        metrics, notes = filter_pairs(checkpoint, table(), settings(**changes), tmp_path / name)
        results[name] = set(notes["dropped_ids"])
        assert metrics["dropped"] == len(results[name]) == 4
        assert ("ln_ches_cutoff" in metrics) == (notes["cutoff"] is not None) == (seed is None)
    assert len(set(map(frozenset, results.values()))) == 3


def test_distribution_counts_every_pair_once(checkpoint: Path, tmp_path: Path) -> None:
    filter_pairs(checkpoint, table(), settings(), tmp_path)
    csv = pl.read_csv(tmp_path / "distribution.csv")
    assert dict(csv.group_by("outcome").agg(pl.col("count").sum()).iter_rows()) == {
        "kept": 4, "dropped": 5, "heldout": 3,
    }  # fmt: skip
    assert ((csv["bin_low"] < csv["ln_ches"]) & (csv["ln_ches"] < csv["bin_high"])).all()


def test_distribution_of_equal_scores() -> None:
    rows = pl.DataFrame({"s": [1.0, 1.0], "kept": [True, False], "split": ["train", "train"]})
    assert distribution(rows, "s")["count"].sum() == 2


def test_conversational_pairs_are_scored(checkpoint: Path, tmp_path: Path) -> None:
    def message(role: str, text: str) -> str:
        return json.dumps([{"role": role, "content": text}])

    rows = [{**row, "prompt": message("user", row["prompt"]), "chosen": message("assistant", row["chosen"]),
             "rejected": message("assistant", row["rejected"]), "conversational": True}
            for row in table().iter_rows(named=True)]  # fmt: skip
    filter_pairs(checkpoint, pl.DataFrame(rows), settings(), tmp_path)
    result = pl.read_parquet(tmp_path / "pairs.parquet")
    plain, _, _ = scorable(table(), small_tokenizer(), 128)
    assert plain.height == result.height
    assert result["prompt"].to_list() == [row["prompt"] for row in rows], "messages stay JSON text"


def test_pairs_that_cannot_be_scored_leave_the_table_and_are_named(checkpoint: Path, tmp_path: Path) -> None:
    rows = table().to_dicts()
    rows[0]["chosen"] = " a very long one" * 60
    rows[1]["rejected"] = ""
    metrics, notes = filter_pairs(checkpoint, pl.DataFrame(rows), settings(rule="all"), tmp_path)
    assert notes["unusable"] == {"too_long": ["p00"], "empty_response": ["p01"]}
    assert metrics["unusable"] == 2
    assert metrics["pairs"] == pl.read_parquet(tmp_path / "pairs.parquet").height == 10


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rule": "count", "value": 3}, "keeps 3 of 9 train pairs"),
        ({"rule": "threshold", "value": -1e9}, "higher pairs.value"),
        ({"rule": "quantile", "value": 0.1}, "larger pairs.value"),
        ({"max_tokens": 8}, "larger pairs.max_tokens"),
    ],
)
def test_too_few_kept_says_what_to_change(checkpoint: Path, tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says) as caught:
        filter_pairs(checkpoint, table(), settings(**changes), tmp_path)
    assert "\n" not in str(caught.value)


def test_correlation_by_hand() -> None:
    """Ranks 1 2 3 against 1 3 2: Spearman 1 - 6 * 2 / (3 * 8) = 0.5. Undefined for a constant: None, never NaN."""
    assert correlation(np.array([1.0, 2, 3]), np.array([10.0, 30, 20]))["spearman"] == pytest.approx(0.5)
    assert correlation(np.ones(3), np.array([1.0, 2, 3])) == {"spearman": None, "pearson": None}
