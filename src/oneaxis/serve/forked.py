"""Engines forked from a process that has the imports behind it (`preloaded.py`): whose it is, and how it is asked.

    with preloaded_engines():      # `oneaxis run`, a multirun, a test session: the owner
        ...                        # further starts, here and in whatever this process starts, are forks

The first start that finds no preloaded process starts one and waits for its imports; it takes about as long as a start
in a process of its own. One is kept per environment that imports may look at (`OMP_NUM_THREADS` is read when libgomp
is loaded), the newest three. All of it ends with its owner, also when the owner is killed.

An engine that is forked has the arguments, environment, working directory, CPUs, session, log and guard that it would
have in a process of its own, and gives the same answers; only its imports are older. So a timing of the *start* is
never taken from one (the stage `serve` starts in a process of its own), all others may be.
"""

import array
import fcntl
import hashlib
import json
import os
import re
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from oneaxis import guard
from oneaxis.serve import preloaded
from oneaxis.serve.sockets import LONGEST, socket_parent

VARIABLE = "ONEAXIS_PRELOADED"
"""Names the folder of the owner's sockets to all that the owner starts."""

MOST = 3
"""Preloaded processes that an owner keeps; each takes some 0.6 GiB."""

PATIENCE_S = 120.0
"""For the imports of a preloaded process; they take 10 s on an idle machine."""

_NAME = re.compile(r"oneaxis-engines-(\d+)-(\d+)")
_BELOW = len("/0123456789ab.sock")
"""Bytes of a socket's name below the owner's folder."""

_PRIVATE = ("TMPDIR", "VLLM_RPC_BASE_PATH")
"""In an engine's environment, and of that engine alone."""
_OF_THE_CALLER = re.compile(r"(ONEAXIS|DVC|MLFLOW|PYTEST|GIT|HYDRA)_.*|_|PWD|OLDPWD|SHLVL|COLUMNS|LINES|TERM")
"""Variables that imports do not look at, and that differ between the stages of a run."""


class ForkedGuard:
    """The guard of a forked engine, with the means that `subprocess.Popen` offers for one of its own."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._connection = connection
        self._pidfd = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """The exit code, -9 for a guard that was killed, None while it runs."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit code.

        Raises:
            subprocess.TimeoutExpired: when it still runs after `timeout` seconds.
        """
        if self.returncode is None:
            # It writes its code and closes the connection; killed, it only does the latter.
            if not select.select([self._connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"guard {self.pid}", timeout or 0.0)
            try:
                said = self._connection.recv(256)
            except OSError:
                said = b""
            self.returncode = int(json.loads(said)["code"]) if said else -signal.SIGKILL
            # Its own end follows its word.
            select.select([self._pidfd], [], [], 10)
            os.close(self._pidfd)
            self._connection.close()
        return self.returncode

    def terminate(self) -> None:
        """Ask the guard to stop its engine."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the guard, and with it its engine."""
        self._signal(signal.SIGKILL)

    def release(self) -> None:
        """Close the connection: a guard that still runs kills its tree at once."""
        self._connection.close()

    def _signal(self, number: int) -> None:
        if self.returncode is None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)


@contextmanager
def preloaded_engines() -> Iterator[None]:
    """Let engine starts in the block, by this process or any that it starts, be forks of a preloaded process.

    Within the block of another owner that still lives this does nothing.
    """
    if owners_folder() is not None:
        yield
        return
    ticks = _started(os.getpid())
    name = f"oneaxis-engines-{os.getpid()}-{ticks}"
    folder = socket_parent(1 + len(name) + _BELOW) / name
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before
        for path in sorted(folder.glob("*.sock")):
            _stop(path)
        shutil.rmtree(folder, ignore_errors=True)


def owners_folder() -> Path | None:
    """Where the sockets of a living owner are, or are to be; None without one."""
    folder = Path(os.environ.get(VARIABLE, ""))
    named = _NAME.fullmatch(folder.name)
    return folder if named and _started(int(named.group(1))) == int(named.group(2)) else None


def _started(pid: int) -> int | None:
    """When a process began, in clock ticks since boot; tells it from another that got its number."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[19])
    except OSError:
        return None


def fork_engine(
    arguments: Sequence[str], environment: Mapping[str, str], *, log: int, folder: Path, grace_s: float
) -> ForkedGuard | None:
    """Have a preloaded process fork an engine under a guard, and start such a process where there is none.

    Args:
        arguments: the program (`launch.py`: it has `preload` and `main`) and its arguments. log: an open file.
        folder: the engine's own (`guard.py`).

    Returns:
        The guard; None when there is no owner, or no preloaded process came up, which is then said.
    """
    where = owners_folder()
    if where is None:
        return None
    seen_by_imports = {
        name: value
        for name, value in environment.items()
        if name not in _PRIVATE and not _OF_THE_CALLER.fullmatch(name)
    }
    program = Path(arguments[0])
    decided = [sys.executable, str(program), program.read_text(encoding="utf-8"), sorted(seen_by_imports.items())]
    path = where / f"{hashlib.sha256(json.dumps(decided).encode()).hexdigest()[:12]}.sock"
    if len(os.fsencode(path)) > LONGEST:
        print(f"oneaxis: {path}: too long for a socket; the engine starts in a process of its own", file=sys.stderr)
        return None
    message = {
        "arguments": list(arguments),
        "environment": dict(environment),
        "cpus": sorted(os.sched_getaffinity(0)),
        "cwd": os.getcwd(),
        "grace_s": grace_s,
        "folder": str(folder),
    }
    try:
        where.mkdir(mode=0o700, exist_ok=True)
        if where.stat().st_uid != os.getuid() or where.is_symlink():
            raise PermissionError(f"{where}: belongs to another user")
        connection = _connect(path, program, seen_by_imports)
    except OSError as error:
        print(f"oneaxis: no preloaded process ({error}); the engine starts in a process of its own", file=sys.stderr)
        return None
    try:
        _send(connection, message, log)
        connection.settimeout(PATIENCE_S)
        said = connection.recv(256)
        pid = int(json.loads(said)["pid"]) if said else 0
        if not pid:
            raise ConnectionError(f"it ended: {_last_words(path)}")
        forked = ForkedGuard(connection, pid)
    except (OSError, ValueError) as error:
        connection.close()
        print(f"oneaxis: the preloaded process forks no engine ({error}); the engine starts in a process of its own",
              file=sys.stderr)  # fmt: skip
        return None
    connection.settimeout(None)
    return forked


def _connect(path: Path, program: Path, environment: Mapping[str, str]) -> socket.socket:
    """Connect to the preloaded process at `path`, after starting it when it is not there."""
    with path.with_suffix(".lock").open("w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with suppress(OSError):
            connection.connect(str(path))
            return connection
        # Nobody listens: never started, or killed.
        path.unlink(missing_ok=True)
        there = sorted(path.parent.glob("*.sock"), key=lambda other: other.stat().st_mtime)
        for other in there[: max(0, len(there) - MOST + 1)]:
            _stop(other)
        owner = str(_NAME.fullmatch(path.parent.name)[1])  # type: ignore[index]
        command = [sys.executable, "-P", preloaded.__file__, str(path), owner, guard.__file__, str(program)]
        with path.with_suffix(".log").open("wb") as log:
            # By way of a shell that ends at once: no stage is its parent, and no stage's end is its own.
            subprocess.run(["/bin/sh", "-c", '"$@" &', "sh", *command], env=dict(environment), stdin=subprocess.DEVNULL,
                           stdout=log, stderr=log, start_new_session=True, check=True)  # fmt: skip
        deadline = time.monotonic() + PATIENCE_S
        while True:
            with suppress(FileNotFoundError, ConnectionRefusedError):
                connection.connect(str(path))
                return connection
            if time.monotonic() > deadline:
                raise TimeoutError(f"it did not come up within {PATIENCE_S:g} s: {_last_words(path)}")
            time.sleep(0.02)


def _send(connection: socket.socket, message: Mapping[str, Any], *fds: int) -> None:
    body = json.dumps(message).encode()
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    connection.sendmsg([preloaded.HEADER.pack(len(body))], rights)
    connection.sendall(body)


def _stop(path: Path) -> None:
    """End a preloaded process; the engines that it has forked go on."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection, suppress(OSError):
        connection.connect(str(path))
        pid = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
        process = os.pidfd_open(pid)
        try:
            signal.pidfd_send_signal(process, signal.SIGTERM)
            if not select.select([process], [], [], 5)[0]:
                signal.pidfd_send_signal(process, signal.SIGKILL)
        finally:
            os.close(process)
    path.unlink(missing_ok=True)


def _last_words(path: Path) -> str:
    """The last line that a preloaded process wrote."""
    try:
        lines = path.with_suffix(".log").read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        return "no word of it"
    return next((line.strip()[:200] for line in reversed(lines) if line.strip()), "it said nothing")
