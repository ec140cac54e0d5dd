"""The latency part of the page: from the requests of a sweep and the server's samples to plots, tables and findings.

Every number is computed from the request table again, by the functions that the sweep itself used.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from oneaxis.config.schema import service_classes
from oneaxis.load.levels import at_one_rate, level_name, level_size, level_unit
from oneaxis.load.metrics import attained_by_class, per_request, requests_needed, summarise_cell
from oneaxis.report import plots, text
from oneaxis.report.facts import Cell, cells
from oneaxis.report.plots import DRAWN_REQUESTS, INK, LINES, MARKERS, SERIES, Plot, draw, thinned
from oneaxis.report.results import Results
from oneaxis.report.tables import Table

Key = tuple[str, str]
"""Shape and level."""


class Evidence:
    """The requests of each cell, and every figure of it with its interval, computed once."""

    def __init__(self, results: Results) -> None:
        self.results = results
        self.requests = _requests_by_cell(results)
        load = results.section("load")
        self.figures = {
            key: summarise_cell(own, service_classes(load), load["duration_s"], open_loop=at_one_rate(key[1]))
            for key, own in self.requests.items()
        }


def _requests_by_cell(results: Results) -> dict[Key, pl.DataFrame]:
    """The requests of each cell, by shape in the order of the table and then by level."""
    requests = results.table("sweep", "requests.parquet")
    if requests is None:
        return {}
    keys = list(dict.fromkeys(requests.select("shape", "level").iter_rows()))
    shapes = list(dict.fromkeys(shape for shape, _ in keys))
    keys.sort(key=lambda key: (shapes.index(key[0]), key[1][0], level_size(key[1]), key[1]))
    return {key: requests.filter((pl.col("shape") == key[0]) & (pl.col("level") == key[1])) for key in keys}


def latency_intervals(evidence: Evidence) -> dict[Key, dict[str, str]]:
    """What the requests of each cell bound: n, TTFT p50 and p90, attainment, each as text beside its figure.

    A p90 of too few requests is marked, and so is a load under which the queue grew.
    """
    found = {}
    for key, cell in evidence.figures.items():
        around = {"n": text.count(cell["n"]), "load": "" if not cell["saturated"] else " ▲"}
        for name in ("ttft_p50", "ttft_p90"):
            around[name] = _bounds(cell, name)
        around["ttft_p90"] += "" if cell["n"] >= requests_needed(90) else " *"
        around["attainment"] = f" [{100 * cell['attainment_low']:.0f}–{100 * cell['attainment_high']:.0f}%]"
        found[key] = around
    return found


def _bounds(cell: Mapping[str, Any], name: str) -> str:
    """`[612–1403]`; “?” where so few requests bound no end."""
    low, high = (cell[f"{name}_{end}_ms"] for end in ("low", "high"))
    if low is None and high is None:
        return " [?]"
    return f" [{'?' if low is None else text.milliseconds(low)}–{'?' if high is None else text.milliseconds(high)}]"


def words(evidence: Evidence) -> str:
    """The finding that comes first: loads beyond capacity."""
    grown = [
        f"{shape} at {level_name(level)} by {cell['queue_growth_rps']:.2g} requests/s "
        f"[{cell['queue_growth_low_rps']:.2g}, {cell['queue_growth_high_rps']:.2g}]"
        for (shape, level), cell in evidence.figures.items()
        if cell["saturated"]
    ]
    if not grown:
        return ""
    return (f"Beyond capacity (▲): the queue grew all through the cell, {'; '.join(grown)}. Latencies there depend on "
            "how long the load lasted.")  # fmt: skip


def plots_of(evidence: Evidence) -> list[Plot]:
    """Distribution of TTFT, capacity curve, timeline."""
    by_cell, results = evidence.requests, evidence.results
    if not by_cell:
        return []
    load = results.section("load")
    drawn = _drawn(by_cell)
    named = {f"{shape}, {level_name(level)}": by_cell[shape, level] for shape, level in drawn}
    classes = service_classes(load)
    bound = load["service_class"]["ttft_ms"] if len(classes) == 1 else None
    timed = {name: per_request(own, classes)["ttft_ms"].to_list() for name, own in named.items()}
    found = (results.document("sweep", "summary.json") or {}).get("capacity", {})
    shapes: dict[str, list[Point]] = {}
    for (shape, level), cell in evidence.figures.items():
        if at_one_rate(level) or not any(at_one_rate(other) for _, other in by_cell):
            shapes.setdefault(shape, []).append(_point(level, cell))
    unit = level_unit(next((level for _, level in by_cell if at_one_rate(level)), next(iter(by_cell))[1]))
    samples = results.table("sweep", "server_samples.parquet")
    lines = [
        Timeline(f"{key[0]}, {level_name(key[1])}", _requests(by_cell[key]), _sampled(samples, *key)) for key in drawn
    ]
    return [plots.ecdf(timed, bound), against_load(shapes, found, unit), timeline(lines, len(by_cell) - len(drawn))]


def _drawn(by_cell: Mapping[Key, pl.DataFrame]) -> list[Key]:
    """Of each shape the lowest and the highest load of the kind that most levels are, `DRAWN_CELLS` at most."""
    drawn: list[Key] = []
    for shape in dict.fromkeys(shape for shape, _ in by_cell):
        own = [key for key in by_cell if key[0] == shape]
        steady = [key for key in own if at_one_rate(key[1])] or own
        drawn += dict.fromkeys((steady[0], steady[-1]))
    return drawn[:DRAWN_CELLS] if len(by_cell) > DRAWN_CELLS else list(by_cell)


def _point(level: str, cell: Mapping[str, Any]) -> "Point":
    goodput, attainment = (
        (cell[name.format("")], cell[name.format("_low")], cell[name.format("_high")])
        for name in ("goodput{}_tok_s", "attainment{}")
    )
    return Point(level_size(level), goodput, attainment, bool(cell["saturated"]))


def _requests(requests: pl.DataFrame) -> list[tuple[float, float | None, float | None]]:
    return [
        (row["intended_s"], row["first_token_s"] if row["status"] == "ok" else None, row["done_s"])
        for row in requests.iter_rows(named=True)
    ]


def _sampled(samples: pl.DataFrame | None, shape: str, level: str) -> pl.DataFrame | None:
    """The server's samples of a cell; of a level, where its shapes went together."""
    if samples is None:
        return None
    own = samples.filter((pl.col("level") == level) & (pl.col("shape").is_null() | (pl.col("shape") == shape)))
    return own.sort("time_s") if own.height > 1 else None


def tables(evidence: Evidence) -> list[Table]:
    """The capacity that a search found, attainment by class, and percentiles with their intervals."""
    found = [_search(evidence.results), _by_class(evidence), _percentiles(evidence)]
    return [table for table in found if table is not None and table.rows]


def _search(results: Results) -> Table | None:
    searched = (results.document("sweep", "summary.json") or {}).get("search")
    if not searched:
        return None
    rows = []
    for shape, one in searched.items():
        known = one["goodput_tok_s"] is not None
        rows.append([
            shape,
            text.number(one["goodput_tok_s"]) if known else "none",
            _ends(one["goodput_low_tok_s"], one["goodput_high_tok_s"]),
            f"{one['rate_rps']:g}" if known else text.NONE,
            _ends(one["rate_low_rps"], one["rate_high_rps"]),
            text.milliseconds(one["serial_e2e_ms"]),
            text.number(one["saturated_rps"]),
            text.signed_percent(one["drift"]),
            str(len(one["probes"])),
            one["reason"],
        ])  # fmt: skip
    return Table(
        ("Shape", "tok/s", "interval", "req/s", "interval", "one user, E2E ms", "many users, req/s", "drift", "probes",
         "to be said"), rows, "lrrrrrrrrw", caption="Capacity",
        note="The highest goodput whose class was met by 90% of the requests and whose queue did not grow. Intervals: "
        "from the highest rate that is shown to hold to the lowest that is shown to miss; “?”: too few requests.",
    )  # fmt: skip


def _ends(low: float | None, high: float | None) -> str:
    return f"{'?' if low is None else text.number(low)}–{'?' if high is None else text.number(high)}"


def _by_class(evidence: Evidence) -> Table | None:
    load = evidence.results.section("load")
    classes = service_classes(load) if load else {}
    if len(classes) < 2:
        return None
    rows = []
    for (shape, level), own in evidence.requests.items():
        for name, one in attained_by_class(own, classes, load["duration_s"]).items():
            rows.append([shape, level_name(level), name, text.count(one["n"]), text.number(one["goodput_tok_s"]),
                         f"{text.percent(one['attainment'], 0)} "
                         f"[{100 * one['attainment_low']:.0f}–{100 * one['attainment_high']:.0f}%]"])  # fmt: skip
    return Table(("Shape", "load", "class", "n", "goodput tok/s", "attainment"), rows, "lllrrr", caption="By class")


def _percentiles(evidence: Evidence) -> Table:
    rows, cells_of = [], evidence.figures
    for (shape, level), cell in cells_of.items():
        for quantity in ("ttft", "itl", "tpot", "e2e"):
            shown = []
            for percent in (50, 90, 99):
                value = cell[f"{quantity}_p{percent}_ms"]
                # ITL has many gaps a request, but they are not independent: the requests are what counts.
                few = "" if cell["n"] >= requests_needed(percent) else " *"
                shown.append("not reached" if value is None else
                             f"{text.milliseconds(value)}{_bounds(cell, f'{quantity}_p{percent}')}{few}")  # fmt: skip
            if set(shown) != {"not reached"} or quantity in ("ttft", "e2e"):
                rows.append([shape, level_name(level), quantity.upper(), *shown, text.count(cell["n"])])
    if not cells_of:
        rows = _bare(cells(evidence.results))
    return Table(
        ("Shape", "load", "quantity", "p50 ms", "p90 ms", "p99 ms", "n"), rows, "lllrrrr", caption="Percentiles",
        note=f"In brackets: 95% intervals. * too few requests for a claim (a p99 needs {requests_needed(99)}, a p90 "
        f"{requests_needed(90)}): read it as one that was seen.", folded=True,
    )  # fmt: skip


def _bare(measured: Sequence[Cell]) -> list[list[str]]:
    """Percentiles as metrics alone have them, where the requests are not here."""
    rows = []
    for cell in measured:
        n = int(cell.numbers.get("n", 0))
        for quantity in ("ttft", "itl", "tpot", "e2e"):
            values = [(percent, cell.numbers.get(f"{quantity}_p{percent}_ms")) for percent in (50, 90, 99)]
            if any(value is not None for _, value in values):
                shown = [text.milliseconds(v) + ("" if n >= requests_needed(p) else " *") for p, v in values]
                rows.append([cell.shape, level_name(cell.level), quantity.upper(), *shown, text.count(n)])
    return rows


DRAWN_CELLS = 4
"""In the timeline: of each shape the lowest and the highest level."""
TOP, BOTTOM, BETWEEN = 0.75, 0.45, 0.75
"""Inches of the timeline above, below and between its rows: legend, labels and titles."""


@dataclass(frozen=True)
class Timeline:
    """One cell for the timeline; times in seconds since the cell began."""

    title: str
    requests: Sequence[tuple[float, float | None, float | None]]
    """Intended send, first token (None: failed), last token."""
    samples: pl.DataFrame | None
    """The server's: time_s, running, waiting, kv_cache_usage, output_tokens (as counted); None: there are none."""


def timeline(cells: Sequence[Timeline], left_out: int) -> Plot:
    """Each request as a bar, and under it on the same time axis the server's own tokens/s, queue and KV cache."""
    columns = min(2, len(cells))
    rows = -(-len(cells) // columns)
    sampled = any(cell.samples is not None for cell in cells)
    parts = (3.2, 1.2, 1.2, 0.9) if sampled else (1.0,)
    height = TOP + BOTTOM + (rows - 1) * BETWEEN + rows * (2.9 if sampled else 1.1)

    def paint(canvas: Canvas) -> None:
        # Placed by hand: the solver of a constrained layout gives nested panels other bytes from run to run.
        canvas.set_layout_engine("none")
        inner = (height - TOP - BOTTOM - (rows - 1) * BETWEEN) / rows
        grid = canvas.add_gridspec(rows, columns, left=0.09, right=0.98, top=1 - TOP / height, bottom=BOTTOM / height,
                                   hspace=BETWEEN / inner, wspace=0.16)  # fmt: skip
        for place, cell in enumerate(cells):
            own = grid[place // columns, place % columns].subgridspec(len(parts), 1, height_ratios=parts, hspace=0.3)
            axes = list(own.subplots(sharex=True, squeeze=False).ravel())
            _bars(axes[0], cell)
            if cell.samples is not None:
                _state(axes[1:], cell.samples, labels=place % columns == 0)
            axes[-1].set_xlabel("seconds since the cell began")
        handles = [
            Line2D([], [], color=SERIES[0], linewidth=0.8, label="until the first token"),
            Line2D([], [], color=SERIES[1], linewidth=2.0, label="generating"),
            Line2D([], [], color=INK, marker="x", linestyle="", label="failed"),
        ]
        if sampled:
            handles += [Line2D([], [], color=SERIES[2], label="running"),
                        Line2D([], [], color=SERIES[3], linestyle=LINES[1], label="waiting")]  # fmt: skip
        canvas.legend(handles=handles, loc="upper left", ncols=3)

    most = max(len(cell.requests) for cell in cells)
    some = f" {DRAWN_REQUESTS} of up to {most:,} requests are drawn." if most > DRAWN_REQUESTS else ""
    some += f" {left_out} more cells are in requests.parquet." if left_out else ""
    below = " Below, by the server's own counters: tokens a second, requests running and waiting, KV cache in use."
    return draw("timeline", f"Timeline of every request in {len(cells)} cells, with the server's counters.{some}",
                f"One line per request, in the order of arrival. Growing left parts: a queue builds up."
                f"{below if sampled else ''}{some}",
                paint, height=height, width=5.6)  # fmt: skip


def _bars(axes: Axes, cell: Timeline) -> None:
    bars_of = list(enumerate(thinned(sorted(cell.requests, key=lambda request: request[0]), DRAWN_REQUESTS)))
    failed = [(sent, place) for place, (sent, first, _) in bars_of if first is None]
    waited = [(place, sent, first) for place, (sent, first, _) in bars_of if first is not None]
    wrote = [(place, first, done) for place, (_, first, done) in bars_of if None not in (first, done)]
    for bars, color, thick in ((waited, SERIES[0], 0.8), (wrote, SERIES[1], 2.0)):
        if bars:
            axes.hlines(*zip(*bars, strict=True), color=color, linewidth=thick)
    if failed:
        axes.plot(*zip(*failed, strict=True), "x", color=INK, markersize=4, linestyle="")
    axes.set_title(cell.title, fontsize=8.5)
    axes.set_yticks([])
    axes.grid(visible=False, axis="y")
    axes.invert_yaxis()


def _state(panels: Sequence[Axes], samples: pl.DataFrame, *, labels: bool) -> None:
    """Tokens/s, requests and KV cache of one cell; the counter of tokens is since the server's start."""
    speed, queue, cache = panels
    times = samples["time_s"].to_numpy()
    if len(times) > 1:
        gained = np.diff(samples["output_tokens"].cast(pl.Float64).fill_null(np.nan).to_numpy())
        speed.stairs(gained / np.diff(times), times, baseline=None, color=SERIES[1])
    queue.step(times, samples["running"].to_numpy(), where="post", color=SERIES[2])
    queue.step(times, samples["waiting"].to_numpy(), where="post", color=SERIES[3], linestyle=LINES[1])
    cache.step(times, 100 * samples["kv_cache_usage"].to_numpy(), where="post", color=SERIES[4])
    for axes, title in ((speed, "tok/s"), (queue, "requests"), (cache, "KV %")):
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_locator(MaxNLocator(nbins=2, integer=True))
        if labels:
            axes.set_ylabel(title, fontsize=8)


@dataclass(frozen=True)
class Point:
    """A cell in the capacity curve: (value, low, high) each."""

    load: float
    goodput: tuple[float, float, float]
    attainment: tuple[float, float, float]
    saturated: bool


def against_load(
    shapes: Mapping[str, Sequence[Point]], capacity: Mapping[str, Mapping[str, Any] | None], unit: str
) -> Plot:
    """The capacity curve: goodput (tokens/s) and attainment over the load, with their intervals.

    Args:
        capacity: per shape `goodput_tok_s`, `rate_rps` and, from a search, `rate_low_rps` and `rate_high_rps`; None
            where no level reached an attainment of 90%. unit: of the load.
    """
    reached = {title: best for title in shapes if (best := capacity.get(title)) and best.get("goodput_tok_s")}

    def paint(canvas: Canvas) -> None:
        left, right = canvas.subplots(1, 2)
        offered = sorted({point.load for points in shapes.values() for point in points})
        for i, (title, points) in enumerate(shapes.items()):
            ordered = sorted(points, key=lambda point: point.load)
            at = [point.load for point in ordered]
            style: dict[str, Any] = {"color": SERIES[i % 6], "linestyle": LINES[i % 6], "capsize": 2, "elinewidth": 0.8}
            for axes, scale, values in ((left, 1, [point.goodput for point in ordered]),
                                        (right, 100, [point.attainment for point in ordered])):  # fmt: skip
                value, low, high = (scale * np.array(column) for column in zip(*values, strict=True))
                axes.errorbar(at, value, yerr=np.maximum([value - low, high - value], 0),
                              marker=MARKERS[i % 6], label=title, **style)  # fmt: skip
                grew = [place for place, point in enumerate(ordered) if point.saturated]
                if grew:
                    axes.plot([at[k] for k in grew], value[grew], marker=MARKERS[i % 6], linestyle="", markersize=9,
                              markerfacecolor="none", color=SERIES[i % 6])  # fmt: skip
        for title, best in reached.items():
            ends = best.get("rate_low_rps"), best.get("rate_high_rps")
            if None not in ends:
                left.plot(ends, [best["goodput_tok_s"]] * 2, color=INK, linewidth=1.0, marker="|", markersize=7)
            left.plot(best["rate_rps"], best["goodput_tok_s"], marker="*", markersize=12, linestyle="", color=INK,
                      markerfacecolor="none", label="capacity" if title == next(iter(reached)) else None)  # fmt: skip
        left.set_ylim(bottom=0)
        left.set_ylabel("goodput (tokens/s)")
        right.set_ylim(0, 104)
        right.axhline(90, color=INK, linewidth=0.9, linestyle=(0, (4, 3)))
        right.set_ylabel("attainment (%)")
        for axes in (left, right):
            axes.set_xlabel(f"load ({unit})")
            if len(offered) <= 6:
                axes.set_xticks(offered, [f"{load:g}" for load in offered])
        handles, names = left.get_legend_handles_labels()
        canvas.legend(handles, names, loc="outside upper left", ncols=3)

    each = [f"{title} {_found(reached[title])}" if title in reached else f"{title} none" for title in shapes
            if title in capacity]  # fmt: skip
    said = f" Capacity: {', '.join(each)}." if each else ""
    grew = any(point.saturated for points in shapes.values() for point in points)
    return draw("rates", f"Goodput and attainment over the load.{said}",
                "Goodput counts only tokens of requests that met the class; bars are 95% intervals. Dashed: 90%, the "
                f"bar for capacity.{' Ringed: the queue grew all through the cell.' if grew else ''}{said}",
                paint)  # fmt: skip


def _found(best: Mapping[str, Any]) -> str:
    """`88 tokens/s at 7.2 req/s [6.4 to 9.1]`."""
    low, high = best.get("rate_low_rps"), best.get("rate_high_rps")
    around = f" [{'?' if low is None else f'{low:g}'} to {'?' if high is None else f'{high:g}'}]" if low or high else ""
    return f"{best['goodput_tok_s']:.3g} tokens/s at {best['rate_rps']:g} req/s{around}"
