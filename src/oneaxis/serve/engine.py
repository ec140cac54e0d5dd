"""A vLLM engine as a context: started, waited for, watched, and gone when the block ends, however it ends.

    with running_engine(checkpoint, settings, log_path=log) as engine:
        requests.post(f"{engine.base_url}/v1/completions", json={"model": engine.model_name, ...})

The engine runs under a guard (`guard.py`), so that it also goes when this process is killed.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from tqdm import tqdm

from oneaxis import guard
from oneaxis.config.schema import Serve
from oneaxis.errors import RunError, UserError
from oneaxis.serve.command import (
    Device,
    check_engine_args,
    engine_command,
    engine_device,
    engine_environment,
    known_arguments,
    single_process,
)
from oneaxis.serve.log import MARKS, core_ended, last_lines, refused_arguments, refused_configuration, root_error
from oneaxis.serve.metrics import parse_metrics
from oneaxis.serve.preflight import (
    available_bytes,
    cautions,
    check_checkpoint,
    check_kv_cache,
    check_length,
    check_memory,
    check_quantization,
    check_threads,
    cpu_flags,
    reserve_port,
    weights_bytes,
)

STOP_GRACE_S = 10.0

# Loopback only: a proxy from the environment must not see these requests.
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass
class Engine:
    """A running engine, as those who send it requests see it."""

    base_url: str
    """`http://127.0.0.1:PORT`, without `/v1`."""
    port: int
    model_name: str
    """The name that requests give as `model`."""
    log_path: Path
    settings: Serve
    device: Device
    process: subprocess.Popen[bytes]
    """The guard; it ends when the engine ends."""
    session: int = 0
    """The engine's session: the process id of its API server, once that has been seen."""
    cold_start: dict[str, float] = field(default_factory=dict)
    """Seconds of each phase of the start, and `total_s`."""

    @property
    def pid(self) -> int | None:
        """The API server's process id, or None when it is gone."""
        try:
            below = psutil.Process(self.process.pid).children()
        except psutil.NoSuchProcess:
            return None
        return below[0].pid if below else None

    def alive(self) -> bool:
        """Whether the engine's processes are still there."""
        return self.process.poll() is None

    def log_lines(self) -> list[str]:
        """The log so far."""
        return self.log_path.read_text(encoding="utf-8", errors="replace").splitlines()

    def last_words(self, num_lines: int = 5) -> str:
        """The error that ended the engine, or else the last `num_lines` lines of its log, in one line."""
        lines = self.log_lines()
        return root_error(lines) or last_lines(lines, num_lines)

    def require_alive(self) -> None:
        """Raise when the engine is gone.

        Raises:
            RunError: with how it ended, its last words and its log.
        """
        if not self.alive():
            raise RunError(f"the engine died {how_it_ended(self.process.returncode, self.log_lines())}; "
                           f"log: {self.log_path}")  # fmt: skip

    def get(self, path: str, *, timeout_s: float = 30.0) -> str:
        """GET `path`, as text.

        Raises:
            RunError: when the engine is gone or does not answer.
        """
        return self._request(urllib.request.Request(f"{self.base_url}{path}"), timeout_s)

    def post(self, path: str, body: dict[str, Any], *, timeout_s: float = 120.0) -> dict[str, Any]:
        """POST JSON to `path`, and its JSON answer.

        Raises:
            RunError: when the engine is gone, does not answer, or answers with an error.
        """
        request = urllib.request.Request(
            f"{self.base_url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        answer = json.loads(self._request(request, timeout_s) or "{}")
        assert isinstance(answer, dict)
        return answer

    def _request(self, request: urllib.request.Request, timeout_s: float) -> str:
        try:
            with _direct.open(request, timeout=timeout_s) as response:
                return str(response.read().decode("utf-8"))
        except urllib.error.HTTPError as error:
            said = " ".join(error.read().decode("utf-8", "replace").split())[:300]
            raise RunError(f"the engine answered {error.code} to {request.selector}: {said}; "
                           f"log: {self.log_path}") from error  # fmt: skip
        except (OSError, TimeoutError) as error:
            # A dying engine closes its connections a moment before it is gone.
            for _ in range(20):
                self.require_alive()
                time.sleep(0.1)
            raise RunError(f"the engine does not answer {request.selector}: {error}; log: {self.log_path}") from error

    def metrics(self) -> dict[str, float]:
        """Every sample of `/metrics`, by `name{label="value",...}` with sorted labels (see `metric_total`)."""
        return parse_metrics(self.get("/metrics"))

    def server_info(self) -> dict[str, Any]:
        """`/server_info?config_format=json`: the engine's own configuration."""
        info = json.loads(self.get("/server_info?config_format=json", timeout_s=120))
        assert isinstance(info, dict)
        return info


def how_it_ended(code: int, lines: Sequence[str]) -> str:
    """`(exit code 1): ` and the error in the log, or what is known without one.

    An engine that is killed logs no error; what it happened to log last would then be taken for the reason.
    """
    number = -code if code < 0 else code - 128
    ending = f"exit code {code}"
    if code < 0:
        ending = f"its guard was killed by signal {number}"
    elif code > 128:
        ending = f"killed by signal {number}"
    if said := root_error(lines):
        return f"({ending}): {said}"
    if code < 0 or number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        return f"({ending}): killed from outside, there is no error in its log"
    if code == 0 or core_ended(lines):
        return f"({ending}): its core process ended (killed?), there is no error in its log"
    return f"({ending}): {last_lines(lines, 3)}"


@contextmanager
def running_engine(
    checkpoint: Path,
    settings: Serve,
    *,
    log_path: Path,
    observed: dict[str, Any] | None = None,
    served_name: str = "oneaxis",
) -> Iterator[Engine]:
    """Start vLLM's OpenAI server for `checkpoint` on 127.0.0.1, wait until it is healthy, and stop it at the end.

    `log_path` is overwritten with the engine's log. `observed` gets `cold_start`, the port, and the names of vLLM's
    environment variables that were not passed on.

    Raises:
        UserError: for settings, a checkpoint, a port or a memory need that cannot work, before the start; or arguments
            or a configuration that the engine itself refuses.
        RunError: when the engine dies while starting or is not healthy after `settings.start_timeout_s`.
    """
    device = engine_device()
    check_engine_args(settings.engine_args, known_arguments())
    config = check_checkpoint(checkpoint)
    check_length(config, settings)
    if device == "cpu":
        check_threads(settings, cores=len(os.sched_getaffinity(0)))
        check_quantization(checkpoint, config, settings, cpu_flags=cpu_flags())
        for caution in cautions(config, cpu_flags=cpu_flags()):
            print(f"oneaxis: {checkpoint}: {caution}", file=sys.stderr)
        if single_process(settings, device):
            check_kv_cache(config, settings)
        check_memory(weights_bytes(checkpoint), settings, available=available_bytes())
    port, holder = reserve_port(settings.port)
    folder = Path(tempfile.mkdtemp(prefix="oneaxis-"))
    process: subprocess.Popen[bytes] | None = None
    engine: Engine | None = None
    pipe, pipe_write = os.pipe()
    try:
        environment, dropped = engine_environment(os.environ, settings, device=device, folder=folder)
        if dropped:
            print(f"oneaxis: not passed to the engine: {', '.join(dropped)} (use serve.engine_args)", file=sys.stderr)
        command = engine_command(checkpoint.resolve(), settings, served_name=served_name, port=port, device=device)
        keeper = [sys.executable, "-P", "-S", guard.__file__]
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                [*keeper, str(os.getpid()), str(pipe), str(STOP_GRACE_S), str(folder), *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                pass_fds=[pipe],
                start_new_session=True,
            )
        engine = Engine(f"http://127.0.0.1:{port}", port, served_name, log_path, settings, device, process)
        engine.cold_start = _wait_until_healthy(engine, settings.start_timeout_s)
        holder.close()
        if observed is not None:
            observed.update(cold_start=engine.cold_start, port=port, environment_not_passed=dropped)
        yield engine
    finally:
        holder.close()
        os.close(pipe)
        try:
            if process is not None:
                _stop(process)
        finally:
            # Also on a second interrupt: the closed pipe tells the guard to kill the tree at once.
            os.close(pipe_write)
            if process is not None and engine is not None and process.returncode == -signal.SIGKILL:
                _sweep(engine.session)
            shutil.rmtree(folder, ignore_errors=True)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Let the guard stop its engine; kill the guard when it does not."""
    process.terminate()
    try:
        process.wait(STOP_GRACE_S + 15)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _sweep(session: int) -> None:
    """Kill what is left in the engine's session. Only needed when the guard was killed and could not do it.

    The kernel has then killed the API server; a core that was spawned, not forked (`launch.py`), is still there.
    """
    for process in psutil.process_iter():
        try:
            if session and os.getsid(process.pid) == session:
                process.kill()
                process.wait(5)
        except (psutil.Error, OSError):
            continue


def _wait_until_healthy(engine: Engine, timeout_s: float) -> dict[str, float]:
    """Seconds of each phase of the start, as its end shows in the log, and of the whole.

    Raises:
        UserError: when the engine refuses its arguments or its configuration.
        RunError: when the engine dies or the time is up.
    """
    started = last = time.monotonic()
    phases: dict[str, float] = {}
    with engine.log_path.open(encoding="utf-8", errors="replace") as log:
        with tqdm(total=len(MARKS) + 1, desc="engine start", unit="phase", leave=False, delay=2) as bar:
            while True:
                text = log.read()
                now = time.monotonic()
                for name, mark in MARKS:
                    if name not in phases and mark in text:
                        phases[name], last = round(now - last, 3), now
                        bar.update()
                engine.session = engine.session or engine.pid or 0
                if not engine.alive():
                    _raise_why_it_died(engine)
                if _healthy(engine):
                    now = time.monotonic()
                    return {**phases, "server_s": round(now - last, 3), "total_s": round(now - started, 3)}
                if now - started > timeout_s:
                    raise RunError(
                        f"the engine was not ready within serve.start_timeout_s={timeout_s:g}; "
                        f"it last said: {engine.last_words(2)}; log: {engine.log_path}"
                    )
                time.sleep(0.1)


def _healthy(engine: Engine) -> bool:
    try:
        with _direct.open(f"{engine.base_url}/health", timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def _raise_why_it_died(engine: Engine) -> None:
    lines = engine.log_lines()
    refused = refused_arguments(lines)
    if refused:
        raise UserError(f"serve.engine_args: the engine refuses its arguments: {refused}; log: {engine.log_path}")
    if refused := refused_configuration(lines):
        given = ", ".join(f"serve.engine_args.{name}" for name in sorted(engine.settings.engine_args))
        raise UserError(f"{given or 'serve'}: the engine refuses its configuration: {refused}; log: {engine.log_path}")
    raise RunError(f"the engine died while starting {how_it_ended(engine.process.returncode, lines)}; "
                   f"log: {engine.log_path}")  # fmt: skip
