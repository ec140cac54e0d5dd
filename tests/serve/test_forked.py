"""Who ends what, when a preloaded process forks engines. The engine is played by a program that imports nothing heavy
and sleeps (`PROGRAM`); owner, preloaded process, guard and their signals are the real ones."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from oneaxis.serve.forked import VARIABLE, ForkedGuard, fork_engine, preloaded_engines
from tests.test_guard import gone, wait_for

PROGRAM = """
# Plays launch.py: an engine with a core in the same session, which ignores SIGTERM, and says what it was given.
import os, signal, sys, tempfile, threading, time
LOADED = os.environ.get("AT_IMPORT")
def preload():
    assert threading.active_count() == 1
def main():
    print("from", os.getpid(), LOADED, os.environ["OWN"], sys.argv[1:], tempfile.gettempdir(), flush=True)
    if "fail" in sys.argv:
        sys.exit(7)
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("core", os.getpid(), flush=True)
    time.sleep(300)
"""

OWNER = """
# An owner with a stage of its own that starts an engine.
import os, subprocess, sys, time
from oneaxis.serve.forked import preloaded_engines
with preloaded_engines():
    stage = subprocess.Popen([sys.executable, *sys.argv[1:]])
    try:
        while True:
            time.sleep(1)
    except KeyboardInterrupt:
        stage.wait()
        raise
"""

STAGE = """
import os, sys, time
from pathlib import Path
from tests.serve.test_forked import fork
try:
    process = fork(Path(sys.argv[1]))
    print(os.environ["ONEAXIS_PRELOADED"], os.getpid(), process.pid, flush=True)
    time.sleep(300)
except KeyboardInterrupt:
    process.terminate()
    process.wait(20)
"""


def fork(folder: Path, *arguments: str, **environment: str) -> ForkedGuard:
    """A forked engine, its log in `folder`."""
    program, own = folder / "program.py", folder / "own"
    program.write_text(PROGRAM, encoding="utf-8")
    own.mkdir(exist_ok=True)
    given = {"PATH": os.environ["PATH"], "OWN": "x", "TMPDIR": str(own), **environment}
    with (folder / "log").open("ab") as log:
        process = fork_engine([str(program), *arguments], given, log=log.fileno(), folder=own, grace_s=0.3)
    assert process is not None
    return process


def words(folder: Path, first: str) -> list[list[str]]:
    """The lines of the log that begin with a word."""
    lines = [line.split() for line in (folder / "log").read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if line[:1] == [first]]


def started(folder: Path, count: int = 1) -> list[int]:
    """Process ids of engines and cores, once `count` of each are there."""
    wait_for(lambda: len(words(folder, "core")) == count, "the engine has not started")
    return [int(line[1]) for line in [*words(folder, "from"), *words(folder, "core")]]


@pytest.fixture
def owner(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """This process as an owner of its own, not of the whole session's; the folder of its sockets."""
    monkeypatch.delenv(VARIABLE, raising=False)
    # A folder is named by its owner, who is that of the session too. A socket's path must be short.
    with tempfile.TemporaryDirectory(prefix="oa-") as apart:
        monkeypatch.setattr(tempfile, "tempdir", apart)
        with preloaded_engines():
            yield Path(os.environ[VARIABLE])
        monkeypatch.setattr(tempfile, "tempdir", None)


def preloaded(folder: Path) -> list[psutil.Process]:
    """The preloaded processes whose sockets lie in `folder`."""
    found = [process for process in psutil.process_iter(["cmdline"]) if process.info["cmdline"]]
    return [
        process
        for process in found
        if any(Path(word).name == "preloaded.py" for word in process.info["cmdline"])
        and any(Path(word).parent == folder for word in process.info["cmdline"])
    ]


def test_an_engine_gets_what_it_would_get_in_a_process_of_its_own(owner: Path, tmp_path: Path) -> None:
    assert not owner.exists()
    process = fork(tmp_path, "--a", "b", AT_IMPORT="1")
    engine, core = started(tmp_path)
    assert words(tmp_path, "from")[0][2:] == ["1", "x", "['--a',", "'b']", str(tmp_path / "own")]
    # A session of its own, apart from guard and preloaded process, which are apart from this one.
    (holder,) = preloaded(owner)
    sessions = [os.getsid(pid) for pid in (engine, process.pid, holder.pid, os.getpid())]
    assert len(set(sessions)) == 4
    assert os.getsid(core) == engine
    assert owner.stat().st_mode & 0o777 == 0o700
    process.terminate()
    assert process.wait(10) == 128 + signal.SIGTERM
    assert gone(engine)
    assert gone(core)
    assert not (tmp_path / "own").exists()


def test_one_preloaded_process_serves_all_that_import_alike(owner: Path, tmp_path: Path) -> None:
    """What a stage or a test sets for itself makes no other; what imports may read does; the newest three are kept."""
    for own in ("x", "y"):
        assert fork(tmp_path, "fail", OWN="x", DVC_STAGE=own, PYTEST_CURRENT_TEST=own).wait(10) == 7
    first = preloaded(owner)
    assert len(first) == 1
    for number in range(3):
        assert fork(tmp_path, "fail", OMP_NUM_THREADS=str(number)).wait(10) == 7
    wait_for(lambda: gone(first[0].pid), "the oldest is left")
    assert len([process for process in preloaded(owner) if not gone(process.pid)]) == 3


def test_a_killed_guard_takes_its_engine_along(owner: Path, tmp_path: Path) -> None:
    process = fork(tmp_path)
    pids = started(tmp_path)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait(10) == -signal.SIGKILL
    # The kernel ends the engine; its core is in its session, which `running_engine` sweeps.
    wait_for(lambda: gone(pids[0]), "the engine is left")
    os.kill(pids[1], signal.SIGKILL)


def test_a_killed_preloaded_process_leaves_its_engine_running_and_is_replaced(owner: Path, tmp_path: Path) -> None:
    process = fork(tmp_path)
    before = started(tmp_path)
    (holder,) = preloaded(owner)
    holder.kill()
    wait_for(lambda: gone(holder.pid), "the preloaded process is left")
    other = tmp_path / "other"
    other.mkdir()
    second = fork(other)
    assert process.poll() is None
    assert not any(gone(pid) for pid in before)
    assert len([found for found in preloaded(owner) if not gone(found.pid)]) == 1
    for each in (process, second):
        each.terminate()
        assert each.wait(10) == 128 + signal.SIGTERM
    assert all(gone(pid) for pid in before)


def test_the_end_of_the_owner_ends_what_is_idle(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with preloaded_engines():
        folder = Path(os.environ[VARIABLE])
        with preloaded_engines():  # an owner below an owner owns nothing
            assert os.environ[VARIABLE] == str(folder)
            assert fork(tmp_path, "fail").wait(10) == 7
        holders = preloaded(folder)
        assert not gone(holders[0].pid)
    assert all(gone(holder.pid) for holder in holders)
    assert not folder.exists()
    assert VARIABLE not in os.environ


def test_without_a_living_owner_there_is_no_fork(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with subprocess.Popen(["true"]) as ended:
        pass
    for name in ("", str(tmp_path), f"/tmp/oneaxis-engines-{ended.pid}-1", f"/tmp/oneaxis-engines-{os.getpid()}-1"):
        monkeypatch.setenv(VARIABLE, name)
        assert fork_engine(["x"], {}, log=1, folder=tmp_path, grace_s=1) is None


@pytest.mark.parametrize("how", ["kill -9 of the owner", "kill -9 of the stage", "Ctrl-C twice"])
def test_nothing_is_left(
    how: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Processes: owner, stage, preloaded process, guard, engine, its core. Files: the sockets' folder, the engine's."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("PYTHONPATH", f"{root / 'src'}{os.pathsep}{root}")
    for name, text in (("owner.py", OWNER), ("stage.py", STAGE)):
        (tmp_path / name).write_text(text, encoding="utf-8")
    command = [sys.executable, str(tmp_path / "owner.py"), str(tmp_path / "stage.py"), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        said = process.stdout.readline().split()
        folder, stage, guard = Path(said[0]), int(said[1]), int(said[2])
        pids = [stage, guard, *(holder.pid for holder in preloaded(folder)), *started(tmp_path)]
        assert len(pids) == 5
        assert not any(gone(pid) for pid in pids)
        if how == "kill -9 of the stage":
            os.kill(stage, signal.SIGKILL)
            kept = {pids[2]}
            wait_for(lambda: all(gone(pid) for pid in pids if pid not in kept), "processes are left")
            assert not gone(pids[2])  # for the next stage
            process.kill()
        elif how == "Ctrl-C twice":
            for _ in range(2):
                os.killpg(process.pid, signal.SIGINT)
                time.sleep(0.05)
        else:
            process.kill()
            os.kill(stage, signal.SIGTERM)  # as `end_with_parent` does in a stage
    wait_for(lambda: all(gone(pid) for pid in pids), "processes are left")
    wait_for(lambda: not folder.exists(), "the sockets' folder is left")
    assert not (tmp_path / "own").exists()
