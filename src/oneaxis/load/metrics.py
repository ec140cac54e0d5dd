"""Latency, goodput and capacity: pure functions of the request table.

Per request, in milliseconds, counted from the *intended* send time, so that waiting in the client counts:

- TTFT: intended send to first token. E2E: intended send to last token.
- TPOT = (E2E - TTFT) / (output tokens - 1): null where one token was asked for.
- ITL, one sample a token after the first arrival: tokens that arrive at one instant share the gap since the instant
  before, each counting gap / tokens. (So a chunk of two tokens after 10 ms is two samples of 5 ms, and the sum of a
  request's samples is E2E - TTFT. Tools differ here: some take one sample a chunk.)

**Every request that was sent counts.** One that failed has infinite TTFT, TPOT and E2E, and each of its tokens that
never came is an infinite ITL sample. A percentile is a nearest-rank order statistic; when it falls on an infinite
value it is *not reached*, and is given as null.

**Good** is a request that succeeded within its service class: TTFT and TPOT; where one token was asked for, TTFT alone,
since there is no TPOT. An answer of one token where more were asked for has no TPOT, and is not good.
**Attainment** = good / sent. **Goodput** = output tokens of good requests / window. The window runs from the cell's
start to the planned duration or the last request's end, whichever is later. **Capacity** of a shape = its highest
goodput over levels whose attainment is at least `CAPACITY_ATTAINMENT` and whose queue did not grow.

Each stands with a 95% interval (`intervals.py`). A percentile of fewer than `requests_needed` requests is given, and is
no claim: whoever prints it says so, and a verdict on it is refused. A cell in which the queue grew says so
(`saturation.py`): its percentiles depend on its length.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import polars as pl

from oneaxis.config.schema import ServiceClass
from oneaxis.load.intervals import (
    clustered_quantile_interval,
    effective_number,
    exact_share_interval,
    quantile_interval,
    sum_interval,
)
from oneaxis.load.levels import at_one_rate
from oneaxis.load.saturation import saturation

PERCENTILES = (50, 90, 99)
HEADLINE_PERCENTILE = 90
CAPACITY_ATTAINMENT = 0.9
LATENCIES = ("ttft", "itl", "itl_max", "tpot", "e2e")


Classes = ServiceClass | Mapping[str, ServiceClass]
"""One class for all requests, or classes by name, where the request table says in `service_class` whose each is."""


def per_request(requests: pl.DataFrame, classes: Classes) -> pl.DataFrame:
    """The request table with `ttft_ms`, `ttft_from_sent_ms`, `tpot_ms`, `e2e_ms`, `send_lag_ms` and `good` added.

    Latencies are infinite for a request that failed; `tpot_ms` is null where one token was asked for. `send_lag_ms`
    is null where nothing was sent.
    """
    ok = pl.col("status") == "ok"
    missed = pl.lit(math.inf)
    asked_one = pl.col("asked_output_tokens") == 1
    ttft = 1000 * (pl.col("first_token_s") - pl.col("intended_s"))
    tpot = 1000 * (pl.col("done_s") - pl.col("first_token_s")) / (pl.col("output_tokens") - 1)
    timed = requests.with_columns(
        ttft_ms=pl.when(ok).then(ttft).otherwise(missed),
        ttft_from_sent_ms=pl.when(ok).then(1000 * (pl.col("first_token_s") - pl.col("sent_s"))).otherwise(missed),
        tpot_ms=pl.when(asked_one)
        .then(pl.lit(None, dtype=pl.Float64))
        .when(ok & (pl.col("output_tokens") > 1))
        .then(tpot)
        .otherwise(missed),
        e2e_ms=pl.when(ok).then(1000 * (pl.col("done_s") - pl.col("intended_s"))).otherwise(missed),
        send_lag_ms=1000 * (pl.col("sent_s") - pl.col("intended_s")),
    )
    within = (pl.col("ttft_ms") <= _limit(classes, lambda each: each.ttft_ms)) & (
        asked_one | (pl.col("tpot_ms") <= _limit(classes, lambda each: each.tpot_ms)).fill_null(False)
    )
    return timed.with_columns(good=ok & within)


def _limit(classes: Classes, bound: Callable[[ServiceClass], float]) -> pl.Expr:
    if isinstance(classes, ServiceClass):
        return pl.lit(bound(classes), dtype=pl.Float64)
    limits = {name: float(bound(each)) for name, each in classes.items()}
    return pl.col("service_class").replace_strict(limits, return_dtype=pl.Float64)


def inter_token_ms(token_times: Sequence[float]) -> list[float]:
    """ITL samples of one request, from the arrival times of its tokens in seconds."""
    instants: list[tuple[float, int]] = []
    for moment in token_times:
        if instants and instants[-1][0] == moment:
            instants[-1] = (moment, instants[-1][1] + 1)
        else:
            instants.append((moment, 1))
    samples: list[float] = []
    for (before, _), (after, tokens) in pairwise(instants):
        samples.extend([1000 * (after - before) / tokens] * tokens)
    return samples


def percentile(values: Sequence[float], percent: int) -> float | None:
    """Nearest-rank percentile, the ceil(percent/100 * n)-th smallest; None when infinite (not reached) or no values."""
    if not values:
        return None
    value = sorted(values)[-(-percent * len(values) // 100) - 1]
    return value if math.isfinite(value) else None


def requests_needed(percent: int, confidence: float = 0.95) -> int:
    """Requests, all within a bound, that show with this confidence that the percentile is within it (p99 at 95%: 299).

    The exact binomial rule of MLPerf LoadGen's early stopping, without a miss: percent^n <= 1 - confidence.
    """
    return math.ceil(math.log(1 - confidence) / math.log(percent / 100))


def summarise_cell(
    requests: pl.DataFrame, classes: Classes, duration_s: float, *, open_loop: bool = True
) -> dict[str, Any]:
    """Counts, percentiles (null: not reached), attainment and goodput of one cell's requests, with intervals.

    `ttft_p90_ms` has its interval in `ttft_p90_low_ms` and `ttft_p90_high_ms`; a side that is not bounded is null.
    `saturated` and the two growths are null where the cell is too short to tell, or is no open loop.

    Args:
        requests: all requests of one shape and level, as recorded; at least one.
        duration_s: the planned length of the cell.
        open_loop: whether requests arrived on a clock of one rate. A closed loop cannot show overload.
    """
    timed = per_request(requests, classes).sort("intended_s", maintain_order=True)
    n = timed.height
    assert n > 0
    gaps = _gaps(timed)
    samples = {
        "ttft": timed["ttft_ms"].to_list(),
        "itl": [gap for own in gaps for gap in own],
        # What a reader feels is the longest wait of an answer; as a percentile of all gaps it drowns in the short ones.
        "itl_max": [max(own) for own in gaps if own],
        "tpot": timed["tpot_ms"].drop_nulls().to_list(),
        "e2e": timed["e2e_ms"].to_list(),
        "ttft_from_sent": timed["ttft_from_sent_ms"].to_list(),
    }
    window_s = max(duration_s, *timed["ended_s"].drop_nulls().to_list(), 0.0)
    ok = timed.filter(pl.col("status") == "ok")
    sent = timed["sent_s"].drop_nulls()
    cell: dict[str, Any] = {"n": n, "ok": ok.height, "failed": n - ok.height}
    for name, values in samples.items():
        for percent in PERCENTILES:
            cell[f"{name}_p{percent}_ms"] = percentile(values, percent)
            low, high = (
                clustered_quantile_interval(gaps, percent / 100)
                if name == "itl"
                else quantile_interval(values, percent / 100)
            )
            cell |= {f"{name}_p{percent}_low_ms": low, f"{name}_p{percent}_high_ms": high}
    seen = saturation(requests) if open_loop else None
    growth, slower = (seen.queue_growth_rps, seen.ttft_growth) if seen else (None, None)
    return {
        **cell,
        **attained(timed, window_s),
        "output_tok_s": float(ok["output_tokens"].sum()) / window_s,
        "offered_tok_s": float(timed["asked_output_tokens"].sum()) / duration_s,
        "achieved_rate_rps": len(sent) / max(duration_s, float(sent.max() or 0.0)),  # type: ignore[arg-type]
        "lag_p99_ms": percentile(timed["send_lag_ms"].drop_nulls().to_list(), 99),
        "window_s": window_s,
        "saturated": seen.saturated if seen else None,
        "queue_growth_rps": growth.value if growth else None,
        "queue_growth_low_rps": growth.low if growth else None,
        "queue_growth_high_rps": growth.high if growth else None,
        "ttft_growth": slower.value if slower else None,
        "ttft_growth_low": slower.low if slower else None,
        "ttft_growth_high": slower.high if slower else None,
    }


def attained(timed: pl.DataFrame, window_s: float) -> dict[str, float]:
    """Attainment and goodput (tokens/s) of requests, each with its 95% interval.

    Goodput's is the bootstrap's over requests, and no narrower than attainment's is, in proportion: where every request
    was good a bootstrap would claim certainty.

    `effective_n`: how many independent requests they are worth (`intervals.py`).

    Args:
        timed: at least one row of `per_request`.
    """
    timed = timed.sort("intended_s", maintain_order=True)
    n, hits = timed.height, int(timed["good"].sum())
    effective = effective_number(timed["good"].to_numpy())
    low, high = exact_share_interval(hits / n * effective, effective)
    tokens = timed.select(pl.when("good").then("output_tokens").otherwise(0)).to_series().fill_null(0)
    total = float(tokens.sum())
    least, most = sum_interval(tokens.to_list())
    if hits:
        least, most = min(least, total * low * n / hits), max(most, total * high * n / hits)
    else:
        most = high * float(timed["asked_output_tokens"].sum())
    return {
        "attainment": hits / n,
        "attainment_low": low,
        "attainment_high": high,
        "effective_n": effective,
        "goodput_tok_s": total / window_s,
        "goodput_low_tok_s": least / window_s,
        "goodput_high_tok_s": most / window_s,
    }


def attained_by_class(
    requests: pl.DataFrame, classes: Mapping[str, ServiceClass], duration_s: float
) -> dict[str, dict[str, float]]:
    """`n`, attainment and goodput of each class among the requests of one cell, in the order of `classes`."""
    timed = per_request(requests, classes)
    window_s = max(duration_s, *timed["ended_s"].drop_nulls().to_list(), 0.0)
    found = {}
    for name in classes:
        own = timed.filter(pl.col("service_class") == name)
        if own.height:
            found[name] = {"n": float(own.height), **attained(own, window_s)}
    return found


def _gaps(timed: pl.DataFrame) -> list[list[float]]:
    """ITL samples of each request; of one that failed, each token that never came is an infinite one."""
    each: list[list[float]] = []
    for row in timed.iter_rows(named=True):
        samples = inter_token_ms(row["token_times"])
        if row["status"] != "ok":
            received = max(len(row["token_times"]), 1)
            samples.extend([math.inf] * (row["asked_output_tokens"] - received))
        each.append(samples)
    return each


def capacity(cells: pl.DataFrame) -> dict[str, dict[str, Any] | None]:
    """Per shape, `{goodput_tok_s, level, rate_rps}` of its capacity, or None when no level attained enough.

    Goodput stands with its interval, `goodput_low_tok_s` and `goodput_high_tok_s`, which is of that level alone.

    A shape whose levels are users in closed loop, or a ramp, is left out: they can show no capacity.

    Args:
        cells: one row per cell with shape, level, rate_rps, and of `summarise_cell` attainment, goodput and saturated.
    """
    found: dict[str, dict[str, Any] | None] = {}
    cells = cells.filter(pl.Series([at_one_rate(level) for level in cells["level"]], dtype=pl.Boolean))
    for shape in cells["shape"].unique(maintain_order=True):
        held = cells.filter(
            (pl.col("shape") == shape)
            & (pl.col("attainment") >= CAPACITY_ATTAINMENT)
            & ~pl.col("saturated").cast(pl.Boolean).fill_null(False)
        )
        best = held.sort("goodput_tok_s", descending=True).head(1).to_dicts()
        facts = ("goodput_tok_s", "goodput_low_tok_s", "goodput_high_tok_s", "level", "rate_rps")
        found[shape] = {key: best[0][key] for key in facts} if best else None
    return found
