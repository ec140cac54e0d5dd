"""Levels: how much load a cell of a sweep puts on the engine, by a label for tables, metrics and ids of requests.

A cell is a shape under a level. A label says all that is needed to order, to name and to draw it: `r2` is 2 requests a
second in open loop, `u4` four users in closed loop, `ramp1-8` a rate that goes from 1 to 8 a second, `x2` a trace at
twice its speed. `u1b` is one user again, at the end of a search for capacity.
"""

import re

from oneaxis.config.schema import Load, level_number

NUMBER = r"\d+(?:\.\d+)?(?:e[+-]\d+)?"
LABEL = rf"(?:[rux]{NUMBER}b?|ramp{NUMBER}-{NUMBER})"
"""A label as a regular expression."""

AGAIN = "b"
"""The end of the label of a level that was measured before."""

TRACE_SHAPE = "trace"
"""The one shape of a load that replays a trace."""


def shape_names(load: Load) -> list[str]:
    """Names of the shapes of a `load` section, in its order."""
    return [TRACE_SHAPE] if load.arrival == "trace" else [shape.name for shape in load.shapes]


def levels(load: Load) -> list[str]:
    """Labels of the levels of a `load` section, in its order."""
    match load.arrival:
        case "closed":
            return [f"u{users}" for users in load.users]
        case "trace":
            return [f"x{level_number(speed)}" for speed in load.trace_speed]
        case "ramp":
            return ["ramp{}-{}".format(*map(level_number, load.rates_rps))]
        case _:
            return [f"r{level_number(rate)}" for rate in load.rates_rps]


def level_size(label: str) -> float:
    """What the levels of one load are ordered by, and drawn over: req/s (of a ramp the last), users, or the speed."""
    return float(re.findall(NUMBER, label)[-1])


def level_unit(label: str) -> str:
    """What `level_size` counts."""
    return {"u": "users", "x": "times the trace's speed"}.get(label[0], "req/s")


def level_name(label: str) -> str:
    """A level as a person reads it: `2 req/s`, `4 users`, `1 to 8 req/s`, `speed 1x`."""
    numbers = [f"{float(number):g}" for number in re.findall(NUMBER, label)]
    if label.startswith("ramp"):
        return f"{numbers[0]} to {numbers[1]} req/s"
    if label.startswith("x"):
        return f"speed {numbers[0]}x"
    again = ", again" if label.endswith(AGAIN) else ""
    return f"{numbers[0]} {'user' if label.removesuffix(AGAIN) == 'u1' else level_unit(label)}{again}"


def at_one_rate(label: str) -> bool:
    """Whether requests come on a clock at one mean rate all through, so that a queue that grows means overload.

    Only such a level can show a capacity: users wait for the engine, and a ramp has no one rate.
    """
    return label.startswith(("r", "x")) and not label.startswith("ramp")
