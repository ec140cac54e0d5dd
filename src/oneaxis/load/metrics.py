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

**Good** is a request that succeeded within the service class: TTFT and TPOT; where one token was asked for, TTFT alone,
since there is no TPOT. An answer of one token where more were asked for has no TPOT, and is not good.
**Attainment** = good / sent. **Goodput** = output tokens of good requests / window. The window runs from the cell's
start to the planned duration or the last request's end, whichever is later. **Capacity** of a shape = its highest
goodput over levels whose attainment is at least `CAPACITY_ATTAINMENT`.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import polars as pl

from oneaxis.config.schema import ServiceClass

PERCENTILES = (50, 90, 99)
HEADLINE_PERCENTILE = 90
CAPACITY_ATTAINMENT = 0.9
LATENCIES = ("ttft", "itl", "tpot", "e2e")


def per_request(requests: pl.DataFrame, service_class: ServiceClass) -> pl.DataFrame:
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
    within = (pl.col("ttft_ms") <= service_class.ttft_ms) & (
        asked_one | (pl.col("tpot_ms") <= service_class.tpot_ms).fill_null(False)
    )
    return timed.with_columns(good=ok & within)


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


def summarise_cell(requests: pl.DataFrame, service_class: ServiceClass, duration_s: float) -> dict[str, Any]:
    """Counts, percentiles (null: not reached), attainment and goodput of one cell's requests.

    Args:
        requests: all requests of one shape and level, as recorded; at least one.
        duration_s: the planned length of the cell.
    """
    timed = per_request(requests, service_class)
    n = timed.height
    assert n > 0
    samples = {
        "ttft": timed["ttft_ms"].to_list(),
        "itl": _itl_samples(timed),
        "tpot": timed["tpot_ms"].drop_nulls().to_list(),
        "e2e": timed["e2e_ms"].to_list(),
        "ttft_from_sent": timed["ttft_from_sent_ms"].to_list(),
    }
    window_s = max(duration_s, *timed["ended_s"].drop_nulls().to_list(), 0.0)
    ok = timed.filter(pl.col("status") == "ok")
    good = timed.filter(pl.col("good"))
    sent = timed["sent_s"].drop_nulls()
    return {
        "n": n,
        "ok": ok.height,
        "failed": n - ok.height,
        **{
            f"{name}_p{percent}_ms": percentile(values, percent)
            for name, values in samples.items()
            for percent in PERCENTILES
        },
        "attainment": good.height / n,
        "goodput_tok_s": float(good["output_tokens"].sum()) / window_s,
        "output_tok_s": float(ok["output_tokens"].sum()) / window_s,
        "achieved_rate_rps": len(sent) / max(duration_s, float(sent.max() or 0.0)),  # type: ignore[arg-type]
        "lag_p99_ms": percentile(timed["send_lag_ms"].drop_nulls().to_list(), 99),
        "window_s": window_s,
    }


def _itl_samples(timed: pl.DataFrame) -> list[float]:
    samples: list[float] = []
    for row in timed.iter_rows(named=True):
        samples.extend(inter_token_ms(row["token_times"]))
        if row["status"] != "ok":
            received = max(len(row["token_times"]), 1)
            samples.extend([math.inf] * (row["asked_output_tokens"] - received))
    return samples


def capacity(cells: pl.DataFrame) -> dict[str, dict[str, Any] | None]:
    """Per shape, `{goodput_tok_s, level, rate_rps}` of its capacity, or None when no level attained enough.

    Args:
        cells: one row per cell with shape, level, rate_rps, attainment, goodput_tok_s.
    """
    found: dict[str, dict[str, Any] | None] = {}
    for shape in cells["shape"].unique(maintain_order=True):
        held = cells.filter((pl.col("shape") == shape) & (pl.col("attainment") >= CAPACITY_ATTAINMENT))
        best = held.sort("goodput_tok_s", descending=True).head(1).to_dicts()
        found[shape] = {key: best[0][key] for key in ("goodput_tok_s", "level", "rate_rps")} if best else None
    return found
