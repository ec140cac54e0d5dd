"""The line through the steps. Oracle: a table worked by hand, and scipy's regression."""

import polars as pl
import pytest
from scipy.stats import linregress, t

from oneaxis.load.steps import step_fits


def cells(*rows: tuple[str, str, float | None]) -> pl.DataFrame:
    sizes = [float(level.lstrip("ru")) for _, level, _ in rows]
    return pl.DataFrame({
        "shape": [row[0] for row in rows], "level": [row[1] for row in rows], "level_size": sizes,
        "itl_p50_ms": [row[2] for row in rows],
    })  # fmt: skip


def test_a_line_is_found_exactly() -> None:
    # 20 ms a step, and half a millisecond a request.
    table = cells(*(("d", f"u{n}", 20 + 0.5 * n) for n in (1, 2, 4, 8)))
    fit = step_fits(table, 16)["d"]
    assert fit["step_base_ms"] == pytest.approx(20)
    assert fit["step_per_request_ms"] == pytest.approx(0.5)
    assert fit["step_base_ms_ci_high"] - fit["step_base_ms_ci_low"] == pytest.approx(0, abs=1e-9)


def test_intervals_are_those_of_a_regression() -> None:
    users, gaps = [1, 2, 4, 8, 16], [21.0, 20.5, 23.9, 24.0, 30.2]
    fit = step_fits(cells(*(("d", f"u{n}", gap) for n, gap in zip(users, gaps, strict=True))), 16)["d"]
    want, factor = linregress(users, gaps), t.ppf(0.975, 3)
    assert fit["step_per_request_ms"] == pytest.approx(want.slope)
    assert fit["step_base_ms"] == pytest.approx(want.intercept)
    assert fit["step_per_request_ms_ci_high"] == pytest.approx(want.slope + factor * want.stderr)
    assert fit["step_base_ms_ci_low"] == pytest.approx(want.intercept - factor * want.intercept_stderr)


def test_what_queues_or_has_a_rate_or_no_gap_is_left_out() -> None:
    rows = [("d", "u1", 10.0), ("d", "u2", 11.0), ("d", "u4", 13.0), ("d", "u32", 99.0), ("d", "r8", 99.0)]
    fit = step_fits(cells(*rows, ("one", "u1", None), ("one", "u2", None)), 8)["d"]
    assert fit["levels"] == ["u1", "u2", "u4"]
    assert fit["step_base_ms"] == pytest.approx(9.0)
    assert "one" not in step_fits(cells(*rows, ("one", "u1", None)), 8)
    assert step_fits(cells(*rows[:2]), 8) == {}
