"""A whole sweep: against the scripted server (fast), and against the real engine on a tiny random model (slow).

Oracle of the fast ones: the fake server's script and record. Faked there: the engine.
"""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl
import psutil
import pytest

from oneaxis.config.schema import Guards, Load, Search
from oneaxis.errors import RunError
from oneaxis.load.capacity import run_load
from oneaxis.load.draws import DRAWS_SCHEMA, draw_answers
from oneaxis.load.plan import Plan, draw_plan, due
from oneaxis.load.summary import cache_block_tokens, flat_metrics, judge, report_lines, summarise, summary_document
from oneaxis.load.sweep import Sweep, run_sweep
from oneaxis.load.trace import TRACE_SCHEMA
from tests.load.fake_server import Answer, FakeServer, fake_server
from tests.load.sections import UNUSED

HELD = {"device": "cpu 0-1", "exclusive": True, "waited_s": 0.0}
GUARDS = Guards(max_send_lag_p99_ms=100.0, max_prefix_hit_rate=0.01, max_token_disagreement=0.01, max_stall_shift=1.0,
                max_stray_cpu_share=1.0, max_server_disagreement=0.05, max_server_disagreement_ms=50.0)  # fmt: skip

LOAD = Load.model_validate(
    {
        "arrival": "constant",
        "shapes": [
            {"name": "long", "prompt_tokens": 40, "output_tokens": 1},
            {"name": "short", "prompt_tokens": 8, "output_tokens": 5},
        ],
        "rates_rps": [10.0],
        **UNUSED,
        "duration_s": 1.0,
        "warmup_requests": 2,
        "request_timeout_s": 3.0,
        "service_class": {"ttft_ms": 400.0, "tpot_ms": 100.0},
    }
)
ALONE = {"cpus": 2, "other_cpus": 0.0, "busiest": [], "gpu_processes": []}
DRAWN = pl.DataFrame([{"call": k, "seed": k, "token_ids": [k, 7], "logprob": -9.0} for k in range(4)],
                     schema=DRAWS_SCHEMA)  # fmt: skip
CLEAN: dict[str, Any] = {"load": LOAD, "lease": HELD, "tenants": ALONE, "draws": DRAWN}


@pytest.fixture
def plan() -> Plan:
    """Two shapes at 10 req/s for 1 s: 20 requests."""
    import numpy as np

    text = np.random.default_rng(2).integers(3, 90, size=500).astype(np.int32)
    return draw_plan(LOAD, text, seed=0, session="test", repetition=0)


def sweep_of(server: FakeServer, plan: Plan) -> Sweep:
    return run_sweep(server, plan, duration_s=LOAD.duration_s, timeout_s=LOAD.request_timeout_s)


def invalid(plan: Plan, sweep: Sweep, differences: Sequence[object] = ()) -> list[int]:
    """Numbers of the guards that fail."""
    return [
        guard.number
        for guard in judge(plan, sweep, summarise(sweep, LOAD), differences, GUARDS, **CLEAN)
        if not guard.valid
    ]


@pytest.mark.clock
def test_a_clean_sweep_end_to_end(plan: Plan) -> None:
    with fake_server(Answer(gap_s=0.03)) as server:
        sweep = sweep_of(server, plan)
    assert invalid(plan, sweep) == []
    # Every cell: its own warm-up, the reset, and then exactly the plan in its order.
    measured = plan.arrivals["request_id"].to_list()
    warmups = plan.warmups["request_id"].to_list()
    reset = "/reset_prefix_cache"
    assert sorted(server.calls[:2]) == warmups[:2]
    assert server.calls[2] == reset
    assert sorted(server.calls[3:13]) == measured[:10]
    assert sorted(server.calls[13:15]) == warmups[2:]
    assert server.calls[15] == reset
    assert sorted(server.calls[16:]) == measured[10:]
    assert sweep.requests["request_id"].to_list() == measured
    assert not set(warmups) & set(measured)
    # The server's counters over the measured requests only: 10 x 40 and 10 x 8 tokens in, 10 x 1 and 10 x 5 out.
    counted = sweep.counters["long", "r10"]
    assert (counted["prompt_tokens"], counted["output_tokens"], counted["preemptions"]) == (400, 10, 0)
    assert (counted["prefix_cache_queries"], counted["prefix_cache_hits"]) == (400, 0)
    assert sweep.counters["short", "r10"]["output_tokens"] == 50
    assert [condition["prefix_cache_reset"] for condition in sweep.conditions] == [True, True]
    assert sweep.samples.height >= 4
    assert set(sweep.samples["kv_cache_usage"]) == {0.25}
    # 10 answers of 5 tokens: 10 first tokens in all buckets, 40 gaps of 30 ms.
    ttft = sweep.histograms.filter((pl.col("shape") == "short") & (pl.col("histogram") == "ttft"))
    assert ttft["count"].sum() == sweep.counters["short", "r10"]["ttft_count"] == 10
    assert sweep.counters["short", "r10"]["itl_count"] == 40
    assert sweep.counters["short", "r10"]["itl_sum_s"] == pytest.approx(1.2, abs=0.4)
    short = sweep.samples.filter(pl.col("shape") == "short")["output_tokens"]
    assert short.is_sorted()
    assert short[-1] - short[0] > 20

    cells = summarise(sweep, LOAD)
    metrics = flat_metrics(cells, judge(plan, sweep, cells, [], GUARDS, **CLEAN))
    assert metrics["sweep/valid"] == 1
    assert metrics["sweep/requests"] == 20
    assert metrics["sweep/failed"] == 0
    assert metrics["sweep/prefix_hit_rate"] == 0
    assert metrics["sweep/short/r10/ttft_p50_ms"] == pytest.approx(30, abs=25)
    assert metrics["sweep/short/r10/tpot_p50_ms"] == pytest.approx(30, abs=15)
    assert metrics["sweep/short/r10/goodput_tok_s"] == pytest.approx(50 / 1.05, rel=0.15)
    assert metrics["sweep/short/capacity_tok_s"] == metrics["sweep/short/r10/goodput_tok_s"]
    # A shape of one token has neither.
    assert not [name for name in metrics if name.startswith(("sweep/long/r10/tpot", "sweep/long/r10/itl"))]


def test_what_is_said_of_a_sweep(plan: Plan) -> None:
    with fake_server(Answer(gap_s=0.03), answers={plan.arrivals["request_id"][0]: Answer(ending="hang", chunks=())},
                     offers_reset=False) as server:  # fmt: skip
        sweep = sweep_of(server, plan)
    cells = summarise(sweep, LOAD)
    verdicts = judge(plan, sweep, cells, [], GUARDS, **CLEAN)
    document = json.loads(json.dumps(summary_document(cells, verdicts, sweep, LOAD), allow_nan=False))
    long, short = document["cells"]
    # One of ten hangs: p90 is the ninth and is reached, p99 is not. A failure does not make the run INVALID.
    assert document["valid"] is True
    assert (long["failed"], long["attainment"]) == (1, 0.9)
    assert long["not_reached"] == ["ttft_p99_ms", "e2e_p99_ms"]
    assert (long["judged_on"], short["judged_on"]) == (["ttft"], ["ttft", "tpot"])
    # Ten requests support a p50 (5), not a p90 (29) or a p99 (299).
    assert long["supported"] == {"p50": True, "p90": False, "p99": False}
    assert long["prefix_cache_reset"] is False
    assert document["capacity"]["long"]["rate_rps"] == 10
    metrics = flat_metrics(cells, verdicts)
    assert "sweep/long/r10/ttft_p90_ms" in metrics
    assert "sweep/long/r10/ttft_p99_ms" not in metrics
    lines = report_lines(document, verdicts)
    assert "failed 1" in lines[0]
    assert "on TTFT alone" in lines[0]
    assert "n too small for a p90" in lines[0]
    assert lines[-3] == f"long: capacity {long['goodput_tok_s']:.1f} tok/s at 10 req/s"
    assert lines[-1] == "load: VALID (11 guards)"
    said = report_lines(document, judge(plan, sweep, cells, ["kv_cache_dtype: fp8"], GUARDS, **CLEAN))
    assert said[-2] == "load: INVALID"
    assert "guard 3, realised config: the engine runs otherwise than asked: kv_cache_dtype: fp8. To do: " in said[-1]


def test_guards_fail_for_what_the_server_does(plan: Plan) -> None:
    first = plan.arrivals["request_id"][0]
    with fake_server(answers={first: Answer(finish_reason="stop")}) as server:
        assert invalid(plan, sweep_of(server, plan)) == [7]
    with fake_server(answers={first: Answer(usage_offset=2)}) as server:
        assert invalid(plan, sweep_of(server, plan)) == [2, 7]
    with fake_server() as server:
        sweep = sweep_of(server, plan)
        assert invalid(plan, sweep, ["kv_cache_dtype: fp8"]) == [3]
        # Somebody else used the engine.
        other = {name: {**counted, "output_tokens": 90.0} for name, counted in sweep.counters.items()}
        shared = Sweep(sweep.requests, sweep.samples, other, sweep.conditions)
        assert invalid(plan, shared) == [2, 15]
        # The slowest is left out.
        fewer = Sweep(sweep.requests.head(19), sweep.samples, sweep.counters, sweep.conditions)
        assert {5, 6} <= set(invalid(plan, fewer))


@pytest.mark.clock
def test_a_client_that_reads_late_does_not_agree_with_the_server(plan: Plan) -> None:
    # The process is held up for 0.3 s a time, whenever it looks after the engine: what has arrived waits to be read.
    with fake_server(Answer(gap_s=0.03), client_pause_s=0.3) as server:
        sweep = sweep_of(server, plan)
    found = judge(plan, sweep, summarise(sweep, LOAD), [], GUARDS, **CLEAN)[-1]
    assert (found.number, found.valid) == (15, False)
    assert "by the client, " in found.reason


@pytest.mark.clock
def test_prompts_that_repeat_trip_the_guard_by_themselves_and_by_the_servers_counter(plan: Plan) -> None:
    same = plan.arrivals["prompt_token_ids"].to_list()[-1]
    copies = pl.Series("prompt_token_ids", [same] * plan.arrivals.height, dtype=pl.List(pl.Int32))
    repeated = plan.arrivals.with_columns(copies)
    with fake_server(reuse=True) as server:
        sweep = sweep_of(server, Plan(repeated, plan.warmups))
    cells = summarise(sweep, LOAD)
    # 9 of 10 prompts of each cell come from the cache, which the reset had emptied before the cell.
    assert cells["prefix_hit_rate"].to_list() == pytest.approx([0.9, 0.9])
    # The plan that was meant is unique: the counter alone tells.
    found = judge(plan, sweep, cells, [], GUARDS, **CLEAN)[0]
    assert not found.valid
    assert "90.0% of the prompt tokens" in found.reason
    assert "repeat another" in judge(Plan(repeated, plan.warmups), sweep, cells, [], GUARDS, **CLEAN)[0].reason


def test_an_engine_that_dies_in_the_middle_ends_the_sweep_at_once_with_its_last_words(plan: Plan) -> None:
    hanging = {name: Answer(ending="hang", chunks=()) for name in plan.arrivals["request_id"]}
    started = time.perf_counter()
    with fake_server(answers=hanging, kill_after=8) as server:
        with pytest.raises(RunError, match="the engine died: out of memory in block 7"):
            run_sweep(server, plan, duration_s=50, timeout_s=50)
    # Neither the duration of the cell nor the time limit of its requests is waited for.
    assert time.perf_counter() - started < 25


def test_an_engine_whose_last_request_kills_it(plan: Plan) -> None:
    with fake_server(kill_after=24) as server:
        with pytest.raises(RunError, match="out of memory in block 7"):
            sweep_of(server, plan)


def test_a_sweep_in_which_all_failed_is_no_result(plan: Plan) -> None:
    with fake_server(Answer(http_status=503)) as server:
        with pytest.raises(RunError, match=r"all 20 requests failed \(server_error 20\): HTTP 503"):
            sweep_of(server, plan)


# --- other ways of arriving -----------------------------------------------------------------------------------


def other(**changes: Any) -> tuple[Load, Plan]:
    """`LOAD` with changes, and its plan."""
    import numpy as np

    text = np.random.default_rng(2).integers(3, 90, size=500).astype(np.int32)
    section = Load.model_validate(LOAD.model_dump() | changes)
    return section, draw_plan(section, text, seed=0, session="test", repetition=0)


def verdicts_of(load: Load, plan: Plan, sweep: Sweep, **facts: Any) -> dict[int, str]:
    """Number -> reason of the guards that fail."""
    found = judge(plan, sweep, summarise(sweep, load), [], GUARDS, **(CLEAN | {"load": load} | facts))
    return {guard.number: guard.reason for guard in found if not guard.valid}


CLOSED = {"arrival": "closed", "rates_rps": [], "users": [3], "think_time_s": 0.1, "requests_per_user": 40}


@pytest.mark.clock
def test_users_wait_for_their_answers_and_think_and_never_show_a_capacity() -> None:
    load, plan = other(**CLOSED)
    with fake_server(Answer(gap_s=0.04)) as server:
        sweep = run_sweep(server, plan, duration_s=load.duration_s, timeout_s=3.0)
    assert verdicts_of(load, plan, sweep) == {}
    for _, cell in sweep.requests.group_by("shape"):
        # By the server's own record: never more than three at once.
        edges = [(server.seen[name].received_at, 1) for name in cell["request_id"]]
        edges += [(server.seen[name].chunk_at[-1], -1) for name in cell["request_id"]]
        in_flight = 0
        for _, step in sorted(edges):
            in_flight += step
            assert in_flight <= 3
        # Each user's request comes when the one before has ended and the pause that was drawn is over.
        rows = cell.join(plan.arrivals.select("request_id", "think_s"), on="request_id", maintain_order="left")
        for _, own in rows.group_by("user"):
            before = [0.0, *own["ended_s"].to_list()[:-1]]
            due = [end + pause for end, pause in zip(before, own["think_s"], strict=True)]
            assert own["intended_s"].to_list() == pytest.approx(due, abs=1e-6)
        assert cell["intended_s"].max() < load.duration_s
        assert (cell["sent_s"] - cell["intended_s"]).median() < 0.02
    cells = summarise(sweep, load)
    document = summary_document(cells, [], sweep, load)
    assert document["capacity"] == {}
    assert any(line.startswith("no capacity: ") for line in report_lines(document, []))
    assert not [name for name in flat_metrics(cells, []) if "capacity" in name]
    assert "sweep/short/u3/ttft_p50_ms" in flat_metrics(cells, [])


def test_a_user_without_prompts_makes_the_run_invalid() -> None:
    load, plan = other(**CLOSED | {"requests_per_user": 2})
    with fake_server(Answer(gap_s=0.0)) as server:
        sweep = run_sweep(server, plan, duration_s=load.duration_s, timeout_s=3.0)
    failed = verdicts_of(load, plan, sweep)
    assert list(failed) == [5]
    assert "6 users had used all their prompts before the cell was over" in failed[5]


@pytest.mark.clock
def test_shapes_together_run_at_once_and_the_servers_counters_belong_to_the_level() -> None:
    shapes = [{"name": "long", "prompt_tokens": 40, "output_tokens": 1, "weight": 0.5},
              {"name": "short", "prompt_tokens": 8, "output_tokens": 5}]  # fmt: skip
    load, plan = other(together=True, shapes=shapes)
    with fake_server(Answer(gap_s=0.03)) as server:
        sweep = run_sweep(server, plan, duration_s=load.duration_s, timeout_s=3.0)
    assert verdicts_of(load, plan, sweep) == {}
    spans = {shape: [server.seen[name].received_at for name in cell["request_id"]]
             for (shape,), cell in sweep.requests.group_by("shape")}  # fmt: skip
    assert {shape: len(times) for shape, times in spans.items()} == {"long": 5, "short": 10}
    assert min(spans["long"]) < max(spans["short"])
    assert min(spans["short"]) < max(spans["long"])
    # 5 x 40 + 10 x 8 tokens in, 5 x 1 + 10 x 5 out, under each shape.
    for shape in ("long", "short"):
        counted = sweep.counters[shape, "r10"]
        assert (counted["prompt_tokens"], counted["output_tokens"]) == (280, 55)
    assert set(sweep.samples["shape"]) == {None}
    cells = summarise(sweep, load)
    assert sorted(cells.select("shape", "n", "rate_rps").rows()) == [("long", 5, 5.0), ("short", 10, 10.0)]


@pytest.mark.clock
def test_declared_prefixes_are_held_against_the_servers_counter() -> None:
    shapes = [{"name": "long", "prompt_tokens": 40, "output_tokens": 1,
               "shared_prefix": {"tokens": 32, "groups": 1, "share": 1.0}},
              {"name": "short", "prompt_tokens": 8, "output_tokens": 5}]  # fmt: skip
    load, plan = other(shapes=shapes)
    # The server's cache works in blocks of 16: 9 of 10 prompts have 32 of their 40 tokens there, which is 72%.
    hits = {"prefix_cache_queries": 400.0, "prefix_cache_hits": 288.0}
    with fake_server(Answer(gap_s=0.0)) as server:
        sweep = run_sweep(server, plan, duration_s=load.duration_s, timeout_s=3.0)
    counters = {**sweep.counters, ("long", "r10"): sweep.counters["long", "r10"] | hits}
    cached = Sweep(sweep.requests, sweep.samples, counters, sweep.conditions)
    assert verdicts_of(load, plan, cached, cache_block_tokens=16) == {}
    # No hits where they were declared, and hits where the cache should have none, are both INVALID.
    unused = verdicts_of(load, plan, sweep, cache_block_tokens=16)
    assert "took 0.0% of the prompt tokens of long r10" in unused[1]
    assert "where the declared prefixes give 72.0%" in unused[1]
    assert list(verdicts_of(load, plan, cached)) == [1]


def test_prompts_that_are_repeated_on_purpose_are_invalid() -> None:
    load, plan = other(repeat_prompts=2)
    with fake_server(Answer(gap_s=0.0), reuse=True) as server:
        sweep = run_sweep(server, plan, duration_s=load.duration_s, timeout_s=3.0)
    failed = verdicts_of(load, plan, sweep)
    assert list(failed) == [1]
    assert "16 of 24 prompts repeat another" in failed[1]


# --- the real engine ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, root: Path) -> Path:
    """A folder with the tiny profile's settings, a random two-layer Llama as the served checkpoint, and text."""
    from oneaxis.checkpoint.fetch import fetch_model
    from oneaxis.config import compose, derived_paths, write_params

    folder = tmp_path_factory.mktemp("project")
    config = compose(root / "conf", ["profile=tiny", "quantize=none", "load.duration_s=4",
                                     "load.warmup_requests=2", "guards.max_send_lag_p99_ms=500",
                                     "guards.max_server_disagreement_ms=250"])  # fmt: skip
    write_params(config, folder)
    checkpoint = folder / derived_paths(config.model_dump())["served"]
    checkpoint.parent.mkdir(parents=True)
    fetch_model(config.model, seed=0, root=root, out=checkpoint)
    prepared = folder / "artifacts" / "prepare_data"
    prepared.mkdir()
    texts = [" ".join(f"word{(index * 7 + word) % 531} goes on" for word in range(60)) for index in range(40)]
    rows = [{"doc_id": f"d{index}", "source": "made", "text": text} for index, text in enumerate(texts)]
    pl.DataFrame(rows).write_parquet(prepared / "heldout.parquet")
    return folder


ONE = {"rates_rps": [], "duration_s": 2.0}
ARRIVALS: dict[str, dict[str, Any]] = {
    "ramp": {"arrival": "ramp", "rates_rps": [2.0, 8.0], "duration_s": 2.0, "together": True},
    "closed": ONE | {"arrival": "closed", "users": [3], "think_time_s": 0.1, "requests_per_user": 100},
    "trace": ONE | {"arrival": "trace", "shapes": [], "trace": "t.csv", "trace_speed": [1.0]},
    "shared": {
        "arrival": "constant",
        "duration_s": 2.0,
        "shapes": [
            {"name": "rag", "prompt_tokens": 300, "output_tokens": 3,
             "shared_prefix": {"tokens": 260, "groups": 2, "share": 1.0}},
            {"name": "plain", "prompt_tokens": 300, "output_tokens": {"distribution": "uniform", "min": 2, "max": 5}},
        ],
    },
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.clock
def test_real_engine_clean_and_with_prompts_that_repeat(project: Path) -> None:
    from transformers import AutoTokenizer

    from oneaxis.config import load_stage_config
    from oneaxis.load.plan import text_tokens
    from oneaxis.serve import realised_config, running_engine

    config, paths, _ = load_stage_config(project, "sweep")
    served = project / paths["served"]
    tokenizer = AutoTokenizer.from_pretrained(served)
    texts = pl.read_parquet(project / "artifacts" / "prepare_data" / "heldout.parquet")["text"]
    text = text_tokens(texts, lambda t: tokenizer.encode(t, add_special_tokens=False), set(tokenizer.all_special_ids))
    load = config.load.model_copy(
        update={
            "shapes": [
                shape.model_copy(update={"prompt_tokens": 300}) if shape.name == "prefill_heavy" else shape
                for shape in config.load.shapes
            ],
            "rates_rps": [5.0],
        }
    )
    plan = draw_plan(load, text, seed=0, session="a", repetition=0)
    again = draw_plan(load, text, seed=1, session="b", repetition=0)
    same = again.arrivals["prompt_token_ids"].to_list()[0]
    one_shape = again.arrivals.filter(pl.col("shape") == "prefill_heavy")
    copies = pl.Series("prompt_token_ids", [same] * one_shape.height, dtype=pl.List(pl.Int32))
    repeated = Plan(one_shape.with_columns(copies), again.warmups)
    limits = {"duration_s": load.duration_s, "timeout_s": load.request_timeout_s}
    arrivals = {name: Load.model_validate(load.model_dump() | changes) for name, changes in ARRIVALS.items()}
    trace = pl.DataFrame([(k, 0.4 * k, 20 + k, 3 + k % 3) for k in range(1, 5)], schema=TRACE_SCHEMA, orient="row")
    plans = {
        name: draw_plan(section, text, seed=2, session=name, repetition=0, trace=trace)
        for name, section in arrivals.items()
    }
    with running_engine(served, config.serve, log_path=project / "engine.log") as engine:
        realised = realised_config(engine, served)
        draws = draw_answers(engine, text[:16].tolist(), seed=3)
        sweep = run_sweep(engine, plan, **limits)
        cached = run_sweep(engine, repeated, **limits)
        searching = load.model_copy(update={
            "shapes": load.shapes[1:], "rates_rps": [10.0], "duration_s": 1.5,
            "search": Search(probes=2, resolution=0.1, users=4, max_drift=9.0),
        })  # fmt: skip
        keyed = {"seed": 0, "session": "c", "repetition": 0}
        probes, searched, capacities = run_load(engine, plan, searching, text, most_users=8, **keyed)
        seen = {name: run_sweep(engine, plans[name], duration_s=2.0, timeout_s=20.0) for name in plans}
        # Ten more, short ones, each with prompts and draws of its own.
        short = load.model_copy(
            update={"arrival": "constant", "rates_rps": [8.0], "duration_s": 0.5, "warmup_requests": 1}
        )
        clean_runs = []
        for seed in range(10):
            own = draw_plan(short, text, seed=seed, session="clean", repetition=seed)
            drawn = draw_answers(engine, text[seed : seed + 16].tolist(), seed=100 * seed)
            clean_runs.append((own, run_sweep(engine, own, duration_s=0.5, timeout_s=20.0), drawn))
    differences = realised["differences"]

    clean = {"load": load, "lease": HELD, "tenants": ALONE, "draws": draws}
    cells = summarise(sweep, load)
    verdicts = judge(plan, sweep, cells, differences, config.guards, **clean)
    assert [guard for guard in verdicts if not guard.valid] == []
    assert cells["failed"].to_list() == [0, 0]
    assert cells["prefix_hit_rate"].to_list() == [0, 0]
    # One token a step and request, but for steps that took several requests.
    assert (cells["tokens_per_step"] >= 1).all()
    assert (cells["server_finished"] == cells["n"]).all()
    assert cells["accepted_per_draft"].to_list() == [None, None]
    for name in ("ttft", "itl", "e2e", "queue", "prefill", "decode"):
        counted = sweep.histograms.filter(pl.col("histogram") == name).group_by("shape").agg(pl.col("count").sum())
        assert dict(counted.iter_rows()) == dict(cells.select("shape", f"server_{name}_count").iter_rows())
    # The server's own counters, exactly: tokens in and out of the measured requests.
    for cell in cells.iter_rows(named=True):
        shape = next(shape for shape in load.shapes if shape.name == cell["shape"])
        assert cell["server_prompt_tokens"] == cell["n"] * shape.prompt_tokens
        assert cell["server_output_tokens"] == cell["n"] * shape.output_tokens
    assert [condition["prefix_cache_reset"] for condition in sweep.conditions] == [True, True]

    for own, measured, drawn in clean_runs:
        found = judge(own, measured, summarise(measured, short), differences, config.guards,
                      **clean | {"load": short, "draws": drawn})  # fmt: skip
        assert [guard for guard in found if not guard.valid] == []
        assert measured.requests.height == 8

    # A search: the endpoints, the given rate, two that it chose, and one user again; every prompt its own.
    assert capacities is not None
    found_one = capacities[load.shapes[1].name]
    found_cells = summarise(searched, searching)
    chosen = [f"r{probe.rate_rps:g}" for probe in found_one.probes]
    assert found_cells["level"].to_list() == ["u1", "u4", *chosen, "u1b"]
    assert chosen[0] == "r10"
    assert len(set(chosen)) == 3
    verdicts = judge(probes, searched, found_cells, differences, config.guards, **clean | {"load": searching})
    assert [guard for guard in verdicts if not guard.valid] == []
    assert found_one.saturated_rps is not None
    assert found_one.saturated_rps > found_cells["ok"][0] / 1.6
    document = json.loads(json.dumps(summary_document(found_cells, verdicts, searched, searching, capacities)))
    assert document["search"][load.shapes[1].name]["serial_e2e_ms"] == found_cells["e2e_p50_ms"][0]
    assert any(": capacity " in line for line in report_lines(document, verdicts))
    named = flat_metrics(found_cells, verdicts, capacities, searching)
    assert f"sweep/{load.shapes[1].name}/r10/ttft_p50_ms" in named
    assert not [name for name in named if f"/{chosen[1]}/" in name or "/u1" in name]

    found = judge(repeated, cached, summarise(cached, load), differences, config.guards, **clean)
    assert [guard.number for guard in found if not guard.valid] == [1]
    # Whole blocks only: up to 256 of 300 tokens at a block size of 128, for all requests but the first.
    assert summarise(cached, load)["prefix_hit_rate"][0] > 0.5
    assert "prefix cache" in found[0].reason

    # However requests arrive, what was drawn is what was sent, and nothing is INVALID.
    for name, section in arrivals.items():
        of_cells = summarise(seen[name], section)
        facts = clean | {"load": section, "cache_block_tokens": cache_block_tokens(realised)}
        verdicts = judge(plans[name], seen[name], of_cells, differences, config.guards, **facts)
        assert [(name, guard.reason) for guard in verdicts if not guard.valid] == []
        assert of_cells["failed"].sum() == 0
        assert of_cells["n"].sum() == due(plans[name], seen[name].requests).height
    assert set(seen["closed"].requests["user"].to_list()) == {0, 1, 2}
    assert seen["trace"].requests["output_tokens"].to_list() == [4, 5, 3, 4]
    # Two blocks of 128 tokens of each prompt but the first of its group, by the server's own counter.
    assert 0.3 < summarise(seen["shared"], arrivals["shared"])["prefix_hit_rate"][0] < 256 / 300


@pytest.mark.slow
def test_real_engine_killed_in_the_middle_of_the_load(project: Path, root: Path) -> None:
    stage = subprocess.Popen(
        [sys.executable, str(root / "stages" / "sweep.py")],
        cwd=project,
        env=os.environ | {"PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    log = project / ".oneaxis" / "logs" / "sweep-engine.log"
    deadline = time.monotonic() + 300
    # The load has begun when the cache was reset and a request came after it.
    while time.monotonic() < deadline and stage.poll() is None:
        lines = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
        if "POST /v1/completions" in lines.partition("Resetting prefix cache")[2]:
            break
        time.sleep(0.05)
    # The engine core, the server's own child: the server itself is still there to answer for a moment.
    core = psutil.Process(int(re.findall(r"EngineCore pid=(\d+)", lines)[-1]))
    engine = [core, *core.parents()[:2]]
    core.kill()
    killed = time.monotonic()
    _, error = stage.communicate(timeout=60)
    assert stage.returncode == 1, error
    assert "the engine died" in error.splitlines()[-1]
    assert time.monotonic() - killed < 40
    assert not (project / "artifacts" / "sweep").exists()
    assert not list((project / "artifacts").glob(".tmp-*"))
    assert [process for process in engine if process.is_running() and process.status() != psutil.STATUS_ZOMBIE] == []
