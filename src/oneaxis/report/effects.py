"""Plots of a multirun: effects with intervals against the baseline, a metric over the axis, repetitions in run order.

A decision has a marker of its own, and its word stands beside it, so nothing rests on colour. A point without an
interval says so; an INVALID one is hollow on hatched ground. The drawing itself is that of `plots`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D
from matplotlib.transforms import blended_transform_factory

from oneaxis.report import text
from oneaxis.report.plots import INK, LINES, MARKERS, MUTED, PAPER, SERIES, Plot, draw
from oneaxis.report.verdicts import Comparison, Row

MARKS: dict[str, dict[str, Any]] = {
    "accept": {"marker": "o", "color": SERIES[2]},
    "better": {"marker": "o", "color": SERIES[2]},
    "reject": {"marker": "s", "color": SERIES[1]},
    "worse": {"marker": "s", "color": SERIES[1]},
    "tie": {"marker": "D", "color": INK},
    "unresolved": {"marker": "^", "color": SERIES[3], "markerfacecolor": PAPER},
    "invalid": {"marker": "s", "color": INK, "markerfacecolor": "none"},
    "not judged": {"marker": "x", "color": INK},
}
NAME_LENGTH = 34
PANEL_CANDIDATES = 5


def forest(comparison: Comparison) -> Plot:
    """One row a candidate: its name and decision, its effect with interval, the zero line, the bar and what was
    expected."""
    rows, sign = comparison.rows, -1.0 if comparison.better == "lower" else 1.0
    bar = sign * comparison.bar if comparison.claimed and comparison.bar else None
    if comparison.claimed and comparison.margin is not None:
        bar = -sign * comparison.margin
    expected = comparison.expected if comparison.claimed else None

    def paint(canvas: Canvas) -> None:
        axes = canvas.subplots()
        ends = [value for row in rows for value in (row.effect, row.low, row.high) if value is not None]
        ends += [value for value in (0.0, bar, expected) if value is not None]
        low, high = min(ends), max(ends)
        room = (high - low) * 0.07 or 1.0
        axes.set_xlim(low - room, high + room)
        if bar is not None:
            axes.axvspan(bar, axes.get_xlim()[1 if sign > 0 else 0], color=SERIES[2], alpha=0.10, linewidth=0)
            axes.axvline(bar, color=SERIES[2], linewidth=1.2, linestyle=(0, (5, 3)))
        axes.axvline(0, color=INK, linewidth=1.0)
        if expected is not None:
            axes.axvline(expected, color=SERIES[0], linewidth=1.2, linestyle=(0, (1.5, 2)))
            axes.plot([expected], [-0.75], marker="v", color=SERIES[0], markersize=6, clip_on=False)
        for place, row in enumerate(rows):
            _label(axes, place, row)
        for decision, places in _by_decision(rows).items():
            mark = MARKS.get(decision, MARKS["unresolved"])
            ends_of = [(place + 0.18, rows[place].low, rows[place].high) for place in places if _bounded(rows[place])]
            if ends_of:
                dashed = (0, (3, 2)) if decision in ("unresolved", "invalid") else "-"
                axes.hlines(*zip(*ends_of, strict=True), color=mark["color"], linewidth=1.8, linestyle=dashed)
            effects = [float(rows[place].effect or 0) for place in places]
            axes.plot(effects, [place + 0.18 for place in places], linestyle="", markersize=6.5, **mark)
        axes.set_ylim(len(rows) - 0.4, -0.75)
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        axes.grid(visible=False, axis="y")
        toward = {"lower": "← better", "higher": "better →"}.get(str(comparison.better), "")
        unit = f", {comparison.unit}" if comparison.unit and comparison.unit not in comparison.metric else ""
        axes.set_xlabel(f"effect on {text.shorten(comparison.metric, 40)}{unit}  {toward}".rstrip())
        axes.locator_params(axis="x", nbins=6)
        bound = "bar" if comparison.margin is None else "largest loss allowed"
        canvas.legend(handles=_lines(bar, expected, bound), loc="outside upper left", ncols=3)

    counted = [f"{row.point} {row.decision} {row.shown[0]}" for row in rows[:12]]
    more = f" and {len(rows) - 12} more" if len(rows) > 12 else ""
    caption = ("Lines: intervals. Filled: accept or better ●, reject or worse ■, tie ◆. Hollow: unresolved △, "
               "INVALID □ on hatched ground.")  # fmt: skip
    return draw(f"forest-{comparison.id}",
                f"Effects on {comparison.metric} against the baseline, best first: {'; '.join(counted)}{more}.",
                caption, paint, height=0.95 + 0.4 * max(1, len(rows)))  # fmt: skip


def _by_decision(rows: Sequence[Row]) -> dict[str, list[int]]:
    """Decision -> places of its rows that have an effect."""
    found: dict[str, list[int]] = {}
    for place, row in enumerate(rows):
        if row.effect is not None:
            found.setdefault(row.decision, []).append(place)
    return found


def _bounded(row: Row) -> bool:
    return row.low is not None and row.high is not None


def _label(axes: Axes, place: int, row: Row) -> None:
    across = blended_transform_factory(axes.transAxes, axes.transData)
    said = " ".join(row.shown) if row.effect is not None else "no effect"
    word = "INVALID" if row.decision == "invalid" else row.decision
    if row.decision in ("invalid", "not judged"):
        axes.axhspan(place - 0.5, place + 0.45, facecolor="none", edgecolor=MUTED, hatch="////", linewidth=0, alpha=0.3)
    name = f"{text.shorten(row.point, NAME_LENGTH)} · {word}"
    for x, words, side in ((0.0, name, "left"), (1.0, said, "right")):
        # They lie inside the axes: measuring them for the layout would take most of the time.
        axes.text(x, place - 0.18, words, transform=across, fontsize=8.5, ha=side, in_layout=False)


def _lines(bar: float | None, expected: float | None, bound: str) -> list[Line2D]:
    handles = [Line2D([], [], color=INK, linewidth=1.0, label="baseline")]
    if bar is not None:
        handles.append(Line2D([], [], color=SERIES[2], linestyle=(0, (5, 3)), label=f"{bound} {text.signed(bar)}"))
    if expected is not None:
        handles.append(Line2D([], [], color=SERIES[0], linestyle=(0, (1.5, 2)), marker="v",
                              label=f"expected {text.signed(expected)}"))  # fmt: skip
    return handles


def over_axis(comparison: Comparison, axis: str, values: Mapping[str, float], baseline: str) -> Plot | None:
    """The metric over the values of a numeric axis; a candidate's interval is that of its effect, from the baseline's
    value. None when fewer than three values were measured: the effect plot then says all."""
    at = next((float(row.verdict["baseline_value"]) for row in comparison.rows
               if isinstance(row.verdict.get("baseline_value"), int | float)), None)  # fmt: skip
    rows = sorted((row for row in comparison.rows if row.effect is not None), key=lambda row: values[row.point])
    if at is None or len(rows) < 2:
        return None
    sound = [row for row in rows if row.sound]

    def paint(canvas: Canvas) -> None:
        axes = canvas.subplots()
        line = sorted([(values[baseline], at), *((values[row.point], at + float(row.effect or 0)) for row in sound)])
        axes.plot([x for x, _ in line], [y for _, y in line], color=MUTED, linewidth=1.0)
        axes.axhline(at, color=INK, linewidth=0.9, linestyle=(0, (4, 3)))
        axes.plot([values[baseline]], [at], marker="*", color=INK, markersize=10, linestyle="", label="baseline")
        for decision, places in _by_decision(rows).items():
            mark = MARKS.get(decision, MARKS["unresolved"])
            word = "INVALID" if decision == "invalid" else decision
            for bounded, label in ((True, word), (False, f"{word}, no interval")):
                own = [rows[place] for place in places if _bounded(rows[place]) is bounded]
                if not own:
                    continue
                x, y = [values[row.point] for row in own], [at + float(row.effect or 0) for row in own]
                if bounded:
                    low, high = [at + float(row.low or 0) for row in own], [at + float(row.high or 0) for row in own]
                    axes.vlines(x, low, high, color=mark["color"], linewidth=1.6)
                axes.plot(x, y, linestyle="", markersize=6.5, label=label, **mark)
        if min(values.values()) > 0 and max(values.values()) / min(values.values()) >= 20:
            axes.set_xscale("log")
        if len(values) <= 8:
            ticks = sorted(set(values.values()))
            axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            axes.minorticks_off()
        axes.set_xlabel(text.shorten(axis, 44))
        axes.set_ylabel(text.shorten(comparison.metric, 26))
        canvas.legend(loc="outside upper left", ncols=4)

    return draw(f"over-{comparison.id}", f"{comparison.metric} over {axis}, {len(rows) + 1} values.",
                "Bars: the interval of the difference to the baseline, laid at the baseline's value (dashed). INVALID "
                "points are hollow and not joined.", paint)  # fmt: skip


def in_run_order(
    comparison: Comparison, measured: Mapping[str, Sequence[tuple[int, float, float]]], baseline: str
) -> list[Plot]:
    """Every repetition at the time it was measured, joined with its partner of the baseline: drift shows as a slope.

    At most five candidates a plot, in the order of the comparison.
    """
    ordered = [row.point for row in comparison.rows if row.point in measured]
    base = measured.get(baseline, ())
    panels = [ordered[i : i + PANEL_CANDIDATES] for i in range(0, len(ordered), PANEL_CANDIDATES)] or [[]]
    partner = {repetition: (minute, value) for repetition, minute, value in base}

    def panel(number: int, names: Sequence[str]) -> Plot:
        def paint(canvas: Canvas) -> None:
            axes = canvas.subplots()
            for i, name in enumerate(names):
                for repetition, minute, value in measured[name]:
                    if repetition in partner:
                        then, other = partner[repetition]
                        axes.plot([then, minute], [other, value], color=SERIES[i], linewidth=0.8, alpha=0.7,
                                  linestyle=LINES[i])  # fmt: skip
                axes.plot([minute for _, minute, _ in measured[name]], [value for *_, value in measured[name]],
                          linestyle="", marker=MARKERS[i], color=SERIES[i], label=text.shorten(name, 22),
                          markersize=5.5)  # fmt: skip
            axes.plot([minute for _, minute, _ in base], [value for *_, value in base], linestyle="-", linewidth=0.7,
                      marker="*", markersize=8, color=INK, label=text.shorten(baseline, 22))  # fmt: skip
            axes.set_xlabel("minutes since the first measurement")
            axes.set_ylabel(text.shorten(comparison.metric, 26))
            canvas.legend(loc="outside upper left", ncols=3)

        n = max(len(values) for values in measured.values())
        return draw(f"order{number}-{comparison.id}",
                    f"{comparison.metric} of each of up to {n} repetitions in run order: {', '.join(names)}.",
                    "Each thin line joins the two arms of one repetition. A slope of the stars alone is drift of the "
                    "machine.", paint)  # fmt: skip

    return [panel(number, names) for number, names in enumerate(panels)]
