"""Run the jobs of a multirun through one of Hydra's launchers, unchanged: job indices in, one `Status` a job out.

Hydra instantiates the launcher (`basic`, `joblib`, `submitit_local`, `submitit_slurm`, `ray`) and calls one function a
job with nothing but that job's index. Around that call stands what no launcher does:

- a job that raises, or whose process dies, is that job's failure; the others go on;
- Ctrl-C and SIGTERM reach the jobs first, which stop their stages; a job also ends when its launcher was killed;
- no `outputs/`, no `.hydra`, no log files, no change of directory: Hydra's own folder is temporary;
- threads and devices that a job sees do not depend on the launcher (joblib and submitit change both).
"""

import fcntl
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from oneaxis.config import Config
from oneaxis.errors import RunError, UserError
from oneaxis.multirun.node import Returned, bring_home
from oneaxis.multirun.record import Status
from oneaxis.stage import STATE

LAUNCHERS = {
    "basic": "",
    "joblib": "hydra-joblib-launcher",
    "submitit_local": "hydra-submitit-launcher",
    "submitit_slurm": "hydra-submitit-launcher",
    "ray": "hydra-ray-launcher",
}
"""Hydra's launchers -> the package that brings them."""

GRACE_S = 130.0
"""A job that is told to stop has this long to stop its stages (an engine takes some seconds) before it is killed."""

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "BLIS_NUM_THREADS", "NUMEXPR_NUM_THREADS",
           "NUMBA_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")  # fmt: skip
"""joblib sets these in its workers, by how many there are: low bits and timings would depend on the launcher."""

ATTEMPTS = 2
"""After a death of worker processes, the jobs without a result start together this often, then one by one."""


def launcher_of(launcher_overrides: Sequence[str]) -> str:
    """The launcher that Hydra's overrides choose: `basic` unless one says `hydra/launcher=...`."""
    chosen = [o.partition("=")[2].strip() for o in launcher_overrides if o.startswith("hydra/launcher=")]
    return chosen[-1] if chosen else "basic"


def runs_elsewhere(launcher_overrides: Sequence[str]) -> bool:
    """Whether jobs may run on other machines than this one, of which this one knows nothing."""
    return launcher_of(launcher_overrides) in ("submitit_slurm", "ray")


def check_launcher(conf_dir: Path, launcher_overrides: Sequence[str], configs: Sequence[Config] = ()) -> None:
    """Refuse before anything runs what a launcher could not do.

    Raises:
        UserError: an unknown launcher or one whose plugin is not installed, a setting that it does not have, a value
            of the wrong type, or jobs side by side whose engines would share a port.
    """
    settings = _compose(conf_dir, launcher_overrides, Path("unused")).hydra.launcher
    name = launcher_of(launcher_overrides)
    if name == "joblib" and settings.n_jobs == 0:
        raise UserError("hydra.launcher.n_jobs=0: allowed: how many jobs run at once, or -1 for one a CPU")
    if name == "submitit_slurm" and shutil.which("sbatch") is None:
        raise UserError("hydra/launcher=submitit_slurm: no sbatch on the PATH; allowed: a host that submits to Slurm")
    side_by_side = name != "basic" and not (name == "joblib" and settings.n_jobs == 1)
    ports = sorted({config.serve.port for config in configs if config.serve.kind == "vllm"} - {0})
    if side_by_side and len(configs) > 1 and ports:
        raise UserError(f"serve.port={ports[0]}: jobs run side by side under hydra/launcher={name}, and one port takes "
                        "one engine; allowed: 0 (a free port each), or hydra/launcher=basic")  # fmt: skip


def launch(
    conf_dir: Path,
    launcher_overrides: Sequence[str],
    jobs: Sequence[Sequence[str]],
    task: Callable[[int], Status | Returned],
    labels: Sequence[str] = (),
) -> list[Status]:
    """Call `task(index)` for every job through Hydra's launcher; the results in the order of the jobs.

    Args:
        conf_dir: the project's `conf/`.
        launcher_overrides: Hydra's own (`hydra/launcher=joblib`, `hydra.launcher.n_jobs=2`).
        jobs: one list of overrides a job.
        task: picklable (a module's function, or `functools.partial` of one).
        labels: what a job's lines begin with where jobs write to one terminal; its number by default.

    Raises:
        UserError: as `check_launcher`.
        KeyboardInterrupt: after Ctrl-C or SIGTERM, when the jobs have stopped.
    """
    check_launcher(conf_dir, launcher_overrides)
    name = launcher_of(launcher_overrides)
    with _folder(conf_dir.parent, far=name == "ray") as folder, _interrupts(folder):
        configured = _compose(conf_dir, launcher_overrides, folder)
        call = JobCall(
            task=task,
            folder=folder,
            inline=name == "basic",
            labels=tuple(labels) or tuple(f"{n}/{len(jobs)}" for n in range(1, len(jobs) + 1)),
            prefix=name == "joblib",
            near=name in ("joblib", "submitit_local"),
            devices=os.environ.get("CUDA_VISIBLE_DEVICES") if not _asks_for_gpus(configured) else "",
            host=_host(),
            pid=os.getpid(),
            born=psutil.Process().create_time(),
            threads={key: os.environ[key] for key in THREADS if key in os.environ},
        )
        try:
            return _run_all(conf_dir, configured, [list(job) for job in jobs], call)
        finally:
            _close(name, folder)


def _run_all(conf_dir: Path, configured: Any, jobs: list[list[str]], call: "JobCall") -> list[Status]:
    """Start all; when the launcher itself fails (a worker died), start those without a result again, at last singly."""
    done: dict[int, Status] = {}
    for attempt in range(ATTEMPTS + 1):
        left = [index for index in range(len(jobs)) if index not in done]
        batches = [left] if attempt < ATTEMPTS else [[index] for index in left]
        for batch in batches:
            if not batch:
                continue
            try:
                done |= _hydra_launch(conf_dir, configured, jobs, batch, call)
            except Exception as error:
                _end_stragglers(configured, call.folder)
                done |= {index: status for index in batch if (status := _result(call.folder, index))}
                if len(batch) == 1 and batch[0] not in done:
                    done[batch[0]] = failed_status(f"its process died: {_one_line(error)}")
    return [done[index] for index in range(len(jobs))]


def _end_stragglers(configured: Any, folder: Path) -> None:
    """After a launcher gave up: jobs on this host are waited for; Ray's, which cannot be reached, are ended."""
    if configured.hydra.launcher._target_.endswith("RayLauncher"):
        import ray

        ray.shutdown()
    _settle(folder)


def _hydra_launch(
    conf_dir: Path, configured: Any, jobs: list[list[str]], batch: list[int], call: "JobCall"
) -> dict[int, Status]:
    from hydra import initialize_config_dir
    from hydra._internal.callbacks import Callbacks
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.core.plugins import Plugins
    from hydra.core.utils import JobStatus
    from hydra.types import HydraContext

    results: dict[int, Status] = {}
    with initialize_config_dir(version_base="1.3", config_dir=str(conf_dir.resolve())):
        loader = GlobalHydra.instance().config_loader()
        launcher = Plugins.instance().instantiate_launcher(
            hydra_context=HydraContext(config_loader=loader, callbacks=Callbacks(configured)),
            task_function=call.numbered(batch),
            config=configured,
        )
        held = HydraConfig.instance().cfg
        try:
            returns = launcher.launch([jobs[index] for index in batch], initial_job_idx=0)
        finally:
            HydraConfig.instance().cfg = held
    for index, returned in zip(batch, returns, strict=True):
        if returned.status is JobStatus.COMPLETED:
            value = returned.return_value
            results[index] = bring_home(conf_dir.parent, value) if isinstance(value, Returned) else value
        else:
            results[index] = failed_status(_one_line(returned._return_value))
    return results


# --- one job, in whatever process the launcher gave it --------------------------------------------------------------


@dataclass(frozen=True)
class JobCall:
    """What a launcher calls, pickled: runs one job, and sees to it that the job ends with the launcher."""

    task: Callable[[int], Status | Returned]
    folder: Path
    """Of Hydra's folders, and of ours: `<index>.pid` while a job runs, `<index>.json` its result."""
    inline: bool
    """The job runs in the launcher's own process."""
    labels: Sequence[str]
    prefix: bool
    near: bool
    """The job runs on the launcher's host by definition, and sees its threads and devices."""
    devices: str | None
    host: str
    pid: int
    born: float
    threads: dict[str, str]
    batch: Sequence[int] = ()
    """The indices of this start's jobs: Hydra numbers them from 0."""

    def numbered(self, batch: Sequence[int]) -> "JobCall":
        """The same for a start of these jobs only."""
        return replace(self, batch=tuple(batch))

    def __call__(self, _config: Any) -> Status | Returned:
        """Hydra's task function."""
        from hydra.core.hydra_config import HydraConfig

        hydra = HydraConfig.get()
        index = self.batch[int(hydra.job.num)]
        if self.inline:
            before = set(psutil.Process().children(recursive=True))
            try:
                return _guarded(self.task, index)
            except KeyboardInterrupt:
                _end_children(spare=before)
                raise
        own_folder = not self.folder.is_dir() or not (self.folder / "lock").is_file()
        with self._own_process(index), self._lines(index):
            try:
                result = _guarded(self.task, index)
            except KeyboardInterrupt:
                result = failed_status("interrupted", state="interrupted", code=130)
            finally:
                _end_children()
        if own_folder:
            # Another host, without the project's folder: leave nothing of Hydra's there.
            shutil.rmtree(hydra.runtime.output_dir, ignore_errors=True)
        elif isinstance(result, Status):
            _write_whole(self.folder / f"{index}.json", json.dumps(asdict(result)))
        return result

    @contextmanager
    def _own_process(self, index: int) -> Iterator[None]:
        """Signals, threads, devices and the watch of a process that a launcher started."""
        if self.near:
            for key in THREADS:
                os.environ.pop(key, None)
            os.environ.update(self.threads)
            if self.devices is None:
                os.environ.pop("CUDA_VISIBLE_DEVICES", None)
            elif self.devices:
                os.environ["CUDA_VISIBLE_DEVICES"] = self.devices
        main = threading.current_thread() is threading.main_thread()
        previous = {number: signal.signal(number, _interrupt) for number in _STOPS} if main else {}
        mark = self.folder / f"{index}.pid"
        here = self.host == _host()
        over = threading.Event()
        if here and self.folder.is_dir():
            _write_whole(mark, f"{os.getpid()}")
        if here:
            threading.Thread(target=self._watch, args=(over,), daemon=True, name="end-with-launcher").start()
        try:
            yield
        finally:
            over.set()
            for number, handler in previous.items():
                signal.signal(number, handler)
            mark.unlink(missing_ok=True)

    def _watch(self, over: threading.Event) -> None:
        while not over.wait(0.5):
            if not _alive(self.pid, self.born):
                os.kill(os.getpid(), signal.SIGTERM)
                if not over.wait(GRACE_S):
                    _end_children(grace_s=0)
                    os._exit(1)
                # The launcher's own machinery may wait for a launcher that is gone.
                time.sleep(1)
                os._exit(1)

    @contextmanager
    def _lines(self, index: int) -> Iterator[None]:
        """Write whole lines that begin with the job's label, from it and from all processes below it."""
        if not self.prefix:
            yield
            return
        sys.stdout.flush()
        sys.stderr.flush()
        kept = [os.dup(1), os.dup(2)]
        pumps = []
        for number in (1, 2):
            read, write = os.pipe()
            os.dup2(write, number)
            os.close(write)
            pump = threading.Thread(
                target=_pump, args=(read, kept[number - 1], f"[{self.labels[index]}] "), daemon=True
            )
            pump.start()
            pumps.append(pump)
        try:
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number in (1, 2):
                os.dup2(kept[number - 1], number)
            for pump in pumps:
                # A process of the job's that lives on would hold the pipe.
                pump.join(timeout=2)
            for number in kept:
                os.close(number)


_STOPS = (signal.SIGINT, signal.SIGTERM)


def _guarded(task: Callable[[int], Status | Returned], index: int) -> Status | Returned:
    """The task's result; an exception is its failure, in one line (a bug of ours keeps its traceback on stderr)."""
    try:
        return task(index)
    except (UserError, RunError) as error:
        return failed_status(str(error), code=error.exit_code)
    except Exception as error:
        traceback.print_exc()
        return failed_status(_one_line(error))


def failed_status(message: str, *, code: int = 1, state: Any = "failed") -> Status:
    """The status of a job that could not write its own."""
    return Status(state=state, exit_code=code, message=message, ran=(), stage_seconds={}, seconds=0.0, waited_s=0.0,
                  commit="", node=socket.gethostname(), slot="",
                  finished_at=datetime.now(UTC).isoformat(timespec="milliseconds"))  # fmt: skip


def _interrupt(_number: int, _frame: Any) -> None:
    # Once: a second signal must not cut short the cleaning up that the first one began.
    for number in _STOPS:
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def _pump(read: int, write: int, label: str) -> None:
    """Copy whole lines, each with the label; a line is one write, so that lines of several jobs never mix."""
    with os.fdopen(read, "rb", closefd=True) as stream:
        for line in stream:
            text = line.rstrip(b"\n").split(b"\r")[-1]
            try:
                os.write(write, label.encode() + text + b"\n")
            except OSError:
                continue


def _end_children(grace_s: float = GRACE_S, spare: Container[psutil.Process] = ()) -> None:
    """End whatever the job left below its process: SIGTERM, then SIGKILL."""
    below = psutil.Process().children(recursive=True)
    below = [process for process in below if process not in spare and not _is_machinery(process)]
    for number, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 5.0)):
        for process in below:
            try:
                process.send_signal(number)
            except psutil.Error:
                continue
        _, below = psutil.wait_procs(below, timeout=wait_s)


def _is_machinery(process: psutil.Process) -> bool:
    """Of multiprocessing or a launcher: lives as long as the worker does."""
    try:
        return any("resource_tracker" in word or "loky" in word for word in process.cmdline())
    except psutil.Error:
        return True


# --- the launcher's side --------------------------------------------------------------------------------------------


def _compose(conf_dir: Path, launcher_overrides: Sequence[str], folder: Path) -> Any:
    """Hydra's configuration for the launcher."""
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from hydra.core.plugins import Plugins
    from hydra.errors import HydraException
    from hydra.types import RunMode
    from omegaconf.errors import OmegaConfBaseException

    for override in launcher_overrides:
        if not re.match(r"[+~]*hydra[/.]launcher\b", override):
            raise UserError(f"{override}: set by oneaxis; allowed: hydra/launcher=... and hydra.launcher.<setting>=...")
    name = launcher_of(launcher_overrides)
    own = conf_dir / "hydra" / "launcher" / f"{name}.yaml"
    if name not in LAUNCHERS and not own.is_file():
        raise UserError(f"hydra/launcher={name}: no such launcher; allowed: {', '.join(LAUNCHERS)}")
    from importlib.util import find_spec

    plugin = LAUNCHERS.get(name, "")
    if plugin and find_spec(f"hydra_plugins.{plugin.replace('-', '_')}") is None:
        extra = "oneaxis[ray]" if name == "ray" else plugin
        here = [other for other, package in LAUNCHERS.items() if not package or _installed(package)]
        raise UserError(f"hydra/launcher={name}: {plugin} is not installed (`pip install {extra}`); allowed here: "
                        f"{', '.join(here)}")  # fmt: skip
    quiet = [
        f"hydra.sweep.dir={json.dumps(str(folder))}",
        "hydra.sweep.subdir=${hydra.job.num}",
        f"hydra.run.dir={json.dumps(str(folder))}",
        "hydra.output_subdir=null",
        "hydra.job.chdir=false",
        "hydra/job_logging=none",
        "hydra/hydra_logging=none",
    ]
    Plugins.instance()
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(conf_dir.resolve()), job_name="oneaxis"):
            hydra = GlobalHydra.instance().hydra
            assert hydra is not None
            return hydra.compose_config(
                config_name="config",
                overrides=[*_defaults(name, launcher_overrides), *launcher_overrides, *quiet],
                run_mode=RunMode.MULTIRUN,
                with_log_configuration=False,
            )
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(_explain(error, conf_dir, name, launcher_overrides)) from error


def _installed(package: str) -> bool:
    from importlib.util import find_spec

    return find_spec(f"hydra_plugins.{package.replace('-', '_')}") is not None


def _defaults(name: str, given: Sequence[str]) -> list[str]:
    """Ours where the user says nothing: jobs that last, a Ray that listens on this machine only and is quiet."""
    keys = {override.partition("=")[0].lstrip("+~") for override in given}
    ours = {
        # Hydra's default of an hour would kill a longer job. A week.
        "submitit_local": {"hydra.launcher.timeout_min": "10080", "hydra.launcher.stderr_to_stdout": "true"},
        "ray": {"+hydra.launcher.ray.remote.max_retries": "0"},
    }.get(name, {})
    if name == "ray":
        joins = any(key == "hydra.launcher.ray.init.address" for key in keys) or "RAY_ADDRESS" in os.environ
        ours |= {"+hydra.launcher.ray.init.logging_level": "error"}
        # The launcher asks for an object store of its size, which Ray refuses to who joins a cluster.
        ours |= {"+hydra.launcher.ray.init.object_store_memory": "null"} if joins else {
            "+hydra.launcher.ray.init.include_dashboard": "false",
            "+hydra.launcher.ray.init._node_ip_address": "127.0.0.1",
        }  # fmt: skip
    return [f"{key}={value}" for key, value in ours.items() if key.lstrip("+") not in keys]


def _explain(error: Exception, conf_dir: Path, name: str, given: Sequence[str]) -> str:
    text = _one_line(error)
    unknown = re.search(r"(?:Could not override|Key) '([\w.]+)'", text)
    if unknown:
        key = unknown.group(1).rpartition(".")[2]
        override = next((o for o in given if o.partition("=")[0].endswith(f".{key}")), unknown.group(1))
        settings = _compose(conf_dir, [f"hydra/launcher={name}"], Path("unused")).hydra.launcher
        allowed = ", ".join(sorted(str(key) for key in settings if key != "_target_"))
        return f"{override}: hydra/launcher={name} has no such setting; allowed: {allowed}"
    named = next((o for o in given if o in text), " ".join(given))
    cause = _one_line(error.__cause__) if error.__cause__ else text
    return f"{named}: {re.sub(r' (full_key|See http).*', '', cause.partition(': ')[2])}; allowed: key=value"


def _asks_for_gpus(configured: Any) -> bool:
    return bool(configured.hydra.launcher.get("gpus_per_node") or configured.hydra.launcher.get("gpus_per_task"))


@contextmanager
def _folder(root: Path, *, far: bool) -> Iterator[Path]:
    """A folder for one launch, removed at its end; what a killed launcher left is removed too.

    A launcher whose jobs may run on hosts without the project's folder (`far`) gets one that any host can make.
    """
    above = Path(tempfile.gettempdir()) if far else root.resolve() / STATE / "hydra"
    above.mkdir(parents=True, exist_ok=True)
    for old in above.glob("launch-*" if not far else "oneaxis-launch-*"):
        _remove_dead(old)
    folder = Path(tempfile.mkdtemp(prefix="oneaxis-launch-" if far else "launch-", dir=above))
    with (folder / "lock").open("w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _remove_dead(folder: Path) -> None:
    try:
        with (folder / "lock").open(encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    except OSError:
        return


@contextmanager
def _interrupts(folder: Path) -> Iterator[None]:
    """Ctrl-C and SIGTERM: stop the jobs on this host and wait for them, then raise KeyboardInterrupt, once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: Any) -> None:
        for each in _STOPS:
            signal.signal(each, signal.SIG_IGN)
        _settle(folder, interrupt=True)
        _cancel_slurm(folder)
        _interrupt(number, frame)

    previous = {number: signal.signal(number, stop) for number in _STOPS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _settle(folder: Path, *, interrupt: bool = False) -> None:
    """Wait until no job of this launch runs on this host; with `interrupt`, tell them to stop, then kill."""
    told: set[int] = set()
    deadline = time.monotonic() + GRACE_S + 10
    while alive := _running(folder):
        for process in alive:
            if interrupt and process.pid not in told:
                told.add(process.pid)
                process.send_signal(signal.SIGTERM)
            elif interrupt and time.monotonic() > deadline:
                for below in [*process.children(recursive=True), process]:
                    below.kill()
        time.sleep(0.1)


def _running(folder: Path) -> list[psutil.Process]:
    found = []
    for mark in folder.glob("*.pid"):
        try:
            process = psutil.Process(int(mark.read_text(encoding="utf-8")))
            if process.status() == psutil.STATUS_ZOMBIE or process.create_time() > mark.stat().st_mtime + 1:
                raise psutil.NoSuchProcess(process.pid)
            found.append(process)
        except (OSError, ValueError, psutil.Error):
            mark.unlink(missing_ok=True)
    return found


def _cancel_slurm(folder: Path) -> None:
    """Take this launch's jobs out of Slurm's queue; submitit names a folder by each job's id."""
    ids = {path.name.partition("_")[0] for path in (folder / ".submitit").glob("*") if path.name[0].isdigit()}
    if ids and shutil.which("scancel"):
        subprocess.run(["scancel", *sorted(ids)], check=False, capture_output=True, timeout=60)


def _close(name: str, folder: Path) -> None:
    """End the launcher's own processes."""
    _settle(folder, interrupt=True)
    if name == "joblib":
        from joblib.externals.loky import get_reusable_executor

        get_reusable_executor(max_workers=1, reuse=True).shutdown(wait=True, kill_workers=True)
    if name == "ray":
        import ray

        ray.shutdown()


def _result(folder: Path, index: int) -> Status | None:
    path = folder / f"{index}.json"
    return Status(**json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else None


def _write_whole(path: Path, text: str) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def _host() -> str:
    """This machine and this boot of it: a process id means nothing elsewhere."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip() + "@" + os.uname().nodename
    except OSError:
        return os.uname().nodename


def _alive(pid: int, born: float) -> bool:
    try:
        process = psutil.Process(pid)
        return abs(process.create_time() - born) < 1 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _one_line(error: BaseException) -> str:
    return re.sub(r"\s+", " ", f"{type(error).__name__}: {error}").strip()[:500]
