"""Each guard passes a clean run and fails when its fault is injected, naming it. Oracle: the injected fault."""

import polars as pl
import pytest

from oneaxis.judge.guards import (
    Guard,
    exclusive_device,
    load_fidelity,
    output_limit,
    realised_as_asked,
    survivors,
    token_truth,
    unique_prompts,
)
from oneaxis.load.client import REQUEST_SCHEMA

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
