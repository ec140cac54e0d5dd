"""Cost of a million tokens of a machine of one's own, and metered cost of events at a price list.

    cost = hourly / (tok_per_s x 3600 x utilisation) x 1e6 x overhead

Metering: an event has an id that its sender chose, and counts once however often it is sent; cached input tokens have a
price of their own; a model without a price is *unpriced*, never free; and a meter neither blocks nor fails the call
that it meters: what it cannot store in time it drops, and counts.
"""

import queue
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from oneaxis.errors import UserError
from oneaxis.plan.units import positive
from oneaxis.report.results import Results

MILLION = 1e6


def cost_per_million(hourly_usd: float, tok_per_s: float, utilisation: float, overhead: float) -> float:
    """USD for a million tokens.

    Args:
        utilisation: share of the hour in which the machine gives `tok_per_s`. overhead: factor for what is paid beside
            the machine (1.15: 15% more).
    """
    positive(hourly_usd=hourly_usd, tok_per_s=tok_per_s, utilisation=utilisation, overhead=overhead)
    if utilisation > 1:
        raise UserError(f"utilisation={utilisation:g}: allowed: above 0, up to 1")
    return hourly_usd / (tok_per_s * 3600 * utilisation) * MILLION * overhead


# --- metering ------------------------------------------------------------------------------------------------

Tokens = Annotated[int, Field(ge=0)]
Price = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Event(BaseModel):
    """What one call used."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    id: Annotated[str, Field(min_length=1)]
    """A UUID of the sender's."""
    model: Annotated[str, Field(min_length=1)]
    input_tokens: Tokens
    """Cached ones among them."""
    cached_tokens: Tokens = 0
    output_tokens: Tokens


class Prices(BaseModel):
    """Of one model, USD for a million tokens."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    input: Price
    cached_input: Price
    output: Price


@dataclass(frozen=True)
class Bill:
    """What the events of one model come to."""

    model: str
    events: int
    repeats: int
    """Sent again, and not counted again."""
    conflicts: int
    """Of the repeats, those that say something else than the first did."""
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    usd: float | None
    """None: unpriced."""


def price(event: Event, prices: Prices) -> float:
    """USD of one event."""
    if event.cached_tokens > event.input_tokens:
        raise UserError(f"event {event.id}: cached_tokens={event.cached_tokens}: allowed: up to input_tokens="
                        f"{event.input_tokens}, which hold them")  # fmt: skip
    fresh = event.input_tokens - event.cached_tokens
    parts = fresh * prices.input, event.cached_tokens * prices.cached_input, event.output_tokens * prices.output
    return sum(parts) / MILLION


def bills(events: Iterable[Event], prices: Mapping[str, Prices]) -> list[Bill]:
    """A bill for each model, in the order of the models' first events."""
    first: dict[str, Event] = {}
    repeats: dict[str, list[bool]] = {}
    for event in events:
        if event.id in first:
            known = first[event.id]
            repeats.setdefault(known.model, []).append(event != known)
        else:
            first[event.id] = event
    found = []
    for model in dict.fromkeys(event.model for event in first.values()):
        own = [event for event in first.values() if event.model == model]
        again = repeats.get(model, [])
        usd = sum(price(event, prices[model]) for event in own) if model in prices else None
        found.append(
            Bill(model, len(own), len(again), sum(again), sum(event.input_tokens for event in own),
                 sum(event.cached_tokens for event in own), sum(event.output_tokens for event in own), usd)
        )  # fmt: skip
    return found


def read_events(path: Path) -> list[Event]:
    """Events of a JSONL file, as `Meter` writes them.

    Raises:
        UserError: it is missing, or a line is no event.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read; allowed: a JSONL file of events") from error
    found = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                found.append(Event.model_validate_json(line))
            except ValidationError as error:
                raise UserError(f"{path}, line {number}: {_problem(error)}; allowed: id, model, input_tokens, "
                                "cached_tokens, output_tokens, whole numbers from 0 up") from error  # fmt: skip
    return found


def read_prices(path: Path) -> dict[str, Prices]:
    """Prices by model: a YAML or JSON file.

    Raises:
        UserError: it is missing, or a price is none.
    """
    try:
        values = YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read; allowed: a YAML file of prices by model") from error
    except YAMLError as error:
        raise UserError(f"{path}: not YAML: {str(error).splitlines()[0]}") from error
    try:
        return TypeAdapter(dict[str, Prices]).validate_python(values)
    except ValidationError as error:
        raise UserError(f"{path}: {_problem(error)}; allowed: for each model input, cached_input and output, USD for a "
                        "million tokens, from 0 up") from error  # fmt: skip


def _problem(error: ValidationError) -> str:
    problem = error.errors(include_url=False)[0]
    key = ".".join(map(str, problem["loc"]))
    given = "" if problem["type"] == "missing" or isinstance(problem["input"], dict) else f"={problem['input']!r}"
    return f"{key}{given}: {problem['msg'].lower()}"


def events_of_run(results: Results, model: str) -> list[Event]:
    """One event a cell of a finished sweep, with the tokens that the server counted.

    Their ids follow from the run, so a run that is metered twice counts once.

    Raises:
        UserError: the run has no sweep, or its server did not count.
    """
    cells = results.table("sweep", "cells.parquet")
    if cells is None:
        raise UserError(f"{results.folder}: holds no sweep/cells.parquet; allowed: a run whose sweep is done")
    ended = results.provenance.get("sweep", {}).get("finished_at", "")
    found = []
    for cell in cells.to_dicts():
        counted = {name: cell.get(f"server_{name}") for name in ("prompt_tokens", "prefix_cache_hits", "output_tokens")}
        if None in counted.values():
            missing = ", ".join(name for name, value in counted.items() if value is None)
            raise UserError(f"{results.folder}: the server of {cell['shape']} {cell['level']} counted no {missing}; "
                            "allowed: an engine with these counters")  # fmt: skip
        name = uuid.uuid5(uuid.NAMESPACE_OID, f"oneaxis {ended} {cell['shape']} {cell['level']}")
        found.append(
            Event(id=str(name), model=model, input_tokens=int(counted["prompt_tokens"] or 0),
                  cached_tokens=int(counted["prefix_cache_hits"] or 0),
                  output_tokens=int(counted["output_tokens"] or 0))
        )  # fmt: skip
    return found


class Meter:
    """Takes events beside calls and stores them in a thread of its own.

    `record` returns at once and raises nothing, whatever becomes of the store: an event is dropped when the queue is
    full, or when the store refuses it twice. `dropped` counts both.
    """

    def __init__(self, store: Callable[[Sequence[Event]], None], *, capacity: int = 10_000) -> None:
        self._store = store
        self._queue: queue.Queue[Event | None] = queue.Queue(capacity)
        self._counting = threading.Lock()
        self.dropped = 0
        self._thread = threading.Thread(target=self._work, daemon=True, name="meter")
        self._thread.start()

    def record(
        self, model: str, input_tokens: int, output_tokens: int, *, cached_tokens: int = 0, id: str | None = None
    ) -> None:
        """Take one event; `id`: the caller's own, for an event that may be sent again."""
        try:
            event = Event(id=id or str(uuid.uuid4()), model=model, input_tokens=input_tokens,
                          cached_tokens=cached_tokens, output_tokens=output_tokens)  # fmt: skip
            self._queue.put_nowait(event)
        except (queue.Full, ValidationError):
            self._drop(1)

    def close(self, timeout_s: float = 2.0) -> bool:
        """Store what is left, for at most so long; whether all of it was. Raises nothing."""
        try:
            self._queue.put_nowait(None)
        except queue.Full:
            return False
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while True:
            batch = [self._queue.get()]
            while len(batch) < 100 and not self._queue.empty():
                batch.append(self._queue.get_nowait())
            events = [event for event in batch if event is not None]
            if events and not self._stored(events):
                self._drop(len(events))
            if None in batch:
                return

    def _stored(self, events: Sequence[Event]) -> bool:
        for _ in range(2):
            try:
                self._store(events)
                return True
            except Exception:
                # Whatever a store raises must not reach the metered program. An event that was stored by half is sent
                # again whole: its id makes that harmless.
                continue
        return False

    def _drop(self, number: int) -> None:
        with self._counting:
            self.dropped += number


def append_to(path: Path) -> Callable[[Sequence[Event]], None]:
    """A store that appends to a JSONL file."""

    def store(events: Sequence[Event]) -> None:
        with path.open("a", encoding="utf-8") as file:
            file.writelines(event.model_dump_json() + "\n" for event in events)

    return store


def as_rows(found: Sequence[Bill]) -> list[dict[str, Any]]:
    """Rows of the table: a model without a price reads `unpriced`."""
    return [{**asdict(bill), "usd": "unpriced" if bill.usd is None else bill.usd} for bill in found]
