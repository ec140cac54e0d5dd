"""The probe of guard 8: a few sampled answers to one prompt, each with a seed of its own, before the load.

The load itself is greedy, so that nothing in it tells whether the engine's random draws are random. A frozen generator
(a seed that is ignored, a cached answer) makes every sampled evaluation a single sample that is counted many times.
The probe is not measured: it ends before the first cell, and the prefix cache is emptied after it.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import polars as pl

from oneaxis.errors import RunError

CALLS = 6
TOKENS = 16
"""Of each answer. At one nat a token a repeat by chance has a probability under 1e-6."""
PROMPT_TOKENS = 16

CHANCE = 1e-6
"""Sampled answers that are equal with a smaller probability than this were not drawn."""
REDRAW = "make the engine honour `seed` (and keep no answers); until then nothing that was sampled from it counts twice"
"""What to do about answers that repeat."""

SPECULATES_ON_CPU = (
    "vLLM's CPU build takes the temperature of a request that it guesses for from memory that nobody wrote (seen in "
    "0.32; vllm-project/vllm issue 55005): trust greedy answers only, or sample without guesses"
)

DRAWS_SCHEMA = pl.Schema(
    {"call": pl.Int64(), "seed": pl.Int64(), "token_ids": pl.List(pl.Int64()), "logprob": pl.Float64()}
)
"""One row per call; `logprob`: of the whole answer under the distribution that it was drawn from, null where the engine
does not tell."""


class Posts(Protocol):
    """What the probe needs of an engine (`oneaxis.serve.Engine`)."""

    model_name: str

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """The JSON answer to a request."""


def draw_answers(engine: Posts, prompt: Sequence[int], *, seed: int) -> pl.DataFrame:
    """Ask `CALLS` times for an answer at temperature 1, the seeds being `seed`, `seed` + 1, ...; a table of
    `DRAWS_SCHEMA`.

    Raises:
        RunError: when the engine does not answer, or an answer lacks its tokens.
    """

    def one(call: int) -> dict[str, Any]:
        body = {
            "model": engine.model_name,
            "prompt": list(prompt),
            "seed": seed + call,
            "max_tokens": TOKENS,
            "min_tokens": TOKENS,
            "ignore_eos": True,
            # The model's own defaults (generation_config.json) would cut the distribution that is told.
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "logprobs": 0,
            "return_token_ids": True,
        }
        reply = engine.post("/v1/completions", body)
        try:
            choice = reply["choices"][0]
            ids = [int(token) for token in choice["token_ids"]]
            told = (choice.get("logprobs") or {}).get("token_logprobs") or []
            known = len(told) == len(ids) and None not in told
            logprob = float(sum(told)) if known else None
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise RunError(f"a sampled answer lacks {error}: {str(reply)[:200]}") from error
        return {"call": call, "seed": seed + call, "token_ids": ids, "logprob": logprob}

    with ThreadPoolExecutor(CALLS) as pool:
        return pl.DataFrame(list(pool.map(one, range(CALLS))), schema=DRAWS_SCHEMA)


def redraw(realised: Mapping[str, Any]) -> str:
    """What to do about answers that repeat, of an engine that runs so (`oneaxis.serve.realised_config`)."""
    resolved = realised["resolved"]
    return SPECULATES_ON_CPU if resolved.get("speculative") and resolved.get("device") == "cpu" else REDRAW


@dataclass(frozen=True)
class Repeat:
    """An answer that came more than once."""

    times: int
    tokens: int
    chance: float | None
    """Probability of as many equal ones among all calls, if they were drawn; None: the engine tells none."""

    @property
    def by_chance(self) -> bool:
        """Whether chance explains it."""
        return self.chance is not None and self.chance >= CHANCE

    def said(self, calls: int) -> str:
        """In a sentence."""
        same = f"{self.times} of {calls} sampled answers with different seeds are the same {self.tokens} tokens, "
        if self.chance is None:
            return same + "and the engine tells no log-probability"
        return same + f"which chance does with probability {self.chance:.1g}"


def repeats(draws: pl.DataFrame) -> list[Repeat]:
    """The answers that came more than once, with their chance in closed form.

    An answer with log-probability L is drawn by each other call with probability p = exp(L), so that m - 1 or more of
    the other n - 1 calls repeat it with a binomial tail, and any of n answers with at most n times that. A model that
    is nearly certain of its answer repeats it rightly.

    Args:
        draws: `DRAWS_SCHEMA`.
    """
    counts = Counter(tuple(ids) for ids in draws["token_ids"].to_list())
    logprobs = {tuple(row["token_ids"]): row["logprob"] for row in draws.iter_rows(named=True)}
    n = draws.height
    found = []
    for answer, times in counts.items():
        if times > 1:
            logprob = logprobs[answer]
            chance = None if logprob is None else min(n * _tail(n - 1, math.exp(min(logprob, 0.0)), times - 1), 1.0)
            found.append(Repeat(times, len(answer), chance))
    return found


def _tail(n: int, p: float, at_least: int) -> float:
    """Probability of `at_least` or more successes in n trials."""
    return sum(math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(at_least, n + 1))


def require_draws(engine: Posts, prompt: Sequence[int], *, seed: int) -> None:
    """Refuse to sample from an engine whose draws repeat.

    Raises:
        RunError: when they do.
    """
    draws = draw_answers(engine, prompt[:PROMPT_TOKENS], seed=seed)
    for repeat in repeats(draws):
        if not repeat.by_chance:
            raise RunError(f"guard 8, frozen draws: {repeat.said(draws.height)}; {REDRAW}")
