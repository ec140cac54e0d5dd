"""Over-saturation against queues whose load is known: constant service, Poisson arrivals, simulated here."""

import heapq

import numpy as np
import polars as pl
import pytest
from scipy.stats import linregress
from scipy.stats import t as student

from oneaxis.load.metrics import summarise_cell
from oneaxis.load.saturation import saturation, slope
from tests.load.test_metrics import CLASS, row, table


def queue(load: float, n: int, seed: int, *, servers: int = 1, timeout_s: float = 1e9) -> pl.DataFrame:
    """Requests of a queue that can take 10 requests/s, at `load` times that. The first token comes when service begins;
    one whose service has not ended `timeout_s` after it came is given up."""
    draw = np.random.default_rng(seed)
    arrived = np.cumsum(draw.exponential(1 / (10 * load), size=n)).tolist()
    free = [0.0] * servers
    rows = []
    for index, at in enumerate(arrived):
        begins = max(at, heapq.heappop(free))
        ends = begins + 0.1 * servers
        heapq.heappush(free, ends)
        late = ends - at > timeout_s
        rows.append(
            row(f"q{index}", at, [] if late else [begins + 0.01, ends], asked=2,
                **({"status": "timeout", "ended_s": at + timeout_s, "done_s": None} if late else {}))
        )  # fmt: skip
    return table(*rows)


@pytest.mark.parametrize("servers", [1, 8])
def test_a_queue_beyond_capacity_is_found_and_one_below_is_not(servers: int) -> None:
    found = {load: [saturation(queue(load, 300, seed, servers=servers)) for seed in range(100)] for load in (0.7, 1.3)}
    assert [seen for seen in found[0.7] if seen is None or seen.saturated] == []
    assert [seen for seen in found[1.3] if seen is None or not seen.saturated] == []
    # 13 a second come and 10 are answered; each second's arrivals wait 0.3 s longer than those of the second before.
    grown = [seen for seen in found[1.3] if seen is not None]
    assert np.median([seen.queue_growth_rps.value for seen in grown]) == pytest.approx(3, abs=0.3)
    assert np.median([seen.ttft_growth.value for seen in grown if seen.ttft_growth]) == pytest.approx(0.3, abs=0.03)


def test_requests_that_are_given_up_do_not_hide_the_queue() -> None:
    # Each is given up after 3 s: counted as gone, the number in flight would level off at 39.
    requests = queue(1.3, 300, 1, timeout_s=3.0)
    assert 20 < requests.filter(pl.col("status") == "timeout").height < 200
    seen = saturation(requests)
    assert seen is not None
    assert seen.saturated


def test_an_engine_that_refuses_what_it_cannot_take_has_no_queue() -> None:
    requests = queue(1.3, 300, 2, timeout_s=0.5)
    shed = requests.with_columns(
        pl.when(pl.col("status") == "timeout").then(pl.lit("server_error")).otherwise("status").alias("status"),
        pl.when(pl.col("status") == "timeout").then(pl.col("intended_s") + 0.01).otherwise("ended_s").alias("ended_s"),
    )
    seen = saturation(shed)
    assert seen is not None
    assert not seen.saturated


def test_the_first_answers_time_is_no_growth() -> None:
    # Every answer takes 8 s of a cell of 30 s, however many are asked: the number in flight climbs to 40 and stays.
    requests = table(*(row(f"a{k}", k / 5, [k / 5 + 0.1, k / 5 + 8]) for k in range(150)))
    seen = saturation(requests)
    assert seen is not None
    assert not seen.saturated
    assert abs(seen.queue_growth_rps.value) < 0.3


def test_what_cannot_be_told_is_not_told() -> None:
    assert saturation(queue(1.3, 19, 0)) is None
    same = table(*(row(f"a{k}", 0.0, [0.1, 0.2]) for k in range(30)))
    assert saturation(same) is None
    closed = summarise_cell(queue(1.3, 300, 0), CLASS, 20.0, open_loop=False)
    assert (closed["saturated"], closed["queue_growth_rps"]) == (None, None)
    cell = summarise_cell(queue(1.3, 300, 0), CLASS, 20.0)
    assert cell["saturated"] is True
    assert 0 < cell["queue_growth_low_rps"] < cell["queue_growth_rps"] < cell["queue_growth_high_rps"]


def test_slope_is_that_of_scipy() -> None:
    draw = np.random.default_rng(4)
    x, y = draw.uniform(size=9), draw.normal(size=9)
    theirs = linregress(x, y)
    half = float(student.ppf(0.975, 7)) * theirs.stderr
    mine = slope(x, y.tolist())
    assert mine is not None
    assert (mine.value, mine.low, mine.high) == pytest.approx(
        (theirs.slope, theirs.slope - half, theirs.slope + half), rel=1e-9
    )
    assert slope(x[:4], y[:4].tolist()) is None
