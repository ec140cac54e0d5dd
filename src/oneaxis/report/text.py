"""Numbers as a reader wants them: sensible digits, a real minus sign, units beside them, intervals in brackets."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

NONE = "–"


def number(value: float | None, digits: int = 3) -> str:
    """`digits` significant digits, thousands apart: 15.4, 0.0183, 1,234, 3.10e−6."""
    if value is None or not math.isfinite(value):
        return NONE
    if value == 0:
        return "0"
    places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    if abs(value) < 1e-4:
        mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
        return f"{mantissa}e{int(exponent)}".replace("-", "−")
    return f"{value:,.{places}f}".replace("-", "−")


def percent(share: float | None, places: int = 1) -> str:
    """A share as a percentage: 0.385 -> 38.5%."""
    return NONE if share is None or not math.isfinite(share) else f"{100 * share:.{places}f}%".replace("-", "−")


def signed_percent(share: float | None, places: int = 1) -> str:
    """A relative change: 0.018 -> +1.8%."""
    text = percent(share, places)
    return f"+{text}" if share is not None and share > 0 and text != NONE else text


def points(share: float | None) -> str:
    """A change of a share: −0.079 -> −7.9 points."""
    if share is None:
        return NONE
    shown = f"{100 * share:+.1f}"
    return f"{'0.0' if float(shown) == 0 else shown} points".replace("-", "−")


def milliseconds(value: float | None) -> str:
    """Whole milliseconds from 10 on, one place below; the unit stands in the column's head."""
    if value is None or not math.isfinite(value):
        return NONE
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def seconds(value: float | None) -> str:
    """`75.2` -> 1 min 15 s; `3.21` -> 3.2 s."""
    if value is None or not math.isfinite(value):
        return NONE
    if value < 60:
        return f"{value:.1f} s"
    return f"{int(value // 60)} min {int(value % 60)} s"


def nats(value: float | None) -> str:
    """A log-probability, two places: −42.25. Hundredths of a nat are below what decides."""
    return NONE if value is None or not math.isfinite(value) else f"{value:,.2f}".replace("-", "−")


def signed_nats(value: float | None) -> str:
    """A change of a log-probability: +1.75."""
    return NONE if value is None or not math.isfinite(value) else f"{value:+,.2f}".replace("-", "−")


def count(value: float | None) -> str:
    """A whole number, thousands apart."""
    return NONE if value is None else f"{int(value):,}"


def value_text(value: Any) -> str:
    """A setting or a piece of evidence in one short line."""
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return (f"{value:,.0f}" if 1000 <= abs(value) < 1e12 else f"{value:.4g}").replace("-", "−")
    if isinstance(value, Mapping):
        return evidence(value) or "none"
    if isinstance(value, Sequence) and not isinstance(value, str):
        shown = ", ".join(value_text(item) for item in list(value)[:8])
        return (shown or "none") + (f", … ({len(value)} in all)" if len(value) > 8 else "")
    return str(value)


def evidence(facts: Mapping[str, Any]) -> str:
    """`{"hit_rate": 0.0, "bound": 0.01}` -> `hit rate: 0; bound: 0.01`."""
    return "; ".join(f"{str(key).replace('_', ' ')}: {value_text(value)}" for key, value in facts.items())


def signed(value: float | None, digits: int = 3) -> str:
    """A change in its metric's unit: +0.301, −4.50."""
    shown = number(value, digits)
    return f"+{shown}" if value is not None and value > 0 and shown != NONE else shown


def effect(value: float | None, low: float | None, high: float | None) -> tuple[str, str]:
    """A change and its interval with the same places, as many as the interval's width bears: two digits of it.

    `(-0.31, -0.4, -0.22)` -> `("−0.31", "[−0.40, −0.22]")`; without both ends, `("−0.310", "no interval")`.
    """
    if value is None or not math.isfinite(value):
        return NONE, NONE
    if low is None or high is None or not (math.isfinite(low) and math.isfinite(high)):
        return signed(value), "no interval"
    width = max(high - low, 1e-9 * abs(value))
    places = max(0, 1 - math.floor(math.log10(width))) if width > 0 else 3
    if places > 6:
        return signed(value), f"[{signed(low)}, {signed(high)}]"
    shown = [f"{0:.{places}f}" if round(end, places) == 0 else f"{end:+,.{places}f}" for end in (value, low, high)]
    value_shown, low_shown, high_shown = (end.replace("-", "−") for end in shown)
    return value_shown, f"[{low_shown}, {high_shown}]"


def plural(n: float | None, unit: str | None) -> str:
    """`16 sequences`, `1 item`, `12`."""
    if n is None:
        return NONE
    if not unit:
        return count(n)
    return f"{count(n)} {unit}" if int(n) == 1 or unit.endswith("s") else f"{count(n)} {unit}s"


def shorten(words: str, most: int) -> str:
    """One line of at most `most` characters; the middle of what is longer is left out, since names differ at ends."""
    line = " ".join(words.split())
    if len(line) <= most:
        return line
    head = (most - 1) // 2
    return f"{line[:head]}…{line[len(line) - (most - 1 - head) :]}"


def guards_tally(entries: Sequence[Mapping[str, Any]]) -> str:
    """`14 guards: 9 passed, 1 failed, 4 not applicable`, of rows as `verdicts.json` holds them."""
    counts = {state: sum(entry["state"] == state for entry in entries)
              for state in ("passed", "failed", "unproven", "not applicable")}  # fmt: skip
    said = [f"{count} {state}" for state, count in counts.items() if count or state == "passed"]
    return f"{len(entries)} guards: {', '.join(said)}"
