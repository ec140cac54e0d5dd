"""What a plan says: facts, a table and a curve, as text, as JSON and as a picture.

Names carry the unit of the bare number in JSON (`read_s`, `ceiling_tok_s`); the text shows it with a fitting prefix.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oneaxis.errors import UserError
from oneaxis.plan.units import show

SUFFIXES = (".svg", ".png", ".pdf")


@dataclass(frozen=True)
class Fact:
    """One number with the words that say what it is."""

    key: str
    value: float | str | None
    unit: str
    words: str


@dataclass(frozen=True)
class Column:
    """A column of the table; `unit` as `oneaxis.plan.units.show` knows it, or `text`."""

    key: str
    label: str
    unit: str


@dataclass(frozen=True)
class Curve:
    """Lines over one axis."""

    x: str
    y: str
    lines: Mapping[str, tuple[Sequence[float], Sequence[float]]]
    log_x: bool = True
    log_y: bool = False


@dataclass(frozen=True)
class Answer:
    """All that one plan says."""

    plan: str
    formula: str
    inputs: Mapping[str, Any]
    facts: Sequence[Fact] = ()
    columns: Sequence[Column] = ()
    rows: Sequence[Mapping[str, Any]] = ()
    curve: Curve | None = None
    notes: Sequence[str] = field(default_factory=tuple)

    def as_json(self) -> dict[str, Any]:
        """For programs; what is not defined is null."""
        return {
            "plan": self.plan,
            "formula": self.formula,
            "inputs": dict(self.inputs),
            "facts": {fact.key: fact.value for fact in self.facts},
            "rows": [{column.key: row.get(column.key) for column in self.columns} for row in self.rows],
            "notes": list(self.notes),
        }

    def as_text(self) -> str:
        """For people."""
        lines = [f"{self.plan}: {self.formula}"]
        lines += [f"  with {', '.join(_input(key, value) for key, value in self.inputs.items())}"]
        if self.facts:
            shown = [fact.value if isinstance(fact.value, str) else show(fact.value, fact.unit) for fact in self.facts]
            width = max(len(text) for text in shown)
            lines += [""] + [f"  {text:>{width}}  {fact.words}" for text, fact in zip(shown, self.facts, strict=True)]
        if self.rows:
            lines += ["", *_table(self.columns, self.rows)]
        if self.notes:
            lines += ["", *(f"  {note}" for note in self.notes)]
        return "\n".join(lines)


INPUT_UNITS = {"_bytes_s": "B/s", "_flops_s": "FLOP/s", "flops_s": "FLOP/s", "_bytes": "B", "_rps": "req/s", "_s": "s"}
"""What the end of an input's name says of its unit; `tok_s` has none of these."""


def _input(key: str, value: Any) -> str:
    unit = next((unit for end, unit in INPUT_UNITS.items() if key.endswith(end) and key != "tok_s"), "")
    if not isinstance(value, int | float):
        return f"{key.replace('_', ' ')} {value}"
    name = key.removesuffix(next((end for end in INPUT_UNITS if key.endswith(end)), "")) if unit else key
    return f"{name.replace('_', ' ')} {show(float(value), unit)}".strip()


def _table(columns: Sequence[Column], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    def cell(row: Mapping[str, Any], column: Column) -> str:
        value = row.get(column.key)
        return value if isinstance(value, str) else show(value, column.unit)

    cells = [[column.label for column in columns]] + [[cell(row, column) for column in columns] for row in rows]
    widths = [max(len(line[place]) for line in cells) for place in range(len(columns))]
    return [
        "  "
        + "  ".join(
            text.ljust(width) if column.unit == "text" else text.rjust(width)
            for text, width, column in zip(line, widths, columns, strict=True)
        ).rstrip()
        for line in cells
    ]


def print_answer(answer: Answer, *, as_json: bool, plot: Path | None) -> None:
    """Print it, and draw its curve into `plot`.

    Raises:
        UserError: a plot is asked for and the plan is no curve, or the file has another suffix or no folder.
    """
    if plot is not None:
        draw(answer, plot)
    print(json.dumps(answer.as_json(), indent=2, allow_nan=False) if as_json else answer.as_text())


def draw(answer: Answer, path: Path) -> None:
    """The curve as a file of its own; the same bytes for the same answer.

    Raises:
        UserError: as `print_answer`.
    """
    if answer.curve is None:
        raise UserError(f"--plot={path}: `plan {answer.plan}` is no curve here; allowed: without --plot")
    if path.suffix not in SUFFIXES:
        raise UserError(f"--plot={path}: allowed: a file that ends in {', '.join(SUFFIXES)}")
    if not path.absolute().parent.is_dir():
        raise UserError(f"--plot={path}: allowed: a folder that exists")
    import matplotlib
    from matplotlib.figure import Figure

    # Okabe and Ito's hues, and a line style each, told apart by all kinds of colour vision and in print.
    colors = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
    styles = ("-", "--", ":", "-.", (0, (3, 1)), (0, (6, 2)))
    with matplotlib.rc_context({"svg.hashsalt": "oneaxis", "font.size": 10, "axes.grid": True, "grid.alpha": 0.3,
                                "axes.spines.top": False, "axes.spines.right": False}):  # fmt: skip
        canvas = Figure(figsize=(6.4, 4.0), layout="constrained")
        axes = canvas.subplots()
        for place, (name, (xs, ys)) in enumerate(answer.curve.lines.items()):
            known = [(x, y) for x, y in zip(xs, ys, strict=True) if math.isfinite(y)]
            axes.plot(*zip(*known, strict=True), label=name, color=colors[place % 6], linestyle=styles[place % 6],
                      marker="o", markersize=3)  # fmt: skip
        axes.set(xlabel=answer.curve.x, ylabel=answer.curve.y)
        axes.set_title(answer.formula, fontsize=9, loc="left")
        if answer.curve.log_x:
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}")
        if answer.curve.log_y:
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
        axes.legend(frameon=False)
        canvas.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else {})
