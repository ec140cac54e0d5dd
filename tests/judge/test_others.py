"""Verdicts of other tools' results. Files of `vllm bench serve` are written here by hand, with known effects; nothing
in them was measured. What the tools really write is held by `test_foreign.py`."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from oneaxis.cli import main
from oneaxis.judge.statistics import bootstrap_difference, two_samples

RECORDED = Path(__file__).parent / "foreign"
NUM = 40


def vllm(
    folder: Path, name: str, *, minute: int, seed: int = 0, gap_s: float = 0.02, ttft_s: float = 0.06, tokens: int = 13,
    per_chunk: int = 1, prompt: int = 40, fail: int = 0, stall_s: float = 0.0, **keys: Any,
) -> Path:  # fmt: skip
    """A file of `vllm bench serve` (0.32) of 40 requests at 10/s: 1% noise, the last `fail` failed, one late by
    `stall_s`; `keys` replace any."""
    draw = np.random.default_rng([minute, seed, int(1e6 * gap_s)])
    lengths = np.random.default_rng(seed).integers(prompt // 2, 2 * prompt, size=NUM)
    chunks = -(-tokens // per_chunk)
    ttfts = ttft_s * draw.normal(1, 0.01, size=NUM)
    gaps = gap_s * per_chunk * draw.normal(1, 0.01, size=(NUM, chunks - 1))
    gaps[NUM // 2, chunks // 2] += stall_s
    ok = np.arange(NUM) < NUM - fail
    starts = 100.0 + 0.1 * np.arange(NUM)
    document = {
        "date": f"20260102-03{minute:02d}00", "endpoint_type": "openai", "backend": "openai", "label": None,
        "model_id": "m", "tokenizer_id": "m", "num_prompts": NUM, "request_rate": 10.0, "burstiness": 1.0,
        "max_concurrency": None, "duration": 4.5, "completed": int(ok.sum()), "failed": fail,
        "input_lens": lengths.tolist(), "output_lens": np.where(ok, tokens, 0).tolist(),
        "ttfts": np.where(ok, ttfts, 0).tolist(),
        "itls": [row.tolist() if good else [] for row, good in zip(gaps, ok, strict=True)],
        "latencies": np.where(ok, ttfts + gaps.sum(axis=1), 0).tolist(), "start_times": starts.tolist(),
        "queue_times": [1e-4] * NUM, "errors": ["" if good else "refused" for good in ok],
        "mean_ttft_ms": 1.0, "p99_itl_ms": 1.0, **keys,
    }  # fmt: skip
    path = folder / name
    path.write_text(json.dumps(document))
    return path


def sides(
    folder: Path,
    candidate: dict[str, Any],
    *,
    runs: int = 6,
    order: Callable[[int, int], int] | None = None,
    **both: Any,
) -> list[str]:
    """Six files a side, the candidate's changed, in alternating order (or another: arm and repetition -> minute)."""
    order = order or (lambda arm, k: 2 * k + arm)
    made: list[str] = []
    for arm, own in enumerate((both, both | candidate)):
        files = [vllm(folder, f"{'ab'[arm]}{k}.json", minute=order(arm, k), seed=k, **own) for k in range(runs)]
        made.append(",".join(map(str, files)))
    return made


def judged(capsys: pytest.CaptureFixture[str], words: list[str], metric: str, *more: str, code: int) -> dict[str, Any]:
    """The one verdict of a metric."""
    assert main(["judge", *words, "--metric", metric, "--json", *more]) == code
    (verdict,) = json.loads(capsys.readouterr().out)
    return dict(verdict)


def states(verdict: dict[str, Any]) -> dict[int, str]:
    return {entry["guard"]: entry["state"] for entry in verdict["guards"]}


def test_six_files_a_side_decide_and_say_what_is_unproven(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """20 ms against 17 ms a token, 1% noise over 480 gaps: -3 ms, known to .01."""
    words = sides(tmp_path, {"gap_s": 0.017, "draft": "ngram"}, draft="none")
    found = judged(capsys, words, "itl_mean_ms", "--bar", "1", code=0)
    assert (found["decision"], found["n"], found["unit_of_pairing"]) == ("accept", 6, "repetition")
    assert found["effect"] == pytest.approx(-3, abs=0.03)
    assert found["ci_low"] < found["effect"] < found["ci_high"] < -2.9
    assert found["changed_axis"] == "declared.draft"
    assert [said.partition(":")[0] for said in found["unproven"]] == [
        "guard 1, unique prompts", "guard 2, token truth", "guard 3, realised config", "guard 4, one axis",
        "guard 5, load fidelity", "guard 7, output limit honoured", "guard 10, exclusive device", "guard 13, warm-up",
        "guard 14, same conditions", "guard 15, server truth",
    ]  # fmt: skip
    assert states(found) == {1: "unproven", 2: "unproven", 3: "unproven", 4: "unproven", 5: "unproven", 6: "passed",
                             7: "unproven", 8: "not applicable", 9: "passed", 10: "unproven", 11: "passed",
                             12: "passed", 13: "unproven", 14: "unproven", 15: "unproven"}  # fmt: skip
    assert found["recommendations"][-1].startswith("see to it that what is unproven holds")
    worse = judged(capsys, words[::-1], "load/r10/itl_mean_ms", code=1)
    assert worse["decision"] == "reject"


def test_more_files_on_one_side_are_two_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = sides(tmp_path, {"gap_s": 0.017}, runs=7)
    words[1] = words[1].rpartition(",")[0]
    found = judged(capsys, words, "tpot_p50_ms", code=0)
    assert (found["decision"], found["n"]) == ("accept", 6)
    assert found["test"].startswith("permutation of two samples, and Welch's t")


def test_one_file_a_side_gives_effect_and_interval_and_decides_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = sides(tmp_path, {"gap_s": 0.017}, runs=1)
    found = judged(capsys, words, "tpot_p50_ms", code=1)
    assert (found["decision"], found["n"], found["unit_of_pairing"]) == ("unresolved", 40, "request")
    assert found["ci_low"] < -3 < found["ci_high"] < -2.5
    assert "paired by prompt" in found["test"]
    assert "a claim about a timing needs 6 runs a side" in found["reasons"][0]
    speed = judged(capsys, words, "output_tok_s", code=1)
    assert speed["effect"] is None
    assert "with no interval" in speed["reasons"][0]
    assert main(["judge", *words]) == 0
    out = capsys.readouterr().out
    assert out.count("UNRESOLVED") == 5
    assert out.count("guard 3, realised config: what the engine ran") == 1


# --- faults: each is caught by the guard it belongs to ---------------------------------------------------------------


GOODPUT = ("--goodput", "ttft:100", "tpot:25")


def test_goodput_is_what_kept_the_bounds_in_both_arms(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The candidate's gaps are 30 ms, over the bound: nothing of it is good, whatever its throughput."""
    words = sides(tmp_path, {"gap_s": 0.03}, fail=2)
    verdict = judged(capsys, words, "attainment", *GOODPUT, code=1)
    assert (verdict["baseline_value"], verdict["candidate_value"]) == (pytest.approx(0.95), 0.0)
    assert verdict["decision"] == "reject"
    assert any("good is what kept ttft 100 ms, tpot 25 ms" in said for said in verdict["warnings"])
    verdict = judged(capsys, words, "goodput_tok_s", *GOODPUT, code=1)
    assert verdict["candidate_value"] == 0.0 < verdict["baseline_value"]


@pytest.mark.parametrize("metric", ["attainment", "goodput_tok_s"])
@pytest.mark.parametrize("runs", [6, 7])
def test_what_the_baseline_does_not_reach_either_is_no_pass(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], metric: str, runs: int
) -> None:
    """Gaps of 20 ms against a bound of 1 ms: 0 in both arms, in pairs and as two samples."""
    words = sides(tmp_path, {}, runs=runs)
    words[1] = ",".join(words[1].split(",")[:6])
    verdict = judged(capsys, words, metric, "--goodput", "tpot:1", "--margin", "0.05", code=1)
    assert (verdict["baseline_value"], verdict["candidate_value"], verdict["decision"]) == (0.0, 0.0, "unresolved")
    assert verdict["reasons"][0].startswith("nothing to lose: the baseline is at 0")


def test_attainment_of_one_file_a_side_has_an_interval(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = sides(tmp_path, {"gap_s": 0.03}, runs=1, fail=2)
    verdict = judged(capsys, words, "attainment", *GOODPUT, code=1)
    assert verdict["decision"] == "unresolved"
    assert verdict["effect"] == pytest.approx(-0.95)
    assert verdict["ci_low"] <= verdict["effect"] <= verdict["ci_high"] < -0.8


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--goodput", "ttft=5"], "--goodput ttft=5: allowed: ttft, tpot and e2el"),
        (["--goodput", "itl:5"], "--goodput itl:5"),
        (["--goodput", "ttft:0"], "--goodput ttft:0"),
        (["--goodput", "ttft:nan"], "--goodput ttft:nan"),
        (["--goodput", "ttft:5", "ttft:6"], "--goodput ttft:6"),
        (["--metric", "attainment"], "--metric=attainment: needs bounds (--goodput ttft:500 tpot:50)"),
        (
            ["--metric", "attainment", *GOODPUT, "--margin", "5"],
            "--margin=5: load/r10/attainment is a share, between 0 and 1; allowed: 0 or more, and less than 1",
        ),
    ],
)
def test_bounds_that_cannot_be_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    assert main(["judge", *sides(tmp_path, {}, runs=1), *words]) == 2
    assert says in capsys.readouterr().err


def drifting(arm: int, k: int) -> int:
    return 10 * arm + k


@pytest.mark.parametrize(
    ("candidate", "both", "decision", "said"),
    [
        ({}, {"order": drifting}, "unresolved", "guard 11: 6 runs of one arm came without one of the other"),
        ({"gap_s": 0.020}, {}, "tie", "no effect shown"),
        ({"request_rate": 30.0, "start_times": (100 + np.arange(NUM) / 30).tolist()}, {}, None, "no load is in both"),
        ({"start_times": (100 + np.arange(NUM) / 90).tolist()}, {}, "invalid", "asked for 10 requests/s and had 90"),
        ({"max_concurrency": 4}, {}, "invalid", "guard 4, one axis: the load differs"),
        (
            {"draft": "ngram", "dtype": "fp8"},
            {"draft": "none", "dtype": "bf16"},
            "invalid",
            "guard 4, one axis: 2 axes",
        ),
        ({"prompt": 60}, {}, "invalid", "guard 2, token truth: the prompts have"),
        ({"stall_s": 9.0}, {}, "invalid", "guard 9, stalls: 6 calls of the candidate took far longer"),
        ({"fail": 21}, {}, "reject", "tpot_p50_ms is not reached in 0 of 6 runs of the baseline and 6 of 6"),
    ],
    ids=["drift", "nothing", "another_load", "rate_not_kept", "held_back", "two_axes", "prompts", "stall", "failures"],
)
def test_fault_in_a_timing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], candidate: dict[str, Any], both: dict[str, Any],
    decision: str | None, said: str,
) -> None:  # fmt: skip
    words = sides(tmp_path, {"gap_s": 0.0199} | candidate, **both)
    metric = "e2e_mean_ms" if "stall_s" in candidate else "tpot_p50_ms"
    if decision is None:
        assert main(["judge", *words, "--metric", metric]) == 2
        assert said in capsys.readouterr().err
        return
    found = judged(capsys, words, metric, code=1)
    assert found["decision"] == decision
    assert any(said in reason for reason in found["reasons"])


def test_fault_prompts_of_one_seed_are_repeated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [",".join(str(vllm(tmp_path, f"{arm}{k}.json", minute=2 * k + (arm == "b"), gap_s=gap)) for k in range(6))
             for arm, gap in (("a", 0.02), ("b", 0.017))]  # fmt: skip
    found = judged(capsys, words, "tpot_p50_ms", code=1)
    assert found["decision"] == "unresolved"
    assert "a0.json and a1.json sent the same prompts (by their lengths, in order)" in found["reasons"][0]


def test_fault_chunks_taken_for_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both arms make a token every 20 ms; the candidate sends them by threes. One sample a chunk says three times
    slower; per token nothing has changed, but for the first chunk (12 tokens: 3 of 4 chunks, exact)."""
    words = sides(tmp_path, {"per_chunk": 3}, tokens=12)
    found = judged(capsys, words, "itl_mean_ms", code=1)
    assert found["decision"] == "tie"
    assert abs(found["effect"]) < 0.05
    percentile = judged(capsys, words, "itl_p90_ms", code=1)
    assert percentile["decision"] == "unresolved"
    assert percentile["effect"] == pytest.approx(0, abs=0.2)
    assert "no file says how chunks pack tokens" in percentile["reasons"][0]


def test_fault_a_mean_over_survivors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Faster per token, where one request of forty got no answer."""
    found = judged(capsys, sides(tmp_path, {"gap_s": 0.017, "fail": 1}), "itl_mean_ms", code=1)
    assert found["decision"] == "unresolved"
    assert "itl_mean_ms is over answers that came, and up to 2.5% of a run's did not" in found["reasons"]


def test_fault_answers_of_other_lengths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = sides(tmp_path, {"tokens": 9})
    found = judged(capsys, words, "e2e_p50_ms", code=1)
    assert found["decision"] == "unresolved"
    assert "the answers have 13 tokens on average in the baseline and 9 in the candidate" in found["reasons"][0]
    assert judged(capsys, words, "ttft_p50_ms", code=1)["decision"] == "tie"


def guidellm(folder: Path, name: str, change: Callable[[dict[str, Any]], None]) -> str:
    """The recorded report, each request later by a microsecond, so that it is another run; and changed."""
    report = json.loads((RECORDED / "guidellm.json").read_text())
    for request in report["benchmarks"][0]["requests"]["successful"]:
        request["info"]["timings"]["last_token_iteration"] += 1e-6
    change(report)
    path = folder / name
    path.write_text(json.dumps(report))
    return str(path)


def cached(report: dict[str, Any]) -> None:
    for request in report["benchmarks"][0]["requests"]["successful"]:
        request["input_metrics"]["cached_tokens"] = 16


def cut_short(report: dict[str, Any]) -> None:
    report["benchmarks"][0]["requests"]["successful"][0]["output_metrics"]["total_tokens"] = 12


def warmed(report: dict[str, Any]) -> None:
    report["benchmarks"][0]["config"]["warmup"] = {"percent": 0.1}
    report["benchmarks"][0]["scheduler_metrics"]["measure_start_time"] -= 1


def late(report: dict[str, Any]) -> None:
    for request in report["benchmarks"][0]["requests"]["successful"]:
        request["info"]["timings"]["targeted_start"] -= 0.3


def newer(report: dict[str, Any]) -> None:
    report["metadata"]["guidellm_version"] = "0.9.0"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (cached, "guard 1, unique prompts: the prefix cache gave 0.0% of the baseline's prompt tokens and 80.0%"),
        (cut_short, "guard 2, token truth: 1 of 7 answers of b.json have other output tokens than ignore_eos"),
        (late, "guard 5, load fidelity: b.json sent late: p99 3"),
        (warmed, "guard 13, warm-up: guidellm.json had warm-up none, cool-down none, b.json warm-up 10%"),
        (newer, "guard 14, same conditions: guidellm.json and b.json differ in tool (guidellm 0.8.1, guidellm 0.9.0)"),
    ],
)
def test_fault_that_a_report_of_guidellm_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Callable[[dict[str, Any]], None], said: str
) -> None:
    other = guidellm(tmp_path, "b.json", change)
    found = judged(capsys, [str(RECORDED / "guidellm.json"), other], "tpot_p50_ms", code=1)
    assert (found["decision"], found["valid"]) == ("invalid", False)
    assert any(said in reason for reason in found["reasons"])


def test_a_clean_pair_of_reports_shows_no_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What the server reports of its cache and what the schedule says is proven, and not listed."""
    other = guidellm(tmp_path, "b.json", lambda report: None)
    found = judged(capsys, [str(RECORDED / "guidellm.json"), other], "tpot_p50_ms", code=1)
    assert found["decision"] == "unresolved"
    assert {number for number, state in states(found).items() if state == "failed"} == {11}
    assert states(found)[1] == states(found)[5] == states(found)[13] == "passed"


def test_fault_a_poisson_load_of_guidellm_sent_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(RECORDED / "guidellm_poisson.json", tmp_path / "b.json")
    other = guidellm(tmp_path, "a.json", lambda report: None)
    found = judged(capsys, [other, str(tmp_path / "b.json")], "ttft_p50_ms", code=1)
    assert found["decision"] == "invalid"
    assert "guard 5, load fidelity: b.json asked for 10 requests/s and had 311" in found["reasons"]


def test_two_tools_are_compared_in_what_both_have_and_cannot_decide(capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(RECORDED / "guidellm.json"), str(RECORDED / "aiperf")]
    found = judged(capsys, words, "ttft_p50_ms", code=1)
    assert found["decision"] == "unresolved"
    assert "by AIPerf and guidellm: the difference holds that of the clients" in " ".join(found["reasons"])
    assert any("the two tools do not say the same moment" in note for note in found["warnings"])
    refused = judged(capsys, words, "itl_p50_ms", code=1)
    assert (
        "itl_p50_ms is refused: guidellm.json: guidellm keeps the first and the last arrival" in refused["reasons"][0]
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["{a}", "{a}"], "the same run twice; allowed: two different runs"),
        (["{a},{a}", "{b}"], "given twice; allowed: each run once"),
        (["{a},{model}", "{b}"], "the baseline holds runs of 2 models (m, n); allowed: repetitions of one"),
        (["{a},{guidellm}", "{b}"], "the baseline holds runs of 2 tools"),
        (["{a}", "{b}", "--metric", "speed"], "--metric=speed: no file has it; allowed: load/r10/ttft_p50_ms"),
        (
            ["{a}", "{b}", "--metric", "speed"],
            "r10/itl_mean_ms, load/r10/output_tok_s, load/r10/achieved_rate_rps, load",
        ),
        (["{a}", "{b}", "--metric", "ttft_p50_ms", "--better", "higher"], "of load/r10/ttft_p50_ms lower is better"),
        (["{a}", "{b}", "--bar", "1"], "--better, --bar and --margin belong to a metric"),
        (["{a}", "{folder}"], "no results of another tool, as the other has"),
        (["{a}", "{b},missing.json"], "missing.json: no such file"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    (tmp_path / "folder").mkdir()
    names = {
        "a": vllm(tmp_path, "a.json", minute=1), "b": vllm(tmp_path, "b.json", minute=2, seed=1),
        "model": vllm(tmp_path, "n.json", minute=3, seed=2, model_id="n"), "folder": tmp_path / "folder",
        "guidellm": RECORDED / "guidellm.json",
    }  # fmt: skip
    assert main(["judge", *(word.format(**names) for word in words)]) == 2
    told = capsys.readouterr().err
    assert said in told
    assert told.count("\n") == 1


# --- statistics -----------------------------------------------------------------------------------------------------


def test_two_samples_as_scipy_has_them() -> None:
    draw = np.random.default_rng()
    one, other = draw.normal(10, 1, size=7), draw.normal(11, 2, size=6)
    found = two_samples(one, other, 0.95)
    welch = stats.ttest_ind(other, one, equal_var=False)
    interval = welch.confidence_interval(0.95)
    assert (found.ci_low, found.ci_high) == pytest.approx((interval.low, interval.high))
    assert found.p_welch == pytest.approx(welch.pvalue)
    exact = stats.permutation_test((other, one), lambda a, b: abs(a.mean() - b.mean()), alternative="greater",
                                   n_resamples=np.inf)  # fmt: skip
    assert found.p_value == pytest.approx(exact.pvalue)


def test_a_bootstrap_of_means_has_the_width_that_theory_gives() -> None:
    """1.96 standard errors of a difference of means; paired, of the differences: the common part drops out."""
    draw = np.random.default_rng(5)
    common = draw.normal(0, 5, size=300)
    one, other = common + draw.normal(0, 1, size=300), common + draw.normal(1, 1, size=300)
    apart, paired = (
        bootstrap_difference(lambda rows: float(one[rows].mean()), lambda rows: float(other[rows].mean()), (300, 300),
                             paired=paired, confidence=0.95)
        for paired in (False, True)
    )  # fmt: skip
    assert apart is not None
    assert paired is not None
    error = np.sqrt(one.var() / 300 + other.var() / 300)
    assert apart.ci_high - apart.ci_low == pytest.approx(2 * 1.96 * error, rel=0.1)
    assert paired.ci_high - paired.ci_low == pytest.approx(2 * 1.96 * (other - one).std() / np.sqrt(300), rel=0.1)
    # A figure that a quarter of the draws do not reach has no interval.
    rare = bootstrap_difference(lambda rows: 1.0, lambda rows: float("inf") if rows[0] % 4 == 0 else 2.0, (9, 9),
                                paired=False, confidence=0.95)  # fmt: skip
    assert rare is None
