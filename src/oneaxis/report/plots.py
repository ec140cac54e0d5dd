"""Plots as inline SVG whose colours are the page's: every colour is a placeholder that becomes a CSS variable.

So one file reads well in light, in dark and on paper. Same data, same bytes: ids come from a fixed salt, and no date
is written. The hues are Okabe and Ito's, told apart by all kinds of colour vision; series differ by marker or line
style as well.
"""

import html
import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

INK, MUTED, GRID, PAPER = "#000001", "#000002", "#000003", "#000004"
SERIES = ("#0000c1", "#0000c2", "#0000c3", "#0000c4", "#0000c5", "#0000c6")
MARKERS = ("o", "s", "^", "D", "v", "P")
LINES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)), (0, (3, 1)), "-")
VARIABLES = {INK: "currentColor", MUTED: "var(--muted)", GRID: "var(--grid)", PAPER: "var(--paper)"} | {
    color: f"var(--c{i + 1})" for i, color in enumerate(SERIES)
}
STYLE = {
    "svg.fonttype": "none", "svg.hashsalt": "oneaxis", "font.size": 9.5, "font.family": "sans-serif",
    "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": MUTED, "xtick.color": MUTED, "ytick.color": MUTED,
    "xtick.labelcolor": INK, "ytick.labelcolor": INK, "axes.grid": True, "grid.color": GRID, "grid.linewidth": 0.7,
    "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True, "axes.linewidth": 0.7,
    "axes.titlesize": 9.5, "axes.titlelocation": "left", "legend.frameon": False, "legend.fontsize": 8.5,
    "xtick.labelsize": 8.5, "ytick.labelsize": 8.5, "lines.linewidth": 1.6, "lines.markersize": 4.2,
    "figure.facecolor": "none", "axes.facecolor": "none", "savefig.facecolor": "none",
    "axes.unicode_minus": True, "text.parse_math": False,
}  # fmt: skip
WIDTH, HEIGHT = 5.3, 3.0
"""Inches. Small, so that the letters stay readable on a telephone."""
DRAWN_REQUESTS, DRAWN_STEPS = 300, 500
"""Of one cell, in the timeline and in the distribution; tables and intervals use all."""


@dataclass(frozen=True)
class Plot:
    """An SVG with what it shows in words (`label`, read by screen readers) and how to read it (`caption`)."""

    svg: str
    label: str
    caption: str


def draw(
    name: str,
    label: str,
    caption: str,
    paint: Callable[[Canvas], None],
    *,
    height: float = HEIGHT,
    width: float = WIDTH,
) -> Plot:
    """Run `paint` on an empty canvas and turn the result into inline SVG with ids of its own."""
    with matplotlib.rc_context(STYLE):
        canvas = Canvas(figsize=(width, height), layout="constrained")
        paint(canvas)
        buffer = io.StringIO()
        canvas.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    return Plot(svg=inline(buffer.getvalue(), name, label), label=label, caption=caption)


def inline(svg: str, name: str, label: str) -> str:
    """A stand-alone SVG as part of a page: no prolog, no metadata, own ids, the page's colours, a label.

    What a page does not need goes: ids that nothing refers to, indentation, hundredths of a point. Half the size.
    """
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.S)
    svg = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", svg, flags=re.S)
    box = re.search(r'viewBox="[^"]+"', svg)
    assert box, "matplotlib writes a viewBox"
    svg = re.sub(r"<[^>]*>", lambda tag: _short_tag(tag.group()), svg)
    known = set(re.findall(r'(?:url\(|href=")#([^)"]+)', svg))
    svg = re.sub(r' id="([^"]+)"', lambda found: f' id="{name}-{found[1]}"' if found[1] in known else "", svg)
    svg = re.sub(r'(url\(|href=")#', rf"\1#{name}-", svg)
    svg = re.sub(r">\s+<", "><", svg)
    for color, variable in VARIABLES.items():
        svg = svg.replace(color, variable)
    opening = f'<svg class="plot" {box.group(0)} role="img" aria-label="{html.escape(label, quote=True)}">'
    return re.sub(r"<svg\b[^>]*>", lambda _: opening, svg, count=1).strip()


def _short_tag(tag: str) -> str:
    """A tag of an SVG without namespaces, fonts (the page sets them) and superfluous digits."""
    tag = re.sub(r' xmlns(:\w+)?="[^"]*"', "", tag).replace("xlink:href=", "href=")
    tag = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", tag)
    tag = re.sub(r"font-family: [^;\"]*(; )?", "", tag)
    tag = re.sub(r' transform="rotate\(-?0 [^"]*"', "", tag)
    tag = re.sub(r"\s+", " ", tag)
    return re.sub(r"(\d\.\d\d)\d+", r"\1", tag)


def _axes(canvas: Canvas) -> Axes:
    return canvas.subplots()


def _log_scale(axes: Axes, which: str, values: Sequence[float]) -> None:
    """A log scale with plain numbers at 1, 2 and 5 of each decade (1 only over many decades)."""
    known = [value for value in values if value > 0 and np.isfinite(value)]
    if not known:
        return
    axes.set(**{f"{which}scale": "log"})
    axis = axes.xaxis if which == "x" else axes.yaxis
    decades = np.log10(max(known) / min(known))
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if decades < 2.5 else (1,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def paired_change(change: Sequence[float], effect: float | None, low: float | None, high: float | None) -> Plot:
    """Change of the mean NLL of each held-out sequence (nats per token), sorted, with the mean and its interval."""
    ordered = np.sort(np.asarray(change, dtype=float))

    def paint(canvas: Canvas) -> None:
        axes = _axes(canvas)
        places = np.arange(1, len(ordered) + 1)
        if low is not None and high is not None:
            axes.axhspan(low, high, color=SERIES[0], alpha=0.18, linewidth=0)
        if effect is not None:
            axes.axhline(effect, color=SERIES[0], linewidth=1.3, label="mean and its 95% interval")
        axes.axhline(0, color=INK, linewidth=0.9)
        axes.vlines(places, 0, ordered, color=MUTED, linewidth=0.9)
        axes.plot(places, ordered, "o", color=SERIES[1], label="one sequence")
        axes.set_xlabel("held-out sequence, sorted by change")
        axes.set_ylabel("ΔNLL (nats per token)")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend(loc="upper left")

    worse = int((ordered > 0).sum())
    label = f"Change of NLL by quantisation for each of {len(ordered)} held-out sequences; {worse} of them got worse."
    return draw("paired", label, "Each dot is the same text before and after. Above zero: quantisation made it worse.",
                paint)  # fmt: skip


def by_layer(
    name: str,
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    *,
    ylabel: str,
    label: str,
    caption: str,
    bound: tuple[float, str] | None = None,
    log: bool = True,
) -> Plot:
    """One line per site over the layers, on a log scale (or not): `series[site] = (layers, values)`."""

    def paint(canvas: Canvas) -> None:
        axes = _axes(canvas)
        for i, (site, (layers, values)) in enumerate(series.items()):
            axes.plot(layers, values, color=SERIES[i % 6], marker=MARKERS[i % 6], linestyle=LINES[i % 6],
                      markersize=3.4, label=site)  # fmt: skip
        if log:
            _log_scale(axes, "y", [value for _, values in series.values() for value in values])
        if bound is not None:
            axes.axhline(bound[0], color=INK, linewidth=0.9, linestyle=(0, (4, 3)))
            axes.annotate(bound[1], (1, bound[0]), xycoords=("axes fraction", "data"), ha="right", va="bottom",
                          fontsize=8)  # fmt: skip
        axes.set_xlabel("layer")
        axes.set_ylabel(ylabel)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        canvas.legend(loc="outside upper left", ncols=min(5, len(series)))

    return draw(name, label, caption, paint)


def pair_scores(kept: Sequence[float], dropped: Sequence[float], name: str, score: str, cutoff: float | None) -> Plot:
    """Histogram of a pair score, kept and dropped, with the cutoff between them."""
    both = np.concatenate([np.asarray(kept, dtype=float), np.asarray(dropped, dtype=float)])
    low, high = np.quantile(both, [0.005, 0.995])
    edges = np.linspace(low, high if high > low else low + 1, 31)

    def paint(canvas: Canvas) -> None:
        axes = _axes(canvas)
        parts = [np.clip(kept, edges[0], edges[-1]), np.clip(dropped, edges[0], edges[-1])]
        named = [f"kept ({len(kept)})", f"dropped ({len(dropped)})"]
        axes.hist(parts, bins=edges.tolist(), stacked=True, color=[SERIES[0], SERIES[1]], edgecolor=PAPER,
                  linewidth=0.5, hatch=["", "////"], label=named)  # fmt: skip
        if cutoff is not None and edges[0] <= cutoff <= edges[-1]:
            axes.axvline(
                cutoff, color=INK, linewidth=1.2, linestyle=(0, (4, 3)), label=f"cutoff {cutoff:.3g}".replace("-", "−")
            )
        axes.set_xlabel(f"{score} (larger: more displacement expected)")
        axes.set_ylabel("pairs")
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        canvas.legend(loc="outside upper left", ncols=3)

    label = f"Distribution of {score} over {len(both)} training pairs: {len(kept)} kept, {len(dropped)} dropped."
    return draw(name, label, "The outermost bars also hold what lies beyond them.", paint)


def curves(steps: Sequence[float], series: Mapping[str, Sequence[float | None]], name: str, ylabel: str, label: str,
           caption: str) -> Plot:  # fmt: skip
    """Training curves over the steps."""

    def paint(canvas: Canvas) -> None:
        axes = _axes(canvas)
        for i, (title, values) in enumerate(series.items()):
            numbers = np.array([np.nan if value is None else value for value in values], dtype=float)
            axes.plot(steps, numbers, color=SERIES[i % 6], marker=MARKERS[i % 6], linestyle=LINES[i % 6], label=title)
        axes.set_xlabel("step")
        axes.set_ylabel(ylabel)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        canvas.legend(loc="outside upper left", ncols=3)

    return draw(name, label, caption, paint)


def thinned(values: Any, most: int) -> Any:
    """At most `most` of a sequence, evenly spread over it, both ends among them: a page must stay small."""
    if len(values) <= most:
        return values
    places = np.linspace(0, len(values) - 1, most).round().astype(int)
    return values[places] if isinstance(values, np.ndarray) else [values[place] for place in places]


def ecdf(cells: Mapping[str, Sequence[float]], bound_ms: float | None) -> Plot:
    """Share of all requests whose first token came within x ms; a failed request (infinity) never arrives."""

    def paint(canvas: Canvas) -> None:
        axes = _axes(canvas)
        for i, (title, values) in enumerate(cells.items()):
            ordered = np.sort(np.asarray(values, dtype=float))
            arrived = ordered[np.isfinite(ordered)]
            shares = np.arange(1, len(arrived) + 1) / len(ordered)
            arrived, shares = thinned(arrived, DRAWN_STEPS), thinned(shares, DRAWN_STEPS)
            axes.step(np.r_[arrived[:1], arrived], np.r_[0, shares], where="post", color=SERIES[i % 6],
                      linestyle=LINES[i % 6], label=title)  # fmt: skip
        if bound_ms is not None:
            axes.axvline(bound_ms, color=INK, linewidth=1.0, linestyle=(0, (4, 3)))
            axes.annotate(f"class: {bound_ms:g} ms", (bound_ms, 0.02), ha="right", va="bottom", rotation=90, fontsize=8)
        _log_scale(axes, "x", [value for values in cells.values() for value in values])
        axes.set_ylim(0, 1.02)
        axes.set_xlabel("TTFT, from the intended send time (ms)")
        axes.set_ylabel("share of requests")
        canvas.legend(loc="outside upper left", ncols=2)

    return draw("ecdf", f"Cumulative distribution of time to first token in {len(cells)} cells.",
                "Further left is faster. A curve that ends below 1 has requests that never answered.", paint,
                height=3.3)  # fmt: skip


def accuracies(rows: Sequence[tuple[str, str, float, float]], chance: Mapping[str, float]) -> Plot:
    """Accuracy with its standard error per task and scorer: `rows = [(task, scorer, accuracy, stderr), ...]`."""
    tasks = list(dict.fromkeys(task for task, *_ in rows))

    def paint(canvas: Canvas) -> None:
        panels = np.atleast_1d(canvas.subplots(1, len(tasks), sharey=True, squeeze=False)).ravel()
        scorers = list(dict.fromkeys(scorer for _, scorer, *_ in rows))
        for axes, task in zip(panels, tasks, strict=True):
            for this, scorer, accuracy, error in rows:
                if this == task:
                    place = scorers.index(scorer)
                    axes.errorbar(100 * accuracy, place, xerr=100 * error, fmt="o", color=SERIES[0], capsize=3,
                                  elinewidth=1.2)  # fmt: skip
            if task in chance:
                axes.axvline(100 * chance[task], color=INK, linewidth=0.9, linestyle=(0, (4, 3)))
            axes.set_title(task, fontsize=8.5)
            axes.set_yticks(range(len(scorers)), scorers)
        panels[0].invert_yaxis()
        canvas.supxlabel("accuracy (%), ± one standard error; dashed: chance", fontsize=8.5)

    height = 1.1 + 0.27 * len({scorer for _, scorer, *_ in rows})
    return draw("accuracy", f"Accuracy per scorer for {', '.join(tasks)}.",
                "Scorers answer different questions of the same log-probabilities: compare runs by one scorer, never "
                "scorers by their height.", paint, height=height)  # fmt: skip
