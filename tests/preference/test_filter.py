"""Which pairs are kept, what is written beside them, and how too few are refused."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from safetensors.torch import load_file, save_file

from oneaxis.config import compose
from oneaxis.config.schema import PairFilter
from oneaxis.errors import RunError, UserError
from oneaxis.preference.filter import at_random, correlation, distribution, filter_pairs, keep, overlaps, run_key

SOURCE = Path(__file__).resolve().parents[2] / "src"


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


def written(folder: Path, pairs: pl.DataFrame | None = None) -> Path:
    """The pairs as prepare_data leaves them."""
    path = folder / "given.parquet"
    (table() if pairs is None else pairs).write_parquet(path)
    return path


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
    metrics, notes = filter_pairs(checkpoint, written(tmp_path), settings(score=score), tmp_path)
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
        filter_pairs(checkpoint, written(tmp_path), settings(), tmp_path / name)
    for name in ("pairs.parquet", "distribution.csv"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_the_control_draws_every_pair_alike() -> None:
    """3 of 10 by 2,000 seeds: each pair 600 times (standard deviation 20.5), whatever the order of the ids."""
    ids = [f"p{number}" for number in range(10)]
    times = Counter(pair_id for seed in range(2000) for pair_id in at_random(ids, 3, seed))
    assert sum(times.values()) == 6000
    assert all(abs(times[pair_id] - 600) < 4 * 20.5 for pair_id in ids)
    assert at_random(ids, 3, 7) == at_random(reversed(ids), 3, 7)


def test_the_control_follows_the_seed_and_needs_a_rule_that_drops(root: Path) -> None:
    assert compose(root / "conf", ["pairs=random", "seed=3"]).pairs.control_seed == 3
    assert compose(root / "conf", ["pairs=ches", "seed=3"]).pairs.control_seed is None
    with pytest.raises(UserError, match=r"control_seed is 3, and pairs.rule=all drops nothing; allowed: null"):
        compose(root / "conf", ["pairs=random", "seed=3", "pairs.rule=all"])


def test_the_control_drops_as_many_as_the_rule_and_others(checkpoint: Path, tmp_path: Path) -> None:
    results = {}
    for name, seed in (("ches", None), ("random", 5), ("other", 6)):
        (tmp_path / name).mkdir()
        changes = {"control_seed": seed, "rule": "count", "value": 5.0}
        metrics, notes = filter_pairs(checkpoint, written(tmp_path), settings(**changes), tmp_path / name)
        results[name] = set(notes["dropped_ids"])
        assert metrics["dropped"] == len(results[name]) == 4
        assert ("ln_ches_cutoff" in metrics) == (notes["cutoff"] is not None) == (seed is None)
    assert len(set(map(frozenset, results.values()))) == 3


def test_distribution_counts_every_pair_once(checkpoint: Path, tmp_path: Path) -> None:
    filter_pairs(checkpoint, written(tmp_path), settings(), tmp_path)
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
    filter_pairs(checkpoint, written(tmp_path, pl.DataFrame(rows)), settings(), tmp_path)
    result = pl.read_parquet(tmp_path / "pairs.parquet")
    assert result.height == len(rows)
    assert result["prompt"].to_list() == [row["prompt"] for row in rows], "messages stay JSON text"


def test_pairs_that_cannot_be_scored_leave_the_table_and_are_named(checkpoint: Path, tmp_path: Path) -> None:
    """None is cut to fit; a response of which the prompt's last token swallows all has no token of its own."""
    rows = table().to_dicts()
    rows[0]["chosen"] = " a very long one" * 60
    rows[1]["rejected"] = ""
    rows[2]["prompt"] = "Goal: a very long prompt" * 60
    rows[3]["rejected"] = rows[3]["chosen"]
    metrics, notes = filter_pairs(checkpoint, written(tmp_path, pl.DataFrame(rows)), settings(rule="all"), tmp_path)
    found = {"too_long": ["p00"], "empty_response": ["p01"], "prompt_too_long": ["p02"], "same_tokens": ["p03"]}
    assert notes["unusable_ids"] == found
    assert notes["unusable"] == {"no_prompt_token": 0} | dict.fromkeys(found, 1)
    assert "never cut: prompt + response longer than 128 tokens" in notes["unusable_policy"]
    assert metrics["unusable"] == 4
    assert pl.read_parquet(tmp_path / "pairs.parquet")["pair_id"].to_list() == [f"p{n:02}" for n in range(4, 12)]
    assert metrics["pairs"] == 8


def test_a_part_without_a_pair_that_can_be_scored(checkpoint: Path, tmp_path: Path) -> None:
    """The first part of two holds none: the table has the others, with the numbers that they have in one part."""
    rows = table().to_dicts()
    for row in rows[:2]:
        row["rejected"] = row["chosen"]
    for name, size in (("two", 2), ("all", 256)):
        (tmp_path / name).mkdir()
        pairs = written(tmp_path, pl.DataFrame(rows))
        filter_pairs(checkpoint, pairs, settings(rule="all"), tmp_path / name, pairs_per_part=size)
    apart, together = (pl.read_parquet(tmp_path / name / "pairs.parquet") for name in ("two", "all"))
    assert apart.schema == together.schema
    assert apart["pair_id"].to_list() == together["pair_id"].to_list() == [f"p{n:02}" for n in range(2, 12)]
    assert apart["ches"].to_numpy() == pytest.approx(together["ches"].to_numpy(), rel=1e-4)


def test_a_run_goes_on_from_its_parts_to_the_same_bytes(checkpoint: Path, tmp_path: Path) -> None:
    """A run refused at its end leaves its parts; one of the four is taken away, and another rule needs no new score."""
    pairs, parts = written(tmp_path), tmp_path / "parts"
    for name in ("whole", "resumed"):
        (tmp_path / name).mkdir()
    filter_pairs(checkpoint, pairs, settings(), tmp_path / "whole", pairs_per_part=3)
    few = settings(rule="count", value=2.0)
    with pytest.raises(UserError, match="keeps 2 of 9"):
        filter_pairs(checkpoint, pairs, few, tmp_path / "resumed", parts=parts, pairs_per_part=3)
    left = sorted(parts.rglob("*.parquet"))
    assert len(left) == 4
    left[1].unlink()
    observed: dict[str, Any] = {}
    filter_pairs(checkpoint, pairs, settings(), tmp_path / "resumed", parts=parts, observed=observed, pairs_per_part=3)
    assert (observed["parts"], observed["parts_found"]) == (4, 3)
    for name in ("pairs.parquet", "distribution.csv"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "resumed" / name).read_bytes()
    assert not list(parts.iterdir()), "a finished run takes its parts away"


def test_parts_of_other_pairs_or_settings_are_not_taken(checkpoint: Path, tmp_path: Path) -> None:
    pairs = written(tmp_path)
    key = run_key(checkpoint, pairs, settings(), 4)
    assert key == run_key(checkpoint, pairs, settings(rule="count", value=7.0), 4), "the rule comes after the scores"
    assert key != run_key(checkpoint, pairs, settings(max_tokens=64), 4)
    written(tmp_path, table().with_columns(chosen=pl.col("chosen") + "."))
    assert key != run_key(checkpoint, pairs, settings(), 4)


def test_overlap_with_other_measures_by_hand() -> None:
    """d and e of five are dropped. Edit similarity would drop a and e, the embedding d and e, raw CHES b and c."""
    train = pl.DataFrame({
        "pair_id": list("abcde"), "kept": [True, True, True, False, False], "ln_ches": [1.0, 2, 3, 4, 5],
        "edit_similarity": [0.9, 0.1, 0.2, 0.3, 0.8], "cosine": [0.1, 0.2, 0.3, 0.9, 0.9], "ches": [1.0, 9, 8, 2, 3],
    })  # fmt: skip
    found = overlaps(train, "ln_ches")
    assert {name: (one["dropped_too"], one["share"]) for name, one in found.items()} == {
        "edit_similarity": (1, 0.5), "cosine": (2, 1.0), "ches": (0, 0.0),
    }  # fmt: skip
    assert found["ches"]["by_chance"] == 0.4
    assert overlaps(train.with_columns(kept=True), "ln_ches") == {}


def test_hidden_states_that_overflow_stop_the_run(checkpoint: Path, tmp_path: Path) -> None:
    """NaN sorts anywhere: no rule may go by it."""
    broken = shutil.copytree(checkpoint, tmp_path / "broken")
    weights = load_file(broken / "model.safetensors")
    weights["model.norm.weight"][:] = float("inf")
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RunError, match="CHES of pair p00 is not finite"):
        filter_pairs(broken, written(tmp_path), settings(), tmp_path)
    assert not (tmp_path / "pairs.parquet").exists()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rule": "count", "value": 3}, "keeps 3 of 9 train pairs"),
        ({"rule": "threshold", "value": -1e9}, "higher pairs.value"),
        ({"rule": "quantile", "value": 0.1}, "larger pairs.value"),
        ({"max_tokens": 8}, r"0 of 0 train pairs \(12 prompt too long\).*larger pairs.max_tokens"),
    ],
)
def test_too_few_kept_says_what_to_change(checkpoint: Path, tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says) as caught:
        filter_pairs(checkpoint, written(tmp_path), settings(**changes), tmp_path)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "pairs.parquet").exists()


def test_the_error_of_too_few_gives_the_range_of_the_score(checkpoint: Path, tmp_path: Path) -> None:
    filter_pairs(checkpoint, written(tmp_path), settings(rule="all"), tmp_path)
    scores = pl.read_parquet(tmp_path / "pairs.parquet").filter(pl.col("split") == "train")["ln_ches"].sort()
    with pytest.raises(UserError) as caught:
        filter_pairs(checkpoint, written(tmp_path), settings(rule="threshold", value=-1e9), tmp_path)
    assert f"keeps 0 of 9 train pairs; their ln_ches goes from {scores[0]:.4g} to {scores[-1]:.4g}; allowed" in str(
        caught.value
    )


def test_correlation_by_hand() -> None:
    """Ranks 1 2 3 against 1 3 2: Spearman 1 - 6 * 2 / (3 * 8) = 0.5. Undefined for a constant: None, never NaN."""
    assert correlation(np.array([1.0, 2, 3]), np.array([10.0, 30, 20]))["spearman"] == pytest.approx(0.5)
    assert correlation(np.ones(3), np.array([1.0, 2, 3])) == {"spearman": None, "pearson": None}


STREAM = """
import json, resource, sys
from pathlib import Path
from oneaxis.config.schema import PairFilter
from oneaxis.preference.filter import filter_pairs

checkpoint, config, jobs = Path(sys.argv[1]), PairFilter(**json.loads(sys.argv[2])), json.loads(sys.argv[3])
for pairs, out, parts in jobs:
    Path(out).mkdir(exist_ok=True)
    observed = {}
    filter_pairs(checkpoint, Path(pairs), config, Path(out), parts=Path(parts), observed=observed, pairs_per_part=8)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"peak_mib": peak, **observed}), flush=True)
"""


def stream(checkpoint: Path, jobs: list[list[str]]) -> "subprocess.Popen[str]":
    config = json.dumps(settings().model_dump())
    return subprocess.Popen(
        [sys.executable, "-c", STREAM, str(checkpoint), config, json.dumps(jobs)], text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@pytest.mark.slow
def test_ches_of_many_pairs_streams_through_bounded_memory_and_survives_a_kill(
    checkpoint: Path, tmp_path: Path
) -> None:
    """Texts of 60 kB, too long to be scored, in ten times as many pairs: their tokens alone, 24,000 ids or more each,
    would take 90 MiB. And 600 pairs that are scored, killed in the middle: the same bytes as without the kill."""

    def given(name: str, pairs: pl.DataFrame) -> str:
        pairs.write_parquet(tmp_path / f"{name}.parquet")
        return str(tmp_path / f"{name}.parquet")

    def long(count: int) -> pl.DataFrame:
        texts = (
            pl.when(pl.col("split") == "train").then(pl.col("chosen")).otherwise(pl.col("chosen") + " boot" * 12_000)
        )
        return table(count + 12, heldout=count).with_columns(chosen=texts)

    few, many = given("few", long(16)), given("many", long(120))
    normal = given("normal", table(600, heldout=50))
    jobs = [[pairs, str(tmp_path / out), str(tmp_path / "parts")]
            for pairs, out in ((few, "a"), (many, "b"), (normal, "whole"))]  # fmt: skip
    said, errors = stream(checkpoint, jobs).communicate(timeout=300)
    small, large, whole = (json.loads(line) for line in said.splitlines())
    assert large["parts"] == 17, errors
    assert large["peak_mib"] < small["peak_mib"] + 45
    assert whole["parts"] == 75
    assert pl.read_parquet(tmp_path / "b" / "pairs.parquet").height == 12

    killed = stream(checkpoint, [[normal, str(tmp_path / "killed"), str(tmp_path / "kept")]])
    deadline = time.monotonic() + 120
    while len(list((tmp_path / "kept").rglob("*.parquet"))) < 10 and time.monotonic() < deadline:
        assert killed.poll() is None, killed.stderr and killed.stderr.read()
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert not (tmp_path / "killed" / "pairs.parquet").exists(), "it was to be killed in the middle"
    said, errors = stream(checkpoint, [[normal, str(tmp_path / "killed"), str(tmp_path / "kept")]]).communicate()
    assert 10 <= json.loads(said)["parts_found"] < 75, errors
    for name in ("pairs.parquet", "distribution.csv"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
