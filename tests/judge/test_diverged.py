"""Verdicts on divergence: paired by prompt, by McNemar, over records laid out by hand."""

from math import comb
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from oneaxis.artifacts import write_json
from oneaxis.config.schema import Claim
from oneaxis.diverge.measure import flat_metrics
from oneaxis.judge.compare import Verdict, compare
from oneaxis.judge.units import better_of
from oneaxis.judge.validity import judge_run
from oneaxis.report.results import read_results
from tests.diverge.outputs import REALISED, write_outputs
from tests.judge.faults import rewrite_manifest
from tests.judge.records import GATE, settings, write_run

METRIC = "diverge/loaded/several_share"


def run(folder: Path, *, dtype: str = "bfloat16", **outputs: Any) -> Path:
    """One run whose stage `diverge` found what `write_outputs` lays out."""
    write_run(folder, config=settings(serve__dtype=dtype))
    stage = folder / "artifacts" / "diverge"
    realised = {**REALISED, "resolved": {"dtype": dtype, "prefix_caching": True}, "asked": {"dtype": dtype}}
    summary = write_outputs(stage, **{"realised": realised, **outputs})
    write_json(folder / "artifacts" / "diverge.metrics.json",
               {f"diverge/{name}": value for name, value in flat_metrics(summary).items()})  # fmt: skip
    rewrite_manifest(stage)
    return folder


def judged(tmp_path: Path, metric: str = METRIC, **claim: Any) -> Verdict:
    written = {"metric": metric, "better": "lower", "bar": 0.0, "expected": None, **claim}
    return compare([tmp_path / "b"], [tmp_path / "c"], Claim.model_validate(written), GATE)


def test_prompts_are_the_units(tmp_path: Path) -> None:
    run(tmp_path / "b", several=9)
    run(tmp_path / "c", dtype="float32", several=1)
    verdict = judged(tmp_path, bar=0.1)
    assert (verdict.decision, verdict.n, verdict.unit_of_pairing) == ("accept", 12, "prompt"), verdict.reasons
    assert (verdict.baseline_value, verdict.candidate_value) == (9 / 12, 1 / 12)
    # Eight prompts have several outputs in the baseline alone: by the binomial, 2 / 2^8.
    assert verdict.p_value == pytest.approx(2 * comb(8, 8) / 2**8)
    assert "0 gained, 8 lost" in verdict.test
    assert verdict.relative_effect is None


def test_no_prompt_that_differs_is_no_proof_of_equality(tmp_path: Path) -> None:
    run(tmp_path / "b")
    run(tmp_path / "c", dtype="float32")
    verdict = judged(tmp_path, margin=0.1)
    assert (verdict.decision, verdict.effect) == ("unresolved", 0.0)
    # Tango's interval of 0 of 12 discordant: z^2 / (12 + z^2).
    assert verdict.ci_high == pytest.approx(1.96**2 / (12 + 1.96**2), abs=1e-3)
    assert judged(tmp_path, "diverge/modal_differs_share").decision == "tie"
    assert judged(tmp_path, "diverge/loaded/flip_rate").decision == "unresolved"


def test_other_prompts_or_repeats_are_not_compared(tmp_path: Path) -> None:
    run(tmp_path / "b")
    run(tmp_path / "c", dtype="float32", repeats=4)
    assert "3 outputs in the baseline and 4 in the candidate" in judged(tmp_path).reasons[0]
    run(tmp_path / "c", dtype="float32", prompts=11)
    assert "not measured on the same prompts" in judged(tmp_path).reasons[0]
    (tmp_path / "c/artifacts/diverge/outputs.parquet").unlink()
    missing = judged(tmp_path)
    assert (missing.decision, missing.reasons) == ("invalid", ["c: artifacts/diverge/outputs.parquet is missing"])


def test_an_engine_that_ran_otherwise_voids_it(tmp_path: Path) -> None:
    """Otherwise than asked, or than in the other arm."""
    differs = [{"key": "serve.dtype", "asked": "float32", "resolved": "bfloat16", "reason": "as it is"}]
    run(tmp_path / "b")
    run(tmp_path / "c", dtype="float32", realised={**REALISED, "differences": differs})
    [reason] = [said for said in judged(tmp_path).reasons if "as it is" in said]
    assert reason.endswith("diverge: engine: serve.dtype: asked float32, runs bfloat16: as it is")
    results = read_results(tmp_path / "c" / "artifacts")
    assert not judge_run(results, ["diverge"]).valid
    assert judge_run(results, ["serve"]).valid
    run(tmp_path / "c", dtype="float32",
        realised={**REALISED, "asked": {"dtype": "float32", "prefix_caching": True},
                  "resolved": {"dtype": "float32", "prefix_caching": False}})  # fmt: skip
    verdict = judged(tmp_path)
    assert verdict.decision == "invalid"
    assert any("the engines differ beyond the axis: prefix_caching" in reason for reason in verdict.reasons)


def test_which_way_is_better() -> None:
    names = ("loaded/several_share", "loaded/modal_share", "agree_with_alone", "loaded/tie_share", "alone/outputs")
    assert [better_of(f"diverge/{name}") for name in names] == ["lower", "higher", "higher", None, None]


def test_the_metric_follows_from_its_table(tmp_path: Path) -> None:
    run(tmp_path / "b", several=4)
    run(tmp_path / "c", dtype="float32", several=4)
    path = tmp_path / "c/artifacts/diverge/outputs.parquet"
    table = pl.read_parquet(path)
    path.unlink()
    table.with_columns(token_ids=pl.lit([1], dtype=pl.List(pl.Int64))).write_parquet(path)
    assert any("its metrics say 0.333333 and its table gives 0" in reason for reason in judged(tmp_path).reasons)
