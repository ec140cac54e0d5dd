"""The probe of guard 8: a few sampled answers to one prompt, each with a seed of its own, before the load.

The load itself is greedy, so that nothing in it tells whether the engine's random draws are random. A frozen generator
(a seed that is ignored, a cached answer) makes every sampled evaluation a single sample that is counted many times.
The probe is not measured: it ends before the first cell, and the prefix cache is emptied after it.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import polars as pl

from oneaxis.errors import RunError

CALLS = 6
TOKENS = 16
"""Of each answer. At one nat a token a repeat by chance has a probability under 1e-6."""
PROMPT_TOKENS = 16

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
        except (KeyError, IndexError, TypeError) as error:
            raise RunError(f"a sampled answer lacks {error}: {str(reply)[:200]}") from error
        told = (choice.get("logprobs") or {}).get("token_logprobs") or []
        known = len(told) == len(ids) and None not in told
        return {"call": call, "seed": seed + call, "token_ids": ids, "logprob": sum(told) if known else None}

    with ThreadPoolExecutor(CALLS) as pool:
        return pl.DataFrame(list(pool.map(one, range(CALLS))), schema=DRAWS_SCHEMA)
