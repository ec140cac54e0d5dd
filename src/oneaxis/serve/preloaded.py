"""A process that has imported torch, transformers and vLLM once, and forks an engine's server for whoever asks.

Run as a script of its own (`python preloaded.py SOCKET OWNER_PID GUARD LAUNCH`, the last two being the paths of
`guard.py` and `launch.py`), so that nothing of oneaxis is imported. Most of the time that a start of a small model
takes on a CPU goes into imports; what is forked here has them behind it. Nothing else happens before the fork: no
engine, no model, no OpenMP region (libgomp does not survive a fork after one).

A client (`oneaxis.serve.forked`) sends one message on the socket and its log's file with it; it is answered with the
process id of a guard, which is forked, forks the engine, and keeps it as `guard.py` says, the connection standing for
the pipe: the client gone, the engine goes. At the end the guard writes the engine's exit code.

This process ends with its owner, whatever ends that, and then takes the socket's folder with it; SIGTERM ends it too.
Engines that it has forked go on: they end with their clients.
"""

import array
import ctypes
import gc
import importlib.util
import json
import os
import select
import shutil
import signal
import socket
import struct
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
HEADER = struct.Struct("!I")
"""Length of the JSON message that follows, bytes."""


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """A client's message, and the files that came with it.

    Raises:
        OSError, ValueError: when there is no whole message.
    """
    fds = array.array("i")
    data, ancillary, _, _ = connection.recvmsg(HEADER.size, socket.CMSG_SPACE(fds.itemsize))
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(content[: fds.itemsize])
    if len(data) < HEADER.size:
        raise ValueError("no whole message")
    left, body = HEADER.unpack(data)[0], b""
    while len(body) < left:
        part = connection.recv(left - len(body))
        if not part:
            raise ValueError("no whole message")
        body += part
    message = json.loads(body)
    assert isinstance(message, dict)
    return message, list(fds)


def _peer(connection: socket.socket) -> tuple[int, int, int]:
    """Process, user and group at the other side."""
    pid, uid, gid = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid, gid


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


def _module(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _title(words: str) -> None:
    """Show in `ps` what a forked process is; it would carry this program's name."""
    try:
        from setproctitle import setproctitle
    except ImportError:
        return
    setproctitle(words)


def _become_guard(connection: socket.socket, message: dict[str, Any], log: int, guard: ModuleType) -> None:
    """In the first forked process: fork the engine, keep it, exit. Returns in the engine's own process only."""
    os.setsid()
    _title(f"python {guard.__file__} {' '.join(message['arguments'])}")
    client = os.pidfd_open(_peer(connection)[0])
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.environ.clear()
    os.environ.update(message["environment"])
    # It was settled when this program's own environment was another one.
    tempfile.tempdir = None
    os.sched_setaffinity(0, message["cpus"])
    os.chdir(message["cwd"])
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    guard_pid = os.getpid()
    engine = os.fork()
    if engine == 0:
        connection.close()
        os.close(client)
        os.setsid()
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard_pid:
            os._exit(1)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        sys.argv = message["arguments"]
        _title(" ".join(["python", *message["arguments"]]))
        return
    code = 1
    try:
        connection.sendall(json.dumps({"pid": guard_pid}).encode() + b"\n")
        # The connection closes with the client, unless something forked by the client still holds it.
        ends = [connection.fileno(), client]
        code = guard.keep(engine, ends=ends, grace_s=message["grace_s"], folder=message["folder"])
        connection.sendall(json.dumps({"code": code}).encode() + b"\n")
    except OSError:
        pass  # The client is gone, and hears of no exit code.
    finally:
        os._exit(code)


def _reap() -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            continue


def _fork_for_clients(path: Path, listener: socket.socket, owner: int, guard: ModuleType) -> None:
    """Fork a guard and an engine for each client; returns in an engine's own process only."""
    wake, wake_write = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
    watched: list[socket.socket | int] = [listener, owner, wake]
    while True:
        ready, _, _ = select.select(watched, [], [])
        if wake in ready:
            os.read(wake, 4096)
            _reap()
        if owner in ready:
            shutil.rmtree(path.parent, ignore_errors=True)
            os._exit(0)
        if listener not in ready:
            continue
        connection, _ = listener.accept()
        with connection:
            if _peer(connection)[1] != os.getuid():
                continue
            fds: list[int] = []
            try:
                connection.settimeout(10)
                message, fds = _receive(connection)
                connection.settimeout(None)
                if fds and os.fork() == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    for number in (listener.detach(), owner, wake, wake_write):
                        os.close(number)
                    _become_guard(connection, message, fds.pop(), guard)
                    return
            except (OSError, ValueError):
                # No memory to fork, or a client that went away: it sees the connection close.
                continue
            finally:
                for number in fds:
                    with suppress(OSError):
                        os.close(number)


def main(arguments: Sequence[str]) -> None:
    """Listen, import, fork for clients; in a forked engine: run vLLM's server."""
    path, owner = Path(arguments[0]), os.pidfd_open(int(arguments[1]))
    guard, launch = _module(arguments[2]), _module(arguments[3])
    # Ctrl-C of a terminal: the owner decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen(16)
    launch.preload()
    # What is there now is shared with the forks for good: no collector of theirs has to look at it.
    gc.collect()
    gc.freeze()
    _fork_for_clients(path, listener, owner, guard)
    launch.main()


if __name__ == "__main__":
    main(sys.argv[1:])
