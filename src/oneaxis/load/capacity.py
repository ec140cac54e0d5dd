"""Capacity of a shape: the highest goodput at which its class is met, by rates that are chosen while they are measured.

1. **Serial endpoint**: one user who waits for each answer. No load gives better latency: where even this misses the
   class, there is no capacity.
2. **Saturated endpoint**: as many users as the engine runs at once. No load gives more answers a second, so the search
   begins below that rate.
3. **Bisection** in open loop, between the highest rate that held (attainment of at least `CAPACITY_ATTAINMENT`, and no
   queue that grew: a longer cell would have missed) and the lowest that did not, until they lie within `resolution` of
   each other. Each probe is a cell of its own: warm-up, an empty prefix cache, prompts that no other has. Probes that
   are left go to rates a little further off, until the interval below has two ends.
4. **Drift**: the serial endpoint again. Where its median E2E has moved by more than `max_drift` the machine was not the
   same all through: the search starts again, once, and is unresolved when it drifts again.

**Interval.** Attainment falls with the rate, so requests of higher rates can only understate it at a lower one, and
those of lower rates overstate it at a higher one: Clopper and Pearson's interval at a rate (of effective numbers of
requests) may use all probes on the side that counts against it. `rate_low_rps` is the highest rate whose attainment is
so shown to be 90% at least, `rate_high_rps` the lowest where it is shown to be less, or where the queue grew; None
where so few requests show neither. Goodput has the lower end of its own interval at the first, and cannot exceed what
the second offers.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from oneaxis.config.schema import Search
from oneaxis.load.intervals import exact_share_interval
from oneaxis.load.metrics import CAPACITY_ATTAINMENT

Cell = Mapping[str, Any]
"""What `summarise_cell` says of a probe."""

OFF_LOW, OFF_HIGH = (0.9, 0.8, 0.65), (1.1, 1.25)
"""Of the bracket's ends: where probes that are left go while a rate nearer by shows neither."""

BEYOND = 1.1
"""Times the saturated endpoint's rate: where the search takes the upper end to be until a rate has missed."""


@dataclass(frozen=True)
class Probe:
    """An open-loop cell of a search."""

    rate_rps: float
    n: int
    effective_n: float
    """Independent requests that they are worth."""
    attainment: float
    goodput_tok_s: float
    goodput_low_tok_s: float
    offered_tok_s: float
    """Output tokens a second that were asked for."""
    saturated: bool
    """Whether its queue grew all through it."""

    @property
    def held(self) -> bool:
        """Whether the class was met, and would be in a longer cell."""
        return self.attainment >= CAPACITY_ATTAINMENT and not self.saturated


@dataclass(frozen=True)
class Capacity:
    """What a search found, for one shape."""

    goodput_tok_s: float | None
    """None: unresolved, or no rate held."""
    rate_rps: float | None
    goodput_low_tok_s: float | None
    goodput_high_tok_s: float | None
    rate_low_rps: float | None
    rate_high_rps: float | None
    reason: str
    """Why there is no capacity, or what keeps its interval open; empty where there is nothing to say."""
    probes: Sequence[Probe]
    """In the order in which they were measured."""
    serial_e2e_ms: float | None
    """Median of the serial endpoint."""
    serial_attainment: float
    saturated_rps: float | None
    """Answers a second of the saturated endpoint; None where it was not measured."""
    drift: float | None
    """Serial median E2E at the end / at the beginning - 1."""
    restarts: int

    def as_json(self) -> dict[str, Any]:
        """As `summary.json` holds it."""
        return asdict(self)


Measure = Callable[[str, float, int], Cell]
"""`(kind, size, attempt)` to the cell of that load: `serial` and `serial again` (one user), `saturated` (as many users
as the engine runs), `rate` (size in requests a second). An attempt has prompts of its own."""


def search_capacity(search: Search, first_rates: Sequence[float], measure: Measure) -> Capacity:
    """Search the capacity of one shape.

    Args:
        first_rates: rates that are probed in any case, before the others.
    """
    for attempt in (0, 1):
        found = _attempt(search, first_rates, measure, attempt)
        if found.drift is None or abs(found.drift) <= search.max_drift:
            return found
    assert found.drift is not None
    return Capacity(**{
        **vars(found), "goodput_tok_s": None, "rate_rps": None, "goodput_low_tok_s": None, "goodput_high_tok_s": None,
        "rate_low_rps": None, "rate_high_rps": None,
        "reason": f"unresolved: one user's median E2E moved by {found.drift:+.0%} from the beginning to the end, twice "
                  f"(load.search.max_drift {search.max_drift:.0%}): the machine is not quiet",
    })  # fmt: skip


def _attempt(search: Search, first_rates: Sequence[float], measure: Measure, attempt: int) -> Capacity:
    serial = measure("serial", 1, attempt)
    probes: list[Probe] = []
    saturated_rps = drift = None
    if serial["attainment"] >= CAPACITY_ATTAINMENT:
        saturated = measure("saturated", 0, attempt)
        saturated_rps = saturated["ok"] / saturated["window_s"]
        for rate in first_rates:
            probes.append(_probe(rate, measure("rate", rate, attempt)))
        while len(probes) < len(first_rates) + search.probes:
            next_rate = choose_rate(probes, saturated_rps, search.resolution)
            if next_rate is None:
                break
            probes.append(_probe(next_rate, measure("rate", next_rate, attempt)))
        again = measure("serial again", 1, attempt)
        if serial["e2e_p50_ms"] and again["e2e_p50_ms"]:
            drift = again["e2e_p50_ms"] / serial["e2e_p50_ms"] - 1
        else:
            drift = math.inf
    return conclude(probes, serial, saturated_rps, drift, attempt)


def _probe(rate: float, cell: Cell) -> Probe:
    return Probe(
        rate_rps=rate,
        n=cell["n"],
        effective_n=cell["effective_n"],
        attainment=cell["attainment"],
        goodput_tok_s=cell["goodput_tok_s"],
        goodput_low_tok_s=cell["goodput_low_tok_s"],
        offered_tok_s=cell["offered_tok_s"],
        saturated=bool(cell["saturated"]),
    )


def bracket(probes: Sequence[Probe]) -> tuple[float, float | None]:
    """The highest rate that held below the lowest that missed (0: none), and the lowest that missed (None: none)."""
    missed = min((probe.rate_rps for probe in probes if not probe.held), default=None)
    held = [probe.rate_rps for probe in probes if probe.held and (missed is None or probe.rate_rps < missed)]
    return max(held, default=0.0), missed


def choose_rate(probes: Sequence[Probe], saturated_rps: float, resolution: float) -> float | None:
    """The next rate to probe, with three digits; None when the bracket is narrow, and its ends are shown."""
    low, high = bracket(probes)
    if high is None:
        ceiling = BEYOND * saturated_rps
        # Nothing has missed yet: up to the ceiling by halves, then beyond it.
        wanted = [(low + ceiling) / 2 if low < 0.75 * ceiling else max(ceiling, 1.25 * low)]
    elif high - low > resolution * high:
        wanted = [(low + high) / 2]
    else:
        sure, missed = shown(probes)
        wanted = [share * low for share in OFF_LOW if sure is None or sure.rate_rps < share * low]
        wanted += [share * high for share in OFF_HIGH if missed is None or missed.rate_rps > share * high]
    known = {probe.rate_rps for probe in probes}
    rates = [float(f"{rate:.3g}") for rate in wanted]
    return next((rate for rate in rates if rate > 0 and rate not in known), None)


def shown(probes: Sequence[Probe]) -> tuple[Probe | None, Probe | None]:
    """The highest rate that is shown to hold, below any that is shown to miss, and the lowest that is shown to miss."""
    ordered = sorted(probes, key=lambda probe: probe.rate_rps)
    each = list(zip(ordered, attainment_bounds(ordered), strict=True))
    missed = [probe for probe, (_, most) in each if most < CAPACITY_ATTAINMENT or probe.saturated]
    first = missed[0].rate_rps if missed else math.inf
    sure = [p for p, (least, _) in each if least >= CAPACITY_ATTAINMENT and p.held and p.rate_rps < first]
    return (sure[-1] if sure else None), (missed[0] if missed else None)


def attainment_bounds(probes: Sequence[Probe]) -> list[tuple[float, float]]:
    """The interval of attainment at each probe's rate, from those that can only count against either end.

    Args:
        probes: sorted by rate.
    """
    bounds = []
    for index in range(len(probes)):
        above = [probes[index : end + 1] for end in range(index, len(probes))]
        below = [probes[start : index + 1] for start in range(index + 1)]
        bounds.append((max(_interval(some)[0] for some in above), min(_interval(some)[1] for some in below)))
    return bounds


def _interval(probes: Sequence[Probe]) -> tuple[float, float]:
    n = sum(probe.effective_n for probe in probes)
    return exact_share_interval(min(sum(probe.attainment * probe.effective_n for probe in probes), n), n)


def conclude(
    probes: Sequence[Probe], serial: Cell, saturated_rps: float | None, drift: float | None, restarts: int
) -> Capacity:
    """The capacity that the probes show, with its interval."""
    low, high = bracket(probes)
    best = max((p for p in probes if p.held and p.rate_rps <= low), key=lambda p: p.goodput_tok_s, default=None)
    sure, missed = shown(probes)
    said = []
    if saturated_rps is None:
        said.append(
            f"none: one user alone attains {serial['attainment']:.0%}; the class asks for more than the engine can"
        )
    elif best is None:
        said.append("none: no rate that was probed met the class for 90% of its requests")
    elif high is None:
        said.append("every rate that was probed held: the capacity is higher (raise load.search.probes)")
    if best is not None and high is not None and any(probe.held and probe.rate_rps > high for probe in probes):
        said.append(
            "a higher rate held where a lower one missed: the cells are short for their noise (load.duration_s)"
        )
    return Capacity(
        goodput_tok_s=best.goodput_tok_s if best else None,
        rate_rps=best.rate_rps if best else None,
        goodput_low_tok_s=sure.goodput_low_tok_s if sure and best else None,
        goodput_high_tok_s=missed.offered_tok_s if missed and best else None,
        rate_low_rps=sure.rate_rps if sure else None,
        rate_high_rps=missed.rate_rps if missed else None,
        reason="; ".join(said),
        probes=probes,
        serial_e2e_ms=serial["e2e_p50_ms"],
        serial_attainment=serial["attainment"],
        saturated_rps=saturated_rps,
        drift=drift,
        restarts=restarts,
    )
