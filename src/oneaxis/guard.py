"""Keeper of an engine, or of a training: starts a command, passes its exit status on, leaves nothing of it behind.

Run as a script of its own (`python guard.py PARENT_PID PIPE_FD GRACE_S FOLDER COMMAND...`); it imports nothing but the
standard library, so that it is up in milliseconds. An engine is a tree of processes (API server, engine core, workers,
resource trackers), and none may outlive the stage that wanted it. Hence:

- the guard is a *subreaper*: orphans of the tree become its children, wherever they hide;
- it watches its parent through the end of a pipe and by parent id. (PR_SET_PDEATHSIG on the guard itself would fire
  when the *thread* that started it ends.) Parent gone: the tree is killed at once;
- SIGTERM: the engine gets SIGTERM, `GRACE_S` seconds, then the tree is killed;
- should the guard itself be killed, the kernel kills the engine (PR_SET_PDEATHSIG, the guard has one thread).

FOLDER holds the engine's sockets and temporary files, and is removed at the end.
"""

import ctypes
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


def descendants(root: int) -> list[int]:
    """Every living process below `root`, from /proc; zombies are left out."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            # pid (name with any characters) state ppid ...
            state, parent = Path("/proc", entry, "stat").read_bytes().rpartition(b")")[2].split()[:2]
        except OSError:
            continue
        if state != b"Z":
            children.setdefault(int(parent), []).append(int(entry))
    found: list[int] = []
    queue = [root]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


def _reap() -> dict[int, int]:
    """Exit codes of children that ended (128 + signal when killed), by pid."""
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended[pid] = 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def _kill_tree() -> None:
    """SIGKILL everything below this process, until nothing is left (or ten seconds have passed)."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        alive = descendants(os.getpid())
        for pid in alive:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        _reap()
        if not alive:
            return
        time.sleep(0.02)


def _start(command: Sequence[str]) -> int:
    """Fork and execute `command` in a session of its own, bound to the life of this process."""
    guard = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guard:
            os._exit(1)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        os.execvp(command[0], list(command))
    except OSError as error:
        os.write(2, f"OSError: {command[0]}: {error}\n".encode())
    finally:
        os._exit(127)


def keep(engine: int, *, ends: Sequence[int], grace_s: float, folder: str, parent: int | None = None) -> int:
    """Keep a started engine until it ends, one of `ends` is readable, or SIGTERM; its exit code (128 + signal).

    `ends` are the end of a pipe, of a connection, or a pidfd, readable when their other side is gone. `parent` is
    watched too, if given.

    Nothing below this process is left, and `folder` is removed.
    """
    wake, wake_write = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    asked_to_stop: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: asked_to_stop.append(number))
    signal.signal(signal.SIGCHLD, lambda _number, _frame: None)

    code, deadline = 128 + signal.SIGKILL, 0.0
    while True:
        ready, _, _ = select.select([*ends, wake], [], [], 0.2)
        if wake in ready:
            os.read(wake, 4096)
        ended = _reap()
        if engine in ended:
            code = ended[engine]
            break
        if set(ready) & set(ends) or (parent is not None and os.getppid() != parent):
            break
        if asked_to_stop and not deadline:
            deadline = time.monotonic() + grace_s
            os.kill(engine, signal.SIGTERM)
        if deadline and time.monotonic() > deadline:
            break
    _kill_tree()
    shutil.rmtree(folder, ignore_errors=True)
    return code


def main(arguments: Sequence[str]) -> int:
    """Start the engine and keep it; returns its exit code (128 + signal)."""
    parent, pipe, grace_s, folder = int(arguments[0]), int(arguments[1]), float(arguments[2]), arguments[3]
    os.set_inheritable(pipe, False)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    engine = _start(arguments[4:])
    return keep(engine, ends=[pipe], grace_s=grace_s, folder=folder, parent=parent)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
