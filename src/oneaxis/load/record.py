"""A sweep as files: what was sent, what came back, what follows from it, and what the guards say."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from oneaxis.artifacts import write_json
from oneaxis.dvc_plots import over_rate
from oneaxis.judge.guards import Guard
from oneaxis.load.plan import Plan
from oneaxis.load.sweep import Sweep


def write_record(
    out: Path,
    plan: Plan,
    sweep: Sweep,
    draws: pl.DataFrame,
    cells: pl.DataFrame,
    document: Mapping[str, Any],
    verdicts: Sequence[Guard],
) -> None:
    """Write the payload of the stage into `out`.

    Args:
        document: of `summary.json`.
    """
    tables = {"arrivals": plan.arrivals, "draws": draws, "requests": sweep.requests, "cells": cells}
    account = {"server_samples": sweep.samples, "server_histograms": sweep.histograms}
    for name, table in (tables | account).items():
        table.write_parquet(out / f"{name}.parquet")
    over_rate(cells).write_csv(out / "over_rate.csv")
    write_json(out / "summary.json", document)
    write_json(out / "guards.json", [guard.as_json() for guard in verdicts])
