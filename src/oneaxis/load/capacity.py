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

import numpy as np
import polars as pl

from oneaxis.config.schema import Load, Search, Shape
from oneaxis.load.intervals import exact_share_interval
from oneaxis.load.levels import AGAIN, at_one_rate
from oneaxis.load.metrics import CAPACITY_ATTAINMENT, summarise_cell
from oneaxis.load.plan import Plan, Prompts, draw_plan
from oneaxis.load.server import Target
from oneaxis.load.sweep import Sweep, run_sweep

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

    @property
    def level(self) -> str | None:
        """The cell of the capacity."""
        return None if self.rate_rps is None else f"r{self.rate_rps:g}"

    def as_json(self) -> dict[str, Any]:
        """As `summary.json` holds it."""
        return {**asdict(self), "level": self.level}


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
    if best is not None and high is not None and (sure is None or missed is None):
        end = "either end" if sure is None and missed is None else "its lower end" if sure is None else "its upper end"
        said.append(f"too few requests to show {end} (raise load.duration_s)")
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


# --- against a running engine --------------------------------------------------------------------------------

FASTEST_ANSWER_S = 0.01
"""Prompts for one user are drawn for answers that take no less."""

SPARE_PROMPTS = 2.0
"""Prompts drawn for each user, against what the fastest answer seen would need: engines become faster, too."""


def run_load(
    target: Target,
    plan: Plan,
    load: Load,
    text: np.ndarray,
    *,
    seed: int,
    session: str,
    repetition: int,
    most_users: int,
) -> tuple[Plan, Sweep, dict[str, Capacity] | None]:
    """Sweep the plan; or, where the settings ask for a search, search instead, from the rates of the plan on.

    Returns:
        What was planned, what was recorded, and what a search found.
    """
    if load.search is None:
        return plan, run_sweep(target, plan, duration_s=load.duration_s, timeout_s=load.request_timeout_s), None
    return search_sweep(
        target, load, text, seed=seed, session=session, repetition=repetition, most_users=most_users
    )  # fmt: skip


def search_sweep(
    target: Target, load: Load, text: np.ndarray, *, seed: int, session: str, repetition: int, most_users: int
) -> tuple[Plan, Sweep, dict[str, Capacity]]:
    """Search the capacity of every shape: what was sent, what was recorded, and what was found, by shape.

    Cells of an attempt that drifted are left out; their number stands in `Capacity.restarts`.

    Args:
        text: token ids that prompts are cut from.
        most_users: of the saturated endpoint, where the settings name none.

    Raises:
        RunError: when the engine dies, or no request of a cell succeeded.
    """
    assert load.search is not None
    prompts = Prompts(text)
    parts: list[tuple[Plan, Sweep]] = []
    found = {}
    for shape in load.shapes:
        cells: list[tuple[int, Plan, Sweep]] = []

        def measure(
            kind: str, size: float, attempt: int, shape: Shape = shape, cells: list[tuple[int, Plan, Sweep]] = cells
        ) -> Cell:
            probe = _settings(load, shape, kind, size, most_users, _serial_s(cells, kind, attempt))
            # An attempt, and the endpoint that is measured again, have draws of their own.
            own = f"{session}, search {attempt}{', again' if kind == 'serial again' else ''}"
            plan = draw_plan(probe, text, seed=seed, session=own, repetition=repetition, prompts=prompts)
            if kind == "serial again":
                plan = Plan(_named_again(plan.arrivals), _named_again(plan.warmups))
            sweep = run_sweep(target, plan, duration_s=load.duration_s, timeout_s=load.request_timeout_s)
            cells.append((attempt, Plan(_needed(plan.arrivals, sweep.requests), plan.warmups), sweep))
            return summarise_cell(
                sweep.requests, load.classes_by_name(), load.duration_s,
                open_loop=at_one_rate(sweep.requests["level"][0]),
            )  # fmt: skip

        found[shape.name] = search_capacity(load.search, load.rates_rps, measure)
        parts += [(plan, sweep) for attempt, plan, sweep in cells if attempt == found[shape.name].restarts]
    plan = Plan(pl.concat([plan.arrivals for plan, _ in parts]), pl.concat([plan.warmups for plan, _ in parts]))
    return plan, _joined([sweep for _, sweep in parts]), found


def _settings(load: Load, shape: Shape, kind: str, size: float, most_users: int, serial_s: float) -> Load:
    """The `load` section of one probe."""
    if kind == "rate":
        return load.model_copy(update={"shapes": [shape], "rates_rps": [size], "search": None})
    assert load.search is not None
    users = 1 if kind.startswith("serial") else load.search.users or most_users
    answers = math.ceil(SPARE_PROMPTS * load.duration_s / serial_s) + 2
    return load.model_copy(update={
        "arrival": "closed", "shapes": [shape], "rates_rps": [], "burstiness": None, "users": [users],
        "think_time_s": 0.0, "requests_per_user": answers, "search": None,
    })  # fmt: skip


def _serial_s(cells: Sequence[tuple[int, Plan, Sweep]], kind: str, attempt: int) -> float:
    """The fastest answer to one user in this attempt: nobody is answered faster among others.

    For one user alone, at first and again, a guess: an engine that has become faster since needs more prompts.
    """
    own = [sweep.requests for number, _, sweep in cells if number == attempt]
    if kind.startswith("serial") or not own:
        return FASTEST_ANSWER_S
    times = own[0].filter(pl.col("status") == "ok").select(pl.col("done_s") - pl.col("sent_s")).to_series()
    return max(float(times.min()), FASTEST_ANSWER_S)  # type: ignore[arg-type]


def _named_again(plan: pl.DataFrame) -> pl.DataFrame:
    return plan.with_columns(level=pl.col("level") + AGAIN, request_id=pl.col("request_id") + AGAIN)


def _needed(arrivals: pl.DataFrame, requests: pl.DataFrame) -> pl.DataFrame:
    """The arrivals that were sent, and the next of each user, which shows that nobody ran out of prompts."""
    sent = pl.col("request_id").is_in(requests["request_id"].to_list())
    before = sent.shift(1, fill_value=True).over("shape", "level", "user")
    return arrivals.filter(pl.col("user").is_null() | sent | before)


def _joined(sweeps: Sequence[Sweep]) -> Sweep:
    return Sweep(
        requests=pl.concat([sweep.requests for sweep in sweeps]),
        samples=pl.concat([sweep.samples for sweep in sweeps]),
        counters={cell: counted for sweep in sweeps for cell, counted in sweep.counters.items()},
        conditions=[condition for sweep in sweeps for condition in sweep.conditions],
        histograms=pl.concat([sweep.histograms for sweep in sweeps]),
    )
