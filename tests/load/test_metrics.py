"""Latency, goodput and capacity. Oracle: tables of a few requests, worked by hand beside them."""

import math

import numpy as np
import polars as pl
import pytest
from scipy.stats import binomtest

from oneaxis.config.schema import ServiceClass
from oneaxis.load.client import REQUEST_SCHEMA
from oneaxis.load.metrics import (
    attained_by_class,
    capacity,
    inter_token_ms,
    per_request,
    percentile,
    requests_needed,
    summarise_cell,
)

CLASS = ServiceClass(ttft_ms=500.0, tpot_ms=100.0)


def row(name: str, intended: float, times: list[float], *, asked: int | None = None, status: str = "ok", **facts: object) -> dict[str, object]:  # fmt: skip # noqa: E501
    """A request sent 10 ms late, whose tokens arrive at these times."""
    ok = status == "ok"
    return {
        "shape": "s",
        "level": "r1",
        "rate_rps": 1.0,
        "request_id": name,
        "intended_s": intended,
        "sent_s": intended + 0.01,
        "first_token_s": times[0] if times else None,
        "done_s": times[-1] if ok else None,
        "ended_s": times[-1] if times else intended + 1,
        "asked_prompt_tokens": 8,
        "asked_output_tokens": asked or len(times),
        "prompt_tokens": 8 if ok else None,
        "output_tokens": len(times) if ok else None,
        "chunks": len(times),
        "token_times": times,
        "status": status,
        "error": None if ok else "x",
        "finish_reason": "length" if ok else None,
        **facts,
    }


def table(*rows: dict[str, object]) -> pl.DataFrame:
    return pl.DataFrame(rows, schema=REQUEST_SCHEMA)


def test_latencies_of_one_request_count_from_the_intended_moment() -> None:
    # Intended at 1.0, sent at 1.01, tokens at 1.2, 1.3, 1.5.
    timed = per_request(table(row("a", 1.0, [1.2, 1.3, 1.5])), CLASS).row(0, named=True)
    assert timed["ttft_ms"] == pytest.approx(200)
    assert timed["ttft_from_sent_ms"] == pytest.approx(190)
    assert timed["e2e_ms"] == pytest.approx(500)
    assert timed["tpot_ms"] == pytest.approx(150)
    assert timed["send_lag_ms"] == pytest.approx(10)
    assert timed["good"] is False  # 150 ms a token is over the 100 ms of the class


def test_itl_is_one_sample_a_token_and_a_chunk_shares_its_gap() -> None:
    assert inter_token_ms([1.0, 1.25, 1.5]) == [250, 250]
    # Two tokens at once after 10 ms: 5 ms each. Then one after 30 ms.
    assert inter_token_ms([0.0, 0.01, 0.01, 0.04]) == pytest.approx([5, 5, 30])
    # Tokens of the first instant have no gap before them.
    assert inter_token_ms([0.5, 0.5, 0.75]) == [250]
    assert inter_token_ms([0.5]) == inter_token_ms([]) == []


def test_itl_adds_up_to_the_time_after_the_first_token() -> None:
    generator = np.random.default_rng(1)
    for _ in range(50):
        steps = generator.choice([0.0, 0.01, 0.2], size=30)
        times = np.cumsum([1.0, 0.05, *steps]).tolist()
        assert sum(inter_token_ms(times)) == pytest.approx(1000 * (times[-1] - times[0]))


def test_percentile_is_the_nearest_rank_and_infinite_is_not_reached() -> None:
    values = [float(value) for value in range(1, 11)]
    assert [percentile(values, p) for p in (50, 90, 99)] == [5, 9, 10]
    assert percentile([7.0], 50) == 7
    assert percentile([], 50) is None
    # Nine of ten arrived: p90 is the ninth, p99 the tenth, which never came.
    missed = [*values[:9], math.inf]
    assert (percentile(missed, 90), percentile(missed, 99)) == (9, None)


def test_requests_needed_for_a_claim() -> None:
    # Smallest n with 0.99^n <= 0.05 (0.99^298 = 0.05004, 0.99^299 = 0.04954), 0.9^28 = 0.0523, 0.9^29 = 0.0471.
    assert [requests_needed(p) for p in (50, 90, 99)] == [5, 29, 299]


def test_a_cell_counts_every_request_that_was_sent() -> None:
    cell = summarise_cell(
        table(
            row("fast", 0.0, [0.1, 0.15, 0.2]),  # TTFT 100, TPOT 50: good
            row("late", 1.0, [1.6, 1.65, 1.7]),  # TTFT 600: not good
            row("slow", 2.0, [2.1, 2.3, 2.5]),  # TPOT 200: not good
            row("lost", 3.0, [3.1], asked=3, status="timeout", ended_s=23.0),
        ),
        CLASS,
        duration_s=10.0,
    )
    assert (cell["n"], cell["ok"], cell["failed"]) == (4, 3, 1)
    # TTFT 100, 100, 600, inf. The lost one's first token came after 100 ms; its request failed all the same.
    assert cell["ttft_p50_ms"] == pytest.approx(100)
    assert cell["ttft_p90_ms"] is None
    # TPOT 50, 50, 200, inf.
    assert cell["tpot_p50_ms"] == pytest.approx(50)
    # ITL 50 x 4, 200 x 2, and two tokens that never came.
    assert cell["itl_p50_ms"] == pytest.approx(50)
    assert cell["itl_p90_ms"] is None
    # The longest of each: 50, 50, 200, and one that never ended.
    assert [cell[f"itl_max_p{percent}_ms"] for percent in (50, 90)] == [pytest.approx(50), None]
    assert cell["attainment"] == 0.25
    # The window ends when the lost request was given up, at 23 s. Good: 3 tokens. All answered: 9.
    assert cell["window_s"] == 23
    assert cell["goodput_tok_s"] == pytest.approx(3 / 23)
    assert cell["output_tok_s"] == pytest.approx(9 / 23)
    assert cell["achieved_rate_rps"] == pytest.approx(4 / 10)
    assert cell["lag_p99_ms"] == pytest.approx(10)


def test_the_window_is_the_planned_duration_when_all_ends_before() -> None:
    cell = summarise_cell(table(row("a", 0.0, [0.1, 0.15])), CLASS, duration_s=8.0)
    assert cell["goodput_tok_s"] == pytest.approx(2 / 8)


def test_one_token_answers_have_no_tpot() -> None:
    # Asked for one: judged on TTFT alone.
    one = per_request(table(row("good", 0.0, [0.4]), row("late", 0.0, [0.6])), CLASS)
    assert one["tpot_ms"].to_list() == [None, None]
    assert one["good"].to_list() == [True, False]
    cell = summarise_cell(table(row("good", 0.0, [0.4])), CLASS, duration_s=1.0)
    assert cell["tpot_p50_ms"] is None
    assert cell["itl_p50_ms"] is None
    assert cell["itl_max_p50_ms"] is None
    assert cell["attainment"] == 1
    # Asked for eight, given one: it does not pass the TPOT limit for free.
    cut = per_request(table(row("cut", 0.0, [0.1], asked=8)), CLASS)
    assert cut["tpot_ms"].to_list() == [math.inf]
    assert cut["good"].to_list() == [False]


def test_a_cell_in_which_all_failed() -> None:
    cell = summarise_cell(table(row("a", 0.0, [], asked=4, status="refused", sent_s=None)), CLASS, duration_s=5.0)
    assert (cell["attainment"], cell["goodput_tok_s"], cell["achieved_rate_rps"]) == (0, 0, 0)
    assert [cell[f"{name}_p50_ms"] for name in ("ttft", "itl", "tpot", "e2e")] == [None] * 4


def test_goodput_from_the_intended_moment_sees_a_client_that_held_requests_back() -> None:
    # Both are answered 100 ms after they were sent; the second was sent 2 s late.
    held = row("held", 0.0, [2.1, 2.15], sent_s=2.0)
    timed = per_request(table(row("a", 0.0, [0.11, 0.15]), held), CLASS)
    assert timed["ttft_from_sent_ms"].to_list() == pytest.approx([100, 100])
    assert timed["good"].to_list() == [True, False]


def test_capacity_is_the_highest_goodput_among_rates_that_attain() -> None:
    cells = pl.DataFrame(
        [
            ("a", "r1", 1.0, 1.0, 10.0, False),
            ("a", "r2", 2.0, 0.9, 18.0, None),
            ("a", "r3", 3.0, 0.95, 28.0, True),  # its queue grew: a longer cell would have missed
            ("a", "r4", 4.0, 0.89, 30.0, False),
            ("b", "r1", 1.0, 0.5, 9.0, False),
        ],
        schema=["shape", "level", "rate_rps", "attainment", "goodput_tok_s", "saturated"],
        orient="row",
    ).with_columns(goodput_low_tok_s=pl.col("goodput_tok_s") - 1, goodput_high_tok_s=pl.col("goodput_tok_s") + 1)
    around = {"goodput_low_tok_s": 17.0, "goodput_high_tok_s": 19.0}
    assert capacity(cells) == {"a": {"goodput_tok_s": 18.0, "level": "r2", "rate_rps": 2.0, **around}, "b": None}


def test_percentiles_attainment_and_goodput_of_a_cell_have_intervals() -> None:
    # 60 requests; TTFT 10, 20, ... 600 ms in any order: 50 of 60 are good, with 3 tokens each in 10 s.
    waits = np.random.default_rng(6).permutation(60)
    times = [(k / 10, k / 10 + 0.01 * (wait + 1)) for k, wait in enumerate(waits.tolist())]
    requests = table(*(row(f"a{k}", at, [first, first + 0.01, first + 0.02]) for k, (at, first) in enumerate(times)))
    cell = summarise_cell(requests, CLASS, 10.0)
    # Binomial(60, 0.5): P(B <= 21) = 0.0137, P(B <= 22) = 0.0259; P(B <= 37) = 0.9741, P(B <= 38) = 0.9863.
    assert cell["ttft_p50_ms"] == pytest.approx(300)
    assert (cell["ttft_p50_low_ms"], cell["ttft_p50_high_ms"]) == pytest.approx((220, 390))
    # Binomial(60, 0.99): P(B = 60) = 0.547: no upper end.
    assert cell["ttft_p99_high_ms"] is None
    exact = binomtest(50, 60).proportion_ci(0.95, method="exact")
    assert cell["attainment"] == pytest.approx(50 / 60)
    assert (cell["attainment_low"], cell["attainment_high"]) == pytest.approx((exact.low, exact.high))
    assert cell["goodput_tok_s"] == pytest.approx(15)
    # All answers have 3 tokens: goodput is attainment's binomial, times 18 tokens/s.
    assert cell["goodput_low_tok_s"] == pytest.approx(18 * exact.low, rel=0.03)
    assert cell["goodput_high_tok_s"] == pytest.approx(18 * exact.high, rel=0.03)
    # All are good: a bootstrap would say 18 to 18.
    sure = summarise_cell(table(*(row(f"a{k}", k / 10, [k / 10 + 0.1] * 2) for k in range(60))), CLASS, 10.0)
    assert sure["goodput_low_tok_s"] == pytest.approx(12 * 0.025 ** (1 / 60))


def test_each_request_is_held_to_its_own_class() -> None:
    classes = {"fast": ServiceClass(ttft_ms=150.0, tpot_ms=100.0), "slow": ServiceClass(ttft_ms=900.0, tpot_ms=300.0)}
    requests = table(
        row("a", 0.0, [0.1, 0.15, 0.2]),  # fast: TTFT 100, TPOT 50
        row("b", 0.0, [0.2, 0.25, 0.3]),  # fast: TTFT 200 is too late
        row("c", 0.0, [0.8, 1.0, 1.2]),  # slow: 800 and 200
        row("d", 0.0, [], asked=3, status="timeout"),  # slow, never came
    ).with_columns(service_class=pl.Series(["fast", "fast", "slow", "slow"]))
    assert per_request(requests, classes)["good"].to_list() == [True, False, True, False]
    each = attained_by_class(requests, classes, 10.0)
    assert {name: (own["n"], own["attainment"], own["goodput_tok_s"]) for name, own in each.items()} == {
        "fast": (2, 0.5, 0.3), "slow": (2, 0.5, 0.3)
    }  # fmt: skip
    assert summarise_cell(requests, classes, 10.0)["goodput_tok_s"] == pytest.approx(0.6)
