"""What a decode step costs by itself, and what each request that shares it adds: T = base + slope x requests.

Read from closed loops without a pause, in which as many requests share a step as there are users. `base` is reading the
weights and starting the step; `slope` is what a request adds: its part of the arithmetic, and its keys and values
(with W bytes of weights, K bytes of KV a request and bandwidth b: base = t0 + W / b, slope = K / b).
"""

from typing import Any

import numpy as np
import polars as pl
from scipy.special import stdtrit

MIN_LEVELS = 3
STEP_METRICS = ("step_base_ms", "step_per_request_ms")


def step_fits(cells: pl.DataFrame, max_num_seqs: int, confidence: float = 0.95) -> dict[str, dict[str, Any]]:
    """Per shape, the least-squares line through (users, median ITL); shapes with too few levels are left out.

    Args:
        cells: columns shape, level, level_size, itl_p50_ms. max_num_seqs: levels above it queue, and are not used.

    Returns:
        shape -> `step_base_ms`, `step_per_request_ms`, each also `_ci_low` and `_ci_high` (t interval of a regression
        coefficient, n - 2 degrees of freedom), and `levels`, those used.
    """
    fits = {}
    closed = cells.filter(pl.col("level").str.contains(r"^u\d+$") & (pl.col("level_size") <= max_num_seqs))
    for (shape,), own in closed.drop_nulls("itl_p50_ms").group_by("shape", maintain_order=True):
        if own.height < MIN_LEVELS:
            continue
        users, gaps = own["level_size"].to_numpy().astype(float), own["itl_p50_ms"].to_numpy()
        design = np.column_stack([np.ones_like(users), users])
        solution = np.linalg.lstsq(design, gaps, rcond=None)[0]
        freedom = len(users) - 2
        variance = float(((gaps - design @ solution) ** 2).sum()) / freedom
        errors = np.sqrt(np.diag(np.linalg.inv(design.T @ design)) * variance)
        half = float(stdtrit(freedom, (1 + confidence) / 2)) * errors
        fits[str(shape)] = {"levels": own["level"].to_list()} | {
            name + end: float(value)
            for name, middle, width in zip(STEP_METRICS, solution, half, strict=True)
            for end, value in (("", middle), ("_ci_low", middle - width), ("_ci_high", middle + width))
        }
    return fits


def step_metrics(fits: dict[str, dict[str, Any]]) -> dict[str, float]:
    """The fits as flat metrics, `sweep/<shape>/step_base_ms` and so on."""
    return {
        f"sweep/{shape}/{name}": value for shape, fit in fits.items() for name, value in fit.items() if name != "levels"
    }
