"""Every figure of a sweep that may be claimed follows from its tables, however requests came: no right one is voided.

Oracle: the metrics as the stage writes them, of requests that are made up here. Nothing was measured.
"""

import json
from functools import partial
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from oneaxis.config.schema import Load
from oneaxis.errors import UserError
from oneaxis.judge.founded import read_load, read_requests, reused, unfounded
from oneaxis.judge.records import Record
from oneaxis.judge.units import kind_of
from oneaxis.load.capacity import Capacity, search_capacity
from oneaxis.load.client import REQUEST_SCHEMA
from oneaxis.load.levels import at_one_rate
from oneaxis.load.metrics import summarise_cell
from oneaxis.load.steps import step_fits, step_metrics
from oneaxis.load.summary import flat_metrics, summarise
from oneaxis.load.sweep import Sweep
from oneaxis.report.results import Results
from tests.load.sections import UNUSED

CLASS = {"ttft_ms": 300.0, "tpot_ms": 100.0}
FAST = {**CLASS, "ttft_ms": 52.0}
SHAPES = [
    {"name": "chat", "prompt_tokens": 8, "output_tokens": 5},
    {"name": "long", "prompt_tokens": 40, "output_tokens": 5},
]
CAPACITY = 6.0
"""Requests a second that the engine of these tests answers: above it every request waits longer than the one before."""


def load(**changed: Any) -> Load:
    return Load.model_validate({
        "arrival": "constant", "shapes": SHAPES, "rates_rps": [2.0, 8.0], **UNUSED, "duration_s": 20.0,
        "warmup_requests": 2, "request_timeout_s": 60.0, "service_class": CLASS, **changed,
    })  # fmt: skip


def cell(shape: str, level: str, rate: float, service_class: str = "default") -> list[dict[str, Any]]:
    """Requests of 20 s at a rate; every thirteenth fails."""
    rows = []
    for k in range(int(20 * rate)):
        at = k / rate
        first = at + 0.05 + 0.001 * (k % 7) + max(0.0, k / CAPACITY - at) + (0.02 if shape == "long" else 0)
        times = [first + (0.02 + 0.001 * rate) * j + 0.001 * (k % 3) for j in range(5)]
        row = {
            "shape": shape, "level": level, "rate_rps": rate, "service_class": service_class,
            "request_id": f"{shape}-{level}-{k}", "intended_s": at, "sent_s": at, "first_token_s": times[0],
            "done_s": times[-1], "ended_s": times[-1], "asked_prompt_tokens": 8, "asked_output_tokens": 5,
            "prompt_tokens": 8, "output_tokens": 5, "chunks": 5, "token_times": times, "status": "ok", "error": None,
            "finish_reason": "length",
        }  # fmt: skip
        failed = {"first_token_s": None, "done_s": None, "output_tokens": None, "token_times": [], "status": "timeout"}
        rows.append(row | (failed if k % 13 == 12 else {}))
    return rows


def recorded(
    folder: Path, rows: list[dict[str, Any]], settings: Load, found: dict[str, Capacity] | None = None
) -> Record:
    """What the stage would have written of these requests."""
    requests = pl.DataFrame(rows, schema=REQUEST_SCHEMA)
    counted = {"prefix_cache_hits": 0.0, "prefix_cache_queries": 10.0, "output_tokens": 90.0, "steps": 60.0,
               "drafts": 40.0, "accepted_tokens": 30.0, "accepted_at_1": 20.0}  # fmt: skip
    cells = dict.fromkeys(requests.select("shape", "level").iter_rows(), counted)
    sweep = Sweep(requests, pl.DataFrame(), dict(cells), [], pl.DataFrame())  # type: ignore[arg-type]
    summary = summarise(sweep, settings)
    (folder / "sweep").mkdir(parents=True)
    requests.write_parquet(folder / "sweep" / "requests.parquet")
    summary.write_parquet(folder / "sweep" / "cells.parquet")
    metrics = flat_metrics(summary, [], found, settings) | step_metrics(step_fits(summary, 16))
    sections = {"load": settings.model_dump(mode="json"), "serve": {"max_num_seqs": 16}}
    return Record("r", 0, Results(folder, {}, metrics, {}), sections, [], None, False)


def searched(rows: list[dict[str, Any]], settings: Load) -> dict[str, Capacity]:
    """A search of the capacity; every probe's requests are added to `rows`."""
    names = {"serial": "u1", "saturated": "u8", "serial again": "u1b"}

    def measure(shape: str, kind: str, size: float, attempt: int) -> dict[str, Any]:
        level = names.get(kind, f"r{size:g}")
        own = cell(shape, level, size if kind == "rate" else 5.0)
        rows.extend(own)
        return summarise_cell(
            pl.DataFrame(own, schema=REQUEST_SCHEMA), settings.classes_by_name(), settings.duration_s,
            open_loop=at_one_rate(level),
        )  # fmt: skip

    assert settings.search
    return {shape.name: search_capacity(settings.search, settings.rates_rps, partial(measure, shape.name))
            for shape in settings.shapes}  # fmt: skip


SEARCH = {"probes": 6, "resolution": 0.1, "max_drift": 0.2, "users": 8}
CLOSED = {"arrival": "closed", "rates_rps": [], "users": [1, 2, 4], "think_time_s": 0.0, "requests_per_user": 200}


@pytest.mark.parametrize(
    ("settings", "levels", "expected"),
    [
        (load(), ["r2", "r8"], "sweep/chat/capacity_tok_s"),
        (load(together=True), ["r2", "r8"], "sweep/long/capacity_tok_s"),
        (load(arrival="ramp", rates_rps=[1.0, 4.0]), ["ramp1-4"], "sweep/chat/ramp1-4/ttft_p90_ms"),
        (load(**CLOSED), ["u1", "u2", "u4"], "sweep/chat/step_base_ms"),
        (load(shapes=[each | {"service_class": "fast"} for each in SHAPES], classes={"fast": FAST}),
         ["r2", "r8"], "sweep/chat/r2/attainment"),
        (load(rates_rps=[2.0], search=SEARCH), [], "sweep/chat/capacity_tok_s"),
    ],
    ids=["rates", "together", "ramp", "users", "classes", "search"],
)  # fmt: skip
def test_every_figure_follows_from_its_tables_and_no_other_does(
    tmp_path: Path, settings: Load, levels: list[str], expected: str
) -> None:
    rows: list[dict[str, Any]] = []
    found = searched(rows, settings) if settings.search else None
    named = "fast" if settings.classes else "default"
    rows += [row for shape in settings.shapes for level in levels
             for row in cell(shape.name, level, float(level[1:]) if level[1:].isdigit() else 2.0, named)]  # fmt: skip
    record = recorded(tmp_path, rows, settings, found)
    claimable = [name for name in record.results.metrics if kind_of(name) == "repetitions"]
    assert expected in claimable
    assert len(claimable) >= 20
    assert unfounded(record, claimable) == []
    for name in claimable:
        if record.results.metrics[name]:
            record.results.metrics[name] *= 1.001  # type: ignore[index]
    told = {problem.reason.split()[1] for problem in unfounded(record, claimable)}
    assert told == {name for name in claimable if record.results.metrics[name]}


@pytest.mark.parametrize(
    ("column", "said"),
    [
        (
            pl.lit([], dtype=pl.List(pl.Float64)).alias("token_times"),
            "token_times of 37 of 37 answers do not begin with",
        ),
        ((pl.col("first_token_s") - 0.001).alias("first_token_s"), "token_times of 37 of 37 answers do not begin with"),
        (pl.lit(float("inf")).alias("done_s"), "done_s holds a value that is no finite number"),
        (pl.lit(None, dtype=pl.Float64).alias("sent_s"), "sent_s is missing in 37 of 37 rows"),
    ],
)
def test_a_table_that_no_sweep_writes_voids(tmp_path: Path, column: pl.Expr, said: str) -> None:
    record = recorded(tmp_path, cell("chat", "r2", 2.0), load())
    path = tmp_path / "sweep" / "requests.parquet"
    pl.read_parquet(path).with_columns(column).write_parquet(path)
    [problem] = unfounded(record, ["sweep/chat/r2/ttft_p90_ms"])
    assert problem.kind == "invalid"
    assert said in problem.reason


def test_request_ids_of_another_kind_are_no_table_of_requests(tmp_path: Path) -> None:
    record = recorded(tmp_path, cell("chat", "r2", 2.0), load())
    path = tmp_path / "sweep" / "requests.parquet"
    pl.read_parquet(path).with_columns(request_id=pl.int_range(pl.len())).write_parquet(path)
    with pytest.raises(UserError, match=r"requests\.parquet: Int64 in request_id; allowed: the table of requests"):
        read_requests(record)


def test_what_declared_starts_had_in_the_cache_is_read_from_the_record(tmp_path: Path) -> None:
    shared = {"tokens": 4, "groups": 1, "share": 1.0}
    settings = load(shapes=[SHAPES[0] | {"shared_prefix": shared}, SHAPES[1]])
    rows = cell("chat", "r2", 2.0)
    record = recorded(tmp_path, rows, settings)
    requests = read_requests(record)
    assert requests is not None
    section, _ = read_load(record)
    names = [row["request_id"] for row in rows]
    arrivals = pl.DataFrame({"request_id": names, "prefix_group": 0, "prefix_tokens": 4},
                            schema_overrides={"prefix_group": pl.Int64, "prefix_tokens": pl.Int64})  # fmt: skip
    # Nothing says whether there is a cache, or what was planned.
    assert reused(record, requests, section) == {}
    arrivals.write_parquet(tmp_path / "sweep" / "arrivals.parquet")
    (tmp_path / "serve").mkdir()
    realised = {"asked": {}, "differences": [], "cautions": [], "unverified": []}

    def resolved(**what: Any) -> None:
        (tmp_path / "serve" / "realised.json").write_text(json.dumps(realised | {"resolved": what}), encoding="utf-8")

    resolved(prefix_caching=False, block_size=4)
    assert reused(record, requests, section) == {}
    resolved(prefix_caching=True, block_size=4)
    # All but the first have a start that is cached: its token came before the next was sent.
    assert reused(record, requests, section) == dict.fromkeys(names[1:], 4)
    # A load that declares none is not asked.
    assert reused(record, requests, section | {"shapes": SHAPES}) == {}
    other = recorded(tmp_path / "other", rows, settings)
    (tmp_path / "other" / "serve").mkdir()
    (tmp_path / "other" / "serve" / "realised.json").write_bytes((tmp_path / "serve" / "realised.json").read_bytes())
    arrivals.with_columns(pl.col("prefix_tokens").cast(pl.String)).write_parquet(
        tmp_path / "other" / "sweep" / "arrivals.parquet"
    )
    with pytest.raises(UserError, match=r"arrivals\.parquet: String prefix_tokens; allowed"):
        reused(other, requests, section)
