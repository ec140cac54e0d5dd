"""What is sent and when, drawn before the load starts: text and the `load` section to arrivals and unique prompts.

**Arrivals** are a Poisson process (independent exponential gaps of mean 1/rate, the count in the window being random,
as it must be; rescaling the gaps to a fixed count would not be Poisson) or a constant clock.

**Prompts** are exact lists of token ids: `HEAD_TOKENS` random tokens, then a window of the run's own text. No two
prompts of a sweep, warm-up included, have the same head, so none shares its first tokens with another, and a prefix
cache, which stores whole blocks chained from the first token, has nothing to reuse. Guard 1 proves it afterwards.

A **cell** of a sweep is a shape under a level of load; the label of a level names it in tables and metrics: `r2` is 2
requests a second. Every draw is keyed by the run (seed, session, repetition), the cell (shape, level) and the purpose:
two arms of one session and repetition get the same arrivals and the same prompts, so that they can be compared as
pairs, and adding a level changes no other cell.
"""

import hashlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import polars as pl

from oneaxis.config.schema import Load
from oneaxis.errors import UserError
from oneaxis.load.levels import levels

HEAD_TOKENS = 4
"""Random tokens that a prompt starts with. Shorter than any engine's cache block (8 tokens or more)."""

TEXT_TOKENS = 1 << 17
"""No more of the text than this is tokenised."""

PLAN_SCHEMA = pl.Schema(
    {
        "shape": pl.String(),
        "level": pl.String(),
        "rate_rps": pl.Float64(),
        "request_id": pl.String(),
        "intended_s": pl.Float64(),
        "prompt_token_ids": pl.List(pl.Int32()),
        "asked_output_tokens": pl.Int64(),
    }
)
"""One row per request to be sent; `intended_s` counts from the start of the request's cell, and `rate_rps` is the mean
rate that the cell offers, null where it offers none."""


@dataclass(frozen=True)
class Plan:
    """All that will be sent, in the order of the cells."""

    arrivals: pl.DataFrame
    """`PLAN_SCHEMA`, sorted by cell and time."""
    warmups: pl.DataFrame
    """`PLAN_SCHEMA`: requests of their own for each cell, sent before it and never measured (`intended_s` is 0)."""


def text_tokens(
    texts: Iterable[str], encode: Callable[[str], list[int]], special_ids: set[int], limit: int = TEXT_TOKENS
) -> np.ndarray:
    """Token ids of the texts in their order, without special tokens, cut at `limit`.

    Raises:
        UserError: when the texts hold fewer than two different tokens.
    """
    ids: list[int] = []
    for text in texts:
        ids.extend(token for token in encode(text) if token not in special_ids)
        if len(ids) >= limit:
            break
    if len(set(ids)) < 2:
        raise UserError(f"heldout.parquet: its text has {len(ids)} usable tokens; allowed: text to build prompts from")
    return np.asarray(ids[:limit], dtype=np.int32)


def check_fits(load: Load, max_model_len: int) -> None:
    """Refuse a shape that the engine could not take.

    Raises:
        UserError: naming the shape, its length and the allowed one.
    """
    for shape in load.shapes:
        total = shape.prompt_tokens + shape.output_tokens
        if total > max_model_len:
            raise UserError(
                f"load.shapes: {shape.name}: {shape.prompt_tokens} + {shape.output_tokens} = {total} tokens; "
                f"allowed: at most serve.max_model_len ({max_model_len})"
            )


def draw_plan(load: Load, text: np.ndarray, *, seed: int, session: str, repetition: int) -> Plan:
    """Draw arrivals and prompts of every cell.

    Args:
        text: token ids that prompts are cut from; wrapped around when a prompt is longer.

    Raises:
        UserError: when no request would arrive in a cell.
    """
    run = (seed, session, repetition)
    vocabulary = np.unique(text)
    heads: set[tuple[int, ...]] = set()
    arrivals: list[dict[str, object]] = []
    warmups: list[dict[str, object]] = []
    for shape in load.shapes:
        for level, rate in zip(levels(load), load.rates_rps, strict=True):
            cell = (*run, shape.name, level)
            times = draw_arrivals(load.arrival, rate, load.duration_s, _generator(*cell, "arrivals"))
            if len(times) == 0:
                raise UserError(
                    f"load.rates_rps: {rate:g}: no request arrives in load.duration_s ({load.duration_s:g} s); "
                    "allowed: a rate and a duration that give requests"
                )
            for rows, purpose, moments in (
                (arrivals, "measured", times),
                (warmups, "warmup", np.zeros(load.warmup_requests)),
            ):
                generator = _generator(*cell, purpose)
                for index, intended_s in enumerate(moments):
                    prompt = _draw_prompt(text, vocabulary, shape.prompt_tokens, heads, generator)
                    label = "" if purpose == "measured" else f"{purpose}-"
                    rows.append(
                        {
                            "shape": shape.name,
                            "level": level,
                            "rate_rps": rate,
                            "request_id": f"{label}{shape.name}-{level}-{index:05d}",
                            "intended_s": float(intended_s),
                            "prompt_token_ids": prompt,
                            "asked_output_tokens": shape.output_tokens,
                        }
                    )
    return Plan(pl.DataFrame(arrivals, schema=PLAN_SCHEMA), pl.DataFrame(warmups, schema=PLAN_SCHEMA))


def draw_arrivals(arrival: str, rate_rps: float, duration_s: float, generator: np.random.Generator) -> np.ndarray:
    """Sorted moments in [0, duration_s), in seconds."""
    if arrival == "constant":
        count = math.ceil(rate_rps * duration_s - 1e-9)
        return np.arange(count) / rate_rps
    assert arrival == "poisson", arrival
    times = np.empty(0)
    last = 0.0
    while last < duration_s:
        more = last + np.cumsum(generator.exponential(1 / rate_rps, size=64))
        times = np.concatenate([times, more])
        last = float(more[-1])
    return times[times < duration_s]


def _generator(*key: object) -> np.random.Generator:
    digest = hashlib.sha256("\x1f".join(map(repr, key)).encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:16], "big"))


def _draw_prompt(
    text: np.ndarray,
    vocabulary: np.ndarray,
    num_tokens: int,
    heads: set[tuple[int, ...]],
    generator: np.random.Generator,
) -> list[int]:
    """A head that no earlier prompt has (added to `heads`), and a window of the text at a random place."""
    for _ in range(1000):
        head = tuple(int(token) for token in generator.choice(vocabulary, size=HEAD_TOKENS))
        if head not in heads:
            break
    else:
        raise UserError(
            f"heldout.parquet: its {len(vocabulary)} different tokens give too few unique prompts after {len(heads)}; "
            "allowed: more varied text, or fewer requests"
        )
    heads.add(head)
    start = int(generator.integers(len(text)))
    window = np.take(text, np.arange(start, start + num_tokens - HEAD_TOKENS), mode="wrap")
    return [*head, *window.tolist()]
