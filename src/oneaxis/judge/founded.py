"""Whether what a sweep's metrics say follows from its own requests: the figure claimed, computed again from the table.

A metric and the table beside it are two records of one measurement. Where they disagree, or the table is not there,
nobody can say which of them was measured, and the comparison is INVALID. The functions are those of the sweep itself
(`load.metrics`, `load.summary`, `load.capacity`, `load.steps`).
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import pairwise
from typing import Any

import polars as pl

from oneaxis.artifacts import MANIFEST
from oneaxis.config.compose import PARAMS
from oneaxis.config.schema import DEFAULT_CLASS, ServiceClass, service_classes
from oneaxis.errors import UserError
from oneaxis.judge.records import Record
from oneaxis.judge.units import CELL_LATENCY, OF_A_SHAPE, Problem
from oneaxis.load.capacity import Probe, conclude
from oneaxis.load.client import REQUEST_SCHEMA
from oneaxis.load.levels import LABEL, at_one_rate, level_size
from oneaxis.load.metrics import capacity, summarise_cell
from oneaxis.load.plan import PLAN_SCHEMA, reused_tokens
from oneaxis.load.steps import step_fits
from oneaxis.load.summary import cache_block_tokens, speculation

ARRIVALS, REQUESTS, CELLS = "arrivals.parquet", "requests.parquet", "cells.parquet"
ROUNDING = 1e-6
"""Relative: metrics are written with all their digits, and another CPU may sum in another order."""

SAME_MOMENT_S = 1e-6
LATEST_S = 1e9
"""Seconds, of a cell: thirty years."""
NEEDED = ("shape", "level", "rate_rps", "intended_s", "sent_s", "first_token_s", "done_s", "ended_s",
          "asked_prompt_tokens", "asked_output_tokens", "output_tokens", "token_times", "status")  # fmt: skip
"""Columns that figures are computed from; older tables lack some of the others."""
ALWAYS = ("shape", "level", "intended_s", "asked_prompt_tokens", "asked_output_tokens", "token_times", "status")
ANSWERED = ("sent_s", "first_token_s", "done_s", "ended_s", "output_tokens")
"""Known of every request that succeeded."""


def read_requests(record: Record) -> pl.DataFrame | None:
    """The request table of a run; None when it is absent or has no rows.

    Raises:
        UserError: when it is no table of requests.
    """
    table = record.results.table("sweep", REQUESTS)
    if table is None:
        return None
    for name in (*NEEDED, *(name for name in ("service_class", "request_id") if name in table.columns)):
        found = table.schema.get(name)
        if found is None or (found != pl.Null and not _alike(found, REQUEST_SCHEMA[name])):
            path, said = record.results.folder / "sweep" / REQUESTS, "no column" if found is None else f"{found} in"
            raise UserError(f"{path}: {said} {name}; allowed: the table of requests that a sweep writes")
    # An older table knows one class, and does not name it.
    return table if "service_class" in table.columns else table.with_columns(service_class=pl.lit(DEFAULT_CLASS))


def _alike(found: pl.DataType, wanted: pl.DataType) -> bool:
    if isinstance(wanted, pl.List):
        return isinstance(found, pl.List) and (found.inner == pl.Null or found.inner.is_numeric())
    return (found.is_float() or found.is_integer()) if wanted.is_numeric() else found == wanted


def read_load(record: Record) -> tuple[Mapping[str, Any], Mapping[str, ServiceClass]]:
    """The `load` section that a run was measured with, and its classes.

    Raises:
        UserError: when the settings hold none that can be read.
    """
    load = record.settings.get("load")
    try:
        classes = service_classes(load)  # type: ignore[arg-type]
        if 0 < float(load["duration_s"]) < math.inf:  # type: ignore[index]
            return load, classes  # type: ignore[return-value]
    except (KeyError, TypeError, ValueError, AttributeError):
        pass
    params = record.results.folder.parent / PARAMS
    path = params if record.is_job and params.is_file() else record.results.folder / "sweep" / MANIFEST
    raise UserError(f"{path}: its section load has no service_class and duration_s that can be read; `dvc repro -f -s "
                    "sweep` measures again")  # fmt: skip


def reused(record: Record, requests: pl.DataFrame, load: Mapping[str, Any]) -> dict[str, int]:
    """`load.plan.reused_tokens` of a run; nothing where it declares no common start, or its engine caches none.

    Raises:
        UserError: when the arrivals are no such table.
    """
    shapes = load.get("shapes")
    if not isinstance(shapes, list) or not any(
        isinstance(shape, Mapping) and shape.get("shared_prefix") for shape in shapes
    ):
        return {}
    realised = record.results.document("serve", "realised.json")
    block = cache_block_tokens(realised) if realised else None
    arrivals = record.results.table("sweep", ARRIVALS)
    if not isinstance(block, int) or block < 1 or arrivals is None or requests.schema.get("request_id") != pl.String:
        return {}
    for name in ("request_id", "prefix_group", "prefix_tokens"):
        found = arrivals.schema.get(name)
        if found is None or not _alike(found, PLAN_SCHEMA[name]):
            raise UserError(f"{record.results.folder / 'sweep' / ARRIVALS}: {'no column' if found is None else found} "
                            f"{name}; allowed: the arrivals that a sweep writes")  # fmt: skip
    return reused_tokens(arrivals, requests, block)


def unfounded(record: Record, metrics: Sequence[str]) -> list[Problem]:
    """Why metrics of a run's sweep do not follow from its table; a metric that is not recorded says nothing.

    Raises:
        UserError: when the table or the settings cannot be read.
    """
    path = f"artifacts/sweep/{REQUESTS} of {record.name}"
    requests = read_requests(record)
    if requests is None:
        return [_void(f"{path} is missing or empty: nothing shows that its metrics were measured")]
    _, classes = read_load(record)
    if broken := _broken(requests, classes):
        return [_void(f"{path}: {broken}")]
    told = record.results.metrics
    problems = []
    for name in dict.fromkeys([*(each for metric in metrics for each in _counts(metric)), *metrics]):
        if name not in told:
            continue
        found = figure(record, requests, name)
        if found is None or not math.isclose(told[name], found, rel_tol=ROUNDING, abs_tol=1e-9):
            gives = "none" if found is None else f"{found:.6g}"
            problems.append(_void(f"{record.name}: {name} is recorded as {told[name]:.6g}, and its own table gives "
                                  f"{gives} (artifacts/sweep/{_source(name)})"))  # fmt: skip
    return problems


def _void(reason: str) -> Problem:
    return Problem("invalid", reason, "measure again, or restore what was measured (`oneaxis verify`, `dvc checkout`)")


def _broken(requests: pl.DataFrame, classes: Mapping[str, ServiceClass]) -> str:
    """What no sweep writes: a number that is none, a moment that is missing, a class that the load does not have."""
    floats = [name for name in NEEDED if requests.schema[name].is_float()]
    for name in floats:
        if not requests[name].is_null().all() and not requests[name].drop_nulls().is_finite().all():
            return f"{name} holds a value that is no finite number"
    arrivals = requests["token_times"].explode().drop_nulls()
    if arrivals.dtype.is_float() and not arrivals.is_finite().all():
        return "token_times holds a value that is no finite number"
    answered = requests.filter(pl.col("status") == "ok")
    for rows, names in ((requests, ALWAYS), (answered, ANSWERED)):
        missing = next((name for name in names if rows[name].null_count()), None)
        if missing:
            return f"{missing} is missing in {rows[missing].null_count()} of {rows.height} rows"
    odd = next((level for level in requests["level"].unique() if not re.fullmatch(LABEL, level)), None)
    if odd is not None:
        return f"level {odd} is no level of a sweep"
    order = ("intended_s", "sent_s", "first_token_s", "done_s", "ended_s")
    for before, after in pairwise(order):
        early = answered.filter(pl.col(after) < pl.col(before) - SAME_MOMENT_S).height
        if early:
            return f"{after} lies before {before} in {early} of {answered.height} answers"
    late = answered.filter(pl.col("ended_s") > LATEST_S).height
    if late:
        return f"ended_s is over {LATEST_S:.0e} s in {late} of {answered.height} answers"
    first = answered.filter(pl.col("token_times").list.first().ne_missing(pl.col("first_token_s"))).height
    if first:
        return f"token_times of {first} of {answered.height} answers do not begin with first_token_s"
    unknown = set(requests["service_class"].to_list()) - set(classes)
    return f"service_class {min(map(str, unknown))} is none of load ({', '.join(classes)})" if unknown else ""


def _counts(metric: str) -> list[str]:
    """Numbers of requests that are checked with a metric: a table that was cut may leave a percentile where it was."""
    cell = CELL_LATENCY.match(metric)
    return ["sweep/requests", *([f"sweep/{cell['shape']}/{cell['level']}/n"] if cell else [])]


def _of_the_server(metric: str) -> bool:
    return metric.rpartition("/")[2].startswith(("tokens_per_", "accepted_"))


def _source(metric: str) -> str:
    return CELLS if _of_the_server(metric) else REQUESTS


def figure(record: Record, requests: pl.DataFrame, metric: str) -> float | None:
    """A metric of a sweep from the requests given, or from what the server counted; None where they give none.

    Args:
        requests: of `record`, all of them or some.
    """
    if metric == "sweep/requests":
        return float(requests.height)
    if cell := CELL_LATENCY.match(metric):
        if _of_the_server(metric):
            return _counted(record, cell["shape"], cell["level"], cell["name"])
        rows = _summaries(record, requests, shape=cell["shape"], level=cell["level"])
        value = rows[0].get(cell["name"]) if rows else None
    elif OF_A_SHAPE.match(metric):
        _, shape, name = metric.split("/")
        rows = _summaries(record, requests, shape=shape)
        value = _capacity(record, rows) if name == "capacity_tok_s" else _step(record, shape, name, rows)
    else:
        raise AssertionError(f"{metric} is no figure of a sweep that is claimed")
    return None if value is None else float(value)


def _summaries(record: Record, requests: pl.DataFrame, **which: str) -> list[dict[str, Any]]:
    """`summarise_cell` of the cells of a shape, or of one of them, in the order in which they were measured."""
    load, classes = read_load(record)
    own = requests.filter(*(pl.col(name) == value for name, value in which.items()))
    return [
        {
            "shape": shape,
            "level": level,
            "level_size": level_size(level),
            "rate_rps": cell["rate_rps"][0],
            **summarise_cell(cell, classes, load["duration_s"], open_loop=at_one_rate(level)),
        }
        for (shape, level), cell in own.group_by("shape", "level", maintain_order=True)
    ]


def _capacity(record: Record, rows: Sequence[Mapping[str, Any]]) -> float | None:
    if not rows:
        return None
    if not record.settings["load"].get("search"):
        best = capacity(pl.DataFrame(rows, infer_schema_length=None)).get(rows[0]["shape"])
        return best["goodput_tok_s"] if best else None
    names = [field.name for field in fields(Probe)]
    probes = [
        Probe(**{name: row[name] for name in names} | {"saturated": bool(row["saturated"])})
        for row in rows
        if at_one_rate(row["level"])
    ]
    serial = next((row for row in rows if row["level"] == "u1"), None)
    # What the endpoints say beside the capacity is not asked for.
    return conclude(probes, serial, 0.0, None, 0).goodput_tok_s if probes and serial else None


def _step(record: Record, shape: str, name: str, rows: Sequence[Mapping[str, Any]]) -> float | None:
    most = record.settings.get("serve", {}).get("max_num_seqs")
    if not rows or not isinstance(most, int):
        return None
    fit = step_fits(pl.DataFrame(rows, infer_schema_length=None), most).get(shape)
    return fit[name] if fit else None


def _counted(record: Record, shape: str, level: str, name: str) -> float | None:
    table = record.results.table("sweep", CELLS)
    if table is None or any(table.schema.get(name) != pl.String for name in ("shape", "level")):
        return None
    rows = table.filter((pl.col("shape") == shape) & (pl.col("level") == level)).to_dicts()
    counted = {key.removeprefix("server_"): value for key, value in (rows[0] if rows else {}).items()
               if key.startswith("server_") and (value is None or isinstance(value, int | float))}  # fmt: skip
    return speculation(counted).get(name)
