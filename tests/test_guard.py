"""Nothing of an engine outlives the stage that started it. The engine is played by a tree of sleeping processes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from oneaxis import guard

GUARD = [sys.executable, "-P", "-S", guard.__file__]

TREE = """
# A parent; an orphan (its own parent has ended); a process in another session, and its child. All ignore SIGTERM.
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
def stay():
    with open(sys.argv[1], "a") as file:
        file.write(f"{os.getpid()}\\n")
    time.sleep(300)
if os.fork() == 0:
    if os.fork() == 0:
        stay()
    if os.fork() == 0:
        os.setsid()
        os.fork()
        stay()
    os._exit(0)
stay()
"""

PARENT = """
# What running_engine does: a pipe whose write end only this process holds, and a guard that reads it.
import os, subprocess, sys, time
read, write = os.pipe()
guard = sys.argv[2:].index("--")
keeper, command = sys.argv[2:2 + guard], sys.argv[3 + guard:]
process = subprocess.Popen([*keeper, str(os.getpid()), str(read), "5", sys.argv[1], *command], pass_fds=[read],
                           start_new_session=True)
print(process.pid, flush=True)
time.sleep(300)
"""


def gone(pid: int) -> bool:
    """Whether a process is over: not there, or a zombie that nobody has waited for."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 15
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[tuple[list[str], Callable[[], list[int]]]]:
    """The command of a four-process tree, and the ids of its processes once all run."""
    script, ids = tmp_path / "tree.py", tmp_path / "ids"
    script.write_text(TREE, encoding="utf-8")

    def pids() -> list[int]:
        wait_for(lambda: ids.is_file() and len(ids.read_text().split()) == 4, "the tree has not started")
        return [int(pid) for pid in ids.read_text().split()]

    yield [sys.executable, "-S", str(script), str(ids)], pids
    for pid in ids.read_text().split() if ids.is_file() else []:
        if not gone(int(pid)):
            os.kill(int(pid), signal.SIGKILL)


def start_guard(folder: Path, command: list[str], grace_s: float = 5) -> tuple[subprocess.Popen[bytes], int]:
    """A guard under this process, and the pipe's write end."""
    read, write = os.pipe()
    arguments = [*GUARD, str(os.getpid()), str(read), str(grace_s), str(folder), *command]
    process = subprocess.Popen(arguments, pass_fds=[read], start_new_session=True)
    os.close(read)
    return process, write


def test_the_whole_tree_dies_when_the_parent_is_killed(
    tmp_path: Path, tree: tuple[list[str], Callable[[], list[int]]]
) -> None:
    """kill -9 of the stage: no handler runs in it. The tree has an orphan, a second session, and ignores SIGTERM."""
    command, pids = tree
    folder = tmp_path / "private"
    folder.mkdir()
    script = tmp_path / "parent.py"
    script.write_text(PARENT, encoding="utf-8")
    parent = subprocess.Popen(
        [sys.executable, str(script), str(folder), *GUARD, "--", *command], stdout=subprocess.PIPE
    )
    try:
        assert parent.stdout is not None
        keeper = int(parent.stdout.readline())
        running = pids()
        assert not any(gone(pid) for pid in running)
    finally:
        parent.kill()
        parent.communicate()
    wait_for(lambda: all(gone(pid) for pid in [*running, keeper]), "processes are left")
    assert not folder.exists()


def test_the_engine_dies_when_the_guard_is_killed(tmp_path: Path) -> None:
    process, write = start_guard(tmp_path, [sys.executable, "-S", "-c", "import time; time.sleep(300)"])
    wait_for(lambda: len(psutil.Process(process.pid).children()) == 1, "the engine has not started")
    engine = psutil.Process(process.pid).children()[0].pid
    process.kill()
    process.wait()
    os.close(write)
    wait_for(lambda: gone(engine), "the engine is left")


def test_sigterm_gives_grace_and_then_kills_what_ignores_it(
    tmp_path: Path, tree: tuple[list[str], Callable[[], list[int]]]
) -> None:
    command, pids = tree
    process, write = start_guard(tmp_path / "private", command, grace_s=0.3)
    running = pids()
    process.terminate()
    process.wait(10)
    os.close(write)
    assert all(gone(pid) for pid in running)


def test_sigterm_lets_the_engine_end_by_itself(tmp_path: Path) -> None:
    code = (
        "import signal, sys, time; signal.signal(15, lambda *_: sys.exit(3)); print('up', flush=True); time.sleep(99)"
    )
    read, write = os.pipe()
    arguments = [*GUARD, str(os.getpid()), str(read), "30", str(tmp_path / "private"), sys.executable, "-S", "-c", code]
    with subprocess.Popen(arguments, pass_fds=[read], start_new_session=True, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        process.terminate()
        assert process.wait(10) == 3
    os.close(read)
    os.close(write)


@pytest.mark.parametrize(
    ("code", "expected"),
    [("import sys; sys.exit(7)", 7), ("import os; os.kill(os.getpid(), 11)", 128 + 11)],
)
def test_the_exit_status_is_passed_on(tmp_path: Path, code: str, expected: int) -> None:
    process, write = start_guard(tmp_path / "private", [sys.executable, "-S", "-c", code])
    assert process.wait(10) == expected
    os.close(write)


def test_a_command_that_does_not_exist_is_127(tmp_path: Path) -> None:
    process, write = start_guard(tmp_path / "private", ["/nonexistent/engine"])
    assert process.wait(10) == 127
    os.close(write)


def test_descendants_are_found_across_sessions(tmp_path: Path) -> None:
    code = "import os, time; child = os.fork(); child or os.setsid(); time.sleep(300)"
    with subprocess.Popen([sys.executable, "-S", "-c", code], start_new_session=True) as process:
        wait_for(lambda: len(guard.descendants(process.pid)) == 1, "the child is not found")
        assert {process.pid, *guard.descendants(process.pid)} <= set(guard.descendants(os.getpid()))
        for pid in guard.descendants(process.pid):
            os.kill(pid, signal.SIGKILL)
        process.kill()
