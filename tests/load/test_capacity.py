"""The capacity search. Oracle: one server with constant service and Poisson arrivals, whose waiting times Erlang gave
in closed form (1909). Simulated here: the queue; the search sees the table of its requests, as of any engine.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from scipy.optimize import brentq

from oneaxis.config.schema import Search, ServiceClass
from oneaxis.load.capacity import (
    Capacity,
    Probe,
    attainment_bounds,
    choose_rate,
    conclude,
    search_capacity,
    search_sweep,
)
from oneaxis.load.metrics import summarise_cell
from tests.load.fake_server import Answer, fake_server
from tests.load.test_metrics import row, table
from tests.load.test_plan import TEXT, load

SERVICE_S, BOUND_S, TOKENS = 0.1, 0.4, 5
CLASS = ServiceClass(ttft_ms=1000 * BOUND_S, tpot_ms=1000.0)
SEARCH = Search(probes=10, resolution=0.05, users=None, max_drift=0.2)


def true_capacity(service_s: float, bound_s: float) -> float:
    """The rate at which P(wait + service <= bound) of an M/D/1 queue is 90% in the long run."""
    t = bound_s - service_s

    def attainment(rate: float) -> float:
        terms = (
            (-rate * (t - k * service_s)) ** k / math.factorial(k) * math.exp(rate * (t - k * service_s))
            for k in range(math.floor(t / service_s + 1e-9) + 1)
        )
        return (1 - rate * service_s) * sum(terms)

    return float(brentq(lambda rate: attainment(rate) - 0.9, 0.1 / service_s, 0.99 / service_s))


TRUE_RATE = true_capacity(SERVICE_S, BOUND_S)


def engine(seed: int, *, duration_s: float = 60.0, slower: Callable[[int], float] = lambda cell: 1.0) -> Any:
    """`measure` of a search: one server; the first token at the end of service, the last 20 ms later."""
    draw = np.random.default_rng(seed)
    calls: list[tuple[str, float, int]] = []

    def measure(kind: str, size: float, attempt: int) -> Mapping[str, Any]:
        calls.append((kind, size, attempt))
        service = SERVICE_S * slower(len(calls))
        if kind == "rate":
            count = int(draw.poisson(size * duration_s))
            arrived = np.sort(draw.uniform(0, duration_s, size=max(count, 1))).tolist()
        else:
            # One user asks when it has its answer; many keep the server busy and wait their turn.
            users = 1 if kind.startswith("serial") else 16
            arrived = [max(0.0, (k - users + 1) * service) for k in range(int(duration_s / service))]
        free, rows = 0.0, []
        for k, at in enumerate(arrived):
            free = max(at, free) + service
            rows.append(row(f"r{k}", at, [free, *[free + 0.02] * (TOKENS - 1)]))
        return summarise_cell(table(*rows), CLASS, duration_s, open_loop=kind == "rate")

    measure.calls = calls  # type: ignore[attr-defined]
    return measure


def test_the_search_finds_the_capacity_of_a_queue_within_its_interval() -> None:
    assert 6 < TRUE_RATE < 8
    found = [search_capacity(SEARCH, [1.0], engine(seed)) for seed in range(20)]
    inside = [
        (each.rate_low_rps or 0) <= TRUE_RATE <= (each.rate_high_rps or math.inf) for each in found
    ]  # fmt: skip
    assert sum(inside) >= 18
    rates = [each.rate_rps or 0.0 for each in found]
    assert np.median(rates) == pytest.approx(TRUE_RATE, rel=0.08)
    goodputs = [(each.goodput_low_tok_s, each.goodput_tok_s, each.goodput_high_tok_s) for each in found]
    assert all(low is None or tok is None or low <= tok for low, tok, _ in goodputs)
    true_goodput = TRUE_RATE * TOKENS * 0.9
    held = [(low or 0.0) <= true_goodput <= (high or math.inf) for low, _, high in goodputs]
    assert sum(held) >= 18
    # The interval says something: a lower and an upper end, less than half apart.
    told = [each for each in found if each.rate_low_rps and each.rate_high_rps]
    assert len(told) >= 18
    assert np.median([(each.rate_high_rps or 0) / (each.rate_low_rps or 1) for each in told]) < 1.5
    assert {each.restarts for each in found} == {0}
    assert [each.saturated_rps for each in found] == pytest.approx([10] * 20, rel=0.05)


def test_each_probe_is_measured_once_between_the_endpoints() -> None:
    measure = engine(3)
    found = search_capacity(SEARCH, [1.0], measure)
    kinds = [kind for kind, _, _ in measure.calls]
    assert kinds == ["serial", "saturated", *["rate"] * len(found.probes), "serial again"]
    assert measure.calls[2] == ("rate", 1.0, 0)
    rates = [probe.rate_rps for probe in found.probes]
    assert len(set(rates)) == len(rates) <= 11
    missed = min(probe.rate_rps for probe in found.probes if not probe.held)
    assert found.rate_rps is not None
    assert missed - found.rate_rps <= 0.05 * missed + 1e-9


def test_a_machine_that_slows_down_is_searched_again_once_and_then_unresolved() -> None:
    measure = engine(1, slower=lambda call: 1.0 if call < 6 else 1.5)
    found = search_capacity(SEARCH, [1.0], measure)
    assert found.restarts == 1
    assert found.drift == pytest.approx(0, abs=0.05)
    assert {attempt for _, _, attempt in measure.calls} == {0, 1}
    # Service takes 1.5 times as long in all of the second attempt.
    assert found.rate_rps is not None
    assert found.rate_rps < TRUE_RATE / 1.2
    restless = search_capacity(SEARCH, [1.0], engine(1, slower=lambda call: 1 + 0.04 * call))
    assert (restless.goodput_tok_s, restless.rate_high_rps, restless.restarts) == (None, None, 1)
    assert restless.reason.startswith("unresolved: one user's median E2E moved by +")


def test_a_class_that_one_user_alone_misses_has_no_capacity() -> None:
    measure = engine(0, slower=lambda call: 5.0)
    found = search_capacity(SEARCH, [1.0], measure)
    assert [kind for kind, _, _ in measure.calls] == ["serial"]
    assert (found.goodput_tok_s, found.saturated_rps, found.restarts) == (None, None, 0)
    assert "one user alone attains 0%" in found.reason


def probe(rate: float, good: int, n: int = 100, *, saturated: bool = False) -> Probe:
    return Probe(rate, n, n, good / n, rate * 5, rate * 4.5, rate * 5, saturated)


def test_the_next_rate_halves_the_bracket() -> None:
    assert choose_rate([], 10.0, 0.05) == 5.5
    assert choose_rate([probe(5.5, 100)], 10.0, 0.05) == 8.25
    assert choose_rate([probe(5.5, 100), probe(8.25, 100)], 10.0, 0.05) == 11
    # All held up to the ceiling: beyond it.
    assert choose_rate([probe(11, 100)], 10.0, 0.05) == 13.8
    assert choose_rate([probe(4, 100), probe(8, 80)], 10.0, 0.05) == 6
    # Narrow, and 100 of 100 and 80 of 100 show that these rates hold and miss.
    assert choose_rate([probe(8, 100), probe(8.3, 80)], 10.0, 0.05) is None
    # 91 of 100 shows nothing: a rate a little lower; where that does not either, one lower still.
    assert choose_rate([probe(8, 91), probe(8.3, 80)], 10.0, 0.05) == 7.2
    assert choose_rate([probe(7.2, 92), probe(8, 91), probe(8.3, 80)], 10.0, 0.05) == 6.4
    assert choose_rate([probe(8, 100), probe(8.3, 88)], 10.0, 0.05) == 9.13
    # A queue that grew is a miss, however many were served in time before it was long.
    assert choose_rate([probe(4, 100), probe(8, 95, saturated=True)], 10.0, 0.05) == 6
    assert choose_rate([probe(8, 50)], 10.0, 0.05) == 4


def test_bounds_use_the_requests_that_count_against_them() -> None:
    # 60 of 60 at rate 1 and at rate 2: at least 0.025^(1/120) = 0.9697 at rate 1, where alone it were 0.9404.
    bounds = attainment_bounds([probe(1, 60, 60), probe(2, 60, 60)])
    assert bounds[0][0] == pytest.approx(0.025 ** (1 / 120))
    assert bounds[1][0] == pytest.approx(0.025 ** (1 / 60))
    # 0 of 60 at rate 2 says nothing against rate 1, and 60 of 60 at rate 1 nothing for rate 2.
    apart = attainment_bounds([probe(1, 60, 60), probe(2, 0, 60)])
    assert apart[0] == pytest.approx((0.025 ** (1 / 60), 1))
    assert apart[1] == pytest.approx((0, 1 - 0.025 ** (1 / 60)))


def found_by(*probes: Probe) -> Capacity:
    return conclude(probes, {"e2e_p50_ms": 100.0, "attainment": 1.0}, 10.0, 0.0, 0)


def test_what_the_probes_show() -> None:
    # 100 of 100: at least 96.4%. 91 of 100: 83.6% to 95.8%, which shows neither. 60 of 100: at most 69.7%.
    found = found_by(probe(2, 100), probe(4, 91), probe(6, 60))
    assert (found.rate_rps, found.rate_low_rps, found.rate_high_rps) == (4, 2, 6)
    assert (found.goodput_tok_s, found.goodput_low_tok_s, found.goodput_high_tok_s) == (20, 9, 30)
    assert found.reason == ""
    few = found_by(probe(2, 20, 20), probe(6, 17, 20))
    assert (few.rate_rps, few.rate_low_rps, few.rate_high_rps) == (2, None, None)
    assert (few.goodput_low_tok_s, few.goodput_high_tok_s) == (None, None)
    assert few.reason == "too few requests to show either end (raise load.duration_s)"
    assert "the capacity is higher" in found_by(probe(2, 100), probe(4, 99)).reason
    assert "no rate that was probed" in found_by(probe(2, 10)).reason
    odd = found_by(probe(2, 100), probe(4, 88), probe(5, 95))
    assert odd.rate_rps == 2
    assert "a higher rate held where a lower one missed" in odd.reason


@pytest.mark.slow
@pytest.mark.clock
def test_the_search_over_sockets_finds_what_a_server_of_known_service_can() -> None:
    """Faked: the engine, which holds each request 30 ms, one after another. Real: the client, the clock, the search."""
    section = load(rates_rps=[10.0], duration_s=3.0, warmup_requests=1,
                   service_class={"ttft_ms": 120.0, "tpot_ms": 50.0},
                   search={"probes": 4, "resolution": 0.05, "users": 6, "max_drift": 0.5})  # fmt: skip
    one = section.model_copy(update={"shapes": section.shapes[1:]})
    with fake_server(Answer(gap_s=0.001), service_s=0.03) as server:
        plan, sweep, found = search_sweep(server, one, TEXT, seed=0, session="s", repetition=0, most_users=99)
    capacity = found["short"]
    # On a busy machine the server's sleeps, and so its queue, take longer than asked, never shorter.
    assert 0.6 / 0.03 < (capacity.saturated_rps or 0) < 1.01 / 0.03
    assert 49 < (capacity.serial_e2e_ms or 0) < 120
    true = true_capacity(0.03, 0.12)
    # Cells of 3 s see some 70 requests, and miss what a queue still grows to; a machine that holds the server up for a
    # moment costs a rate its attainment. How often the interval holds the truth is tested above, without sockets.
    assert (capacity.rate_low_rps or 0) <= 1.2 * true
    assert (capacity.rate_high_rps or math.inf) >= 0.3 * true
    assert 0.25 * true <= (capacity.rate_rps or 0) <= 1.25 * true
    assert set(plan.arrivals["level"]) == set(sweep.requests["level"]) >= {"u1", "u6", "u1b", "r10"}
    starts = [tuple(prompt[:4]) for prompt in plan.arrivals["prompt_token_ids"].to_list()]
    assert len(set(starts)) == len(starts)
