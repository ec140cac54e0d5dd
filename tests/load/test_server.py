"""The server's account and the guard that holds the client against it. Oracle: pages and tables written by hand."""

import math
from collections.abc import Callable

import polars as pl
import pytest

from oneaxis.judge.guards import server_truth
from oneaxis.load.server import Account, account_of
from oneaxis.load.summary import speculation
from tests.load.test_metrics import row, table

COUNTED: dict[str, float | None] = {
    "ttft_sum_s": 0.6, "ttft_count": 3, "itl_sum_s": 0.8, "prompt_tokens": 24, "output_tokens": 11
}  # fmt: skip
"""Of three requests with TTFT 200 ms by the server, and 8 gaps of 100 ms."""


def page(first: int, fast: int, slow: int) -> str:
    """Two engines; `fast` first tokens within 10 ms, `slow` within 20 ms."""
    return f"""
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{{engine="0",le="0.01",model_name="m"}} {fast}.0
vllm:time_to_first_token_seconds_bucket{{engine="0",le="0.02",model_name="m"}} {fast + slow}.0
vllm:time_to_first_token_seconds_bucket{{engine="0",le="+Inf",model_name="m"}} {fast + slow + 1}.0
vllm:time_to_first_token_seconds_bucket{{engine="1",le="+Inf",model_name="m"}} 2.0
vllm:time_to_first_token_seconds_count{{engine="0",model_name="m"}} {fast + slow + 1}.0
vllm:time_to_first_token_seconds_count{{engine="1",model_name="m"}} 2.0
vllm:time_to_first_token_seconds_sum{{engine="0",model_name="m"}} 3.5
vllm:time_to_first_token_seconds_created{{engine="0",model_name="m"}} 1.79e+09
# TYPE vllm:iteration_tokens_total histogram
vllm:iteration_tokens_total_count{{engine="0",model_name="m"}} {10 * first}.0
vllm:iteration_tokens_total_sum{{engine="0",model_name="m"}} 999.0
# TYPE vllm:prompt_tokens_by_source counter
vllm:prompt_tokens_by_source_total{{engine="0",model_name="m",source="local_compute"}} 70.0
vllm:prompt_tokens_by_source_total{{engine="0",model_name="m",source="local_cache_hit"}} 7.0
# TYPE vllm:generation_tokens counter
vllm:generation_tokens_total{{engine="0",model_name="m"}} {25 * first}.0
# TYPE vllm:spec_decode_num_drafts counter
vllm:spec_decode_num_drafts_total{{engine="0",model_name="m"}} {8 * first}.0
vllm:spec_decode_num_accepted_tokens_total{{engine="0",model_name="m"}} {10 * first}.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="m",position="0"}} {6 * first}.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="m",position="1"}} {4 * first}.0
"""


def test_an_account_is_what_was_gained_between_two_pages() -> None:
    gained = account_of(page(3, 5, 4)).since(account_of(page(1, 1, 1)))
    counters = gained.counters
    assert (counters["ttft_count"], counters["ttft_sum_s"], counters["steps"]) == (7, 0, 20)
    assert (counters["prompt_tokens_computed"], counters["prompt_tokens_transferred"]) == (0, None)
    assert counters["preemptions"] is None
    rows = gained.histogram_rows({"shape": "s", "level": "r1", "rate_rps": 1.0})
    # 4 more within 10 ms, 3 more from 10 to 20 ms, none beyond.
    assert [(r["histogram"], r["le_s"], r["count"]) for r in rows] == [
        ("ttft", 0.01, 4), ("ttft", 0.02, 3), ("ttft", math.inf, 0)
    ]  # fmt: skip


def test_what_a_step_gives_under_speculation() -> None:
    # 16 drafts, 12 and 8 of which had their first and second token accepted; 50 tokens in 20 steps.
    counted = account_of(page(3, 5, 4)).since(account_of(page(1, 1, 1))).counters
    assert speculation(counted) == {
        "tokens_per_step": 2.5,
        "accepted_per_draft": 1.25,
        "tokens_per_verification": 2.25,
        "accepted_at_1": 0.75,
        "accepted_at_2": 0.5,
    }
    assert set(speculation({"output_tokens": 5.0, "steps": None, "drafts": None}).values()) == {None}
    # Drafting is on and nothing was ever drafted: no share, not zero.
    assert (
        speculation({"output_tokens": 5.0, "steps": 5.0, "drafts": 0.0, "accepted_at_1": 0.0})["accepted_at_1"] is None
    )


def requests() -> pl.DataFrame:
    """Sent 10 ms late; TTFT from the sending 205 ms; 4, 4 and 3 tokens, 100 ms apart."""
    return table(
        *(row(f"a{k}", 0.0, [0.215 + 0.1 * token for token in range(n)]) for k, n in enumerate((4, 4, 3)))
    )  # fmt: skip


def test_client_and_server_agree() -> None:
    found = server_truth({"s r1": (requests(), COUNTED)}, 0.05, 1.0)
    assert found.valid, found.reason
    assert found.evidence["means_compared"] == 1
    assert found.evidence["ttft_difference_ms"] == pytest.approx(5)
    assert found.evidence["itl_difference_ms"] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda c: c | {"ttft_sum_s": 0.57}, "mean TTFT 205.0 ms by the client, 190.0 ms by the server"),
        (lambda c: c | {"itl_sum_s": 0.72}, "mean ITL 100.0 ms by the client, 90.0 ms by the server"),
        (lambda c: c | {"ttft_count": 4.0}, "4 first tokens by the server, 3 by the client"),
        (lambda c: c | {"output_tokens": 12.0}, "12 output tokens by the server, 11 by the client"),
        (lambda c: c | {"prompt_tokens": 20.0}, "20 prompt tokens by the server, 24 by the client"),
        (lambda c: c | {"itl_sum_s": None}, "the server has no itl_sum_s"),
    ],
)
def test_what_does_not_agree_is_named(
    change: Callable[[dict[str, float | None]], dict[str, float | None]], said: str
) -> None:
    found = server_truth({"s r1": (requests(), change(COUNTED))}, 0.05, 5.0)
    assert not found.valid
    assert said in found.reason


def test_chunks_of_several_tokens_have_the_mean_gap_of_their_tokens() -> None:
    # Three answers of 8 tokens, the first alone, then 7 at once after 0.7 s. The server counts one gap for the seven.
    chunked = table(*(row(f"a{k}", 0.0, [0.21, *[0.91] * 7]) for k in range(3)))
    counted = COUNTED | {"itl_sum_s": 2.1, "output_tokens": 24.0}
    found = server_truth({"s r1": (chunked, counted)}, 0.05, 0.5)
    assert found.valid, found.reason


def test_requests_that_failed_leave_the_server_a_range() -> None:
    lost = pl.concat([requests(), table(row("lost", 0.0, [], asked=6, status="timeout"))])
    seen = COUNTED | {"ttft_count": 4.0, "output_tokens": 15.0, "prompt_tokens": 32.0}
    found = server_truth({"s r1": (lost, seen)}, 0.05, 5.0)
    assert found.valid, found.reason
    assert found.evidence["means_compared"] == 0
    too_many = server_truth({"s r1": (lost, seen | {"output_tokens": 20.0})}, 0.05, 5.0)
    assert "20 output tokens by the server, 11 to 17 by the client" in too_many.reason


def test_a_page_without_metrics_counts_nothing() -> None:
    nothing = account_of("process_virtual_memory_bytes 1e9\n")
    assert set(nothing.counters.values()) == {None}
    assert nothing.since(Account({}, {})).buckets == {}
