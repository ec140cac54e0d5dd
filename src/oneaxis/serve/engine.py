"""A vLLM engine as a context: started, waited for, watched, and gone when the block ends, however it ends.

    with running_engine(checkpoint, settings, log_path=log) as engine:
        requests.post(f"{engine.base_url}/v1/completions", json={"model": engine.model_name, ...})

The engine runs under a guard (`guard.py`), so that it also goes when this process is killed. Its server is a process
of its own (`cold`), or a fork of one that has the imports behind it (`forked.py`).
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil
from tqdm import tqdm

from oneaxis import guard
from oneaxis.config.schema import Serve, ServeAttach, ServeSection
from oneaxis.errors import RunError, UserError
from oneaxis.serve.attach import attached_endpoint
from oneaxis.serve.command import (
    Device,
    check_contradictions,
    check_engine_args,
    engine_command,
    engine_device,
    engine_environment,
    known_arguments,
    single_process,
)
from oneaxis.serve.endpoint import Endpoint
from oneaxis.serve.forked import ForkedGuard, fork_engine, preloaded_engines
from oneaxis.serve.log import (
    MARKS,
    core_ended,
    last_lines,
    port_taken,
    refused_arguments,
    refused_configuration,
    root_error,
)
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
from oneaxis.serve.sockets import socket_parent

STOP_GRACE_S = 10.0

POLL_S = (0.05, 0.25)
"""Shortest and longest pause between two looks at an engine that starts; each is a fifth longer than the one before."""

PROBE_TOKEN = 10
"""The prompt of the first request: a token that every vocabulary has."""

Start = Literal["cold", "forked"]


@dataclass
class Engine(Endpoint):
    """A running engine of ours."""

    settings: Serve
    port: int = 0
    log_path: Path = Path()
    device: Device = "cpu"
    process: "subprocess.Popen[bytes] | ForkedGuard" = field(kw_only=True)
    """The guard; it ends when the engine ends."""
    start: Start = "cold"
    session: int = 0
    """The engine's session: the process id of its API server, once that has been seen."""
    cold_start: dict[str, float] = field(default_factory=dict)
    """Seconds of each phase of the start, and `total_s`."""
    peers: "list[Engine]" = field(default_factory=list, repr=False)
    """Engines that were started with it."""

    @property
    def pid(self) -> int | None:
        """The API server's process id, or None when it is gone."""
        try:
            below = psutil.Process(self.process.pid).children()
        except psutil.NoSuchProcess:
            return None
        return below[0].pid if below else None

    def alive(self) -> bool:
        """Whether the engine's processes are still there, and those of its peers."""
        return all(engine.process.poll() is None for engine in (self, *self.peers))

    def processes(self) -> list[int]:
        """The guards of this engine and its peers."""
        return [engine.process.pid for engine in (self, *self.peers)]

    def where(self) -> str:
        """Its log."""
        return f"log: {self.log_path}"

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
        for engine in (self, *self.peers):
            if engine.process.poll() is not None:
                which = "the engine" if engine is self else f"the engine beside it on port {engine.port}"
                raise RunError(f"{which} died {how_it_ended(engine.exit_code(), engine.log_lines())}; "
                               f"log: {engine.log_path}")  # fmt: skip

    def exit_code(self) -> int:
        """The exit code of an engine that has ended (128 + signal; -signal when its guard was killed)."""
        code = self.process.poll()
        assert code is not None
        return code


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
        return f"({ending} of its server): the process of its core ended, killed perhaps; there is no error in its log"
    return f"({ending}): {last_lines(lines, 3)}"


@dataclass(frozen=True)
class EngineSpec:
    """An engine that is wanted."""

    checkpoint: Path
    settings: Serve
    log_path: Path
    """Overwritten with the engine's log."""
    served_name: str = "oneaxis"
    environment: Mapping[str, str] = field(default_factory=dict)
    """Beside what `engine_environment` gives it: what a connector reads, and settings do not say."""


@contextmanager
def serving(
    checkpoint: Path, settings: ServeSection, *, log_path: Path, observed: dict[str, Any], cold: bool = False
) -> Iterator[Endpoint]:
    """What the section `serve` says: an engine of ours for `checkpoint`, or a server that runs already.

    Raises:
        UserError, RunError: as `running_engine` or `attached_endpoint`.
    """
    if isinstance(settings, ServeAttach):
        with attached_endpoint(settings, observed=observed) as endpoint:
            yield endpoint
    else:
        with running_engine(checkpoint, settings, log_path=log_path, observed=observed, cold=cold) as engine:
            yield engine


@contextmanager
def running_engine(
    checkpoint: Path,
    settings: Serve,
    *,
    log_path: Path,
    observed: dict[str, Any] | None = None,
    served_name: str = "oneaxis",
    environment: Mapping[str, str] | None = None,
    cold: bool = False,
) -> Iterator[Engine]:
    """Start vLLM's OpenAI server for `checkpoint` on 127.0.0.1, wait until it answers, and stop it at the end.

    Args:
        log_path: overwritten with the engine's log.
        observed: gets `phase` (of the start, as it goes), `cold_start`, `start` (cold or forked), `restarts` (why each
            was needed), the port, and the names of vLLM's environment variables that were not passed on.
        environment: more variables for the engine.
        cold: in a process of its own, imports included, also where a preloaded one could be forked.

    Raises:
        UserError: for settings, a checkpoint, a port or a memory need that cannot work, before the start; or arguments
            or a configuration that the engine itself refuses.
        RunError: when the engine dies while starting, or at its first request, or is not healthy after
            `settings.start_timeout_s`. One that was killed from outside is started anew up to `max_restarts` times.
    """
    spec = EngineSpec(checkpoint, settings, log_path, served_name, environment or {})
    _check([spec])
    with _kept_running(spec, observed if observed is not None else {}, cold=cold) as engine:
        yield engine


@contextmanager
def running_engines(specs: Sequence[EngineSpec], *, observed: dict[str, Any] | None = None) -> Iterator[list[Engine]]:
    """Several engines on this machine at once, started one after the other; when one fails, all are stopped.

    Each counts as alive while all are: who watches one of them sees the others die. `observed` gets `engines`, for each
    what `running_engine` observes.

    Raises:
        UserError, RunError: as `running_engine`; memory and cores are checked for all of them together.
    """
    _check(specs)
    seen: list[dict[str, Any]] = [{} for _ in specs]
    if observed is not None:
        observed["engines"] = seen
    with preloaded_engines(), ExitStack() as stack:
        engines = [
            stack.enter_context(_kept_running(spec, own, cold=False)) for spec, own in zip(specs, seen, strict=True)
        ]
        for engine in engines:
            engine.peers = [other for other in engines if other is not engine]
            engine.require_alive()
        yield engines


def _check(specs: Sequence[EngineSpec]) -> None:
    """Refuse what cannot work before anything is started.

    Raises:
        UserError: naming the key or the file.
    """
    device = engine_device()
    for spec in specs:
        settings, checkpoint = spec.settings, spec.checkpoint
        check_engine_args(settings.engine_args, known_arguments())
        check_contradictions(settings, device)
        config = check_checkpoint(checkpoint)
        check_length(config, settings)
        if device != "cpu":
            continue
        check_quantization(checkpoint, config, settings, cpu_flags=cpu_flags())
        for caution in cautions(config, cpu_flags=cpu_flags()):
            print(f"oneaxis: {checkpoint}: {caution}", file=sys.stderr)
        if single_process(settings, device):
            check_kv_cache(config, settings)
    if device == "cpu":
        check_threads([spec.settings for spec in specs], cores=len(os.sched_getaffinity(0)))
        needs = [(weights_bytes(spec.checkpoint), spec.settings) for spec in specs]
        check_memory(needs, available=available_bytes())


class KilledAtStart(RunError):
    """An engine that ended while it started, by no fault of its settings."""


@contextmanager
def _kept_running(spec: EngineSpec, observed: dict[str, Any], *, cold: bool) -> Iterator[Engine]:
    """Start the engine, again when its start was cut short from outside; once it runs, its death is final.

    (The numbers of two engines are not one run's.)
    """
    restarts: list[str] = []
    observed["restarts"] = restarts
    with ExitStack() as stack:
        while True:
            try:
                engine = stack.enter_context(_one_start(spec, observed, cold=cold))
                break
            except KilledAtStart as error:
                if len(restarts) == spec.settings.max_restarts:
                    again = f", at start {len(restarts) + 1} of {len(restarts) + 1}" if restarts else ""
                    raise RunError(f"{error}{again} (serve.max_restarts={spec.settings.max_restarts})") from error
                restarts.append(str(error))
                print(f"oneaxis: {error}; restart {len(restarts)} of {spec.settings.max_restarts}", file=sys.stderr)
        yield engine


def engine_folder() -> Path:
    """A new folder for an engine's sockets and temporary files."""
    prefix = "oneaxis-"
    # mkdtemp adds 8 letters; vLLM names its sockets by a UUID.
    return Path(tempfile.mkdtemp(prefix=prefix, dir=socket_parent(len(f"/{prefix}") + 8 + 1 + 36)))


@contextmanager
def _one_start(spec: EngineSpec, observed: dict[str, Any], *, cold: bool) -> Iterator[Engine]:
    settings, device = spec.settings, engine_device()
    port, holder = reserve_port(settings.port)
    folder = engine_folder()
    process: subprocess.Popen[bytes] | ForkedGuard | None = None
    engine: Engine | None = None
    pipe, pipe_write = os.pipe()
    try:
        environment, dropped = engine_environment(os.environ, settings, device=device, folder=folder)
        environment |= spec.environment
        if dropped:
            print(f"oneaxis: not passed to the engine: {', '.join(dropped)} (use serve.engine_args)", file=sys.stderr)
        command = engine_command(
            spec.checkpoint.resolve(), settings, served_name=spec.served_name, port=port, device=device
        )
        spec.log_path.parent.mkdir(parents=True, exist_ok=True)
        started = time.monotonic()
        with spec.log_path.open("wb") as log:
            if not cold and single_process(settings, device):
                process = fork_engine(command[2:], environment, log=log.fileno(), folder=folder, grace_s=STOP_GRACE_S)
            start: Start = "forked" if process else "cold"
            if process is None:
                keeper = [sys.executable, "-P", "-S", guard.__file__]
                process = subprocess.Popen(
                    [*keeper, str(os.getpid()), str(pipe), str(STOP_GRACE_S), str(folder), *command],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    pass_fds=[pipe],
                    start_new_session=True,
                )
        engine = Engine(
            f"http://127.0.0.1:{port}", spec.served_name, settings, port=port, log_path=spec.log_path, device=device,
            process=process, start=start,
        )  # fmt: skip
        observed.update(start=start, port=port, environment_not_passed=dropped, cold_start=engine.cold_start)
        if start == "forked":
            # Next to nothing, unless this start was the one that waited for the imports.
            engine.cold_start["preload_s"] = round(time.monotonic() - started, 3)
        _wait_until_it_answers(engine, observed, started)
        holder.close()
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
            if isinstance(process, ForkedGuard):
                process.release()
            if process is not None and engine is not None and process.returncode == -signal.SIGKILL:
                _sweep(engine.session)
            shutil.rmtree(folder, ignore_errors=True)


def _stop(process: "subprocess.Popen[bytes] | ForkedGuard") -> None:
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


PHASES = (*(name for name, _ in MARKS), "server_s", "first_request_s")


def _wait_until_it_answers(engine: Engine, observed: dict[str, Any], started: float) -> None:
    """Follow the start in the log, wait for `/health`, and send the first request; the phases go to `cold_start`.

    The first request is part of the start: an engine can be healthy and die of it (`VLLM_BATCH_INVARIANT` on a CPU).

    Raises:
        UserError: when the engine refuses its arguments or its configuration.
        RunError: when the engine dies or the time is up.
    """
    phases, timeout_s = engine.cold_start, engine.settings.start_timeout_s
    last, (pause_s, longest_s) = time.monotonic(), POLL_S

    def ended(name: str, now: float) -> None:
        nonlocal last
        phases[name], last = round(now - last, 3), now
        bar.update()
        following = [later for later in PHASES if later not in phases]
        observed["phase"] = following[0].removesuffix("_s") if following else "ready"
        bar.set_description(f"engine start: {observed['phase']}")

    observed["phase"] = PHASES[0].removesuffix("_s")
    with engine.log_path.open(encoding="utf-8", errors="replace") as log:
        with tqdm(total=len(PHASES), desc="engine start", unit="phase", leave=False, delay=2) as bar:
            while True:
                text = log.read()
                for name, mark in MARKS:
                    if name not in phases and mark in text:
                        ended(name, time.monotonic())
                engine.session = engine.session or engine.pid or 0
                if not engine.alive():
                    _raise_why_it_died(engine, observed["phase"])
                if not (state := engine.state()):
                    break
                if time.monotonic() - started > timeout_s:
                    raise RunError(
                        f"the engine was not ready within serve.start_timeout_s={timeout_s:g} "
                        f"(phase {observed['phase']}; /health: {state}); it last said: {engine.last_words(2)}; "
                        f"log: {engine.log_path}"
                    )
                time.sleep(pause_s)
                pause_s = min(pause_s * 1.2, longest_s)
            ended("server_s", time.monotonic())
            _first_request(engine, timeout_s=max(10.0, started + timeout_s - time.monotonic()))
            ended("first_request_s", time.monotonic())
            phases["total_s"] = round(time.monotonic() - started, 3)


def _first_request(engine: Engine, *, timeout_s: float) -> None:
    """One token of completion.

    Raises:
        RunError: when the engine dies of it, or does not answer.
    """
    body = {"model": engine.model_name, "prompt": [PROBE_TOKEN], "max_tokens": 1, "temperature": 0}
    try:
        engine.post("/v1/completions", body, timeout_s=timeout_s)
    except RunError as error:
        # It answers with an error and ends a moment later.
        for _ in range(50):
            if not engine.alive():
                how = how_it_ended(engine.exit_code(), engine.log_lines())
                raise RunError(f"the engine was healthy and died at its first request {how}; "
                               f"log: {engine.log_path}") from error  # fmt: skip
            time.sleep(0.1)
        raise


def _raise_why_it_died(engine: Engine, phase: str) -> None:
    lines, code = engine.log_lines(), engine.exit_code()
    refused = refused_arguments(lines)
    if refused:
        raise UserError(f"serve.engine_args: the engine refuses its arguments: {refused}; log: {engine.log_path}")
    if refused := refused_configuration(lines):
        given = ", ".join(f"serve.engine_args.{name}" for name in sorted(engine.settings.engine_args))
        raise UserError(f"{given or 'serve'}: the engine refuses its configuration: {refused}; log: {engine.log_path}")
    said = f"the engine died while starting {how_it_ended(code, lines)}; phase {phase}; log: {engine.log_path}"
    killed = not root_error(lines) and (code < 0 or code >= 128 or core_ended(lines))
    raise KilledAtStart(said) if killed or port_taken(lines) else RunError(said)
