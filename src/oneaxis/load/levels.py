"""Levels: how much load a cell of a sweep puts on the engine, by a label for tables, metrics and ids of requests.

A cell is a shape under a level. `r2` is 2 requests a second. A label says all that is needed to order and to name it.
"""

import re

from oneaxis.config.schema import Load

NUMBER = r"\d+(?:\.\d+)?(?:e[+-]\d+)?"
LABEL = rf"r{NUMBER}"
"""A label as a regular expression."""


def levels(load: Load) -> list[str]:
    """Labels of the levels of a `load` section, in its order."""
    return [f"r{rate:g}" for rate in load.rates_rps]


def level_size(label: str) -> float:
    """What the levels of one load are ordered by, and drawn over: requests a second."""
    return float(re.findall(NUMBER, label)[-1])


def level_name(label: str) -> str:
    """A level as a person reads it: `2 req/s`."""
    return f"{level_size(label):g} req/s"


def at_one_rate(label: str) -> bool:
    """Whether requests come on a clock at one mean rate all through, so that a queue that grows means overload."""
    return label.startswith(("r", "x")) and not label.startswith("ramp")
