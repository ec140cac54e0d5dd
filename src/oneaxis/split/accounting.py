"""What a split deployment did, from its requests and its servers' counters: pure functions.

Every request goes through four phases: prefill on the first engine, the wait for its keys and values on the second,
that engine's first step, and decoding. The servers' histograms give the means; the client's own times of the same
requests must agree with their sum, or the account has a hole.

Decode slots held (Little's law) = rate x output tokens x TPOT; a deployment should keep them under 80% of
`max_num_seqs`. Check: 8 requests/s x 128 tokens x 10.4 ms = 10.6 slots.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from oneaxis.serve.metrics import metric_total

SLOTS_SHARE = 0.8
"""Of `max_num_seqs`: above it a burst has to wait."""
HOLE = 0.05
"""Share of the client's time that the servers' account may leave open, or `HOLE_MS` where that is more."""
HOLE_MS = 5.0
FIRST_STEP_SHARE = 0.9
"""A decoding engine that was sent all but the last token of a prompt has so much of it from outside, at least."""

COUNTERS = {
    "prompt_tokens": ("vllm:prompt_tokens_total", {}),
    "transferred_tokens": ("vllm:prompt_tokens_by_source_total", {"source": "external_kv_transfer"}),
    "output_tokens": ("vllm:generation_tokens_total", {}),
    "transfers": ("vllm:nixl_xfer_time_seconds_count", {}),
    "transfer_s": ("vllm:nixl_xfer_time_seconds_sum", {}),
    "transferred_bytes": ("vllm:nixl_bytes_transferred_sum", {}),
    "failed_transfers": ("vllm:nixl_num_failed_transfers_total", {}),
    "ttft_s": ("vllm:time_to_first_token_seconds_sum", {}),
    "queue_s": ("vllm:request_queue_time_seconds_sum", {}),
    "prefill_s": ("vllm:request_prefill_time_seconds_sum", {}),
    "decode_s": ("vllm:request_decode_time_seconds_sum", {}),
    "e2e_s": ("vllm:e2e_request_latency_seconds_sum", {}),
    "finished": ("vllm:e2e_request_latency_seconds_count", {}),
}
"""Name -> metric of the server, and the labels of the samples that are summed."""


def read(metrics: Mapping[str, float]) -> dict[str, float]:
    """`COUNTERS` of one server as they stand; one that it does not have is 0."""
    values = {}
    for name, (metric, labels) in COUNTERS.items():
        try:
            values[name] = metric_total(metrics, metric, **labels)
        except KeyError:
            values[name] = 0.0
    return values


def gained(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """What was counted in between."""
    return {name: after[name] - before[name] for name in COUNTERS}


def decode_slots(rate_rps: float, output_tokens: float, tpot_s: float) -> float:
    """Requests that decode at a time, by Little's law."""
    return rate_rps * output_tokens * tpot_s


def account(
    rows: Sequence[Mapping[str, Any]],
    prefill: Mapping[str, float],
    decode: Mapping[str, float],
    *,
    transfers: Mapping[str, float],
    rate_rps: float,
    output_tokens: int,
    running_mean: float | None,
    max_num_seqs: int,
) -> dict[str, Any]:
    """The phases, in ms a request, and the slots.

    Args:
        rows: of the requests: prefill_s, decode_s (the client's times at the two engines), equal, prompt_tokens.
        prefill, decode: what the two servers counted for them (`gained`).
        transfers: the same of the server that moves the data: the decoding one pulls, the prefilling one pushes.
        rate_rps: that was reached: requests by the time from the first sent to the last ended.
        running_mean: time average of the decoding server's requests that run, over that time.

    Returns:
        Numbers for `summary.json`, with `invalid`, the reasons why this is no split deployment, and `warnings`.
    """
    n = len(rows)
    tpot_s = decode["decode_s"] / max(1.0, n * (output_tokens - 1))
    client_ms = 1000 * sum(row["prefill_s"] + row["decode_s"] for row in rows) / n
    server_ms = 1000 * (prefill["e2e_s"] + decode["e2e_s"]) / n
    prompts = sum(row["prompt_tokens"] for row in rows)
    slots = decode_slots(rate_rps, output_tokens, tpot_s)
    found: dict[str, Any] = {
        "requests": n,
        "prompt_tokens": prompts,
        "transferred_tokens": decode["transferred_tokens"],
        "transferred_share": decode["transferred_tokens"] / prompts,
        "transferred_bytes": transfers["transferred_bytes"],
        "bytes_per_token": transfers["transferred_bytes"] / decode["transferred_tokens"]
        if decode["transferred_tokens"] else 0.0,
        "transfer_ms": 1000 * transfers["transfer_s"] / n,
        "answers_equal": sum(row["equal"] for row in rows) / n,
        "prefill_ms": 1000 * prefill["e2e_s"] / n,
        "first_token_ms": 1000 * decode["ttft_s"] / n,
        "decode_ms": 1000 * decode["decode_s"] / n,
        "client_ms": client_ms,
        "server_ms": server_ms,
        "tpot_ms": 1000 * tpot_s,
        "rate_rps": rate_rps,
        "decode_slots": slots,
        "decode_slots_seen": running_mean,
        "slots_share": slots / max_num_seqs,
    }  # fmt: skip
    return found | {
        "invalid": why_no_split(found, prefill, decode),
        "warnings": _warnings(found, max_num_seqs),
    }


def why_no_split(found: Mapping[str, Any], prefill: Mapping[str, float], decode: Mapping[str, float]) -> list[str]:
    """Reasons why the figures are not those of a split deployment."""
    reasons = []
    if not found["transferred_tokens"]:
        reasons.append("no token of keys and values was transferred: the decoding engine computed the prompts itself")
    elif found["transferred_share"] < FIRST_STEP_SHARE:
        reasons.append(f"only {found['transferred_share']:.0%} of the prompt tokens were transferred: the decoding "
                       "engine computed the others itself")  # fmt: skip
    if found["transferred_tokens"] and not found["transferred_bytes"]:
        reasons.append("the server counts transferred tokens and no bytes")
    if failed := prefill["failed_transfers"] + decode["failed_transfers"]:
        reasons.append(f"{failed:.0f} transfers failed")
    n = found["requests"]
    if prefill["finished"] != n or decode["finished"] != n:
        reasons.append(f"{n} requests were sent, {prefill['finished']:.0f} ended at the prefilling engine and "
                       f"{decode['finished']:.0f} at the decoding one")  # fmt: skip
    gap = found["client_ms"] - found["server_ms"]
    if not -HOLE_MS <= gap <= max(HOLE_MS * 2, HOLE * found["client_ms"]):
        reasons.append(f"the account has a hole: {found['client_ms']:.1f} ms a request by the client, "
                       f"{found['server_ms']:.1f} ms by the servers")  # fmt: skip
    return reasons


def _warnings(found: Mapping[str, Any], max_num_seqs: int) -> list[str]:
    warnings = []
    if found["answers_equal"] < 1:
        warnings.append(f"{1 - found['answers_equal']:.0%} of the greedy answers differ from those of one engine")
    if found["slots_share"] > SLOTS_SHARE:
        warnings.append(f"{found['decode_slots']:.1f} decode slots of {max_num_seqs} are held: over {SLOTS_SHARE:.0%}")
    return warnings
