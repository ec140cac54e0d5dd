"""Launchers on tasks of a fraction of a second, in the processes that Hydra's launchers really start."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import psutil
import pytest

from oneaxis.config import Config, compose
from oneaxis.errors import UserError
from oneaxis.multirun.launch import check_launcher, launch, launcher_of
from oneaxis.multirun.record import Status
from tests.multirun import launched

JOBS = [["seed=1"], ["seed=2"], ["seed=3"]]
JOBLIB = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
LAUNCH = """
import sys
from functools import partial
from pathlib import Path
from oneaxis.multirun.launch import launch
from tests.multirun import launched

if __name__ == "__main__":
    root, folder, task = sys.argv[1:4]
    for status in launch(Path(root) / "conf", sys.argv[4:], [["seed=1"], ["seed=2"], ["seed=3"]],
                         partial(getattr(launched, task), folder)):
        print("RESULT", status.state, status.slot, status.message)
"""


@pytest.fixture
def started(root: Path, tmp_path: Path, project: Path) -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Start a launch of a task of `launched.py` from a project of its own."""
    processes = []

    def start(task: str, *launcher: str) -> "subprocess.Popen[str]":
        path = os.pathsep.join([str(root), str(root / "src")])
        process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, str(project), str(tmp_path), task, *launcher], cwd=project, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("launcher", [["hydra/launcher=basic"], JOBLIB, ["hydra/launcher=submitit_local"]])
def test_jobs_in_order_and_a_failure_kept_to_its_job(
    launcher: Sequence[str], started: Callable[..., "subprocess.Popen[str]"], project: Path, tmp_path: Path
) -> None:
    """Job 1 raises; the others see the launcher's threads and folder, and nothing of Hydra's is left."""
    before = sorted(path.name for path in project.iterdir())
    process = started("work", *launcher)
    words = process.communicate(timeout=120)[0]
    results = [line for line in words.splitlines() if line.startswith("RESULT")]
    assert results == ["RESULT done 0 ", "RESULT failed  the engine died", "RESULT done 2 "], words
    for index in ("0", "2"):
        assert (tmp_path / index).read_text(encoding="utf-8").split()[1:] == ["1", str(project)]
    assert sorted(path.name for path in project.iterdir() if path.name != ".oneaxis") == before
    assert list((project / ".oneaxis" / "hydra").iterdir()) == []
    if launcher == JOBLIB:
        # Side by side on one terminal: whole lines, each with its job, from processes below it too.
        lines = [line for line in words.splitlines() if line.startswith("[")]
        said = ("job {0} at work", "second line", "child of {0}")
        assert sorted(lines) == sorted(f"[{n + 1}/3] {text.format(n)}" for n in range(3) for text in said)


def test_a_killed_worker_costs_its_job_only(started: Callable[..., "subprocess.Popen[str]"]) -> None:
    """joblib itself gives all jobs up when one worker is killed; the others start again, and at last one by one."""
    words = started("die", *JOBLIB).communicate(timeout=120)[0]
    results = [line for line in words.splitlines() if line.startswith("RESULT")]
    assert [results[0], results[2]] == ["RESULT done 0 ", "RESULT done 2 "], words
    assert results[1].startswith("RESULT failed  its process died")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("launcher", [JOBLIB, ["hydra/launcher=submitit_local"]], ids=["joblib", "submitit_local"])
def test_jobs_end_with_their_launcher(
    launcher: Sequence[str], number: signal.Signals, started: Callable[..., "subprocess.Popen[str]"], tmp_path: Path
) -> None:
    """Ctrl-C, SIGTERM, kill -9: no worker and no process below one lives on."""
    process = started("long", *launcher)
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("*.pids"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    everything = psutil.Process(process.pid).children(recursive=True)
    assert len([each for each in everything if "time.sleep(600)" in " ".join(each.cmdline())]) >= 2
    process.send_signal(number)
    _, alive = psutil.wait_procs(everything, timeout=60)
    assert alive == []
    assert process.wait(timeout=60) in (-signal.SIGINT, -number)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["hydra/launcher=fast"], "hydra/launcher=fast: no such launcher; allowed: basic, joblib, submitit_local, "),
        ([*JOBLIB, "hydra.launcher.n_job=2"], "hydra.launcher.n_job=2: hydra/launcher=joblib has no such setting; "),
        ([JOBLIB[0], "hydra.launcher.n_jobs=two"], "hydra.launcher.n_jobs=two: Value 'two' of type 'str'"),
        ([JOBLIB[0], "hydra.launcher.n_jobs=0"], "hydra.launcher.n_jobs=0: allowed: how many jobs run at once"),
        (["hydra.launcher.n_jobs=2"], "hydra.launcher.n_jobs=2: hydra/launcher=basic has no such setting"),
        (["hydra.sweep.dir=here"], "hydra.sweep.dir=here: set by oneaxis; allowed: hydra/launcher=... and"),
    ],
)
def test_mistakes_are_refused_in_one_line(root: Path, overrides: Sequence[str], said: str) -> None:
    with pytest.raises(UserError) as error:
        check_launcher(root / "conf", overrides)
    assert str(error.value).startswith(said)
    assert "\n" not in str(error.value)


def test_engines_side_by_side_need_ports_of_their_own(root: Path) -> None:
    def configs(port: int) -> list[Config]:
        return [compose(root / "conf", [f"serve.port={port}", f"seed={seed}"]) for seed in (1, 2)]

    check_launcher(root / "conf", JOBLIB, configs(0))
    check_launcher(root / "conf", [], configs(8000))
    check_launcher(root / "conf", [JOBLIB[0], "hydra.launcher.n_jobs=1"], configs(8000))
    with pytest.raises(UserError, match=r"^serve.port=8000: .*; allowed: 0 \(a free port each\), or hydra/launcher="):
        check_launcher(root / "conf", JOBLIB, configs(8000))


def test_launcher_of() -> None:
    assert launcher_of([]) == "basic"
    assert launcher_of(["hydra.launcher.n_jobs=2", "hydra/launcher=joblib"]) == "joblib"


def test_an_interrupt_inside_a_job_stops_the_launch(root: Path, project: Path, tmp_path: Path) -> None:
    """The basic launcher's job runs in the launcher's process: its KeyboardInterrupt is the launch's."""
    with pytest.raises(KeyboardInterrupt):
        launch(project / "conf", [], JOBS, partial(launched.interrupted, str(tmp_path)))


def test_statuses_come_back_as_they_are(project: Path, tmp_path: Path) -> None:
    results = launch(project / "conf", [], JOBS, partial(launched.named, str(tmp_path)))
    assert [type(result) for result in results] == [Status] * 3
    assert [result.slot for result in results] == ["0", "1", "2"]
