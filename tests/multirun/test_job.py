"""A job leaves a whole record and a commit; whatever kills it leaves no process, no lock and no half record."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from oneaxis.multirun.flight import FLIGHT
from oneaxis.multirun.job import run_job
from oneaxis.multirun.record import Plan, job_folder, read_status, write_plan
from oneaxis.multirun.slots import free_slots
from oneaxis.multirun.snapshot import make_snapshot

from .conftest import environment, git, make_plan, ran, sh


def planned(project: Path, *alphas: float, name: str = "m1", repetitions: int = 1) -> Plan:
    """A plan of what is on disk, written."""
    plan = make_plan(make_snapshot(project), alphas, name=name, repetitions=repetitions)
    (project / "multirun" / plan.id).mkdir(parents=True)
    write_plan(project / "multirun" / plan.id, plan)
    return plan


def record(project: Path, plan: Plan, index: int) -> Path:
    return job_folder(project / "multirun" / plan.id, plan.jobs[index])


@pytest.fixture
def shell(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment that a user's shell gives to a launcher's process."""
    for key, value in environment(project).items():
        monkeypatch.setenv(key, value)


def start(project: Path, plan: Plan, index: int) -> "subprocess.Popen[str]":
    """A launcher's process at one job."""
    code = "import sys; from pathlib import Path; from oneaxis.multirun.job import run_job\n"
    code += "print(run_job(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])).state)"
    command = [sys.executable, "-c", code, str(project), plan.id, str(index)]
    return subprocess.Popen(command, env=environment(project), text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE)  # fmt: skip


def wait_until(condition: Callable[[], object], seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the awaited state did not come"
        time.sleep(0.05)


def at_work(project: Path) -> list[psutil.Process]:
    """Workers of this project and what they started."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        words = " ".join(process.info["cmdline"] or [])
        try:
            inside = Path(process.cwd()).is_relative_to(project)
        except (psutil.Error, OSError):
            continue
        if (inside or str(project) in words) and process.status() != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


def worker_of(project: Path) -> psutil.Process:
    (found,) = [each for each in at_work(project) if "oneaxis.multirun.worker" in each.cmdline()]
    return found


def assert_all_free(project: Path) -> None:
    """No process, no slot and no stage's lock is held, and no record is half there."""
    import fcntl

    wait_until(lambda: at_work(project) == [], 40)
    locks = list((project / ".oneaxis").glob("slots/*.lock"))
    with free_slots(project) as free:
        assert len(free) == len(locks)
    for path in (project / ".oneaxis" / FLIGHT).glob("*.lock"):
        with path.open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.usefixtures("shell")
def test_a_job_leaves_its_record_and_a_commit_that_dvc_and_git_understand(project: Path) -> None:
    plan = planned(project, 0.5, 0.8)
    before = git(project, "status", "--porcelain")
    first, second = run_job(project, "m1", 0), run_job(project, "m1", 1)
    assert (first.state, list(first.ran)) == ("done", ["fetch_model", "calibrate", "quantize"])
    assert (second.state, list(second.ran)) == ("done", ["quantize"])
    assert ran(project) == ["fetch_model", "calibrate", "quantize", "quantize"]
    assert set(second.stage_seconds) == {"quantize"}
    assert second == read_status(record(project, plan, 1))
    kept = record(project, plan, 1)
    assert (kept / "artifacts" / "quantize" / "result.txt").read_text(encoding="utf-8") == "quantize 0.8\n"
    assert "alpha: 0.8" in (kept / "params.yaml").read_text(encoding="utf-8")
    assert "quantize:" in (kept / "dvc.lock").read_text(encoding="utf-8")
    # The workspace is as it was; the commits differ in the axis and in what came of it.
    assert git(project, "status", "--porcelain") == before
    commits = [first.commit, second.commit]
    metrics = json.loads(sh(project, "dvc", "metrics", "diff", "--json", *commits))
    assert metrics["artifacts/quantize.metrics.json"]["quantize/value"] == {
        "old": 0.5,
        "new": 0.8,
        "diff": pytest.approx(0.3),
    }
    params = json.loads(sh(project, "dvc", "params", "diff", "--json", *commits))
    assert list(params["params.yaml"]) == ["quantize.smooth.alpha"]
    git(project, "checkout", "-q", second.commit)
    sh(project, "dvc", "checkout", "-q")
    assert (project / "artifacts" / "quantize" / "result.txt").read_text(encoding="utf-8") == "quantize 0.8\n"
    assert sh(project, "dvc", "status") == "Data and pipelines are up to date."


@pytest.mark.usefixtures("shell")
def test_large_files_and_stages_of_other_jobs_are_not_in_the_record(project: Path) -> None:
    script = project / "stages" / "stage.py"
    big = '\n(out / "checkpoint.bin").write_bytes(b"x" * (8 * 2**20 + 1))\n'
    script.write_text(script.read_text(encoding="utf-8") + big, encoding="utf-8")
    run_job(project, planned(project, 0.5, name="whole").id, 0)
    plan = planned(project, 0.5, name="part")
    plan = replace(plan, experiment={"targets": ["calibrate"], "claims": []})
    write_plan(project / "multirun" / "part", plan)
    status = run_job(project, "part", 0)
    assert list(status.ran) == []
    kept = record(project, plan, 0)
    assert (kept / "artifacts" / "calibrate" / "result.txt").is_file()
    assert not (kept / "artifacts" / "calibrate" / "checkpoint.bin").exists()
    assert not (kept / "artifacts" / "quantize").exists()
    assert "quantize:" not in (kept / "dvc.lock").read_text(encoding="utf-8").replace("    quantize:", "")


@pytest.mark.usefixtures("shell")
def test_a_failing_stage_is_told_in_its_own_words_and_its_results_are_not_kept(project: Path) -> None:
    plan = planned(project, 0.5, 0.8)
    (project.parent / "fail-quantize").write_text("0.5", encoding="utf-8")
    status = run_job(project, "m1", 0)
    assert (status.state, status.exit_code, status.commit) == ("failed", 1, "")
    assert status.message == "quantize failed: the engine died"
    kept = record(project, plan, 0)
    assert (kept / "artifacts" / "calibrate").is_dir()
    assert not (kept / "artifacts" / "quantize").exists()
    assert run_job(project, "m1", 1).state == "done"


@pytest.mark.usefixtures("shell")
def test_a_cache_that_cannot_be_written_is_one_line(project: Path) -> None:
    # Even root may not make folders there.
    (project / ".dvc" / "config.local").write_text("[cache]\n    dir = /sys/kernel/oneaxis\n", encoding="utf-8")
    planned(project, 0.5)
    status = run_job(project, "m1", 0)
    assert (status.state, status.exit_code) == ("failed", 1)
    assert "/sys/kernel" in status.message
    assert "cannot be written to" in status.message
    assert "\n" not in status.message


@pytest.mark.slow
@pytest.mark.usefixtures("shell")
def test_two_jobs_that_want_the_same_stage_at_once_compute_it_once(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAGE_SECONDS", "1")
    plan = planned(project, 0.5, 0.8)
    other = planned(project, 0.8, name="m2")
    jobs = [start(project, plan, 0), start(project, plan, 1), start(project, other, 0)]
    for job in jobs:
        said, errors = job.communicate(timeout=120)
        assert said == "done\n", errors
    assert sorted(ran(project)) == ["calibrate", "fetch_model", "quantize", "quantize"]
    statuses = [
        read_status(record(project, plan, 0)),
        read_status(record(project, plan, 1)),
        read_status(record(project, other, 0)),
    ]
    assert sum(status.waited_s for status in statuses if status) > 1
    assert len({status.slot for status in statuses if status}) == 3


def at_stage(project: Path, stage: str) -> bool:
    return stage in ran(project)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["worker", "stage"])
def test_kill_9_leaves_nothing_and_the_next_attempt_completes(project: Path, victim: str) -> None:
    plan = planned(project, 0.5)
    hold = project.parent / "hold-calibrate"
    hold.touch()
    job = start(project, plan, 0)
    wait_until(lambda: at_stage(project, "calibrate"))
    worker = worker_of(project)
    (stage,) = [each for each in at_work(project) if each.cmdline()[1:2] == ["stages/stage.py"]]
    os.kill({"worker": worker.pid, "stage": stage.pid}[victim], signal.SIGKILL)
    assert job.communicate(timeout=90)[0] == "failed\n"
    assert_all_free(project)
    status = read_status(record(project, plan, 0))
    assert status is not None
    assert ("SIGKILL" if victim == "worker" else "calibrate") in status.message
    hold.unlink()
    assert start(project, plan, 0).communicate(timeout=90)[0] == "done\n"
    assert ran(project) == ["fetch_model", "calibrate", "calibrate", "quantize"]
    assert_all_free(project)
