"""Files of other load generators, against what the server did that they were recorded from (`foreign/record.py`).

The oracle is the server's own record: when each chunk went out, with how many tokens. It shares no code with the
readers. Files that are made here by hand are called so.
"""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from oneaxis.cli import main
from oneaxis.errors import UserError
from oneaxis.judge.foreign import (
    METRICS,
    REQUEST_SCHEMA,
    Bound,
    Run,
    basis,
    good,
    metric,
    read_arm,
    refusals,
    weighted_percentile,
)

RECORDED = Path(__file__).parent / "foreign"
FILES = {"vllm_bench": "vllm_bench.json", "vllm_bench_single": "vllm_bench_single.json", "guidellm": "guidellm.json",
         "aiperf": "aiperf"}  # fmt: skip


def recorded(name: str) -> Run:
    """The one run of a recorded file."""
    (run,) = read_arm(RECORDED / FILES[name])
    return run


def truth(name: str) -> list[dict[str, Any]]:
    """The server's record of the requests of a file, in order; what came before them was warm-up."""
    seen: list[dict[str, Any]] = json.loads((RECORDED / f"{name}.truth.json").read_text())
    return seen[-recorded(name).requests.height :]


def figures(run: Run) -> dict[str, float | None]:
    """All that is not refused."""
    refused = refusals([run])
    names = [name for name in METRICS if name not in refused and name.partition("_")[0] not in refused]
    return {name: metric(run, name, basis([run]) is not None) for name in names}


@pytest.mark.parametrize("name", FILES)
def test_each_request_is_what_the_server_did(name: str) -> None:
    """Tokens, chunks and failures exactly; times within what the client's reading costs."""
    run, seen = recorded(name), truth(name)
    assert [row == "failed" for row in run.requests["status"]] == [each["failed"] for each in seen]
    for row, each in zip(run.requests.iter_rows(named=True), seen, strict=True):
        if each["failed"]:
            assert (row["ttft_s"], row["e2e_s"], row["output_tokens"]) == (None, None, None)
            continue
        moments, tokens = zip(*each["chunks"], strict=True)
        assert row["prompt_tokens"] == each["prompt_tokens"]
        assert (row["output_tokens"], row["chunks"]) == (sum(tokens), len(tokens))
        # The file's TTFT has the way to the server in it, the server's has not.
        assert -0.0005 < row["ttft_s"] - (moments[0] - each["received"]) < 0.020
        assert row["e2e_s"] - row["ttft_s"] == pytest.approx(moments[-1] - moments[0], abs=0.010)
        if row["gaps_s"] is not None:
            assert row["gaps_s"] == pytest.approx(np.diff(moments).tolist(), abs=0.010)


@pytest.mark.parametrize("name", FILES)
def test_inter_token_latency_is_per_token_whatever_the_chunks(name: str) -> None:
    """Of the server: time from first to last chunk over the tokens after the first chunk. With three tokens a chunk
    (and one in the last) a request's mean chunk, 13 / 5, is taken for its first, which holds 3: 4% too low."""
    total_s, tokens = 0.0, 0
    for each in truth(name):
        if not each["failed"]:
            total_s += each["chunks"][-1][0] - each["chunks"][0][0]
            tokens += sum(count for _, count in each["chunks"][1:])
    assert figures(recorded(name))["itl_mean_ms"] == pytest.approx(1000 * total_s / tokens, rel=0.06)


def test_what_the_tools_themselves_say_of_the_same_requests_differs() -> None:
    """vLLM's ITL is one sample a chunk: 2.5 times too long here. AIPerf counts the text by its own tokenizer, two for
    each of the server's tokens, and halves its ITL (here TPOT)."""
    vllm = json.loads((RECORDED / "vllm_bench.json").read_text())
    mean = figures(recorded("vllm_bench"))["itl_mean_ms"]
    assert mean is not None
    assert vllm["mean_itl_ms"] / mean == pytest.approx(2.6, rel=0.05)
    first = json.loads((RECORDED / "aiperf" / "profile_export.jsonl").read_text().splitlines()[-1])["metrics"]
    run = recorded("aiperf")
    assert first["output_sequence_length"]["value"] == 2 * run.ok["output_tokens"][-1] == 26
    assert "usage is taken" in run.notes[0]


def test_the_load_and_what_each_file_is() -> None:
    runs = {name: recorded(name) for name in FILES}
    assert {run.level for run in runs.values()} == {"r10"}
    assert {run.model for run in runs.values()} == {"known"}
    assert [run.intended_is for run in runs.values()] == [
        "the arrival in the client's own queue", "the arrival in the client's own queue", "the schedule",
        "the issue by the rate limiter",
    ]  # fmt: skip
    assert (runs["guidellm"].version, runs["aiperf"].version) == ("0.8.1", "0.13.0")
    # AIPerf's warm-up records are in the file, and are not measured.
    assert (runs["aiperf"].warmup, runs["aiperf"].requests.height) == ("2 requests", 8)
    assert runs["guidellm"].ok["asked_output_tokens"].to_list() == [13] * 7


def test_waiting_in_the_clients_queue_counts() -> None:
    """Ten requests at 10/s, one at a time, each of 13 tokens at 20 ms and 60 ms before: the server is busy for 0.3 s a
    request and the queue grows by 0.2 s with each. vLLM's own TTFT starts after it."""
    run = recorded("vllm_bench_single")
    told = json.loads((RECORDED / "vllm_bench_single.json").read_text())
    assert told["median_ttft_ms"] == pytest.approx(64, abs=3)
    found = figures(run)["ttft_p50_ms"]
    assert found is not None
    received = [each["received"] for each in truth("vllm_bench_single")]
    # The fifth request reaches the server when four have been served; it was due within 0.1 to 0.9 s after the first.
    assert 1000 * (received[4] - received[0]) - 900 < found < 1000 * (received[5] - received[0])


def test_a_poisson_schedule_of_guidellm_that_is_none() -> None:
    """Its targets are seconds after 1970, and the requests were sent at once: as seen of guidellm 0.8.1."""
    (run,) = read_arm(RECORDED / "guidellm_poisson.json")
    assert run.requests["intended_s"].null_count() == run.requests.height
    assert run.intended_is is None
    assert "guidellm began before it knew its start" in run.notes[0]
    assert figures(run)["achieved_rate_rps"] == pytest.approx(311, abs=1)


# --- figures by hand --------------------------------------------------------------------------------------------------


def by_hand(rows: list[dict[str, Any]]) -> Run:
    """A run of these requests."""
    blank = dict.fromkeys(REQUEST_SCHEMA.names()) | {"status": "ok"}
    table = pl.DataFrame([blank | row for row in rows], schema=REQUEST_SCHEMA)
    return Run("by hand", None, Path("hand"), "m", "r1", 1.0, True, 0.0, "the schedule", {}, {}, {}, None, table)


def test_figures_of_three_requests_one_of_which_failed() -> None:
    """First: due 0, sent .1, first token .2 later, 5 tokens in chunks at gaps .4 and .6: TTFT 300 ms, E2E 1300 from its
    due time, TPOT 1000 / 4, a chunk 5/3 tokens: gaps of 240 and 360 a token. Second: on time, 4 tokens one by one."""
    run = by_hand([
        {"intended_s": 0.0, "sent_s": 0.1, "ttft_s": 0.2, "e2e_s": 1.2, "output_tokens": 5, "chunks": 3,
         "gaps_s": [0.4, 0.6]},
        {"intended_s": 1.0, "sent_s": 1.0, "ttft_s": 0.1, "e2e_s": 0.4, "output_tokens": 4, "chunks": 4,
         "gaps_s": [0.1, 0.1, 0.1]},
        {"intended_s": 2.0, "sent_s": 2.1, "status": "failed"},
    ])  # fmt: skip
    found = figures(run)
    assert (found["ttft_p50_ms"], found["e2e_p50_ms"], found["tpot_p50_ms"]) == pytest.approx((300, 1300, 250))
    assert (found["ttft_p90_ms"], found["ttft_mean_ms"], found["failed"]) == (None, None, 1)
    # 1 s over 5 - 5/3 tokens, and 0.3 s over 3.
    assert found["itl_mean_ms"] == pytest.approx(1300 / (10 / 3 + 3))
    # Weights: 100 ms x 3, 240 x 5/3, 360 x 5/3, infinite x 3.5 of the failed one: the middle is at 4.92.
    assert found["itl_p50_ms"] == pytest.approx(360)
    # From the first sent, 0.1, to the last token, 1.4.
    assert found["output_tok_s"] == pytest.approx(9 / 1.3)
    assert found["achieved_rate_rps"] == pytest.approx(1.0)
    assert metric(run, "ttft_p50_ms", False) == pytest.approx(200)


def test_a_percentile_with_weights_is_the_nearest_rank_of_as_many_values() -> None:
    draw = np.random.default_rng()
    values, weights = draw.normal(size=40), draw.integers(1, 6, size=40)
    spread = np.sort(np.repeat(values, weights))
    for percent in (1, 50, 90, 99):
        nearest = spread[math.ceil(percent / 100 * len(spread)) - 1]
        assert weighted_percentile(values, weights.astype(float), percent) == nearest


# --- other shapes of the files ----------------------------------------------------------------------------------------


def changed(folder: Path, name: str = "vllm_bench.json", **keys: Any) -> Path:
    """A recorded file with keys replaced, or left out where None."""
    document = json.loads((RECORDED / name).read_text()) | keys
    path = folder / name
    path.write_text(json.dumps({key: value for key, value in document.items() if value is not None}))
    return path


def test_an_older_file_of_vllm_has_no_starts_and_counts_from_sending(tmp_path: Path) -> None:
    path = changed(tmp_path, latencies=None, start_times=None, queue_times=None, failed=None)
    (run,) = read_arm(path)
    assert basis([run]) is None
    whole = recorded("vllm_bench")
    assert run.ok["e2e_s"].to_list() == pytest.approx(whole.ok["e2e_s"].to_list(), abs=1e-4)
    assert "when its requests were sent" in refusals([run])["output"]


def test_a_count_of_one_token_for_every_answer_is_no_count(tmp_path: Path) -> None:
    """vLLM's tool without a tokenizer against a server without usage."""
    document = json.loads((RECORDED / "vllm_bench.json").read_text())
    (run,) = read_arm(changed(tmp_path, output_lens=[min(count, 1) for count in document["output_lens"]]))
    assert run.ok["output_tokens"].null_count() == run.ok.height
    refused = refusals([run])
    assert all("how many tokens" in refused[name] for name in ("tpot", "itl", "output"))
    assert figures(run)["ttft_p50_ms"] is not None


@pytest.mark.parametrize("at_once", [True, False], ids=["before_the_first_token", "with_it"])
def test_the_role_of_a_chat_is_no_token(tmp_path: Path, at_once: bool) -> None:
    """Of a recorded run a chat is made, by hand: the role comes as the first chunk, 50 ms before the first token (a
    chunk more than tokens tells), or with it (two of three tokens to a chunk: only the gap of nothing tells)."""
    name = "vllm_bench_single" if at_once else "vllm_bench"
    document = json.loads((RECORDED / FILES[name]).read_text())
    ahead = 0.05 if at_once else 0.0
    ttfts = [ttft - ahead if ttft else 0.0 for ttft in document["ttfts"]]
    itls = [[ahead, *gaps] if gaps else [] for gaps in document["itls"]]
    (run,) = read_arm(changed(tmp_path, FILES[name], backend="openai-chat", ttfts=ttfts, itls=itls))
    plain = recorded(name)
    assert run.ok["chunks"].to_list() == plain.ok["chunks"].to_list()
    assert run.ok["ttft_s"].to_list() == pytest.approx(plain.ok["ttft_s"].to_list())
    assert figures(run)["itl_p90_ms"] == pytest.approx(figures(plain)["itl_p90_ms"])
    assert "is the role and holds no token" in run.notes[0]


def test_a_closed_loop_has_no_intended_moment(tmp_path: Path) -> None:
    (run,) = read_arm(changed(tmp_path, "vllm_bench_single.json", request_rate="inf"))
    assert (run.level, run.asked_rps, basis([run])) == ("u1", None, None)
    assert figures(run)["ttft_p50_ms"] == pytest.approx(64, abs=3)


def test_appended_runs_folders_and_lists_are_repetitions(tmp_path: Path) -> None:
    line = (RECORDED / "vllm_bench.json").read_text().strip()
    (tmp_path / "appended.json").write_text(f"{line}\n{line}\n")
    assert len(read_arm(tmp_path / "appended.json")) == 2
    assert len(read_arm(Path(f"{RECORDED}/guidellm.json,{RECORDED}/guidellm_poisson.json"))) == 2
    # What the tool leaves beside is no run.
    (tmp_path / "appended.pytorch.json").write_text("[]")
    assert len(read_arm(tmp_path)) == 2
    summary = read_arm(RECORDED / "aiperf" / "profile_export_aiperf.json")[0]
    assert summary.requests.equals(recorded("aiperf").requests)


def guidellm_changed(folder: Path, change: Any) -> Path:
    """The recorded report, changed."""
    report = json.loads((RECORDED / "guidellm.json").read_text())
    change(report["benchmarks"][0])
    path = folder / "guidellm.json"
    path.write_text(json.dumps(report))
    return path


def test_requests_that_guidellm_cut_off_are_misses(tmp_path: Path) -> None:
    def cut(benchmark: dict[str, Any]) -> None:
        requests, state = benchmark["requests"], benchmark["scheduler_state"]
        requests["incomplete"] = [requests["successful"].pop() for _ in range(2)]
        state["successful_requests"] -= 2

    (run,) = read_arm(guidellm_changed(tmp_path, cut))
    assert run.requests["status"].to_list().count("cut") == 2
    assert "2 requests were cut off" in run.notes[0]
    assert figures(run)["failed"] == 3


def test_chunks_that_guidellm_counts_as_tokens_are_no_count(tmp_path: Path) -> None:
    """Without usage and without a number that was asked for, its `output_tokens` is the number of chunks."""

    def uncounted(benchmark: dict[str, Any]) -> None:
        for request in benchmark["requests"]["successful"]:
            request["output_metrics"] = {}
            request["output_tokens"] = request["info"]["timings"]["token_iterations"]

    (run,) = read_arm(guidellm_changed(tmp_path, uncounted))
    assert run.ok["output_tokens"].null_count() == 7
    assert {"tpot", "itl", "output"} <= refusals([run]).keys()


def test_only_requests_sent_after_guidellms_warm_up_count(tmp_path: Path) -> None:
    """The window opens 0.25 s after the first of eight requests at 10/s: three are left out."""

    def warm(benchmark: dict[str, Any]) -> None:
        benchmark["config"]["warmup"] = {"value": 3, "mode": "prefer_duration"}
        benchmark["scheduler_metrics"]["measure_start_time"] += 0.25

    (run,) = read_arm(guidellm_changed(tmp_path, warm))
    assert (run.requests.height, run.warmup) == (5, "warm-up 3, cool-down none")


# --- bad input ------------------------------------------------------------------------------------------------------

VLLM = json.loads((RECORDED / "vllm_bench.json").read_text())
GUIDELLM = (RECORDED / "guidellm.json").read_text()


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.json", "", "a.json: empty; allowed:"),
        ("a.json", json.dumps(VLLM)[:900], "a.json: not whole JSON:"),
        ("a.json", GUIDELLM[:9000], "a.json: not whole JSON:"),
        ("a.json", '{"results": 1}', "a.json: of no format that is read here; allowed: `vllm bench serve"),
        ("a.json", json.dumps({k: v for k, v in VLLM.items() if k not in ("ttfts", "itls", "errors")}),
         "a benchmark of embeddings (no ttfts, itls, errors); allowed: recorded with --save-result --save-detailed"),
        ("a.json", json.dumps({k: v for k, v in VLLM.items() if not isinstance(v, list)}),
         "no requests of their own (no ttfts, itls, input_lens, output_lens, errors); allowed: recorded with"),
        ("a.json", json.dumps(VLLM | {"itls": VLLM["itls"][1:]}), "itls is no list of 10, as ttfts is"),
        ("a.json", json.dumps(VLLM | {"ttfts": [float("nan")] * 10}), "request 0: ttfts is nan; allowed: a finite"),
        ("a.json", json.dumps(VLLM | {"ttfts": [-0.01] * 10}), "request 0: ttfts is -0.01; allowed: 0 or more"),
        ("a.json", json.dumps(VLLM | {"itls": [[0.1, float("nan"), 0.2]] * 10}), "request 0: itls is nan; allowed: a"),
        ("a.json", json.dumps(VLLM | {"itls": [[0.1, -0.1]] * 10}), "request 0: itls is -0.1; allowed: 0 or more"),
        ("a.json", json.dumps(VLLM | {"latencies": [0.001] * 10}),
         "request 0: latencies is 0.001 s, ttfts 0.0620004 and itls 0.0853768 in all; allowed: ttfts and itls add up"),
        ("a.json", json.dumps(VLLM | {"latencies": [0.2] * 10}), "request 0: latencies is 0.2 s, ttfts 0.0620004"),
        ("a.json", GUIDELLM.replace('first_token_iteration": 1796041874.7512329', 'first_token_iteration": 1796041875'),
         "benchmarks[0].requests.successful[0].info.timings.last_token_iteration is 1796041874.838649, "
         "first_token_iteration 1796041875.000000; allowed: not before it"),
        ("a.json", GUIDELLM.replace('"request_end": 1796041874.8414254', '"request_end": 17'), "request_end is 17.00"),
        ("a.json", json.dumps(VLLM | {"request_rate": "fast"}), "request_rate is fast; allowed: a finite number"),
        ("a.json", json.dumps(VLLM | {"errors": ["Traceback\nConnectionRefusedError: no"] * 10}),
         "all 10 requests failed: ConnectionRefusedError: no; allowed: a run with answers"),
        ("a.json", GUIDELLM.replace('"benchmarks": [{', '"benchmarks": [], "x": [{'), "holds no benchmarks"),
        ("a.json", GUIDELLM.replace('"successful_requests": 7', '"successful_requests": 70'),
         "holds 7 of 70 successful requests; allowed: all, without a sample_size in --metrics"),
        ("a.jsonl", '{"metadata": {"benchmark_phase": "profiling"}, "metrics": {}}\n',
         "a_aiperf.json is not beside it, which says the model and the load"),
        ("a_aiperf.json", '{"schema_version": "1.4", "aiperf_version": "0.13.0"}',
         "a summary without its records (a.jsonl); allowed: recorded with --export-level records"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str, said: str
) -> None:
    (tmp_path / name).write_text(text)
    assert main(["judge", str(RECORDED / "vllm_bench_single.json"), str(tmp_path / name)]) == 2
    told = capsys.readouterr().err
    assert said in told
    assert str(tmp_path / name.partition("_")[0])[:20] in told
    assert told.count("\n") == 1


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"value": 144.13', '"value": 14.13', "request_latency is 0.0141"),
        (
            '"request_end_ns": 1796043007895',
            '"request_end_ns": 1796043007761',
            "from request_start_ns to request_end_ns",
        ),
        ('"request_end_ns": 1796', '"request_end_ns": 1795', "s before request_start_ns; allowed: not before it"),
    ],
)
def test_a_record_of_aiperf_that_cannot_be_is_refused(tmp_path: Path, old: str, new: str, said: str) -> None:
    folder = tmp_path / "run"
    shutil.copytree(RECORDED / "aiperf", folder)
    records = folder / "profile_export.jsonl"
    lines = records.read_text().splitlines()
    assert old in lines[2]
    records.write_text("\n".join([*lines[:2], lines[2].replace(old, new), *lines[3:]]))
    with pytest.raises(UserError, match=f"profile_export.jsonl:3: .*{said}"):
        read_arm(folder)


@pytest.mark.parametrize("left", ["", "{}", '{"dat', '{"results": []}'])
def test_a_broken_file_among_repetitions_is_named_and_not_passed_over(tmp_path: Path, left: str) -> None:
    """Five runs, and what is left of a sixth; of AIPerf, whose runs have folders of their own, one of two."""
    for k in range(5):
        (tmp_path / f"a{k}.json").write_text(json.dumps(VLLM))
    (tmp_path / "a5.json").write_text(left)
    fault = "of no format that is read here" if left else "empty"
    with pytest.raises(UserError, match=f"a5.json: {fault}; allowed in a folder of repetitions"):
        read_arm(tmp_path)
    for k in range(2):
        shutil.copytree(RECORDED / "aiperf", tmp_path / "aiperf" / str(k))
    assert len(read_arm(tmp_path / "aiperf")) == 2
    broken = tmp_path / "aiperf" / "1" / "profile_export.jsonl"
    broken.write_text(left)
    with pytest.raises(UserError, match=f"profile_export.jsonl: {fault}"):
        read_arm(tmp_path / "aiperf")
    broken.unlink()
    with pytest.raises(UserError, match=r"profile_export_aiperf\.json: a summary without its records"):
        read_arm(tmp_path / "aiperf")


@pytest.mark.parametrize("name", ["vllm_bench", "guidellm", "aiperf"])
def test_a_good_request_keeps_every_bound(name: str) -> None:
    """Against the same rule, request by request, on the file's own latencies."""
    run = recorded(name)
    rows = run.requests.to_dicts()
    ttft = sorted(1000 * row["ttft_s"] for row in rows if row["status"] == "ok")[len(rows) // 2]
    tpots = [1000 * (row["e2e_s"] - row["ttft_s"]) / (row["output_tokens"] - 1) for row in rows
             if row["status"] == "ok" and row["output_tokens"] > 1]  # fmt: skip
    tpot = sorted(tpots)[len(tpots) * 3 // 4]
    expected = []
    for row in rows:
        tokens = row["output_tokens"]
        paced = tokens and (tokens == 1 == row["asked_output_tokens"] or (
            tokens > 1 and 1000 * (row["e2e_s"] - row["ttft_s"]) / (tokens - 1) <= tpot))  # fmt: skip
        expected.append(bool(row["status"] == "ok" and 1000 * row["ttft_s"] <= ttft and paced))
    assert 0 < sum(expected) < len(rows)
    bound = Bound(ttft_ms=ttft, tpot_ms=tpot)
    assert good(run, bound, False).tolist() == expected
    assert metric(run, "attainment", False, bound) == pytest.approx(sum(expected) / len(rows))
    tokens = sum(row["output_tokens"] for row, kept in zip(rows, expected, strict=True) if kept)
    whole = metric(run, "output_tok_s", False)
    assert whole is not None
    made = sum(row["output_tokens"] or 0 for row in rows if row["status"] == "ok")
    assert metric(run, "goodput_tok_s", False, bound) == pytest.approx(whole * tokens / made)


def test_one_token_passes_no_bound_on_tpot_unless_it_is_what_was_asked_for() -> None:
    run = recorded("vllm_bench")
    short = run.requests.with_columns(status=pl.lit("ok"), ttft_s=0.01, e2e_s=0.01, output_tokens=pl.lit(1, pl.Int64))
    for asked, kept in ((None, False), (5, False), (1, True)):
        table = short.with_columns(asked_output_tokens=pl.lit(asked, pl.Int64))
        assert good(replace(run, requests=table), Bound(tpot_ms=100.0), False).tolist() == [kept] * table.height
        assert good(replace(run, requests=table), Bound(ttft_ms=11.0), False).all()
