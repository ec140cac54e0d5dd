"""A multirun's verdicts: several claims together, a combination against its best part, jobs that did not end."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from oneaxis.judge.compare import Verdict
from oneaxis.judge.multirun import exit_code, judge_multirun
from oneaxis.judge.statistics import holm
from oneaxis.judge.text import WIDTH, verdict_text
from oneaxis.multirun.record import Axis
from tests.judge.records import ALPHA, CELL, as_plain, claim, edit, settings, write_multirun

PERPLEXITY = "quantize/perplexity_after"
WOBBLE = 0.01 * (-1.0) ** np.arange(12)


def alpha(after: float) -> Axis:
    return Axis("quantize.smooth.alpha", "key", 0.5, after, {"quantize.smooth.alpha": [0.5, after]})


DTYPE = Axis("serve.dtype", "key", "bfloat16", "float32", {"serve.dtype": ["bfloat16", "float32"]})


def at(after: float, shift: float, wobble: float = 1.0) -> list[dict]:
    """One run at an alpha whose perplexity is moved."""
    return [{"config": settings(quantize__smooth__alpha=after), "nll": shift + wobble * WOBBLE}]


def alphas(tmp_path: Path, claims: list[dict]) -> list[Verdict]:
    """alpha 0.6 does nothing, 0.7 helps, 0.8 harms."""
    runs = {"alpha=0.5": [{}], "alpha=0.6": at(0.6, 0.0), "alpha=0.7": at(0.7, -0.05), "alpha=0.8": at(0.8, 0.05)}
    axes = {f"alpha={a}": [alpha(a)] for a in (0.6, 0.7, 0.8)}
    return judge_multirun(write_multirun(tmp_path / "m1", runs, claims, axes=axes))


def test_every_candidate_is_judged_in_every_claim_in_the_plans_order(tmp_path: Path) -> None:
    claims = [claim(PERPLEXITY, "lower", 0.1, -0.5), claim("score/quiz/acc_bytes", "higher")]
    verdicts = alphas(tmp_path, claims)
    assert [(v.point, v.metric, v.decision) for v in verdicts] == [
        ("alpha=0.6", PERPLEXITY, "tie"), ("alpha=0.6", "score/quiz/acc_bytes", "tie"),
        ("alpha=0.7", PERPLEXITY, "accept"), ("alpha=0.7", "score/quiz/acc_bytes", "tie"),
        ("alpha=0.8", PERPLEXITY, "reject"), ("alpha=0.8", "score/quiz/acc_bytes", "tie"),
    ]  # fmt: skip
    first = verdicts[2]
    assert (first.question, first.baseline, first.claim, first.bar, first.expected) == (
        "Does it help?", "alpha=0.5", True, 0.1, -0.5)  # fmt: skip
    # Six claims were tested: Holm multiplies the smallest p by six.
    assert first.num_claims == 6
    p_values = [v.p_value for v in verdicts if v.p_value is not None]
    assert [v.p_adjusted for v in verdicts] == pytest.approx(holm(p_values))
    assert max(v.p_adjusted / v.p_value for v in verdicts if v.p_adjusted and v.p_value) == pytest.approx(6)
    # Not every claim of one candidate was accepted.
    assert exit_code(verdicts) == 1


def test_what_is_written_is_what_is_returned(tmp_path: Path) -> None:
    verdicts = alphas(tmp_path, [claim(PERPLEXITY, "lower")])
    written = json.loads((tmp_path / "m1" / "verdicts.json").read_text())
    assert written == json.loads(json.dumps([verdict.as_json() for verdict in verdicts]))
    assert written[0]["axes"] == [as_plain(alpha(0.6))]
    assert {
        "point", "metric", "changed_axis", "axes", "baseline", "candidate", "valid", "decision", "n", "unit_of_pairing",
        "baseline_value", "candidate_value", "effect", "ci_low", "ci_high", "relative_effect", "test", "p_value",
        "floor", "spread", "bar", "expected", "better", "reasons", "recommendations", "best_single", "claim",
    } <= set(written[0])  # fmt: skip
    assert exit_code(verdicts) == 0  # alpha=0.7 is accepted in all that was claimed.


def test_many_claims_at_once_ask_for_more(tmp_path: Path) -> None:
    """p = 0.03 alone: accepted when it is the only claim, and not when it is one of three."""
    weak = at(0.7, -0.05, wobble=7.3)
    single = judge_multirun(write_multirun(
        tmp_path / "one", {"b": [{}], "c": weak}, [claim(PERPLEXITY, "lower")], axes={"c": [alpha(0.7)]}
    ))  # fmt: skip
    assert single[0].p_value == pytest.approx(0.03, abs=0.02)
    assert (single[0].decision, single[0].p_adjusted) == ("accept", None)
    runs = {"b": [{}], "c": weak, "d": at(0.8, 0.0), "e": at(0.9, 0.001)}
    axes = {"c": [alpha(0.7)], "d": [alpha(0.8)], "e": [alpha(0.9)]}
    three = judge_multirun(write_multirun(tmp_path / "three", runs, [claim(PERPLEXITY, "lower")], axes=axes))
    assert three[0].decision == "unresolved"
    assert "not among 3 claims" in three[0].reasons[0]


def test_without_claims_the_headline_is_described(tmp_path: Path) -> None:
    verdicts = alphas(tmp_path, [])
    assert {v.metric for v in verdicts} == {PERPLEXITY, "score/quiz/acc_bytes"}
    assert not any(v.claim or v.recommendations for v in verdicts)
    assert [v.decision for v in verdicts if v.metric == PERPLEXITY] == ["tie", "accept", "reject"]
    assert exit_code(verdicts) == 0
    said = verdict_text(verdicts, colour=False)
    assert "BETTER      quantize/perplexity_after (lower is better), no claim" in said
    assert "WORSE" in said
    assert "ACCEPT" not in said


def test_metrics_that_the_axis_does_not_reach_are_not_described(tmp_path: Path) -> None:
    run = [{"config": settings(serve__dtype="float32")}]
    verdicts = judge_multirun(
        write_multirun(tmp_path / "m", {"b": [{}], "c": run}, [], axes={"c": [DTYPE]}, session="default")
    )
    # score reads the section serve; perplexity is measured before any engine.
    assert [v.metric for v in verdicts] == ["score/quiz/acc_bytes"]


def timed(shift: float, config: dict, period: int = 1) -> list[dict]:
    """Six repetitions around 100 + shift, with a wobble of their own that changes its sign every `period` of them."""
    noise = [0.0, 0.6, -0.6, 0.3, -0.3, 0.1]
    values = [100 + shift + noise[k] + (0.4 if shift else 0) * (-1) ** (k // period) for k in range(6)]
    return [{"config": config, "timings": {f"{CELL}/ttft_p50_ms": value}} for value in values]


def combination(tmp_path: Path, both: float) -> list[Verdict]:
    """alpha alone gains 4 ms, float32 alone 8, together `both`."""
    runs = {
        "base": timed(0, settings()),
        "alpha": timed(-4, settings(quantize__smooth__alpha=0.8)),
        "dtype": timed(-8, settings(serve__dtype="float32")),
        "both": timed(both, settings(quantize__smooth__alpha=0.8, serve__dtype="float32"), period=2),
    }
    folder = write_multirun(
        tmp_path / "m", runs, [claim(f"{CELL}/ttft_p50_ms", "lower", 0.0, -5.0)],
        axes={"alpha": [ALPHA], "dtype": [DTYPE], "both": [ALPHA, DTYPE]}, parts={"both": ["alpha", "dtype"]},
    )  # fmt: skip
    for point in ("dtype", "both"):
        for realised in (folder / "points" / point).glob("r*/artifacts/serve/realised.json"):
            edit(realised, lambda document: document["resolved"].update(dtype="float32"))
    return judge_multirun(folder)


def test_a_combination_is_accepted_when_it_beats_its_best_part(tmp_path: Path) -> None:
    verdict = combination(tmp_path, -15)[-1]
    assert verdict.decision == "accept", verdict.reasons
    assert verdict.best_single == "dtype"
    assert verdict.against_best
    assert verdict.against_best["effect"] == pytest.approx(-7 + 0.4 * 2 / 6)
    assert verdict.changed_axis == "quantize.smooth.alpha + serve.dtype"


def test_a_combination_that_ties_with_its_best_part_is_a_tie(tmp_path: Path) -> None:
    verdicts = combination(tmp_path, -8.1)
    assert [v.decision for v in verdicts] == ["accept", "accept", "tie"]
    assert verdicts[-1].reasons[0] == "it does not beat the best of its parts, dtype"
    assert verdicts[-1].recommendations == ["take dtype alone"]


def test_a_combination_worse_than_its_best_part_is_rejected(tmp_path: Path) -> None:
    verdict = combination(tmp_path, -5)[-1]
    assert (verdict.decision, verdict.best_single) == ("reject", "dtype")
    assert "best part" in verdict_text([verdict], colour=False)


@pytest.mark.parametrize(
    ("control", "asked", "decision", "first"),
    [
        (-0.01, {}, "accept", "the 95% interval lies beyond zero"),
        (-0.05, {}, "tie", "it does not beat its control, random"),
        (-0.09, {}, "reject", "it does not beat its control, random"),
        # What may be lost against the baseline may be lost against the control, and no more.
        (-0.20, {"margin": 0.5}, "reject", "that it loses no more than the margin against its control, random"),
        (-0.05, {"margin": 0.5}, "accept", "a loss beyond the margin of"),
    ],
)
def test_a_change_has_to_beat_its_control_too(
    tmp_path: Path, control: float, asked: dict, decision: str, first: str
) -> None:
    """NLL falls by 0.05 with the change, and by `control` with another value of the same axis."""
    runs = {"base": [{}], "random": at(0.6, control), "ches": at(0.7, -0.05, wobble=-1.0)}
    folder = write_multirun(
        tmp_path / "m", runs, [claim(PERPLEXITY, "lower", **asked)],
        axes={"random": [alpha(0.6)], "ches": [alpha(0.7)]}, controls={"ches": "random"},
    )  # fmt: skip
    verdicts = judge_multirun(folder)
    verdict = verdicts[-1]
    assert verdict.valid, verdict.reasons
    assert verdict.decision == decision, verdict.reasons
    assert verdict.reasons[0].startswith(first), verdict.reasons
    # The control is accepted itself, which is no candidate's.
    assert verdicts[0].recommendations == ["it is the control of ches, and there to be beaten"]
    assert exit_code(verdicts) == (0 if decision == "accept" else 1)
    assert (verdict.best_single, verdict.against_best) == (None, None)
    assert verdict.baseline_value
    assert verdict.against_control
    # The wobble's mean is zero: each perplexity is that of the baseline times exp of the shift.
    expected = verdict.baseline_value * (np.exp(-0.05) - np.exp(control))
    assert verdict.against_control["effect"] == pytest.approx(expected, rel=1e-6, abs=1e-9)
    assert "  control   random (" in verdict_text([verdict], colour=False)


def test_a_job_that_did_not_end_is_invalid(tmp_path: Path) -> None:
    runs = {"b": timed(0, settings()), "c": timed(-9, settings(quantize__smooth__alpha=0.8))}
    folder = write_multirun(tmp_path / "m", runs, [claim(f"{CELL}/ttft_p50_ms", "lower")], axes={"c": [ALPHA]})
    assert judge_multirun(folder)[0].decision == "accept"
    (folder / "points/c/r4/status.json").unlink()
    verdict = judge_multirun(folder)[0]
    assert (verdict.decision, verdict.valid) == ("invalid", False)
    assert verdict.reasons == ["c r4 did not end"]
    assert exit_code([verdict]) == 1


def test_a_job_that_never_started_is_invalid(tmp_path: Path) -> None:
    folder = write_multirun(tmp_path / "m", {"b": [{}], "c": at(0.8, -0.05)}, [claim(PERPLEXITY, "lower")],
                            axes={"c": [ALPHA]})  # fmt: skip
    shutil.rmtree(folder / "points/c/r0")
    assert judge_multirun(folder)[0].reasons[0] == "c r0 did not end"
    # Without a claim the headline is still looked for, and its absence is said.
    edit(folder / "plan.json", lambda plan: plan["experiment"].pop("claims"))
    assert exit_code(judge_multirun(folder)) == 1


def test_a_metric_that_nobody_has_is_unresolved(tmp_path: Path) -> None:
    verdict = judge_multirun(write_multirun(
        tmp_path / "m", {"b": [{}], "c": at(0.8, 0.0)}, [claim("score/quiz/nothing", "higher")], axes={"c": [ALPHA]}
    ))[0]  # fmt: skip
    assert verdict.decision == "unresolved"
    assert verdict.effect is None


def test_the_block_is_readable(tmp_path: Path) -> None:
    verdicts = alphas(tmp_path, [claim(PERPLEXITY, "lower", 0.1, -0.5), claim("score/quiz/acc_bytes", "higher")])
    said = verdict_text(verdicts, colour=False)
    assert max(map(len, said.splitlines())) <= WIDTH
    assert said.count("Does it help?") == 3  # Once a candidate.
    for part in (
        "candidate alpha=0.7, against alpha=0.5", "axis      quantize.smooth.alpha: 0.5 -> 0.7",
        "ACCEPT      quantize/perplexity_after (lower is better)", "n 12 held-out sequences; paired t on mean NLL, p ",
        "(Holm over 6 claims: ", "bar 0.100, expected −0.500, floor", "take the candidate",
        "McNemar, exact (0 gained, 0 lost)",
    ):  # fmt: skip
        assert part in said, part
    assert "\033" not in said
    assert "\033[32mACCEPT" in verdict_text(verdicts, colour=True)
