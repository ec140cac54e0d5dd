"""Each guard passes a clean run and fails when its fault is injected, naming it. Oracle: the injected fault."""

import math

import polars as pl
import pytest

from oneaxis.judge.guards import (
    Guard,
    exclusive_device,
    frozen_draws,
    load_fidelity,
    output_limit,
    realised_as_asked,
    survivors,
    token_truth,
    unique_prompts,
    warmed_up,
)
from oneaxis.judge.stalls import stalled, stalls
from oneaxis.load.client import REQUEST_SCHEMA
from oneaxis.load.draws import DRAWS_SCHEMA, redraw

N = 20
ASKED = 6


def requests(**faults: dict[int, object]) -> pl.DataFrame:
    """Twenty answers as asked, then `column={index: value}` injected."""
    rows = [
        {
            "shape": "s",
            "service_class": "default",
            "level": "r0.5",
            "rate_rps": 0.5,
            "request_id": f"r{index}",
            "intended_s": float(index),
            "sent_s": index + 0.002,
            "first_token_s": index + 0.1,
            "done_s": index + 0.2,
            "ended_s": index + 0.2,
            "asked_prompt_tokens": 10,
            "asked_output_tokens": ASKED,
            "prompt_tokens": 10,
            "output_tokens": ASKED,
            "chunks": ASKED,
            "token_times": [index + 0.1] * ASKED,
            "status": "ok",
            "error": None,
            "finish_reason": "length",
        }
        for index in range(N)
    ]
    for column, values in faults.items():
        for index, value in values.items():
            rows[index][column] = value
    return pl.DataFrame(rows, schema=REQUEST_SCHEMA)


def lost(index: int, arrived: int = 2) -> dict[str, dict[int, object]]:
    """The faults that make one request a timeout after some tokens."""
    return {
        "status": {index: "timeout"},
        "prompt_tokens": {index: None},
        "output_tokens": {index: None},
        "finish_reason": {index: None},
        "token_times": {index: [1.0] * arrived},
    }


def check(guard: Guard, *reasons: str) -> None:
    """The guard fails for exactly these reasons (valid without), and says what to do."""
    assert guard.valid == (not reasons), guard
    assert bool(guard.recommendation) == bool(reasons)
    for reason in reasons:
        assert reason in guard.reason
    assert guard.reason.count(";") == max(len(reasons) - 1, 0), guard.reason
    assert set(guard.as_json()) == {"guard", "name", "valid", "evidence", "reason", "recommendation"}


PROMPTS = [[1, 2, 3, 4, 5], [1, 2, 3, 9, 5], [7, 2, 3, 4, 5]]


def test_1_unique_prompts() -> None:
    check(unique_prompts(PROMPTS, {"s r1": 0.0, "s r2": 0.01}, 0.01))
    check(unique_prompts([*PROMPTS, PROMPTS[0]], {"s r1": 0.0}, 0.01), "1 of 4 prompts repeat another")
    # The first four tokens are shared, and then they differ: a block of a cache may be.
    check(unique_prompts([*PROMPTS, [7, 2, 3, 4, 6]], {"s r1": 0.0}, 0.01), "share their first 4 tokens")
    check(unique_prompts(PROMPTS, {"s r1": 0.0, "s r2": 0.2}, 0.01), "20.0% of the prompt tokens of s r2")
    check(unique_prompts(PROMPTS, {"s r1": None}, 0.01), "no prefix-cache counters")


def test_2_token_truth() -> None:
    check(token_truth(requests(), 200, 120, 0.01))
    # 121.2 is 1% over 120.
    check(token_truth(requests(), 200, 121, 0.01))
    check(token_truth(requests(), 200, 122, 0.01), "counter of output tokens differs")
    check(token_truth(requests(), 150, 120, 0.01), "counter of prompt tokens differs")
    check(token_truth(requests(), 200, None, 0.01), "counter of output tokens is missing")
    check(token_truth(requests(prompt_tokens={3: 11}), 201, 120, 0.01), "1 of 20 requests were read as another")
    check(token_truth(requests(output_tokens={3: 5}), 200, 119, 0.01), "1 of 20 answers have another number")
    check(token_truth(requests(output_tokens={3: None}), 200, 114, 0.06), "1 of 20 answers have another number")
    # A chunk of two tokens that is counted as one.
    check(token_truth(requests(token_times={3: [1.0, 2.0]}), 200, 120, 0.01), "tokens seen to arrive differ from")


def test_2_a_failed_request_leaves_the_server_a_range() -> None:
    # 19 answers of 6 = 114, and a lost one of which 2 arrived: the server made 116 to 120.
    for served in (116, 118, 120):
        check(token_truth(requests(**lost(4)), 200, served, 0.001))
    check(token_truth(requests(**lost(4)), 200, 115, 0.001), "counter of output tokens differs")
    check(token_truth(requests(**lost(4)), 200, 121, 0.001), "counter of output tokens differs")


def test_3_realised_config() -> None:
    check(realised_as_asked([]))
    difference = {"key": "kv_cache_dtype", "asked": "auto", "resolved": "fp8", "reason": "kv_cache_scheme"}
    check(realised_as_asked([difference]), "kv_cache_dtype: asked auto, resolved fp8")


def test_5_load_fidelity() -> None:
    planned = {"s r0.5": N}
    check(load_fidelity(requests(), planned, 50))
    check(load_fidelity(requests(sent_s={3: 3.08}), planned, 50), "p99 80.0 ms")
    check(load_fidelity(requests(sent_s={3: None}), planned, 50), "s r0.5: 19 of 20 scheduled")
    check(load_fidelity(requests(), {"s r0.5": N, "s r2": 7}, 50), "s r2: 0 of 7 scheduled")
    check(load_fidelity(requests(sent_s={3: 2.5}), planned, 50), "1 requests were sent before their moment")
    # One late request in 200 does not move a p99.
    many = pl.concat([requests(sent_s={3: 3.08}), *[requests()] * 9])
    check(load_fidelity(many, {"s r0.5": 10 * N}, 50))


def summary(**changes: object) -> pl.DataFrame:
    row = {"shape": "s", "level": "r0.5", "rate_rps": 0.5, "n": N, "ok": N, "attainment": 1.0}
    row |= {f"{latency}_p{percent}_ms": 1.0 for latency in ("ttft", "e2e") for percent in (50, 90, 99)}
    return pl.DataFrame([row | changes])


def test_6_survivors() -> None:
    scheduled = [f"r{index}" for index in range(N)]
    check(survivors(scheduled, requests(), summary()))
    # A failed request is no fault of the run, when it counts: p99 of 20 is the slowest, which is not reached.
    gone = {"ttft_p99_ms": None, "e2e_p99_ms": None}
    check(survivors(scheduled, requests(**lost(4)), summary(ok=19, attainment=0.95, **gone)))
    # The same, with the tail of the survivors.
    check(survivors(scheduled, requests(**lost(4)), summary(ok=19, attainment=0.95)),
          "a ttft p99 with only 19 of 20", "a e2e p99 with only 19 of 20")  # fmt: skip
    check(survivors(scheduled, requests(**lost(4)), summary(ok=19, **gone)), "an attainment of 100.0% with 19 of 20")
    # The failed one is dropped from the table, and from the summary.
    survived = requests(**lost(4)).filter(pl.col("status") == "ok")
    check(survivors(scheduled, survived, summary(n=19, ok=19)), "1 requests have no row, such as r4")
    check(survivors(scheduled, requests(**lost(4)), summary(n=19, ok=19, attainment=0.95, **gone)),
          "summed up over 19 requests (19 ok) of 20 (19 ok)")  # fmt: skip
    check(survivors(scheduled, requests(request_id={4: "r5"}), summary()),
          "1 requests have no row", "1 requests have more than one row, such as r5")  # fmt: skip
    check(survivors(scheduled[:-1], requests(), summary()), "1 requests were never scheduled, such as r19")


def test_7_output_limit() -> None:
    check(output_limit(requests()))
    check(
        output_limit(requests(finish_reason={2: "stop", 3: "stop"})),
        "2 of 20 answers ended",
    )
    check(output_limit(requests(output_tokens={2: 4})), "1 of 20 answers have another length than asked, such as r2: 4")
    # A failed request has no length to honour.
    check(output_limit(requests(**lost(4))))


def test_10_exclusive_device() -> None:
    check(exclusive_device({"device": "cpu 0-1", "exclusive": True, "waited_s": 3.0}))
    check(exclusive_device({"device": "cpu 0-1", "exclusive": False, "waited_s": 0.0}), "cpu 0-1 was shared")
    check(exclusive_device(None), "the device was not held")


@pytest.mark.parametrize(
    "guard", [exclusive_device(None), token_truth(requests(), 200, 120, 0.01), output_limit(requests())]
)
def test_evidence_is_json(guard: Guard) -> None:
    import json

    json.dumps(guard.as_json(), allow_nan=False)


def calls(began: list[float], waits: list[list[float]], prompts: list[int] | None = None) -> pl.DataFrame:
    """Answers whose tokens came after these waits, in seconds."""
    prompts = prompts or [8] * len(began)
    rows = []
    for index, (start, own, asked) in enumerate(zip(began, waits, prompts, strict=True)):
        times = [start + sum(own[: k + 1]) for k in range(len(own))]
        rows.append({"shape": "s", "level": "r1", "rate_rps": 1.0, "request_id": f"r{index}", "intended_s": start,
                     "sent_s": start, "first_token_s": times[0], "done_s": times[-1], "ended_s": times[-1],
                     "asked_prompt_tokens": asked, "asked_output_tokens": len(own), "prompt_tokens": asked,
                     "output_tokens": len(own), "chunks": len(own), "token_times": times, "status": "ok",
                     "error": None, "finish_reason": "length"})  # fmt: skip
    return pl.DataFrame(rows, schema=REQUEST_SCHEMA)


STALL_LOAD = {"service_class": {"ttft_ms": 1500.0, "tpot_ms": 150.0}, "classes": {}, "shapes": [], "duration_s": 20.0}
EVEN = [0.2, 0.1, 0.1, 0.1]
"""Half a second."""


def test_9_a_call_that_hung_is_a_stall_and_carries_the_headline_from_a_tenth_on() -> None:
    began = [float(k) for k in range(20)]
    one = calls(began, [[0.2, 3.0, 0.1, 0.1] if k == 7 else EVEN for k in range(20)])
    assert stalled(one, STALL_LOAD).arg_true().to_list() == [7]
    # p90 of twenty is the eighteenth: one of twenty cannot move it, three do.
    check(stalls(one, STALL_LOAD, 0.25))
    three = calls(began, [[0.2, 3.0, 0.1, 0.1] if k in (7, 9, 11) else EVEN for k in range(20)])
    guard = stalls(three, STALL_LOAD, 0.25)
    # TPOT of a stalled call: 3.2 / 3 s, of the others 0.1 s.
    check(guard, "3 of 20 calls stalled, and without them tpot_p90_ms is 100, not 1067")
    assert guard.evidence["stalled"] == 3
    check(stalls(three, STALL_LOAD, 1.0))


def test_9_a_queue_a_long_answer_and_a_long_prompt_are_no_stalls() -> None:
    began = [float(k) for k in range(20)]
    # Eight arrive at once and are served one after the other, half a second each.
    burst = [*began, *[20.0] * 8]
    waits = [EVEN] * 20 + [[0.2 + 0.5 * place, 0.1, 0.1, 0.1] for place in range(8)]
    assert not stalled(calls(burst, waits), STALL_LOAD).any()
    answer = [0.2, *[0.1] * 80]
    assert not stalled(calls(began, [answer if k == 3 else EVEN for k in range(20)]), STALL_LOAD).any()
    prompt = calls(began, [[8.0, 0.1, 0.1, 0.1] if k == 3 else EVEN for k in range(20)],
                   [320 if k == 3 else 8 for k in range(20)])  # fmt: skip
    assert not stalled(prompt, STALL_LOAD).any()
    # As long, and of no longer a prompt.
    assert stalled(prompt.with_columns(asked_prompt_tokens=pl.lit(8)), STALL_LOAD).sum() == 1


def test_9_a_prompt_that_is_computed_meanwhile_is_no_stall() -> None:
    """Two common starts of 256 of 384 tokens: the first of each finds nothing, and computes three times as much."""
    began = [2.0 * k for k in range(10)]
    hit, miss = [0.2, *[0.03] * 7], [0.53, *[0.03] * 7]
    waits = [miss if k in (0, 5) else hit for k in range(10)]
    reused = {f"r{k}": 256 for k in range(10) if k not in (0, 5)}
    cell = calls(began, waits, [384] * 10)
    assert not stalled(cell, STALL_LOAD, reused).any()
    # Without a cache they are stalls: nothing says why they took so long.
    assert stalled(cell, STALL_LOAD).arg_true().to_list() == [0, 5]
    check(stalls(cell, STALL_LOAD, 0.25), "2 of 10 calls stalled, and without them ttft_p90_ms is 200, not 530")
    check(stalls(cell, STALL_LOAD, 0.25, reused))
    # A call beside the second of them, whose tokens wait for that prompt.
    began[4], waits[4] = 9.81, [0.2, 0.52, *[0.03] * 6]
    cell = calls(began, waits, [384] * 10)
    assert stalled(cell, STALL_LOAD).arg_true().to_list() == [0, 4]
    assert not stalled(cell, STALL_LOAD, reused).any()
    # A first that takes three times as long as it should, one that finds its start and does not run, and a call that
    # waits for no prompt.
    for place, own in ((5, [1.6, *[0.03] * 7]), (7, miss), (8, [0.2, 0.52, *[0.03] * 6])):
        slow = calls(began, [own if k == place else wait for k, wait in enumerate(waits)], [384] * 10)
        assert stalled(slow, STALL_LOAD, reused)[place], place


def test_9_a_prompt_of_another_shape_is_computed_meanwhile_where_shapes_go_together() -> None:
    began = [2.0 * k for k in range(10)]
    short = calls(began, [[0.2, 3.0, 0.1, 0.1] if k == 3 else EVEN for k in range(10)])
    long = calls([6.3], [[2.9, 0.1, 0.1, 0.1]], [400]).with_columns(shape=pl.lit("long"))
    both = pl.concat([short, long])
    assert not stalled(both, STALL_LOAD | {"together": True}).any()
    assert stalled(both, STALL_LOAD | {"together": False}).arg_true().to_list() == [3]


def test_9_an_engine_that_stands_still_stalls_all_who_wait() -> None:
    began = [float(k) for k in range(20)] + [20.0, 20.1, 20.2]
    waits = [EVEN] * 20 + [[6.0, 0.1, 0.1, 0.1], [5.9, 0.1, 0.1, 0.1], [5.8, 0.1, 0.1, 0.1]]
    assert stalled(calls(began, waits), STALL_LOAD).arg_true().to_list() == [20, 21, 22]


def draws(answers: list[list[int]], logprob: float | None) -> pl.DataFrame:
    rows = [{"call": k, "seed": k, "token_ids": ids, "logprob": logprob} for k, ids in enumerate(answers)]
    return pl.DataFrame(rows, schema=DRAWS_SCHEMA)


def test_8_frozen_draws() -> None:
    check(frozen_draws(draws([[1, 2], [1, 3], [2, 2], [4, 4]], -20.0)))
    # Of four calls two agree; each of three others does by chance with exp(-20): 4 x (3 exp(-20)) = 2.5e-8.
    guard = frozen_draws(draws([[1, 2], [1, 2], [2, 2], [4, 4]], -20.0))
    check(guard, "2 of 4 sampled answers with different seeds are the same 2 tokens")
    assert guard.evidence["chance_of_the_repeats"] == pytest.approx(12 * math.exp(-20), rel=1e-6)
    # A model that is nearly certain repeats itself rightly.
    check(frozen_draws(draws([[1, 2]] * 4, math.log(0.9))))
    assert frozen_draws(draws([[1, 2]] * 4, math.log(0.5))).evidence["chance_of_the_repeats"] == 0.5
    check(frozen_draws(draws([[1, 2], [1, 2]], None)), "and the engine tells no log-probability")
    check(frozen_draws(draws([[1, 2]], -20.0)), "1 answers were sampled")


def test_8_names_the_cause_where_it_is_known() -> None:
    """vLLM's CPU build, with guesses; not a GPU, not without them, and not where the engine tells neither."""
    repeated = draws([[1, 2]] * 4, -20.0)
    for resolved, told in [
        ({"speculative": True, "device": "cpu"}, "issue 55005"),
        ({"speculative": True, "device": "cuda"}, "honour `seed`"),
        ({"speculative": False, "device": "cpu"}, "honour `seed`"),
        ({}, "honour `seed`"),
    ]:
        guard = frozen_draws(repeated, redraw({"resolved": resolved}))
        assert not guard.valid
        assert told in guard.recommendation


def test_10_other_work_on_the_machine() -> None:
    held = {"device": "cpu 0-1", "exclusive": True, "waited_s": 0.0}
    idle = {"cpus": 2, "other_cpus": 0.4, "busiest": ["sshd"], "gpu_processes": []}
    check(exclusive_device(held, idle, 0.25))
    check(exclusive_device(held, idle, 0.1), "other processes kept 0.40 of 2 CPUs busy: sshd")
    check(exclusive_device(held, idle | {"gpu_processes": ["python (process 7, 9 MiB)"]}, 0.25), "on the GPU before")


def test_13_warm_up() -> None:
    cell = {"shape": "s", "level": "r1", "warmup_requests": 2, "warmup_ok": 2, "prefix_cache_reset": True}
    check(warmed_up([cell, cell], ["w0", "w1"], ["r0"]))
    check(warmed_up([cell, cell | {"warmup_ok": 1}], ["w0"], ["r0"]), "s r1: 1 of 2 requests of the warm-up succeeded")
    check(warmed_up([cell | {"warmup_requests": 0, "warmup_ok": 0}], [], ["r0"]), "1 of 1 cells had no warm-up")
    check(warmed_up([cell, cell | {"warmup_requests": 3, "warmup_ok": 3}], [], ["r0"]), "by 2 to 3 requests")
    check(warmed_up([cell], ["r0"], ["r0"]), "1 requests of the warm-up are measured too, such as r0")
