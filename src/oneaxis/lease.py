"""Leases on this host's devices: from what a stage is about to do to the cores or GPUs that it then has.

A timing needs its device for itself (an exclusive lease). Heavy computing may run beside other computing, but not
beside a timing on the same cores (a shared lease on a CPU; a GPU is always taken whole). One lock file per physical
core and per GPU lies in one folder for every user and project of the host, so that processes with cores of their own
(Slurm jobs, `taskset`) do not wait for each other, and all others do.

Locks are `flock`s: the kernel frees them when their holder dies, however it dies. Nothing waits in a circle: a process
takes its locks in one order that is the same for all, and what runs below a holder uses the holder's lease. In front
of every lock stands a turnstile (a second lock, passed one at a time), so that a timing is not starved by computing
that keeps coming. While a lease is wanted or held, a note in the folder says by whom, for those who wait.
"""

import fcntl
import hashlib
import json
import os
import re
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from oneaxis.errors import RunError, UserError

Purpose = Literal["timing", "compute"]

FOLDER = "/tmp/oneaxis-leases"
"""One for the host: TMPDIR differs between users and batch jobs, and would give each its own."""
FOLDER_VARIABLE = "ONEAXIS_LEASE_DIR"
TOKEN_VARIABLE = "ONEAXIS_LEASE"
"""Names, for what a holder starts, the note of the lease that it is under."""
SAY_EVERY_S = 60.0
LOOK_EVERY_S = 0.5
"""How often the first in the queue for any one of several GPUs looks for a free one."""


@dataclass(frozen=True)
class Lease:
    """What a stage holds while it works."""

    device: str
    """`cpu 0-1` or `gpu 0`."""
    exclusive: bool | None
    """None: it is on another machine, where that cannot be known."""
    waited_s: float
    environment: Mapping[str, str] = field(default_factory=dict)
    """Set while the lease is held: CUDA_VISIBLE_DEVICES on a GPU."""

    def as_json(self) -> dict[str, Any]:
        """As provenance records it."""
        return {"device": self.device, "exclusive": self.exclusive, "waited_s": round(self.waited_s, 3)}


@dataclass(frozen=True)
class Gpu:
    """A GPU (or MIG slice) that this process may use."""

    token: str
    """As CUDA_VISIBLE_DEVICES names it: an index, or the identifier that the user gave."""
    identity: str
    """Its UUID, by which every process of the host locks it."""


@contextmanager
def device_lease(purpose: Purpose, *, gpus: int = 0) -> Iterator[Lease]:
    """Wait for the device, hold it for the block, and free it.

    On a host with GPUs that this process may use, `gpus` of them are taken, the first free ones, exclusively. Else the
    cores of this process' affinity mask are: exclusively for `timing`, shared for `compute`.

    Below a process that holds a lease the same device is used and nothing is waited for.

    Args:
        gpus: how many GPUs the work uses where there are any; 0: it computes on the CPU.

    Raises:
        UserError: when more GPUs are wanted than this process may use.
        RunError: when the folder of the leases cannot be used, or the holder above has not what is wanted.
    """
    folder = lease_folder(os.environ)
    visible = visible_gpus(os.environ) if gpus else []
    if visible and gpus > len(visible):
        raise UserError(f"{gpus} GPUs are asked for (serve.engine_args); allowed: at most {len(visible)}, those that "
                        f"this process may use ({', '.join(gpu.token for gpu in visible)})")  # fmt: skip
    cores = [] if visible else physical_cores()
    exclusive = bool(visible) or purpose == "timing"
    above = _note_above(folder)
    if above is not None:
        lease = _under(above, visible, gpus, cores, exclusive)
        with environment_with(lease.environment):
            yield lease
        return
    with ExitStack() as held:
        started = time.monotonic()
        wanted = [_gpu_lock(gpu) for gpu in visible] or [_core_lock(core) for core in cores]
        device = f"gpu {', '.join(gpu.token for gpu in visible)}" if visible else f"cpu {ranges(cores)}"
        note = held.enter_context(_Note.posted(folder, device, wanted, exclusive))
        wait = held.enter_context(_Waiting(folder, note, started))
        if visible:
            taken = _take_gpus(folder, visible, gpus, wait, held)
            device = f"gpu {', '.join(gpu.token for gpu in taken)}"
            environment = _cuda_environment([gpu.token for gpu in taken])
            wanted = [_gpu_lock(gpu) for gpu in taken]
        else:
            _take_in_order(folder, wanted, exclusive, wait, held)
            environment = {}
        waited = wait.end()
        note.hold(device, wanted)
        with environment_with({**environment, TOKEN_VARIABLE: note.path.name}):
            yield Lease(device, exclusive, waited, environment)


# --- devices -------------------------------------------------------------------------------------------------


def physical_cores() -> list[int]:
    """The physical cores that this process may run on, each by the number of its first logical CPU, sorted."""
    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return sorted({_first_sibling(cpu) for cpu in cpus})


def _first_sibling(cpu: int) -> int:
    """The first of the logical CPUs that share a core: two of them cannot be timed apart."""
    path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    try:
        return int(re.split(r"[,-]", path.read_text(encoding="utf-8").strip())[0])
    except (OSError, ValueError):
        return cpu


def ranges(numbers: Sequence[int]) -> str:
    """Sorted numbers as `0-3,8`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in runs)


def visible_gpus(environment: Mapping[str, str]) -> list[Gpu]:
    """The NVIDIA GPUs that this process may use: none on a CPU build of torch, and none that the user took away."""
    try:
        if "+cpu" in metadata.version("torch"):
            return []
    except metadata.PackageNotFoundError:
        return []
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return choose_gpus(listed.stdout, environment.get("CUDA_VISIBLE_DEVICES")) if listed.returncode == 0 else []


def choose_gpus(listing: str, setting: str | None) -> list[Gpu]:
    """The GPUs of `nvidia-smi -L` that CUDA_VISIBLE_DEVICES leaves, in its order.

    As CUDA reads it: None: all of them; an index, or a UUID of which the beginning is enough; what follows an entry
    that does not exist is ignored. MIG slices are named by their own UUID.
    """
    gpus: list[str] = []
    slices: list[str] = []
    for line in listing.splitlines():
        if found := re.match(r"GPU (\d+): .*\(UUID: ([^)]+)\)", line):
            gpus.append(found.group(2))
        elif found := re.match(r"\s+MIG .*\(UUID: ([^)]+)\)", line):
            slices.append(found.group(1))
    if setting is None:
        return [Gpu(str(index), identity) for index, identity in enumerate(gpus)]
    chosen: list[Gpu] = []
    for entry in (part.strip() for part in setting.split(",")):
        if entry.isdigit():
            named = gpus[int(entry) : int(entry) + 1]
        else:
            named = [identity for identity in (*gpus, *slices) if entry and identity.startswith(entry)]
        if len(named) != 1:
            break
        chosen.append(Gpu(entry, named[0]))
    return chosen


def _cuda_environment(tokens: Sequence[str]) -> dict[str, str]:
    """What makes CUDA see these GPUs alone; where the user numbered none, numbers are those of nvidia-smi."""
    order = {} if "CUDA_VISIBLE_DEVICES" in os.environ else {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    return {"CUDA_VISIBLE_DEVICES": ",".join(tokens), **order}


@contextmanager
def environment_with(variables: Mapping[str, str]) -> Iterator[None]:
    """This process' environment with some variables set, and as it was before at the end."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


# --- locks ---------------------------------------------------------------------------------------------------

_open_handles: set[int] = set()


def _close_in_child() -> None:
    """A forked child shares its parent's locks, and would hold them after the parent died."""
    for handle in _open_handles:
        with suppress(OSError):
            os.close(handle)
    _open_handles.clear()


os.register_at_fork(after_in_child=_close_in_child)


def lease_folder(environment: Mapping[str, str]) -> Path:
    """The folder of the host's leases, made when it is not there: every user may add to it, none removes another's.

    Raises:
        UserError: when ONEAXIS_LEASE_DIR names no folder. RunError: when the default one cannot be made or used.
    """
    own = environment.get(FOLDER_VARIABLE)
    folder = Path(own or FOLDER)
    before = os.umask(0)
    try:
        os.mkdir(folder, 0o1777)
    except FileExistsError:
        pass
    except OSError as error:
        raise _unusable(folder, str(error.strerror)) from error
    finally:
        os.umask(before)
    if not stat.S_ISDIR(os.stat(folder, follow_symlinks=bool(own)).st_mode):
        if own:
            raise UserError(f"{FOLDER_VARIABLE}={own}: not a folder; allowed: a folder that every user can write to")
        raise _unusable(folder, "not a folder")
    return folder


def _unusable(path: Path, why: str) -> RunError:
    return RunError(f"{path}: cannot hold the leases on this machine's devices ({why}); set {FOLDER_VARIABLE} to a "
                    "folder that every user of the machine can write to")  # fmt: skip


def _core_lock(core: int) -> str:
    return f"core{core:05d}"


def _gpu_lock(gpu: Gpu) -> str:
    return f"gpu-{re.sub(r'[^A-Za-z0-9-]', '_', gpu.identity)}"


def _take_in_order(folder: Path, names: Sequence[str], exclusive: bool, wait: "_Waiting", held: ExitStack) -> None:
    for name in sorted(names):
        turnstile = _lock(folder / f"{name}.turn", exclusive=True, on_wait=wait.begin)
        try:
            handle = _lock(folder / name, exclusive=exclusive, on_wait=wait.begin)
        finally:
            _close(turnstile)
        held.callback(_close, handle)


def _take_gpus(folder: Path, visible: Sequence[Gpu], count: int, wait: "_Waiting", held: ExitStack) -> list[Gpu]:
    """The first `count` free ones. Who wants all of them waits for each; who wants any queues for a look at all."""
    if count == len(visible):
        _take_in_order(folder, [_gpu_lock(gpu) for gpu in visible], True, wait, held)
        return list(visible)
    among = hashlib.sha256(" ".join(sorted(gpu.identity for gpu in visible)).encode()).hexdigest()[:16]
    queue = _lock(folder / f"any-{among}.turn", exclusive=True, on_wait=wait.begin)
    try:
        while True:
            with ExitStack() as found:
                taken = []
                for gpu in visible:
                    with suppress(BlockingIOError):
                        found.callback(_close, _lock(folder / _gpu_lock(gpu), exclusive=True, on_wait=None))
                        taken.append(gpu)
                    if len(taken) == count:
                        held.push(found.pop_all())
                        return taken
            wait.begin()
            time.sleep(LOOK_EVERY_S)
    finally:
        _close(queue)


def _lock(path: Path, *, exclusive: bool, on_wait: Callable[[], None] | None) -> int:
    """A handle that holds the lock; without `on_wait`, BlockingIOError when it is not free."""
    kind = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
    while True:
        handle = _open(path)
        try:
            try:
                fcntl.flock(handle, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                if on_wait is None:
                    raise
                on_wait()
                fcntl.flock(handle, kind)
            if _still_named(handle, path):
                with suppress(OSError):
                    os.utime(handle)
                return handle
        except BaseException as error:
            _close(handle)
            if isinstance(error, OSError) and not isinstance(error, BlockingIOError):
                raise _unusable(path, str(error.strerror)) from error
            raise
        # A cleaner of temporary files took the name away while we waited: others lock the file that has it now.
        _close(handle)


def _still_named(handle: int, path: Path) -> bool:
    try:
        named = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    ours = os.fstat(handle)
    return (named.st_dev, named.st_ino) == (ours.st_dev, ours.st_ino)


def _open(path: Path) -> int:
    """Open a lock file, or make it; never through a link, and never one that would block."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    while True:
        try:
            handle = os.open(path, flags)
        except FileNotFoundError:
            before = os.umask(0)
            try:
                handle = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
            except FileExistsError:
                continue
            except OSError as error:
                raise _unusable(path, str(error.strerror)) from error
            finally:
                os.umask(before)
        except OSError as error:
            raise _unusable(path, str(error.strerror)) from error
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            os.close(handle)
            raise _unusable(path, "not a file")
        _open_handles.add(handle)
        return handle


def _close(handle: int) -> None:
    if handle in _open_handles:
        _open_handles.discard(handle)
        os.close(handle)


# --- notes: who holds what, and who waits --------------------------------------------------------------------


class _Note:
    """This process' note, locked while it stands: one that is not locked is a dead process'."""

    def __init__(self, handle: int, path: Path, said: dict[str, Any]) -> None:
        self.handle, self.path, self.said = handle, path, said

    @classmethod
    @contextmanager
    def posted(cls, folder: Path, device: str, locks: Sequence[str], exclusive: bool) -> "Iterator[_Note]":
        """Say that a lease is wanted."""
        name = f"{os.getpid()}-{os.urandom(6).hex()}"
        # Locked before it has its name: nobody may take it for a dead process'.
        hidden, path = folder / f".new-{name}", folder / f"note-{name}"
        try:
            handle = os.open(hidden, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise _unusable(hidden, str(error.strerror)) from error
        _open_handles.add(handle)
        command = " ".join([Path(sys.executable).name, *sys.argv])[:200]
        note = cls(handle, path, {
            "name": path.name, "pid": os.getpid(), "command": command, "folder": os.getcwd(), "device": device,
            "locks": list(locks), "exclusive": exclusive, "holds": False, "since": _now(),
        })  # fmt: skip
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            note._write()
            os.rename(hidden, path)
            yield note
        finally:
            # A forked child that unwinds must not take its parent's note away.
            if handle in _open_handles:
                for written in (hidden, path):
                    written.unlink(missing_ok=True)
                _close(handle)

    def hold(self, device: str, locks: Sequence[str]) -> None:
        """Say that the lease is held."""
        self.said.update(device=device, locks=list(locks), holds=True, since=_now())
        self._write()

    def _write(self) -> None:
        text = json.dumps(self.said).encode()
        try:
            os.pwrite(self.handle, text, 0)
            os.ftruncate(self.handle, len(text))
        except OSError as error:
            raise _unusable(self.path, str(error.strerror)) from error


def _now() -> str:
    return f"{datetime.now(UTC):%H:%M:%S} UTC"


def _notes(folder: Path) -> list[dict[str, Any]]:
    """The notes of living processes; those of dead ones are removed."""
    notes = []
    for path in sorted(folder.glob("note-*")):
        said = _living(path)
        if said is not None:
            notes.append(said)
    for path in folder.glob(".new-*"):
        with suppress(OSError):
            if time.time() - path.lstat().st_mtime > SAY_EVERY_S and _living(path) is None:
                path.unlink(missing_ok=True)
    return notes


def _living(path: Path) -> dict[str, Any] | None:
    """What a note says, or None when its process is gone (it is then removed) or has not written it yet."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            said = json.loads(os.read(handle, 1 << 20) or b"null")
            return said if isinstance(said, dict) else None
        with suppress(OSError):
            path.unlink()
        return None
    except (OSError, ValueError):
        return None
    finally:
        os.close(handle)


def _who(note: Mapping[str, Any]) -> str:
    return f"process {note['pid']} ({note['command']} in {note['folder']}), since {note['since']}"


class _Waiting:
    """Says once who is waited for, again every minute, and counts the time. Nothing is said when nobody is."""

    def __init__(self, folder: Path, note: _Note, started: float) -> None:
        self.folder, self.note, self.started = folder, note, started
        self.ended = threading.Event()
        self.speaker: threading.Thread | None = None

    def __enter__(self) -> "_Waiting":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def begin(self) -> None:
        """Something must be waited for."""
        if self.speaker is None:
            self._say()
            self.speaker = threading.Thread(target=self._repeat, daemon=True, name="lease-waiting")
            self.speaker.start()

    def end(self) -> float:
        """Stop; seconds waited, 0 when nothing had to be waited for."""
        self.ended.set()
        return time.monotonic() - self.started if self.speaker is not None else 0.0

    def _repeat(self) -> None:
        while not self.ended.wait(SAY_EVERY_S):
            self._say()

    def _say(self) -> None:
        mine = self.note.said
        others = [
            note for note in _notes(self.folder)
            if set(note["locks"]) & set(mine["locks"]) and (note["exclusive"] or mine["exclusive"])
            and note["name"] != mine["name"]
        ]  # fmt: skip
        holders = [_who(note) for note in others if note["holds"]]
        before = [_who(note) for note in others if not note["holds"]]
        by = "held by " + "; ".join(holders) if holders else "wanted by " + "; ".join(before) if before else "taken"
        kind = "for itself" if mine["exclusive"] else "to compute on"
        seconds = time.monotonic() - self.started
        print(f"oneaxis: waiting for {mine['device']} {kind} ({seconds:.0f} s): {by}", file=sys.stderr, flush=True)


# --- below a holder ------------------------------------------------------------------------------------------


def _note_above(folder: Path) -> dict[str, Any] | None:
    """The note of the lease that this process runs under: its own, or that of a process above it; else None."""
    name = os.environ.get(TOKEN_VARIABLE, "")
    if not re.fullmatch(r"note-[0-9a-f-]+", name):
        return None
    note = _living(folder / name)
    return note if note is not None and note["holds"] else None


def _under(above: Mapping[str, Any], visible: Sequence[Gpu], gpus: int, cores: Sequence[int], exclusive: bool) -> Lease:
    """The lease of the holder above. To wait for more while it holds what it has could be to wait for ever."""
    has = set(above["locks"])
    shared = [gpu for gpu in visible if _gpu_lock(gpu) in has][:gpus]
    enough = len(shared) == gpus if visible else {_core_lock(core) for core in cores} <= has
    if not enough or (exclusive and not above["exclusive"]):
        wants = f"{gpus} GPUs" if visible else f"cpu {ranges(cores)}"
        raise RunError(
            f"{wants} is wanted {'exclusively' if exclusive else 'to compute on'}, below {_who(above)}, which holds "
            f"{above['device']} {'exclusively' if above['exclusive'] else 'shared'}: start it outside of that"
        )
    if not visible:
        return Lease(str(above["device"]), bool(above["exclusive"]), 0.0)
    tokens = [gpu.token for gpu in shared]
    return Lease(f"gpu {', '.join(tokens)}", True, 0.0, {"CUDA_VISIBLE_DEVICES": ",".join(tokens)})
