"""The real engine on a random model of two layers: it starts, answers, tells what it runs, fails in one line, and goes.

Starts cost the most of the test time, so the engine of `running` serves several tests, and the last one kills it.
"""

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from oneaxis.artifacts import read_json
from oneaxis.config import compose, load_stage_config, write_params
from oneaxis.errors import RunError, UserError
from oneaxis.load.client import Record, Request, send_all
from oneaxis.serve import (
    Engine,
    EngineSpec,
    metric_total,
    realised_config,
    running_engine,
    running_engines,
    smoke_answers,
)
from oneaxis.serve.engine import PHASES
from oneaxis.serve.preflight import WIDE, cpu_flags
from tests.serve.tiny import random_llama, serve

FP8_CACHE = {
    "quant_method": "compressed-tensors",
    "format": "dense",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {},
    "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False},
}


def tree(pid: int) -> list[psutil.Process]:
    """A process and everything below it."""
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def living(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that still run (psutil tells a process from another that got its number)."""
    return [process for process in processes if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]


def wait_for(condition: Callable[[], bool], what: str, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


RUNS_FP8_CACHE = not cpu_flags() or bool(cpu_flags() & WIDE)
"""A narrower CPU is refused such a cache before the start (tests/serve/test_preflight.py)."""


@pytest.fixture(scope="module")
def silent_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """BF16 weights whose config.json asks for an FP8 KV cache, where the CPU runs one."""
    asked = {"quantization_config": FP8_CACHE} if RUNS_FP8_CACHE else {}
    return random_llama(tmp_path_factory.mktemp("silent") / "checkpoint", **asked)


@pytest.fixture(scope="module")
def running(silent_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine with settings that vLLM silently changes."""
    settings = serve(kv_cache_gib=0.25, threads=1, start_timeout_s=240.0, engine_args={"async_scheduling": True})
    observed: dict[str, Any] = {}
    log_path = tmp_path_factory.mktemp("logs") / "engine.log"
    with running_engine(silent_checkpoint, settings, log_path=log_path, observed=observed) as engine:
        assert observed["cold_start"] == engine.cold_start
        assert engine.pid is not None
        processes = tree(engine.process.pid)
        yield engine
    assert living(processes) == []


@pytest.mark.slow
def test_it_answers_and_its_counters_move(running: Engine, silent_checkpoint: Path) -> None:
    engine = running
    assert engine.alive()
    assert len(tree(engine.process.pid)) >= 3  # guard, API server, engine core
    before = metric_total(engine.metrics(), "vllm:generation_tokens_total")
    answers = smoke_answers(engine, silent_checkpoint)
    moved = metric_total(engine.metrics(), "vllm:generation_tokens_total") - before
    assert moved == sum(answer["usage"]["completion_tokens"] for answer in answers) > 0
    # One token a byte: the prompt's tokens are its bytes (the tokenizer adds none).
    assert [answer["usage"]["prompt_tokens"] for answer in answers] == [len(answer["prompt"]) for answer in answers]
    assert smoke_answers(engine, silent_checkpoint) == answers


@pytest.mark.slow
def test_the_phases_of_the_start_add_up(running: Engine) -> None:
    phases = dict(running.cold_start)
    total = phases.pop("total_s")
    assert running.start == "forked"  # of the process that this session has preloaded (tests/conftest.py)
    assert list(phases) == ["preload_s", *PHASES]
    assert sum(phases.values()) == pytest.approx(total, abs=0.1)


@pytest.mark.slow
def test_settings_that_vllm_silently_changes_are_found(running: Engine, silent_checkpoint: Path) -> None:
    engine = running
    realised = realised_config(engine, silent_checkpoint)
    found = {difference["key"]: difference["resolved"] for difference in realised["differences"]}
    # 2 * 2 layers * 1 KV head * 64 * 2 bytes = 512 bytes a token in BF16: 0.25 GiB hold 524,288, and FP8 twice that.
    cache = {"serve.kv_cache_dtype": "kv_cache_scheme float8", "kv_cache_tokens": 1_048_576}
    assert found == {"serve.engine_args.async_scheduling": False, **(cache if RUNS_FP8_CACHE else {})}
    assert realised["resolved"]["threads"] == 1
    assert str(engine.port) not in str(realised)


@pytest.mark.slow
def test_its_port_is_refused_to_a_second_engine(running: Engine, tiny_checkpoint: Path) -> None:
    engine = running
    with pytest.raises(UserError, match=rf"serve\.port={engine.port}: in use"):
        with running_engine(
            tiny_checkpoint, serve(port=engine.port, threads=1), log_path=engine.log_path.with_name("no.log")
        ):
            pass


@pytest.mark.slow
def test_a_refused_request_is_an_error_in_one_line(running: Engine) -> None:
    engine = running
    with pytest.raises(RunError, match="answered 404") as refusal:
        engine.post("/v1/completions", {"model": "no such model", "prompt": "x"})
    assert "\n" not in str(refusal.value)
    assert engine.alive()


@pytest.mark.slow
def test_sleep_that_frees_nothing(running: Engine) -> None:
    """Why `enable_sleep_mode` is refused on a CPU: the engine says that it sleeps, and keeps its memory."""
    core = psutil.Process(int(re.findall(r"EngineCore pid=(\d+)", running.log_path.read_text(encoding="utf-8"))[-1]))
    before = core.memory_info().rss
    assert running.post("/sleep?level=1", {})["status"] == "sleeping"
    assert json.loads(running.get("/is_sleeping")) == {"is_sleeping": True}
    assert core.memory_info().rss > 0.98 * before
    running.post("/wake_up", {})
    assert running.post("/v1/completions", {"model": running.model_name, "prompt": "a", "max_tokens": 1})["choices"]


def request(engine: Engine, name: str, at_s: float, tokens: int, **changes: Any) -> Request:
    """A streamed request of three tokens, with changes to its body."""
    body = {"model": engine.model_name, "prompt": [5, 6, 7], "max_tokens": tokens, "min_tokens": tokens,
            "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}} | changes  # fmt: skip
    return Request(shape="s", level="x1", rate_rps=None, service_class="c", request_id=name, user=None, intended_s=at_s,
                   think_s=None, asked_prompt_tokens=3, asked_output_tokens=tokens,
                   body=json.dumps(body).encode())  # fmt: skip


@pytest.mark.slow
def test_failing_requests_are_told_apart(running: Engine) -> None:
    """A bad request, a stream that its client leaves, a server that stands still, and one that is not there; what
    becomes of requests under way when it dies is the next test's."""

    def send(base_url: str, *requests: Request, timeout_s: float) -> list[Record]:
        return asyncio.run(send_all(base_url, requests, timeout_s=timeout_s, alive=running.alive))

    api = psutil.Process(running.pid)
    asked = [
        request(running, "good", 0, 4),
        request(running, "bad", 0, 4, max_tokens=100_000),
        request(running, "long", 0, 500),
    ]
    good, bad, long = send(running.base_url, *asked, timeout_s=0.7)
    assert (good.status, good.output_tokens) == ("ok", 4)
    assert bad.status == "server_error"
    assert "HTTP 400" in str(bad.error)
    if long.status != "ok":  # 500 tokens in 0.7 s are too many, unless the machine is very fast
        assert (long.status, len(long.token_times) < 500) == ("timeout", True)
    # What the client left, the engine ends.
    wait_for(lambda: metric_total(running.metrics(), "vllm:num_requests_running") == 0, "it goes on for nobody", 10)
    api.suspend()
    try:
        (still,) = send(running.base_url, request(running, "still", 0, 4), timeout_s=0.7)
    finally:
        api.resume()
    assert (still.status, still.token_times) == ("timeout", [])
    with socket.create_server(("127.0.0.1", 0)) as free:
        nobody = f"http://127.0.0.1:{free.getsockname()[1]}"
    (refused,) = send(nobody, request(running, "refused", 0, 4), timeout_s=5)
    assert refused.status == "refused"
    assert send(running.base_url, request(running, "after", 0, 2), timeout_s=30)[0].status == "ok"


@pytest.mark.slow
def test_an_engine_that_is_killed_is_noticed(running: Engine) -> None:
    """The core is killed, as the kernel does when memory runs out; the API server in front of it still lives, and may
    yet say to a request under way that its engine is dead."""
    engine = running
    assert engine.pid is not None
    core = [child for child in psutil.Process(engine.pid).children() if "EngineCore" in " ".join(child.cmdline())]
    assert len(core) == 1

    async def killed_meanwhile() -> Record:
        sending = asyncio.create_task(
            send_all(engine.base_url, [request(engine, "cut", 0, 500)], timeout_s=30, alive=engine.alive)
        )
        await asyncio.sleep(0.1)
        core[0].send_signal(signal.SIGKILL)
        return (await sending)[0]

    cut = asyncio.run(killed_meanwhile())
    assert cut.status in ("engine_died", "server_error"), cut
    wait_for(lambda: not engine.alive(), "the engine still counts as alive", 20)
    with pytest.raises(RunError, match="the engine died") as death:
        engine.require_alive()
    assert "\n" not in str(death.value)
    assert str(engine.log_path) in str(death.value)
    with pytest.raises(RunError, match="the engine died"):
        engine.get("/health")


@contextmanager
def killing_cores(log_path: Path, times: int) -> Iterator[list[int]]:
    """Kill the engine core of the next `times` starts as soon as there is one; their process ids."""
    killed: list[int] = []
    done = threading.Event()

    def kill() -> None:
        while len(killed) < times and not done.wait(0.02):
            text = log_path.read_text(encoding="utf-8", errors="replace") if log_path.is_file() else ""
            for pid in map(int, re.findall(r"EngineCore pid=(\d+)", text)[:1]):
                if pid not in killed:
                    killed.append(pid)
                    os.kill(pid, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    yield killed
    done.set()
    thread.join()


@pytest.mark.slow
def test_a_start_that_is_killed_is_repeated_so_often_and_no_more(tiny_checkpoint: Path, tmp_path: Path) -> None:
    log_path, observed = tmp_path / "engine.log", {}
    settings = serve(kv_cache_gib=0.25, threads=1, max_restarts=1)
    with killing_cores(log_path, times=1) as killed:
        with running_engine(tiny_checkpoint, settings, log_path=log_path, observed=observed) as engine:
            assert engine.alive()
    assert len(killed) == len(observed["restarts"]) == 1
    assert "the engine died while starting" in observed["restarts"][0]
    log_path.unlink()
    with killing_cores(log_path, times=9) as killed:
        with pytest.raises(RunError, match=r"at start 2 of 2 \(serve\.max_restarts=1\)") as death:
            with running_engine(tiny_checkpoint, settings, log_path=log_path, observed=observed):
                pass
    assert "\n" not in str(death.value)
    assert len(killed) == 2


@pytest.mark.slow
def test_two_at_once_live_and_die_together(tiny_checkpoint: Path, tmp_path: Path) -> None:
    specs = [
        EngineSpec(tiny_checkpoint, serve(kv_cache_gib=0.25, threads=1), tmp_path / f"{name}.log", served_name=name)
        for name in ("a", "b")
    ]
    observed: dict[str, Any] = {}
    with running_engines(specs, observed=observed) as (first, second):
        body = {"prompt": "abc", "max_tokens": 4, "temperature": 0}
        texts = [engine.post("/v1/completions", body | {"model": engine.model_name}) for engine in (first, second)]
        assert texts[0]["choices"][0]["text"] == texts[1]["choices"][0]["text"]
        processes = [*tree(first.process.pid), *tree(second.process.pid)]
        assert len(processes) >= 6
        psutil.Process(second.pid).kill()
        wait_for(lambda: not first.alive(), "the first does not see the second's end", 10)
        with pytest.raises(RunError, match=r"the engine beside it on port \d+ died .*b\.log"):
            first.require_alive()
    assert living(processes) == []
    assert [seen["start"] for seen in observed["engines"]] == ["forked", "forked"]


@pytest.mark.slow
def test_an_engine_that_dies_of_its_first_request_has_not_started(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """`VLLM_BATCH_INVARIANT` passes `/health` on a CPU. Inherited, it is not passed on (test_command.py)."""
    environment = {"VLLM_BATCH_INVARIANT": "1"}
    with pytest.raises(RunError, match=r"was healthy and died at its first request .*TypeError"):
        with running_engine(tiny_checkpoint, serve(kv_cache_gib=0.25, threads=1), log_path=tmp_path / "engine.log",
                            environment=environment, cold=True):  # fmt: skip
            pass


@pytest.mark.slow
def test_broken_weights_end_the_start_in_one_line(tiny_checkpoint: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(tiny_checkpoint, checkpoint)
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    log_path = tmp_path / "logs" / "engine.log"
    with pytest.raises(RunError, match=r"died while starting .*SafetensorError.*log: ") as death:
        with running_engine(checkpoint, serve(kv_cache_gib=0.25, threads=1, start_timeout_s=240.0), log_path=log_path):
            pass
    assert "\n" not in str(death.value)
    assert str(log_path) in str(death.value)


@pytest.mark.slow
def test_a_start_that_takes_too_long_is_ended(tiny_checkpoint: Path, tmp_path: Path) -> None:
    before = set(psutil.pids())
    with pytest.raises(RunError, match=r"not ready within serve\.start_timeout_s=0\.5"):
        # Cold: still at its imports, where it ends at once.
        with running_engine(tiny_checkpoint, serve(start_timeout_s=0.5, threads=1), log_path=tmp_path / "engine.log",
                            cold=True):  # fmt: skip
            pass
    ours = [pid for pid in set(psutil.pids()) - before if _mentions(pid, str(tiny_checkpoint))]
    assert ours == []


def _mentions(pid: int, text: str) -> bool:
    try:
        return text in " ".join(psutil.Process(pid).cmdline())
    except psutil.Error:
        return False


@pytest.fixture
def project(tiny_checkpoint: Path, root: Path, tmp_path: Path) -> Path:
    """A project's root in which the serve stage can run: parameters and the fetched model."""
    overrides = ["model=random", "train=none", "quantize=none", "serve.max_model_len=512", "serve.kv_cache_gib=0.25",
                 "serve.threads=1", "measure.session=s7", "measure.repetition=2"]  # fmt: skip
    write_params(compose(root / "conf", overrides), tmp_path)
    shutil.copytree(tiny_checkpoint, tmp_path / "artifacts" / "fetch_model" / "checkpoint")
    return tmp_path


@pytest.mark.slow
def test_the_stage_writes_what_the_inputs_decide_and_leaves_no_process(project: Path, root: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(root / "src")}
    command = [sys.executable, str(root / "stages" / "serve.py")]

    # kill -9 while its engine starts: nothing is left but the log.
    log_path = project / ".oneaxis" / "logs" / "serve-engine.log"
    with subprocess.Popen(command, cwd=project, env=environment, stderr=subprocess.DEVNULL) as killed:
        try:
            wait_for(lambda: log_path.is_file() and "Initializing a V1 LLM engine" in log_path.read_text(), "no core")
            processes = tree(killed.pid)
            assert len(processes) >= 4
        finally:
            killed.kill()
    wait_for(lambda: not living(processes), "processes are left", 10)
    assert not (project / "artifacts" / "serve").exists()

    before = set(psutil.pids())
    ended = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert [pid for pid in set(psutil.pids()) - before if _mentions(pid, str(project))] == []
    payload = project / "artifacts" / "serve"
    assert sorted(path.name for path in payload.iterdir()) == [
        "manifest.json",
        "realised.csv",
        "realised.json",
        "smoke.json",
    ]
    realised = read_json(payload / "realised.json")
    assert realised["differences"] == []
    metrics = read_json(project / "artifacts" / "serve.metrics.json")
    assert metrics["serve/config_differences"] == 0
    assert metrics["serve/kv_cache_tokens"] == 524_288
    assert metrics["serve/cold_start_s"] > 1
    observed = read_json(project / "artifacts" / "serve.provenance.json")["observed"]
    assert (observed["session"], observed["repetition"]) == ("s7", 2)
    assert observed["cold_start"]["total_s"] == metrics["serve/cold_start_s"]
    assert (observed["start"], observed["phase"], observed["restarts"]) == ("cold", "ready", [])
    assert set(observed["cold_start"]) == {*PHASES, "total_s"}
    payload_text = "".join(path.read_text(encoding="utf-8") for path in payload.iterdir())
    assert not re.search(rf"{re.escape(str(project))}|127\.0\.0\.1|pid|created", payload_text)

    # A fork of the session's preloaded process is the same engine: what it runs, and what it answers.
    served = project / "artifacts" / "fetch_model" / "checkpoint"
    settings = load_stage_config(project, "serve")[0].serve
    with running_engine(served, settings, log_path=project / "forked.log") as engine:
        assert engine.start == "forked"
        assert realised_config(engine, served) == realised
        assert smoke_answers(engine, served) == read_json(payload / "smoke.json")
