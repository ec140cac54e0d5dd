"""Scoring through an engine. The fast tests talk to a real local server that answers as vLLM does, with numbers that
are a function of token and place; nothing of the client is faked."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from oneaxis.config import compose
from oneaxis.errors import RunError
from oneaxis.score.boundary import Target
from oneaxis.score.contexts import Item
from oneaxis.score.remote import log_probabilities, token_logprobs
from oneaxis.score.scoring import score_checkpoint
from tests.serve.listening import listening


def known(token: int, place: int) -> float:
    """What the fake engine says of a token at a place."""
    return -(token + place / 100)


@dataclass
class FakeEngine:
    """A completions server in a thread."""

    base_url: str = ""
    model_name: str = "m"
    headers: dict[str, str] = field(default_factory=dict)
    alive: bool = True
    fault: str = ""
    asked: list[tuple[int, ...]] = field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0

    def require_alive(self) -> None:
        """As the real engine: its last words when it is dead."""
        if not self.alive:
            raise RunError("the engine died: out of memory")

    async def completions(self, request: web.Request) -> web.Response:
        """prompt_logprobs: the token itself and, where that is another, the likeliest; null at first."""
        body = await request.json()
        assert body["model"] == self.model_name
        assert body["prompt_logprobs"] == 0
        ids = body["prompt"]
        self.asked.append(tuple(ids))
        self.in_flight += 1
        self.most_in_flight = max(self.in_flight, self.most_in_flight)
        await asyncio.sleep(0.005)
        self.in_flight -= 1
        if self.fault == "refuses":
            return web.Response(status=400, text="prompt too long")
        if self.fault == "drops":
            assert request.transport is not None
            request.transport.close()
        entries: list[Any] = [None]
        for place, token in enumerate(ids[1:], start=1):
            entry = {str(token): {"logprob": known(token, place), "rank": 9, "decoded_token": "x"}}
            entries.append({"99999": {"logprob": -0.1, "rank": 1, "decoded_token": "y"}, **entry})
        return web.json_response({"choices": [{"text": "z", "prompt_logprobs": entries}]})


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    """The fake, listening on a free port."""
    fake = FakeEngine()
    with listening(fake.completions) as (fake.base_url, _):
        yield fake


def test_the_tokens_own_logprobs_from_the_start_on_in_the_order_asked(engine: FakeEngine) -> None:
    targets = [Target("g", (5, 6, 7, 8), 2), Target("g", (5, 6, 9), 1), Target("h", (5, 6, 7, 8), 3)]
    scored = log_probabilities(engine, targets, concurrency=4)
    assert scored == [[known(7, 2), known(8, 3)], [known(6, 1), known(9, 2)], [known(8, 3)]]
    assert sorted(engine.asked) == [(5, 6, 7, 8), (5, 6, 9)]


def test_no_more_than_the_allowed_requests_are_in_flight(engine: FakeEngine) -> None:
    targets = [Target("g", (1, 2, token), 2) for token in range(30)]
    assert log_probabilities(engine, targets, concurrency=3) == [[known(token, 2)] for token in range(30)]
    assert engine.most_in_flight == 3


def test_a_refusal_is_reported_in_the_engines_words(engine: FakeEngine) -> None:
    engine.fault = "refuses"
    with pytest.raises(RunError, match="answered 400 to a scoring request: prompt too long"):
        log_probabilities(engine, [Target("g", (1, 2), 1)] * 20, concurrency=2)


def test_an_engine_that_dies_is_reported_with_its_last_words(engine: FakeEngine) -> None:
    engine.fault = "drops"
    engine.alive = False
    with pytest.raises(RunError, match="the engine died: out of memory"):
        log_probabilities(engine, [Target("g", (1, 2), 1)], concurrency=2)
    engine.alive = True
    with pytest.raises(RunError, match="a scoring request failed: "):
        log_probabilities(engine, [Target("g", (1, 2), 1)], concurrency=2)


def test_an_answer_about_other_tokens_is_refused() -> None:
    good = {"choices": [{"prompt_logprobs": [None, {"7": {"logprob": -1.5}, "3": {"logprob": -0.1}}]}]}
    assert token_logprobs(good, (4, 7)) == [-1.5]
    with pytest.raises(RunError, match="no log-probability for token 8 at position 1"):
        token_logprobs(good, (4, 8))
    with pytest.raises(RunError, match="for 2 of 3 tokens"):
        token_logprobs(good, (4, 7, 7))
    with pytest.raises(RunError, match="for none of 2 tokens"):
        token_logprobs({"choices": [{}]}, (4, 7))


@pytest.mark.slow
def test_in_bfloat16_the_engine_and_this_process_agree_to_a_quarter_of_a_nat(
    checkpoint: Path, root: Path, tmp_path: Path
) -> None:
    """Token by token; on average far closer. Both round every layer to 8 bits, each in an order of its own, so that
    accuracies of one dtype are compared, and none with those of float32 (which agree to 1e-4: test_scoring)."""
    items = [
        Item("q0", "bread", "who bakes bread?", ("a baker", "a nurse", "a pilot", "a fish"), 0),
        Item("q1", "cold", "where is it cold?", ("at the pole", "in bread", "日本"), 0),
    ]
    settings = ["profile=tiny", "score.dtype=bfloat16", "score.batch_check=0", "serve.max_model_len=256"]
    tables = []
    for engine in ("transformers", "vllm"):
        config = compose(root / "conf", [*settings, f"score.engine={engine}"])
        scored = score_checkpoint(checkpoint, items, config.score, config.serve, config.seed,
                                  log=tmp_path / "engine.log", observed={})  # fmt: skip
        assert scored.summary["tasks"]["bread"]["scorers"]["acc_bytes"]["scorer"] == "acc_bytes (bfloat16)"
        tables.append(scored.table)
    assert tables[0].drop("logprobs", "logprob").equals(tables[1].drop("logprobs", "logprob"))
    one, other = (table["logprobs"].explode().to_list() for table in tables)
    apart = [abs(a - b) for a, b in zip(one, other, strict=True)]
    assert max(apart) < 0.25
    assert sum(apart) / len(apart) < 0.05
