"""Greedy requests over and over: against a local server that speaks vLLM's protocol, and against the real engine."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from aiohttp import web
from tqdm import tqdm

from oneaxis.config import compose
from oneaxis.config.schema import DivergeGreedy
from oneaxis.diverge.ask import Ask, Output, ask_all, read_answer
from oneaxis.diverge.run import check_length, cut_prompts, parts_folder, parts_of, run_divergence, write_record
from oneaxis.errors import RunError, UserError
from oneaxis.serve import running_engine
from tests.serve.listening import listening
from tests.serve.tiny import serve

SMALL = DivergeGreedy(kind="greedy", prompts=5, prompt_tokens=150, output_tokens=12, repeats=3, concurrency=6)


@dataclass
class FakeEngine:
    """The engine is faked: it answers a prompt with its first token, counted up, after a moment in which others may
    come. `fault` makes its fourth answer bad."""

    base_url: str = ""
    model_name: str = "m"
    headers: dict[str, str] = field(default_factory=dict)
    fault: str = ""
    alive: bool = True
    under_way: int = 0
    most: int = 0
    bodies: list[dict[str, Any]] = field(default_factory=list)

    def require_alive(self) -> None:
        """As the real engine: its last words when it is dead."""
        if not self.alive:
            raise RunError("the engine died: out of memory")

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """Two tokens for a prompt, with what stood second."""
        body = await request.json()
        self.bodies.append(body)
        if self.fault and len(self.bodies) == 4:
            if self.fault == "refuses":
                return web.Response(status=400, text="prompt too long")
            self.alive = self.fault == "drops"
            assert request.transport is not None
            request.transport.close()
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        await asyncio.sleep(0.02)
        self.under_way -= 1
        first = body["prompt"][0]
        top = [{f"token_id:{first + 1}": -0.5, "token_id:7": -1.5}, {f"token_id:{first + 2}": -1.0, "token_id:8": -1.0}]
        return web.json_response({"choices": [{"token_ids": [first + 1, first + 2], "finish_reason": "length",
                                               "logprobs": {"top_logprobs": top}}]})  # fmt: skip


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    """The fake, listening on a free port."""
    fake = FakeEngine()
    with listening(fake.completions) as (fake.base_url, _):
        yield fake


def ask(engine: FakeEngine, *, concurrency: int, count: int = 10) -> list[Output]:
    asks = [Ask(number % 5, number // 5) for number in range(count)]
    with tqdm(total=count, disable=True) as progress:
        return ask_all(engine, {n: [100 * n, 1] for n in range(5)}, asks, concurrency=concurrency, max_tokens=2,
                       progress=progress)  # fmt: skip


@pytest.mark.parametrize("concurrency", [1, 4, 64])
def test_so_many_are_under_way_and_outputs_come_in_the_order_of_the_requests(
    engine: FakeEngine, concurrency: int
) -> None:
    outputs = ask(engine, concurrency=concurrency)
    assert engine.most == min(concurrency, 10)
    assert [output.token_ids for output in outputs] == [(100 * n + 1, 100 * n + 2) for n in range(5)] * 2
    assert outputs[0] == Output((1, 2), finished=False, gaps=(1.0, 0.0), runners_up=(7, 8))
    body = engine.bodies[0]
    assert (body["temperature"], body["repetition_penalty"], body["max_tokens"]) == (0, 1.0, 2)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("refuses", r"the engine answered 400 to prompt 3, repeat 0, 1 at a time: prompt too long"),
        ("drops", r"prompt 3, repeat 0, 1 at a time: the request failed: ServerDisconnectedError"),
        ("dies", r"the engine died: out of memory"),
    ],
)
def test_a_request_that_fails_is_named_and_ends_the_rest(engine: FakeEngine, fault: str, words: str) -> None:
    engine.fault = fault
    with pytest.raises(RunError, match=words):
        ask(engine, concurrency=1)
    assert len(engine.bodies) == 4


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ({"finish_reason": "length"}, "prompt 2: the server gives no token ids"),
        ({"finish_reason": "abort", "token_ids": [1]}, "prompt 2: the output ended by 'abort'"),
        ({}, "prompt 2: no completion in the answer"),
    ],
)
def test_an_answer_that_is_none_is_refused(choice: dict[str, Any], words: str) -> None:
    with pytest.raises(RunError, match=words):
        read_answer({"choices": [choice]}, "prompt 2")


def test_log_probabilities_are_left_out_where_a_token_has_none() -> None:
    half = {"token_ids": [1, 2], "finish_reason": "stop", "logprobs": {"top_logprobs": [{"token_id:1": -1.0}, None]}}
    assert read_answer({"choices": [half]}, "") == Output((1, 2), finished=True, gaps=None, runners_up=None)
    named = {**half, "logprobs": {"top_logprobs": [{"a": -1.0, "b": -2.0}] * 2}}
    assert read_answer({"choices": [named]}, "").gaps is None


def test_prompts_are_pieces_of_the_text() -> None:
    text = np.arange(2000)
    prompts = cut_prompts(text, SMALL, seed=3)
    assert [len(ids) for ids in prompts.values()] == [150] * 5
    assert len({ids[0] // 150 for ids in prompts.values()}) == 5
    assert prompts != cut_prompts(text, SMALL, seed=4)
    # Too short for pieces of their own: they overlap, and are still five.
    assert len({tuple(ids) for ids in cut_prompts(text[:160], SMALL, seed=3).values()}) == 5
    with pytest.raises(UserError, match=r"diverge.prompts=5, diverge.prompt_tokens=150: the held-out text has 153"):
        cut_prompts(text[:153], SMALL, seed=3)


def test_every_part_has_all_repeats_of_its_prompts_in_an_order_of_its_own() -> None:
    settings = SMALL.model_copy(update={"prompts": 40})
    parts = parts_of(settings, seed=0)
    assert [(level, together) for level, together, _ in parts] == [("alone", 1), ("loaded", 6)] * 3
    for level in ("alone", "loaded"):
        asks = [one for name, _, own in parts if name == level for one in own]
        assert sorted((one.prompt, one.repeat) for one in asks) == [(p, r) for p in range(40) for r in range(3)]
    assert parts[0][2] != parts[1][2]
    # Two rounds of so many at a time fit into a part: 64 of them in parts of 43 prompts with 3 repeats.
    assert len(parts_of(settings.model_copy(update={"concurrency": 64}), seed=0)) == 2


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("diverge.repeats=1", r"diverge.repeats=1: allowed: greater than or equal to 2"),
        ("diverge.concurrency=1", r"diverge.concurrency=1: allowed: greater than or equal to 2"),
        ("diverge.prompt_tokens=2000",
         r"prompt_tokens=2000, diverge.output_tokens=128: 2128 tokens; allowed: at most serve.max_model_len=2048"),
    ],
)  # fmt: skip
def test_settings_that_cannot_be_are_refused(root: Path, override: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        compose(root / "conf", ["diverge=greedy", override])
    with pytest.raises(UserError, match=r"162 tokens; allowed: at most serve.max_model_len=160"):
        check_length(SMALL, 160)


def test_the_reproducible_mode_stays_one_at_a_time_in_every_profile(root: Path) -> None:
    for more in ([], ["profile=tiny"]):
        made = compose(root / "conf", ["serve=reproducible", *more]).serve
        assert made.kind == "vllm"
        assert (made.max_num_seqs, made.prefix_caching, made.enforce_eager) == (1, False, True)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_on_the_real_engine_killed_half_way_and_gone_on_with(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """An engine that dies half-way leaves finished parts and no result; the next run computes the rest."""
    text = np.random.default_rng(0).integers(2, 300, 4000)
    settings = SMALL.model_copy(update={"prompts": 20})
    prompts = cut_prompts(text, settings, seed=0)
    engine_settings = serve(prefix_caching=True, threads=1, max_num_seqs=4, kv_cache_gib=0.25)
    folder = parts_folder(tmp_path / "parts", [tiny_checkpoint], prompts, settings, engine_settings, drawn={"seed": 0})
    assert folder is not None
    starts = []

    @contextmanager
    def started() -> Iterator[Any]:
        with running_engine(tiny_checkpoint, engine_settings, log_path=tmp_path / "log", observed={}) as engine:
            starts.append(engine)
            yield engine

    @contextmanager
    def dying() -> Iterator[Any]:
        with started() as engine:
            real, posted = engine.post, []

            def post(path: str, body: dict[str, Any], **more: Any) -> Any:
                # The cache is emptied before the second part: there the guard is ended, and with it the engine.
                posted.append(path)
                if len(posted) == 2:
                    engine.process.terminate()
                    engine.process.wait(20)
                return real(path, body, **more)

            engine.post = post
            yield engine

    def run(engine: Any, observed: dict[str, Any]) -> Any:
        return run_divergence(prompts, settings, tiny_checkpoint, seed=0, folder=folder, engine=engine,
                              observed=observed)  # fmt: skip

    with pytest.raises(RunError, match="the engine died"):
        run(dying, {})
    assert [path.name for path in sorted(folder.glob("part-*"))] == ["part-00000.parquet"]

    observed: dict[str, Any] = {}
    table, realised, emptied = run(started, observed)
    assert (observed["parts"], observed["parts_found"], len(starts)) == (4, 1, 2)
    assert realised["differences"] == []
    assert emptied
    assert table.height == 2 * 20 * 3
    summary = write_record(tmp_path, table, prompts, realised, engine_settings, emptied=emptied)
    assert summary["invalid"] == []
    # Six at a time were sent and four are computed at most; alone a step makes one token.
    assert "the engine computes 4 (serve.max_num_seqs)" in summary["warnings"][0]
    alone, loaded = (summary["levels"][level] for level in ("alone", "loaded"))
    assert alone["tokens_per_step"] == pytest.approx(1.0, abs=0.02)
    assert 1.5 < loaded["tokens_per_step"] <= 4.0
    # Prompts of 150 tokens have one block of 128, found by two of three repeats.
    assert alone["cached_share"] == pytest.approx(2 / 3 * 128 / 150, abs=0.01)
    written = pl.read_parquet(tmp_path / "outputs.parquet")
    assert written["token_ids"].list.len().max() == 12
    assert (written["gaps"].list.len() == written["token_ids"].list.len()).all()
    assert written["gaps"].list.min().min() >= 0  # type: ignore[operator]
    assert written.filter(pl.col("first_divergence").is_not_null()).height == alone["diverged"] + loaded["diverged"]
    # All parts are there: no engine is started again.
    run(started, observed)
    assert len(starts) == 2
