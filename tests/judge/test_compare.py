"""Two arms to a verdict: the units of each metric, and every condition proven by injecting its fault.

Oracle: the records are hand-made (`records.py`), so the effect and the fault are known.
"""

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from ruamel.yaml import YAML

from oneaxis.artifacts import write_json
from oneaxis.config import compose
from oneaxis.config.schema import Claim, derived_paths
from oneaxis.errors import UserError
from oneaxis.judge.compare import Verdict, compare
from oneaxis.judge.records import UPSTREAM
from oneaxis.judge.units import better_of
from oneaxis.multirun.record import Axis
from tests.judge.faults import FAULTS, every, rewrite_manifest
from tests.judge.records import ALPHA, CELL, GATE, edit, settings, write_run

NOISE = [0.0, 0.6, -0.6, 0.3, -0.3, 0.1]
TTFT = f"{CELL}/ttft_p50_ms"


def claim(metric: str, better: str = "lower", bar: float = 0.0, expected: float | None = None) -> Claim:
    return Claim.model_validate({"metric": metric, "better": better, "bar": bar, "expected": expected})


def one_run(tmp_path: Path, metric: str, better: str = "lower", *, base: dict[str, Any] | None = None,
            cand: dict[str, Any] | None = None, alpha: float = 0.8, **options: Any) -> Verdict:  # fmt: skip
    """One run an arm that differ in alpha."""
    write_run(tmp_path / "b", **(base or {}))
    write_run(tmp_path / "c", **{"config": settings(quantize__smooth__alpha=alpha), **(cand or {})})
    return compare([tmp_path / "b"], [tmp_path / "c"], claim(metric, better), GATE, **options)


# --- units ----------------------------------------------------------------------------------------------------------


def test_perplexity_is_paired_by_sequence(tmp_path: Path) -> None:
    shift = -0.05 + 0.01 * (-1.0) ** np.arange(12)
    verdict = one_run(tmp_path, "quantize/perplexity_after", cand={"nll": shift})
    assert (verdict.decision, verdict.n, verdict.unit_of_pairing) == ("accept", 12, "held-out sequence")
    assert verdict.relative_effect == pytest.approx(math.exp(-0.05) - 1)
    assert verdict.changed_axis == "quantize.smooth.alpha"
    # Margin of the log ratio: t(0.975; 11) = 2.20099 times 0.01 sqrt(12/11) / sqrt(12).
    assert verdict.baseline_value
    margin = 2.20099 * 0.01 / 11**0.5
    assert verdict.ci_high == pytest.approx(verdict.baseline_value * math.expm1(-0.05 + margin), rel=1e-5)


def test_an_arm_without_quantisation_is_measured_as_calibrated(tmp_path: Path) -> None:
    write_run(tmp_path / "b", config=settings(quantize={"kind": "none"}))
    write_run(tmp_path / "c", nll=np.linspace(0.01, 0.03, 12))
    for metric, effect in (("quantize/delta_nll", 0.02), ("quantize/perplexity_after", None)):
        verdict = compare([tmp_path / "b"], [tmp_path / "c"], claim(metric), GATE)
        assert (verdict.decision, verdict.changed_axis) == ("reject", "quantize")
        assert effect is None or verdict.effect == pytest.approx(effect)
        assert [axis.kind for axis in verdict.axes] == ["group"]


def test_divergence_and_agreement_are_paired_by_sequence_and_nothing_moves_without_quantisation(tmp_path: Path) -> None:
    write_run(tmp_path / "b", config=settings(quantize={"kind": "none", "kv": "none"}))
    write_run(tmp_path / "c")
    table = pl.read_parquet(tmp_path / "c/artifacts/quantize/heldout_nll.parquet")
    moved = table.select("sequence", "position", "source", kl=0.01 * (1 + pl.col("sequence")),
                         same_top1=pl.col("position") > 0)  # fmt: skip
    moved.write_parquet(tmp_path / "c/artifacts/quantize/quality.parquet")
    tokens = table["position"].n_unique()
    edit(tmp_path / "c/artifacts/quantize.metrics.json",
         lambda m: m.update({"quantize/kl": 0.065, "quantize/top1_agreement": 1 - 1 / tokens}))  # fmt: skip
    verdict = compare([tmp_path / "b"], [tmp_path / "c"], claim("quantize/kl"), GATE)
    # Sequences of 0.01, 0.02, ... 0.12: mean 0.065.
    assert (verdict.decision, verdict.n, verdict.baseline_value) == ("reject", 12, 0.0)
    assert verdict.effect == pytest.approx(0.065)
    verdict = compare([tmp_path / "b"], [tmp_path / "c"], claim("quantize/top1_agreement", "higher"), GATE)
    assert (verdict.baseline_value, verdict.effect) == (1.0, pytest.approx(-1 / tokens))
    (tmp_path / "c/artifacts/quantize/quality.parquet").unlink()
    verdict = compare([tmp_path / "b"], [tmp_path / "c"], claim("quantize/kl"), GATE)
    assert (verdict.decision, verdict.reasons) == ("invalid", ["c: artifacts/quantize/quality.parquet is missing"])


def test_what_the_settings_decide_is_compared_as_it_stands_and_must_be_equal_in_every_run(tmp_path: Path) -> None:
    metric, kv = "serve/kv_cache_tokens", settings(quantize__kv="fp8")
    write_run(tmp_path / "b", config=settings(quantize__kv="none"), timings={metric: 46592.0})
    arm = [write_run(tmp_path / f"c{n}", config=kv, repetition=n, timings={metric: 93184.0}) for n in range(2)]
    verdict = compare([tmp_path / "b"], arm, claim(metric, "higher", bar=40000.0), GATE)
    assert (verdict.decision, verdict.effect, verdict.n) == ("accept", 46592.0, 1), verdict.reasons
    assert (verdict.ci_low, verdict.ci_high) == (46592.0, 46592.0)
    too_high = compare([tmp_path / "b"], arm, claim(metric, "higher", bar=50000.0), GATE)
    assert too_high.decision == "reject"
    edit(tmp_path / "c1/artifacts/serve.metrics.json", lambda m: m.update({metric: 93056.0}))
    verdict = compare([tmp_path / "b"], arm, claim(metric, "higher"), GATE)
    assert verdict.decision == "invalid"
    assert any("differs between runs of one arm (93056, 93184)" in reason for reason in verdict.reasons)


def test_copies_are_paired_by_sequence(tmp_path: Path) -> None:
    """Eight sequences of four strings: all right at first, one wrong in each of the first four after quantisation."""
    write_run(tmp_path / "b", config=settings(quantize={"kind": "none", "kv": "none"}))
    write_run(tmp_path / "c")
    rows = [(kind, s, t, 9, True, 0.1) for kind in ("base64", "digits") for s in range(4) for t in range(4)]
    names = ["kind", "sequence", "task", "num_tokens", "exact", "nll"]
    right = pl.DataFrame(rows, schema=names, orient="row")
    for arm in "bc":
        right.write_parquet(tmp_path / arm / "artifacts/calibrate/copy.parquet")
    wrong = right.with_columns(exact=(pl.col("kind") == "digits") | (pl.col("task") > 0))
    wrong.write_parquet(tmp_path / "c/artifacts/quantize/copy.parquet")
    edit(tmp_path / "c/artifacts/quantize.metrics.json", lambda m: m.update({"quantize/copy_exact_after": 0.875}))
    verdict = compare([tmp_path / "b"], [tmp_path / "c"], claim("quantize/copy_exact_after", "higher"), GATE)
    assert (verdict.n, verdict.unit_of_pairing) == (8, "copy sequence")
    assert (verdict.baseline_value, verdict.candidate_value) == (1.0, 0.875)
    # Differences -1/4 four times and 0 four times: deviation 0.133631, t(0.975; 7) = 2.364624.
    assert verdict.ci_low == pytest.approx(-0.125 - 2.364624 * 0.133631 / 8**0.5, abs=1e-5)
    wrong.head(28).write_parquet(tmp_path / "c/artifacts/quantize/copy.parquet")
    verdict = compare([tmp_path / "b"], [tmp_path / "c"], claim("quantize/copy_exact_after", "higher"), GATE)
    assert verdict.decision == "unresolved"


def test_equal_copies_are_no_certainty_and_nothing_where_the_suite_cannot_tell(tmp_path: Path) -> None:
    """Tango's interval of 32 strings without a difference: z^2 / (n + z^2) on either side."""
    write_run(tmp_path / "b", config=settings(quantize={"kind": "none", "kv": "none"}))
    write_run(tmp_path / "c")
    rows = [("digits", s, t, 9, True, 0.1) for s in range(8) for t in range(4)]
    right = pl.DataFrame(rows, schema=["kind", "sequence", "task", "num_tokens", "exact", "nll"], orient="row")
    right.write_parquet(tmp_path / "b/artifacts/calibrate/copy.parquet")
    right.write_parquet(tmp_path / "c/artifacts/quantize/copy.parquet")
    edit(tmp_path / "b/artifacts/calibrate.metrics.json", lambda m: m.update({"quantize/copy_exact_after": 1.0}))
    verdict = compare([tmp_path / "b"], [tmp_path / "c"], claim("quantize/copy_exact_after", "higher"), GATE)
    assert (verdict.ci_low, verdict.ci_high) == pytest.approx((-3.841459 / 35.841459, 3.841459 / 35.841459), abs=1e-6)
    told = {"discriminates": False, "why": "It cannot."}
    (tmp_path / "c/artifacts/calibrate/copying.json").write_text(json.dumps(told), encoding="utf-8")
    verdict = compare([tmp_path / "b"], [tmp_path / "c"], claim("quantize/copy_exact_after", "higher"), GATE)
    assert verdict.decision == "unresolved"
    assert "cannot tell" in verdict.reasons[0]


def test_sequences_of_unequal_length_weigh_by_their_tokens(tmp_path: Path) -> None:
    for arm, config in (("b", settings()), ("c", settings(quantize__smooth__alpha=0.8))):
        write_run(tmp_path / arm, config=config, nll=np.linspace(0, 0.1, 12) if arm == "c" else 0.0)
        path = tmp_path / arm / "artifacts" / "quantize" / "heldout_nll.parquet"
        kept = pl.read_parquet(path).filter((pl.col("sequence") != 11) | (pl.col("position") < 3))
        kept.write_parquet(path)
        rewrite_manifest(path.parent)
        mean = math.exp(kept["nll"].mean())  # type: ignore[arg-type]
        edit(tmp_path / arm / "artifacts" / "quantize.metrics.json",
             lambda m, mean=mean: m.update({"quantize/perplexity_after": mean}))  # fmt: skip
    verdict = compare([tmp_path / "b"], [tmp_path / "c"], claim("quantize/perplexity_after"), GATE)
    assert verdict.valid, verdict.reasons
    assert None not in (verdict.ci_low, verdict.effect, verdict.ci_high)
    assert verdict.ci_low < verdict.effect < verdict.ci_high  # type: ignore[operator]


def test_accuracy_is_paired_by_item(tmp_path: Path) -> None:
    # 20 of 40 right; the candidate gains 9 and loses 1: exact p = 2 x (1 + 10) / 1024.
    right = [True] * 19 + [False] + [True] * 9 + [False] * 11
    verdict = one_run(tmp_path, "score/quiz/acc_bytes", "higher", cand={"right": right})
    assert verdict.effect == pytest.approx(8 / 40)
    assert verdict.p_value == pytest.approx(22 / 1024)
    assert (verdict.decision, verdict.n, verdict.test) == ("accept", 40, "McNemar, exact (9 gained, 1 lost)")


def test_letter_scorers_are_paired_on_the_items_that_were_asked_by_letter(tmp_path: Path) -> None:
    verdict = one_run(tmp_path, "score/quiz/letter", "higher")
    assert (verdict.n, verdict.decision) == (5, "tie")
    assert "no item was" not in verdict.reasons[0]


def test_an_untrained_arm_stands_where_training_began(tmp_path: Path) -> None:
    write_run(tmp_path / "b")
    write_run(tmp_path / "c", config=settings(train={"kind": "dpo"}), logp=2.0)
    delta = compare([tmp_path / "b"], [tmp_path / "c"], claim("train_dpo/chosen_delta", "higher"), GATE)
    after = compare([tmp_path / "b"], [tmp_path / "c"], claim("train_dpo/chosen_logp_after", "higher"), GATE)
    margin = compare([tmp_path / "b"], [tmp_path / "c"], claim("train_dpo/margin_delta", "higher"), GATE)
    for verdict in (delta, after, margin):
        assert verdict.effect == pytest.approx(2.0, abs=0.1)
        assert (verdict.decision, verdict.n, verdict.unit_of_pairing, verdict.floor) == (
            "accept", 20, "held-out pair", None)  # fmt: skip
    assert delta.baseline_value == 0


def test_an_untrained_arm_stands_where_sft_began_where_sft_came_first(tmp_path: Path) -> None:
    """The records hold DPO alone, +2 nats; SFT is put before it here, +1 nat."""
    write_run(tmp_path / "b")
    write_run(tmp_path / "c", config=settings(train={"kind": "dpo"}), logp=2.0)
    path = tmp_path / "c/artifacts/train_dpo/heldout.parquet"
    source = [(pl.col(f"{side}_before") - 1).alias(f"{side}_source") for side in ("chosen", "rejected")]
    pl.read_parquet(path).with_columns(source).write_parquet(path)
    delta = compare([tmp_path / "b"], [tmp_path / "c"], claim("train_dpo/chosen_delta", "higher"), GATE)
    after = compare([tmp_path / "b"], [tmp_path / "c"], claim("train_dpo/chosen_logp_after", "higher"), GATE)
    assert delta.effect == pytest.approx(2.0, abs=0.1)
    assert after.effect == pytest.approx(3.0, abs=0.1)


def test_refusals_and_escape_texts_are_paired_by_benign_prompt(tmp_path: Path) -> None:
    """Of 40 prompts the trained arm refuses 10, the fetched model none; the hedge rose by 2 nats on each of 5."""
    write_run(tmp_path / "b")
    write_run(tmp_path / "c", config=settings(train={"kind": "dpo"}), logp=2.0)
    folder = tmp_path / "c" / "artifacts" / "train_dpo"
    prompts = [f"q{k:02}" for k in range(40)]
    answers = pl.DataFrame({"probe_id": prompts, "refusal_before": [False] * 40,
                            "refusal_after": [k < 10 for k in range(40)]})  # fmt: skip
    answers.write_parquet(folder / "answers.parquet")
    pl.DataFrame([
        {"moment": moment, "step": 0, "probe_id": prompts[k], "escape": name, "logp": -30.0 - k + gain + 0.01 * k}
        for moment, gain in (("before", 0.0), ("during", 9.0), ("after", 2.0)) for k in range(5)
        for name in ("hedge", "other")
    ]).write_parquet(folder / "escapes.parquet")  # fmt: skip
    arms = [tmp_path / "b"], [tmp_path / "c"]
    rate = compare(*arms, claim("train_dpo/refusal_rate_after", "lower"), GATE)
    assert (rate.decision, rate.n, rate.unit_of_pairing, rate.floor) == ("reject", 40, "benign prompt", None)
    assert (rate.effect, rate.test) == (0.25, "McNemar, exact (10 gained, 0 lost)")
    hedge = compare(*arms, claim("train_dpo/escape_hedge_delta", "lower"), GATE)
    assert (hedge.effect, hedge.n, hedge.unit, hedge.baseline_value) == (pytest.approx(2.0), 5, "nats", 0)
    absent = compare(*arms, claim("train_dpo/escape_mine_delta", "lower"), GATE)
    assert (absent.decision, absent.reasons) == ("unresolved", ["an arm did not score the text 'mine'"])
    assert better_of("train_dpo/refusal_rate_after") == better_of("train_dpo/escape_hedge_delta") == "lower"


def test_a_candidate_that_training_harmed_or_stopped_is_said_whatever_it_won(tmp_path: Path) -> None:
    write_run(tmp_path / "b")
    write_run(tmp_path / "c", config=settings(train={"kind": "dpo"}), logp=2.0)
    path = tmp_path / "c" / "artifacts" / "train_dpo" / "displacement.json"
    write_json(path, {"verdict": "severe", "reasons": ["refusals rose", "chosen rose"], "stopped": None})
    arms = [tmp_path / "b"], [tmp_path / "c"]
    won = compare(*arms, claim("train_dpo/chosen_delta", "higher"), GATE)
    assert won.decision == "accept"
    assert "c: preference training was judged severe: refusals rose" in won.warnings
    write_json(path, {"verdict": "severe", "reasons": [], "stopped": {"reason": "stopped at step 3 of 9"}})
    void = compare(*arms, claim("train_dpo/chosen_delta", "higher"), GATE)
    assert void.decision == "invalid"
    assert "stopped at step 3 of 9" in void.reasons[0]


def test_a_number_without_a_unit_cannot_be_accepted(tmp_path: Path) -> None:
    verdict = one_run(tmp_path, "filter_pairs/kept", "higher")
    assert verdict.decision == "unresolved"
    assert verdict.reasons == ["no unit of pairing: a difference without an interval cannot be accepted"]


# --- timings --------------------------------------------------------------------------------------------------------


Arms = tuple[list[Path], list[Path]]


@pytest.fixture(scope="session")
def templates(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, set[str]]:
    """A folder of arms that were written once, and their names."""
    return tmp_path_factory.mktemp("arms"), set()


@pytest.fixture
def timed_arms(tmp_path: Path, templates: tuple[Path, set[str]]) -> Callable[..., Arms]:
    """Alternating repetitions around 100, the candidate's shifted by `effect`: written once, then linked."""

    def make(effect: float = -10.0, metric: str = TTFT, pairs: int = 6, config: dict[str, Any] | None = None,
             **extra: Any) -> Arms:  # fmt: skip
        whole, known = templates
        name = hashlib.sha256(repr((effect, metric, pairs, config, extra)).encode()).hexdigest()[:16]
        for k in range(pairs) if name not in known else ():
            for side, arm in enumerate("bc"):
                value = 100 + NOISE[k % 6] + side * (effect + 0.5 * (-1) ** k)
                made = (config or settings(serve__max_num_seqs=32)) if side else settings()
                started = f"2026-01-02T03:{2 * k + side:02}:00.000+00:00"
                write_run(whole / name / f"{arm}{k}", config=made, repetition=k, started=started,
                          timings={metric: value}, **extra)  # fmt: skip
        known.add(name)
        shutil.copytree(whole / name, tmp_path / name, copy_function=os.link)
        base, cand = ([tmp_path / name / f"{arm}{k}" for k in range(pairs)] for arm in "bc")
        return base, cand

    return make


WRITTEN = "2026-01-01T00:00:00+00:00"


def judged(arms: tuple[list[Path], list[Path]], metric: str = TTFT, better: str = "lower", **options: Any) -> Verdict:
    return compare(*arms, claim(metric, better, **options), GATE, written_at=WRITTEN)


def test_a_timing_is_paired_by_repetition(timed_arms: Callable[..., Arms]) -> None:
    verdict = judged(timed_arms(), expected=-10.0)
    assert verdict.decision == "accept", verdict.reasons
    assert (verdict.n, verdict.unit_of_pairing, verdict.unit) == (6, "repetition", "ms")
    assert verdict.effect == pytest.approx(-10)
    assert verdict.p_value == 2 / 64
    assert verdict.spread == pytest.approx(1.2 / 100.6)
    assert verdict.floor == pytest.approx(100.017 / 0.95, abs=0.01)
    assert verdict.warnings == []


def test_five_repetitions_do_not_support_a_claim(timed_arms: Callable[..., Arms]) -> None:
    assert judged(timed_arms(pairs=5)).decision == "unresolved"


def test_the_order_in_which_runs_are_given_does_not_matter(timed_arms: Callable[..., Arms]) -> None:
    base, cand = timed_arms()
    there, mixed = judged((base, cand)), judged((base[::-1], cand[3:] + cand[:3]))
    assert (there.effect, there.ci_low, there.p_value) == (mixed.effect, mixed.ci_low, mixed.p_value)


def test_the_expected_effect_is_compared_with_the_interval(timed_arms: Callable[..., Arms]) -> None:
    verdict = judged(timed_arms(), expected=-30.0)
    assert verdict.decision == "accept"
    assert verdict.warnings == ["the effect expected, -30, lies outside the interval"]


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_of_a_timing_is_found_by_its_guard(timed_arms: Callable[..., Arms], fault: str) -> None:
    found = FAULTS[fault]
    metric = f"{CELL}/{found.metric}"
    arms = timed_arms(metric=metric)
    found.inject(*arms)
    verdict = judged(arms, metric, expected=-10.0)
    assert verdict.decision == found.decision, verdict.reasons
    assert any(found.reason in said for said in verdict.reasons), verdict.reasons
    assert verdict.valid == (found.decision != "invalid")
    assert verdict.recommendations
    failed = [entry for entry in verdict.guards if entry["state"] == "failed"]
    assert [entry["guard"] for entry in failed] == ([found.guard] if found.guard else [])
    for entry in failed:
        assert entry["reason"]
        assert entry["recommendation"]


def test_without_a_fault_all_guards_pass(timed_arms: Callable[..., Arms]) -> None:
    verdict = judged(timed_arms(), expected=-10.0)
    assert [(entry["guard"], entry["state"]) for entry in verdict.guards] == [(k, "passed") for k in range(1, 16)]
    assert all(entry["evidence"] for entry in verdict.guards)


def test_guards_that_do_not_apply_say_why(tmp_path: Path) -> None:
    verdict = one_run(tmp_path, "score/quiz/acc_bytes", "higher")
    states = {entry["guard"]: entry["state"] for entry in verdict.guards}
    assert [number for number, state in states.items() if state == "passed"] == [4, 11, 12, 14]
    assert {state for number, state in states.items() if number not in (4, 11, 12, 14)} == {"not applicable"}
    assert verdict.guards[8]["notes"] == ["score/quiz/acc_bytes: no timing: paired by item"]


def test_session_default_never_supports_a_timing(timed_arms: Callable[..., Arms]) -> None:
    verdict = judged(timed_arms(session="default"))
    assert verdict.decision == "invalid"
    assert "guard 11: timings of session `default`" in verdict.reasons[0]


@pytest.mark.parametrize(("percent", "needed"), [(90, 29), (99, 299)])
def test_a_percentile_needs_its_requests(timed_arms: Callable[..., Arms], percent: int, needed: int) -> None:
    metric = f"{CELL}/ttft_p{percent}_ms"
    for n, fits in ((needed, True), (needed - 1, False)):
        verdict = judged(timed_arms(metric=metric, calls=n), metric)
        assert (verdict.decision == "accept") == fits, verdict.reasons
        assert fits or f"a p{percent} needs {needed} requests" in verdict.reasons[0]


def test_what_follows_from_the_axis_is_said_and_allowed(timed_arms: Callable[..., Arms]) -> None:
    arms = timed_arms()
    every(arms[1], "serve/realised.json", lambda r: r["resolved"].update(kv_cache_tokens=500))
    verdict = judged(arms)
    assert verdict.decision == "accept"
    assert "follows from the axis: kv_cache_tokens 1000 -> 500" in verdict.warnings


def test_less_kv_memory_than_the_baseline_is_a_stray_tenant(timed_arms: Callable[..., Arms]) -> None:
    arms = timed_arms(config=settings(quantize__smooth__alpha=0.8))
    assert judged(arms).decision == "accept"
    every(arms[1], "serve/realised.json", lambda r: r["resolved"].update(kv_cache_tokens=800))
    verdict = judged(arms)
    assert verdict.decision == "invalid"
    assert "guard 10, stray tenants: the candidate's engine had room for 800 tokens" in verdict.reasons[0]


def test_prefix_caching_as_the_axis_explains_other_hit_rates(timed_arms: Callable[..., Arms]) -> None:
    config = settings(serve__prefix_caching=True)
    arms = timed_arms(config=config)
    every(arms[1], "sweep.metrics.json", lambda m: m.update({f"{CELL}/prefix_hit_rate": 0.3}))
    assert judged(arms).decision == "accept"


def test_stalls_void_a_claim_that_they_carry(timed_arms: Callable[..., Arms]) -> None:
    # 299 calls of 0.1 s, and of the baseline's three take 60 s: its p99, the 297th, is one of them.
    metric, median = f"{CELL}/e2e_p99_ms", f"{CELL}/e2e_p50_ms"
    arms = timed_arms(metric=metric, calls=299)
    assert judged(arms, metric).decision == "accept"
    stalled = timed_arms(metric=median, calls=299, slow={50: 60.0, 150: 60.0, 250: 60.0})[0]
    every(stalled, "sweep.metrics.json", lambda m: m.update({metric: 60000.0}))
    verdict = judged((stalled, arms[1]), metric, expected=-10.0)
    assert verdict.decision == "invalid"
    assert "guard 9, stalls: 18 calls of the baseline" in verdict.reasons[0]
    # The median of the same runs does not rest on three calls: said, and valid.
    every(arms[1], "sweep.metrics.json", lambda m: m.update({median: m[metric]}))
    calm = judged((stalled, arms[1]), median, expected=-10.0)
    assert calm.decision == "accept", calm.reasons
    assert any("guard 9, stalls: 18 calls" in warning for warning in calm.warnings)


def test_a_goodput_gain_that_costs_the_peak_is_rejected(timed_arms: Callable[..., Arms]) -> None:
    metric, peak = f"{CELL}/goodput_tok_s", "sweep/chat/capacity_tok_s"
    base, cand = (timed_arms(effect=10.0, metric=metric, peak=value)[side] for side, value in enumerate((200.0, 195.0)))
    accepted = judged((base, cand), metric, "higher")
    assert accepted.decision == "accept", accepted.reasons
    arms = base, timed_arms(effect=10.0, metric=metric, peak=180.0)[1]
    verdict = judged(arms, metric, "higher")
    assert (verdict.decision, verdict.reasons) == (
        "reject", ["guard 11: the candidate's peak, 180 tok/s, is under 95% of 200"])  # fmt: skip
    every(arms[1], "sweep.metrics.json", lambda m: m.update({peak: 200.0}))
    hidden = judged(arms, metric, "higher")
    assert hidden.reasons[0] == (
        f"c0: {peak} is recorded as 200, and its own table gives 180 (artifacts/sweep/requests.parquet)"
    )
    every(arms[1], "sweep.metrics.json", lambda m: m.pop(peak))
    assert "the candidate has none in 6 of 6 runs" in judged(arms, metric, "higher").reasons[0]
    assert judged(arms, peak, "higher").decision == "reject"


def test_a_sweep_that_is_older_than_a_guard_needs_none_of_it(timed_arms: Callable[..., Arms]) -> None:
    """Guards 8 and 15 came with files of their own, and the column of classes with several of them."""
    arms = timed_arms()
    for path in (path for arm in arms for path in arm):
        sweep = path / "artifacts" / "sweep"
        for name in ("draws", "server_histograms"):
            (sweep / f"{name}.parquet").unlink()
        edit(sweep / "guards.json", lambda held: held.__setitem__(slice(None), [
            row for row in held if row["guard"] not in (8, 15)]))  # fmt: skip
        requests = pl.read_parquet(sweep / "requests.parquet").drop("service_class", "user")
        (sweep / "requests.parquet").unlink()
        requests.write_parquet(sweep / "requests.parquet")
        rewrite_manifest(sweep)
    verdict = judged(arms)
    assert verdict.decision == "accept", verdict.reasons


def test_a_load_that_the_stage_waited_for_is_a_warning(timed_arms: Callable[..., Arms]) -> None:
    arms = timed_arms()
    every(arms[1][:1], "sweep.provenance.json", lambda p: p.update(load_before=[3.2, 1, 1]))
    every(arms[1][:1], "sweep.provenance.json", lambda p: p["lease"].update(waited_s=12.0))
    verdict = judged(arms)
    assert verdict.decision == "accept", verdict.reasons
    assert any("load average 3.2 on 2 CPUs as sweep began, just after it had waited" in w for w in verdict.warnings)


def test_engines_that_were_not_started_alike_are_a_warning(timed_arms: Callable[..., Arms]) -> None:
    arms = timed_arms()
    for arm in arms:
        every(arm, "sweep.provenance.json", lambda p: p["observed"].update(start="forked"))
    assert not any("started alike" in said for said in judged(arms).warnings)
    every(arms[1][:1], "sweep.provenance.json", lambda p: p["observed"].update(start="cold"))
    verdict = judged(arms)
    assert verdict.decision == "accept", verdict.reasons
    assert "sweep's engines were not started alike (cold, forked)" in verdict.warnings


def test_cold_start_is_a_timing_of_serve(timed_arms: Callable[..., Arms]) -> None:
    arms = timed_arms(metric="serve/cold_start_s")
    assert judged(arms, "serve/cold_start_s").decision == "accept"
    every(arms[1][:1], "serve.provenance.json", lambda p: p.pop("lease"))
    assert judged(arms, "serve/cold_start_s").decision == "invalid"


# --- conditions of numbers that the cache may give -------------------------------------------------------------------


def test_another_machine_is_a_warning_for_perplexity(tmp_path: Path) -> None:
    write_run(tmp_path / "b")
    write_run(tmp_path / "c", config=settings(quantize__smooth__alpha=0.8), nll=np.linspace(-0.03, -0.01, 12))
    edit(tmp_path / "c/artifacts/quantize.provenance.json", lambda p: p["hardware"].update(cpu="Another", boot_id="x"))
    edit(tmp_path / "c/artifacts/sweep/guards.json", lambda g: g[0].update(valid=False, reason="sent late"))
    verdict = compare([tmp_path / "b"], [tmp_path / "c"], claim("quantize/perplexity_after"), GATE, written_at=WRITTEN)
    assert verdict.decision == "accept", verdict.reasons
    assert any("guard 14, conditions: b and c differ in cpu" in said for said in verdict.warnings)
    assert any("guard 5, load fidelity: sent late; this metric does not rest" in said for said in verdict.warnings)


def test_a_claim_after_the_result_is_said(tmp_path: Path) -> None:
    verdict = one_run(tmp_path, "quantize/perplexity_after", written_at="2027-01-01T00:00:00+00:00")
    assert any("was measured before the claim was written (it was restored" in said for said in verdict.warnings)
    late = compare([tmp_path / "b"], [tmp_path / "c"], claim("quantize/perplexity_after"), GATE)
    assert "guard 12: the bar was given when judging, not before the run" in late.warnings


def test_another_text_is_invalid_with_its_file(tmp_path: Path) -> None:
    write_run(tmp_path / "b")
    write_run(tmp_path / "c", config=settings(quantize__smooth__alpha=0.8))
    folder = tmp_path / "c/artifacts/prepare_data"
    (folder / "heldout.parquet").write_text("another text")
    rewrite_manifest(folder)
    verdict = compare([tmp_path / "b"], [tmp_path / "c"], claim("quantize/perplexity_after"), GATE)
    assert verdict.decision == "invalid"
    assert verdict.reasons == [
        "the inputs differ, and the axis does not explain it: artifacts/prepare_data/heldout.parquet"
    ]


def test_another_tokenizer_leaves_no_pairs(tmp_path: Path) -> None:
    """Sequences of the same length, of other tokens: their NLL is of another text."""
    for arm, model in (("b", "/m"), ("c", "/other")):
        write_run(tmp_path / arm, config=settings(model__path=model))
        tokens = pl.DataFrame({"sequence": [0, 0], "position": [0, 1], "token_id": [5, len(model)]})
        tokens.write_parquet(tmp_path / arm / "artifacts/calibrate/heldout_tokens.parquet")
    verdict = compare([tmp_path / "b"], [tmp_path / "c"], claim("quantize/perplexity_after"), GATE)
    assert verdict.decision == "unresolved"
    assert verdict.reasons == ["the arms were not measured on the same tokens of the held-out text: no unit is in both"]


def test_an_axis_that_changes_the_items_leaves_no_pairs(tmp_path: Path) -> None:
    write_run(tmp_path / "b")
    write_run(tmp_path / "c", config=settings(data__items__per_task=30), right=[True] * 30)
    verdict = compare([tmp_path / "b"], [tmp_path / "c"], claim("score/quiz/acc_bytes", "higher"), GATE)
    assert (verdict.decision, verdict.reasons) == (
        "unresolved", ["the arms were not measured on the same items of quiz: no unit is in both"])  # fmt: skip


def test_another_training_than_the_axis_is_another_input(tmp_path: Path) -> None:
    write_run(tmp_path / "b", config=settings(train={"kind": "dpo"}), logp=1.0)
    write_run(tmp_path / "c", config=settings(train={"kind": "dpo"}, quantize__smooth__alpha=0.8), logp=2.0)
    verdict = compare([tmp_path / "b"], [tmp_path / "c"], claim("quantize/perplexity_after"), GATE)
    assert verdict.decision == "invalid"
    assert "artifacts/train_dpo/heldout.parquet" in verdict.reasons[0]


def test_metrics_that_do_not_follow_from_their_table_are_invalid(tmp_path: Path) -> None:
    write_run(tmp_path / "b")
    write_run(tmp_path / "c", config=settings(quantize__smooth__alpha=0.8))
    edit(tmp_path / "c/artifacts/quantize.metrics.json", lambda m: m.update({"quantize/perplexity_after": 3.0}))
    verdict = compare([tmp_path / "b"], [tmp_path / "c"], claim("quantize/perplexity_after"), GATE)
    assert verdict.decision == "invalid"
    assert "c: its metrics say 3 and its table gives" in verdict.reasons[0]


def test_settings_that_moved_on_after_a_stage_are_invalid(tmp_path: Path) -> None:
    write_run(tmp_path / "b")
    write_run(tmp_path / "c")
    edit(tmp_path / "c/params.yaml", lambda p: p["quantize"]["smooth"].update(alpha=0.8))
    verdict = compare([tmp_path / "b"], [tmp_path / "c"], claim("quantize/perplexity_after"), GATE)
    assert verdict.reasons == ["c: quantize ran with other settings than its params.yaml"]
    # A folder of artifacts has no such file: there the manifests say what ran, and nothing differs.
    folders = [tmp_path / arm / "artifacts" for arm in "bc"]
    there = compare(folders[:1], folders[1:], claim("quantize/perplexity_after"), GATE)
    assert (there.decision, there.changed_axis) == ("tie", "")
    assert "the settings of both arms are the same: only noise can differ" in there.warnings


# --- one axis -------------------------------------------------------------------------------------------------------


def test_two_axes_are_invalid_unless_declared_a_combination(tmp_path: Path) -> None:
    write_run(tmp_path / "b")
    write_run(tmp_path / "c", config=settings(quantize__smooth__alpha=0.8, serve__dtype="float32"))
    metric = claim("quantize/perplexity_after")
    verdict = compare([tmp_path / "b"], [tmp_path / "c"], metric, GATE)
    assert verdict.decision == "invalid"
    assert "2 axes differ: quantize.smooth.alpha (0.5 -> 0.8), serve.dtype (bfloat16 -> float32)" in verdict.reasons[0]
    undeclared = compare([tmp_path / "b"], [tmp_path / "c"], metric, GATE, axes=[ALPHA])
    assert undeclared.reasons == ["guard 4, one axis: also differs: serve.dtype (bfloat16 -> float32)"]
    dtype = Axis("serve.dtype", "key", "bfloat16", "float32", {"serve.dtype": ["bfloat16", "float32"]})
    both = compare([tmp_path / "b"], [tmp_path / "c"], metric, GATE, axes=[ALPHA, dtype], combination=True)
    assert both.valid
    assert both.changed_axis == "quantize.smooth.alpha + serve.dtype"


def test_a_declared_value_that_did_not_run_is_invalid(tmp_path: Path) -> None:
    write_run(tmp_path / "b")
    write_run(tmp_path / "c", config=settings(quantize__smooth__alpha=0.7))
    verdict = compare([tmp_path / "b"], [tmp_path / "c"], claim("quantize/perplexity_after"), GATE, axes=[ALPHA])
    assert verdict.reasons == [
        "guard 4, one axis: quantize.smooth.alpha was declared 0.5 -> 0.8 and is 0.5 -> 0.7"
    ]  # fmt: skip


def test_an_axis_that_does_not_reach_the_metric_is_said(tmp_path: Path) -> None:
    write_run(tmp_path / "b")
    write_run(tmp_path / "c", config=settings(serve__dtype="float32"))
    verdict = compare([tmp_path / "b"], [tmp_path / "c"], claim("quantize/perplexity_after"), GATE)
    assert verdict.decision == "tie"
    assert any("the axis does not reach quantize" in said for said in verdict.warnings)


def test_refuses_what_is_not_a_run(tmp_path: Path) -> None:
    write_run(tmp_path / "b")
    (tmp_path / "empty").mkdir()
    for path, said in ((tmp_path / "none", "not a folder"), (tmp_path / "empty", "holds no artifacts")):
        with pytest.raises(UserError, match=said):
            compare([tmp_path / "b"], [path], claim("quantize/perplexity_after"), GATE)
    unknown = compare([tmp_path / "b"], [tmp_path / "b"], claim("nothing/at_all"), GATE)
    assert (unknown.decision, unknown.reasons) == ("unresolved", ["no stage `nothing` measures anything"])


def test_every_stage_that_measures_is_known_by_the_edges_of_the_dag(root: Path) -> None:
    """From `dvc.yaml`, with what a run of everything (a draft, two engines, pairs of its own) puts into `paths`."""
    stages = YAML(typ="safe").load(root / "dvc.yaml")["stages"]
    edges: dict[str, set[str]] = {name: set() for name in stages}
    for pairs in ("all", "on_policy"):
        config = compose(root / "conf", ["draft=layers", f"pairs={pairs}", "quantize=w8a8_int8_dynamic"])
        paths = derived_paths(
            config.model_dump()
            | {"split": {"kind": "pull"}, "diverge": {"kind": "greedy"}, "extract": {"kind": "documents"}}
        )
        for name, stage in stages.items():
            files = [re.sub(r"\$\{paths\.(\w+)\}", lambda found: paths[found[1]], path) for path in stage["deps"]]  # noqa: B023
            edges[name] |= {path.split("/")[1].split(".")[0] for path in files if path.startswith("artifacts/")}

    def above(name: str) -> set[str]:
        return edges[name].union(*(above(other) for other in edges[name]))

    assert set(UPSTREAM) == set(stages) - {"report"}
    # A sweep waits for the stage `serve`, which gives it nothing; a policy may come from pairs that were sampled.
    assert {name: above(name) - {"serve"} for name in UPSTREAM} == {name: set(ups) for name, ups in UPSTREAM.items()}


def test_a_change_that_the_engine_does_not_tell_is_not_shown(timed_arms: Callable[..., Arms]) -> None:
    arms = timed_arms(config=settings(serve__engine_args={"swap_space": 2}))
    every(arms[1], "serve/realised.json", lambda r: r.update(unverified=["serve.engine_args.block_size"]))
    assert not any("does not tell" in reason for reason in judged(arms).reasons)
    every(arms[1], "serve/realised.json", lambda r: r.update(unverified=["serve.engine_args.swap_space"]))
    verdict = judged(arms)
    assert verdict.decision == "unresolved"
    assert any("guard 3, realised config: the engine does not tell serve.engine_args.swap_space" in reason
               for reason in verdict.reasons)  # fmt: skip


SPLIT = "split/first_token_ms"


def two_engines(arms: Arms, **decode: Any) -> Arms:
    """Each run with what the engines of the stage `split` said of themselves; the candidate's also `decode`."""
    for side, arm in enumerate(arms):
        for path in arm:
            resolved = {"dtype": "bfloat16", "engine_args.kv_transfer_config": {"kv_connector": f"connector {side}"}}
            changed = decode if side else {}
            found = {"asked": {"dtype": "bfloat16"}, "resolved": resolved | changed, "differences": []}
            write_json(path / "artifacts/split/realised.json", {"decode": found})
            write_json(path / "artifacts/split/summary.json", {"invalid": [], "warnings": []})
            rewrite_manifest(path / "artifacts/split")
    return arms


def test_two_engines_are_judged_by_what_they_themselves_say(timed_arms: Callable[..., Arms]) -> None:
    def arms() -> Arms:
        return timed_arms(metric=SPLIT, config=settings(split__kind="push"))

    missing = judged(arms(), SPLIT)
    assert "artifacts/split/realised.json of b0 and c0 is missing" in missing.reasons[0]


@pytest.mark.parametrize(("changed", "decision"), [({}, "accept"), ({"dtype": "float32"}, "invalid")])
def test_the_connector_is_the_axis_of_a_split_and_nothing_else_is(
    timed_arms: Callable[..., Arms], changed: dict[str, Any], decision: str
) -> None:
    arms = two_engines(timed_arms(metric=SPLIT, config=settings(split__kind="push")), **changed)
    for path in (path for arm in arms for path in arm):
        # They start before the stage `serve` would, and need none of it.
        (path / "artifacts/serve/realised.json").unlink()
    verdict = judged(arms, SPLIT)
    assert verdict.decision == decision, verdict.reasons
