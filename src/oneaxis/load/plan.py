"""What is sent and when, drawn before the load starts: text and the `load` section to arrivals and unique prompts.

**Arrivals** are, in open loop, a Poisson process (independent exponential gaps of mean 1/rate, the count in the window
being random, as it must be; rescaling the gaps to a fixed count would not be Poisson), a constant clock, a renewal
process of gamma gaps, a Poisson process whose rate is a straight line over time (by inversion of the integrated rate),
or the moments of a trace. In closed loop they are the order of each user's requests, with the pause before each.

**Prompts** are exact lists of token ids: `HEAD_TOKENS` random tokens, then a window of the run's own text. No two
prompts of a sweep, warm-up included, have the same head, so none shares its first tokens with another, and a prefix
cache, which stores whole blocks chained from the first token, has nothing to reuse. Where a shape declares a shared
prefix, those that take part begin with the prefix of their group, and the head comes after it. Guard 1 proves it all
afterwards.

A **cell** of a sweep is a shape under a level of load (`load.levels`). Every draw is keyed by the run (seed, session,
repetition), the cell and the purpose: two arms of one session and repetition get the same arrivals and the same
prompts, so that they can be compared as pairs, and adding a level changes no other cell.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from oneaxis.config.schema import DEFAULT_CLASS, HEAD_TOKENS, MAX_REQUESTS, Load, Shape, Tokens, longest
from oneaxis.errors import UserError
from oneaxis.load.levels import TRACE_SHAPE, levels

TEXT_TOKENS = 1 << 17
"""No more of the text than this is tokenised."""

PLAN_SCHEMA = pl.Schema(
    {
        "shape": pl.String(),
        "level": pl.String(),
        "rate_rps": pl.Float64(),
        "service_class": pl.String(),
        "request_id": pl.String(),
        "intended_s": pl.Float64(),
        "user": pl.Int64(),
        "think_s": pl.Float64(),
        "prefix_group": pl.Int64(),
        "prefix_tokens": pl.Int64(),
        "prompt_token_ids": pl.List(pl.Int32()),
        "asked_output_tokens": pl.Int64(),
    }
)
"""One row per request to be sent. `intended_s` counts from the start of the request's cell; in closed loop it is null,
and `user` sends its rows in their order, each `think_s` after the answer before. `rate_rps` is the mean rate that the
cell offers, null in closed loop. `prefix_group` is null and `prefix_tokens` 0 where a prompt is unique from its first
token."""


@dataclass(frozen=True)
class Plan:
    """All that will be sent, in the order of the cells."""

    arrivals: pl.DataFrame
    """`PLAN_SCHEMA`, sorted by cell (by level, where shapes go together) and time."""
    warmups: pl.DataFrame
    """`PLAN_SCHEMA`: requests of their own for each cell, sent before it and never measured (`intended_s` is 0)."""
    together: bool = False
    """Whether the shapes of a level run at once."""


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


def check_fits(load: Load, max_model_len: int, trace: pl.DataFrame | None = None) -> None:
    """Refuse a shape, or a line of a trace, that the engine could not take, and a trace of too many requests.

    Raises:
        UserError: naming the shape or line, its length and the allowed one, or the number of requests.
    """
    for shape in load.shapes:
        prompt, output = longest(shape.prompt_tokens), longest(shape.output_tokens)
        if prompt + output > max_model_len:
            raise UserError(
                f"load.shapes: {shape.name}: {prompt} + {output} = {prompt + output} tokens; "
                f"allowed: at most serve.max_model_len ({max_model_len})"
            )
    if trace is not None:
        over = trace.filter(pl.col("prompt_tokens") + pl.col("output_tokens") > max_model_len)
        if over.height:
            row = over.row(0, named=True)
            total = row["prompt_tokens"] + row["output_tokens"]
            raise UserError(
                f"load.trace={load.trace}: line {row['line']}: {row['prompt_tokens']} + {row['output_tokens']} = "
                f"{total} tokens, and {over.height - 1} more lines like it; "
                f"allowed: at most serve.max_model_len ({max_model_len})"
            )
        for speed in load.trace_speed:
            sent = trace.filter(pl.col("time_s") / speed < load.duration_s).height
            if sent > MAX_REQUESTS:
                raise UserError(
                    f"load.trace={load.trace}: {sent} requests in load.duration_s={load.duration_s:g} at "
                    f"load.trace_speed={speed:g}; allowed: at most {MAX_REQUESTS} in a cell"
                )


def check_arrivals(load: Load, *, seed: int, session: str, repetition: int) -> None:
    """Refuse a load of which no request would be sent in some cell. (A trace has its first at moment 0.)

    Raises:
        UserError: as `draw_plan`.
    """
    if load.arrival != "trace":
        for _ in _cells(load, (seed, session, repetition), None):
            pass


@dataclass(frozen=True)
class _Cell:
    """A cell as it is drawn: one entry of each sequence per request, in the order in which they are sent."""

    shape: str
    level: str
    rate_rps: float | None
    service_class: str
    intended_s: Sequence[float | None]
    user: Sequence[int | None]
    think_s: Sequence[float | None]
    prompt_tokens: Sequence[int]
    output_tokens: Sequence[int]
    like: Shape | None
    """What says how its warm-up and its prefixes are; None: as the trace's own requests are, without a prefix."""


def draw_plan(
    load: Load,
    text: np.ndarray,
    *,
    seed: int,
    session: str,
    repetition: int,
    trace: pl.DataFrame | None = None,
    prompts: "Prompts | None" = None,
) -> Plan:
    """Draw arrivals and prompts of every cell.

    Args:
        text: token ids that prompts are cut from; wrapped around when a prompt is longer.
        prompts: those of plans that were drawn before, none of which may begin as these do.
        trace: of `load.trace`, as `read_trace` gives it.

    Raises:
        UserError: when no request would arrive in a cell.
    """
    run = (seed, session, repetition)
    prompts = prompts or Prompts(text)
    arrivals: list[dict[str, object]] = []
    warmups: list[dict[str, object]] = []
    for cell in _cells(load, run, trace):
        key = (*run, cell.shape, cell.level)
        facts = {"shape": cell.shape, "level": cell.level, "rate_rps": cell.rate_rps,
                 "service_class": cell.service_class}  # fmt: skip
        drawn = prompts.draw(cell, key, load.repeat_prompts)
        for index, (group, prompt) in enumerate(drawn):
            number = f"{index:05d}" if cell.user[index] is None else f"{cell.user[index]:03d}-{index:05d}"
            arrivals.append(
                {
                    **facts,
                    "request_id": f"{cell.shape}-{cell.level}-{number}",
                    "intended_s": cell.intended_s[index],
                    "user": cell.user[index],
                    "think_s": cell.think_s[index],
                    "prefix_group": group,
                    "prefix_tokens": 0 if group is None or not cell.like or not cell.like.shared_prefix
                    else cell.like.shared_prefix.tokens,
                    "prompt_token_ids": prompt,
                    "asked_output_tokens": cell.output_tokens[index],
                }
            )  # fmt: skip
        generator = _generator(*key, "warmup")
        for index in range(load.warmup_requests):
            like = index % len(cell.prompt_tokens)
            warmups.append(
                {
                    **facts,
                    "request_id": f"warmup-{cell.shape}-{cell.level}-{index:05d}",
                    "intended_s": 0.0,
                    "prefix_tokens": 0,
                    "prompt_token_ids": prompts.unique(cell.prompt_tokens[like], generator),
                    "asked_output_tokens": cell.output_tokens[like],
                }
            )
    table = pl.DataFrame(arrivals, schema=PLAN_SCHEMA)
    if load.together:
        order = pl.col("level").replace_strict({label: index for index, label in enumerate(levels(load))})
        table = table.sort(order, "intended_s", maintain_order=True)
    return Plan(table, pl.DataFrame(warmups, schema=PLAN_SCHEMA), load.together)


def _cells(load: Load, run: tuple[object, ...], trace: pl.DataFrame | None) -> Iterator[_Cell]:
    if load.arrival == "trace":
        assert trace is not None, "a trace is read before it is replayed"
        for label, speed in zip(levels(load), load.trace_speed, strict=True):
            seen = trace.with_columns(pl.col("time_s") / speed).filter(pl.col("time_s") < load.duration_s)
            nothing = [None] * seen.height
            yield _Cell(
                TRACE_SHAPE, label, seen.height / load.duration_s, DEFAULT_CLASS, seen["time_s"].to_list(), nothing,
                nothing, seen["prompt_tokens"].to_list(), seen["output_tokens"].to_list(), None,
            )  # fmt: skip
        return
    for shape in load.shapes:
        for index, label in enumerate(levels(load)):
            key = (*run, shape.name, label)
            weight = shape.weight if load.together else 1.0
            rate: float | None
            intended: list[float | None]
            user: list[int | None]
            think: list[float | None]
            if load.arrival == "closed":
                assert load.requests_per_user is not None
                assert load.think_time_s is not None
                users = round(load.users[index] * weight)
                count = users * load.requests_per_user
                rate, intended = None, [None] * count
                user = [one for one in range(users) for _ in range(load.requests_per_user)]
                pauses = _generator(*key, "think").exponential(load.think_time_s, size=count)
                think = [float(pause) for pause in pauses]
            else:
                generator = _generator(*key, "arrivals")
                if load.arrival == "ramp":
                    first, last = (bound * weight for bound in load.rates_rps)
                    times, rate = draw_ramp(first, last, load.duration_s, generator), (first + last) / 2
                else:
                    rate = load.rates_rps[index] * weight
                    times = draw_arrivals(load.arrival, rate, load.duration_s, generator, burstiness=load.burstiness)
                if len(times) == 0:
                    raise UserError(
                        f"load.rates_rps: {rate:g}: no request arrives in load.duration_s ({load.duration_s:g} s); "
                        "allowed: a rate and a duration that give requests"
                    )
                intended = [float(time) for time in times]
                user, think = [None] * len(times), [None] * len(times)
            yield _Cell(
                shape.name, label, rate, shape.service_class or DEFAULT_CLASS, intended, user, think,
                draw_lengths(shape.prompt_tokens, len(user), _generator(*key, "prompt_tokens")),
                draw_lengths(shape.output_tokens, len(user), _generator(*key, "output_tokens")), shape,
            )  # fmt: skip


def draw_arrivals(
    arrival: str, rate_rps: float, duration_s: float, generator: np.random.Generator, *, burstiness: float | None = None
) -> np.ndarray:
    """Sorted moments in [0, duration_s), in seconds, of `poisson`, `constant` or `gamma` arrivals.

    Args:
        burstiness: shape of the gaps' gamma distribution, whose mean is 1 / rate; for `gamma` alone.
    """
    if arrival == "constant":
        count = math.ceil(rate_rps * duration_s - 1e-9)
        return np.arange(count) / rate_rps
    times = np.empty(0)
    last = 0.0
    while last < duration_s:
        if arrival == "gamma":
            assert burstiness is not None
            gaps = generator.gamma(burstiness, 1 / (rate_rps * burstiness), size=64)
        else:
            assert arrival == "poisson", arrival
            gaps = generator.exponential(1 / rate_rps, size=64)
        more = last + np.cumsum(gaps)
        times = np.concatenate([times, more])
        last = float(more[-1])
    return times[times < duration_s]


def draw_ramp(first_rps: float, last_rps: float, duration_s: float, generator: np.random.Generator) -> np.ndarray:
    """Sorted moments in [0, duration_s) of a Poisson process whose rate goes in a straight line from first to last.

    By inversion (Cinlar 1975): a process of rate 1 on the integrated rate s = first t + slope t^2 / 2, each point taken
    back to its t. The root is written so that it also holds for first = last.
    """
    slope = (last_rps - first_rps) / duration_s
    expected = (first_rps + last_rps) / 2 * duration_s
    integrated = draw_arrivals("poisson", 1.0, expected, generator)
    root = np.sqrt(np.maximum(first_rps**2 + 2 * slope * integrated, 0))
    return 2 * integrated / (first_rps + root)


def draw_lengths(tokens: Tokens, count: int, generator: np.random.Generator) -> list[int]:
    """Numbers of tokens of so many requests."""
    if isinstance(tokens, int):
        return [tokens] * count
    if tokens.distribution == "uniform":
        return [int(one) for one in generator.integers(tokens.min, tokens.max, size=count, endpoint=True)]
    # mean = exp(mu + sigma^2 / 2) and cv^2 = exp(sigma^2) - 1.
    variance = math.log1p(tokens.cv**2)
    drawn = generator.lognormal(math.log(tokens.mean) - variance / 2, math.sqrt(variance), size=count)
    return [int(one) for one in np.clip(np.rint(drawn), tokens.min, tokens.max)]


def expected_hit_rates(arrivals: pl.DataFrame, block_tokens: int, *, together: bool) -> dict[str, float]:
    """By cell (`SHAPE LEVEL`), the share of prompt tokens that a prefix cache has by the prefixes that were declared.

    The cache is empty at first, stores whole blocks, and has nothing for the first prompt of a group. An engine that
    must drop blocks has fewer. Only cells that declare a prefix are there; where shapes go together all cells of a
    level have the same share, since the server counts them as one.

    Args:
        arrivals: `PLAN_SCHEMA`, as sent.
        block_tokens: of the engine's cache.
    """
    rows = arrivals.select(
        "shape", "level", "prefix_group", "prefix_tokens", tokens=pl.col("prompt_token_ids").list.len()
    )
    hits = (
        rows.filter(pl.col("prefix_group").is_not_null())
        .group_by("shape", "level", "prefix_group")
        .agg(hits=(pl.len() - 1) * (pl.col("prefix_tokens").first() // block_tokens * block_tokens))
    )
    scope = ["level"] if together else ["shape", "level"]
    found = (
        rows.group_by(scope).agg(pl.col("tokens").sum()).join(hits.group_by(scope).agg(pl.col("hits").sum()), on=scope)
    )
    cells = rows.select("shape", "level").unique(maintain_order=True).join(found, on=scope, maintain_order="left")
    return {f"{row['shape']} {row['level']}": row["hits"] / row["tokens"] for row in cells.iter_rows(named=True)}


def reused_tokens(arrivals: pl.DataFrame, requests: pl.DataFrame, block_tokens: int) -> dict[str, int]:
    """By request id, the prompt tokens that a prefix cache had when the request was sent, by the declared prefixes.

    As `expected_hit_rates` has it, for each request by itself: whole blocks, from when one of the group had its first
    token. Two of a group that are sent at once both find nothing. Requests that find nothing are not there.

    Args:
        arrivals: `PLAN_SCHEMA`.
        requests: the request table; those that were not planned find nothing.
        block_tokens: of the engine's cache.
    """
    planned = arrivals.filter(pl.col("prefix_group").is_not_null()).select(
        "request_id", "prefix_group", found=pl.col("prefix_tokens") // block_tokens * block_tokens
    )
    sent = requests.select("shape", "level", "request_id", "sent_s", "first_token_s").join(planned, on="request_id")
    cached_s = pl.col("first_token_s").min().over("shape", "level", "prefix_group")
    found = sent.filter((pl.col("sent_s") >= cached_s) & (pl.col("found") > 0))
    return dict(found.select("request_id", "found").iter_rows())


def declared_prefixes(arrivals: pl.DataFrame) -> list[tuple[str, int] | None]:
    """For each request the group whose prefix it begins with and the prefix's tokens; None: it begins alone."""
    return [
        None if group is None else (f"{shape} {level} group {group}", tokens)
        for shape, level, group, tokens in arrivals.select(
            "shape", "level", "prefix_group", "prefix_tokens"
        ).iter_rows()
    ]


def due(plan: Plan, requests: pl.DataFrame) -> pl.DataFrame:
    """The arrivals that had to be sent: in open loop all, in closed loop each user's up to the last one recorded.

    Args:
        requests: the request table; its `request_id` says what was sent.
    """
    own = ["shape", "level", "user"]
    sent = plan.arrivals["request_id"].is_in(requests["request_id"].to_list())
    rows = plan.arrivals.with_columns(place=pl.int_range(pl.len()).over(own), sent=sent)
    last = pl.when(pl.col("sent")).then(pl.col("place")).max().over(own)
    return rows.filter(pl.col("user").is_null() | (pl.col("place") <= last)).drop("place", "sent")


def out_of_prompts(plan: Plan, requests: pl.DataFrame, duration_s: float) -> list[str]:
    """Users of a closed loop who had nothing left to send before the cell was over: `SHAPE LEVEL user N`."""
    own = ["shape", "level", "user"]
    last = plan.arrivals.filter(pl.col("user").is_not_null()).group_by(own, maintain_order=True).last()
    early = last.join(requests.select("request_id", "ended_s"), on="request_id").filter(pl.col("ended_s") < duration_s)
    return [f"{shape} {level} user {user}" for shape, level, user in early.select(own).iter_rows()]


def _generator(*key: object) -> np.random.Generator:
    digest = hashlib.sha256("\x1f".join(map(repr, key)).encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:16], "big"))


class Prompts:
    """Prompts cut from a text, none of which begins as another does."""

    def __init__(self, text: np.ndarray) -> None:
        self.text, self.vocabulary = text, np.unique(text)
        self.heads: set[tuple[int, ...]] = set()

    def draw(self, cell: _Cell, key: tuple[object, ...], repeat: int | None) -> list[tuple[int | None, list[int]]]:
        """Group of the shared prefix (None: none) and prompt of each request of a cell."""
        generator = _generator(*key, "measured")
        shared = cell.like.shared_prefix if cell.like else None
        if shared is not None:
            prefixes = [self.unique(shared.tokens, generator) for _ in range(shared.groups)]
            choice = _generator(*key, "prefix")
            takes_part = choice.random(len(cell.prompt_tokens)) < shared.share
            groups = choice.integers(shared.groups, size=len(cell.prompt_tokens))
        drawn: list[tuple[int | None, list[int]]] = []
        for index, num_tokens in enumerate(cell.prompt_tokens):
            if repeat is not None and index >= repeat:
                drawn.append(drawn[index % repeat])
            elif shared is not None and takes_part[index]:
                prefix = prefixes[groups[index]]
                drawn.append((int(groups[index]), prefix + self.unique(num_tokens - len(prefix), generator)))
            else:
                drawn.append((None, self.unique(num_tokens, generator)))
        return drawn

    def unique(self, num_tokens: int, generator: np.random.Generator) -> list[int]:
        """A head that no earlier prompt has (kept in `heads`), and a window of the text at a random place."""
        for _ in range(1000):
            head = tuple(int(token) for token in generator.choice(self.vocabulary, size=HEAD_TOKENS))
            if head not in self.heads:
                break
        else:
            raise UserError(
                f"heldout.parquet: its {len(self.vocabulary)} different tokens give too few unique prompts after "
                f"{len(self.heads)}; allowed: more varied text, or fewer requests"
            )
        self.heads.add(head)
        start = int(generator.integers(len(self.text)))
        window = np.take(self.text, np.arange(start, start + num_tokens - HEAD_TOKENS), mode="wrap")
        return [*head, *window.tolist()]
