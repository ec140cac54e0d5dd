"""The client that draws responses, against a local server that speaks vLLM's protocol. What is faked is the engine:
it answers each request with its own seed and priority, and only once it has been resumed."""

import asyncio
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web
from tqdm import tqdm

from oneaxis.errors import RunError
from oneaxis.sample.ask import Answer, Ask, ask_all, read_events
from tests.serve.listening import listening


@dataclass
class FakeEngine:
    """Pauses, resumes and completes as the real one does; `log` is the order in which it was told things."""

    base_url: str = ""
    model_name: str = "m"
    alive: bool = True
    fault: str = ""
    log: list[str] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    go: asyncio.Event = field(default_factory=asyncio.Event)
    loop: asyncio.AbstractEventLoop | None = None

    def require_alive(self) -> None:
        """As the real engine: its last words when it is dead."""
        if not self.alive:
            raise RunError("the engine died: out of memory")

    def post(self, path: str, body: dict[str, Any]) -> None:
        """As `Engine.post`, which is not what is tested here."""
        assert body == {}
        self.log.append(path)
        if path == "/resume":
            assert self.loop is not None
            self.loop.call_soon_threadsafe(self.go.set)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """Headers at once, tokens when it runs: the first to arrive is the last to be answered."""
        body = await request.json()
        self.bodies.append(body)
        self.log.append("request")
        if self.fault == "refuses":
            return web.Response(status=400, text="prompt too long")
        response = web.StreamResponse()
        await response.prepare(request)
        await self.go.wait()
        if self.fault == "drops":
            assert request.transport is not None
            request.transport.close()
        await asyncio.sleep(0.01 * (len(self.bodies) - body["priority"]))
        events: list[dict[str, Any]] = [
            {"choices": [{"text": f"seed {body['seed']}", "finish_reason": None}]},
            {"choices": [{"text": "!", "finish_reason": "length" if body["seed"] % 2 else "stop"}]},
            {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": body["priority"] + 1}},
        ]
        for event in events:
            await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    """The fake, listening on a free port."""
    fake = FakeEngine()
    with listening(fake.completions) as (fake.base_url, fake.loop):
        yield fake


def draw(engine: FakeEngine, count: int) -> list[Answer]:
    asks = [Ask((1, 2, place), seed=10 + place) for place in range(count)]
    with tqdm(total=count, disable=True) as progress:
        return ask_all(engine, asks, temperature=0.7, top_p=0.9, max_tokens=5, progress=progress)


def test_all_requests_are_with_the_paused_engine_before_it_goes_on(engine: FakeEngine) -> None:
    answers = draw(engine, 40)
    assert answers == [Answer(f"seed {10 + place}!", place + 1, finished=place % 2 == 0) for place in range(40)]
    assert engine.log == ["/reset_prefix_cache", "/pause?mode=keep", *["request"] * 40, "/resume"]
    assert sorted(body["priority"] for body in engine.bodies) == list(range(40))
    for body in engine.bodies:
        assert body["prompt"] == [1, 2, body["priority"]]
        assert (body["temperature"], body["top_p"], body["max_tokens"]) == (0.7, 0.9, 5)
        # A model's own generation defaults must not reach the sampling.
        assert (body["top_k"], body["min_p"], body["repetition_penalty"]) == (-1, 0.0, 1.0)


def test_a_refusal_is_reported_in_the_engines_words_and_nothing_waits(engine: FakeEngine) -> None:
    engine.fault = "refuses"
    with pytest.raises(RunError, match="answered 400 to a sampling request: prompt too long"):
        draw(engine, 5)
    assert "/resume" not in engine.log


def test_an_engine_that_dies_is_reported_with_its_last_words(engine: FakeEngine) -> None:
    engine.fault = "drops"
    engine.alive = False
    with pytest.raises(RunError, match="the engine died: out of memory"):
        draw(engine, 5)


@pytest.mark.parametrize(
    ("events", "said"),
    [
        ([{"choices": [{"text": "a", "finish_reason": "stop"}]}], "ended without its usage record"),
        ([{"choices": [{"text": "a"}], "usage": {"completion_tokens": 1}}], "without its finish reason"),
        ([{"error": {"message": "boom"}}], "broke a sampled answer off.*boom"),
        ([{"choices": [{"text": "a", "finish_reason": "abort"}], "usage": {"completion_tokens": 1}}], "by 'abort'"),
    ],
)
def test_an_answer_that_is_not_whole_is_no_answer(events: list[dict[str, Any]], said: str) -> None:
    with pytest.raises(RunError, match=said):
        read_events(b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events))
