"""A multirun from the command line: plan, jobs, exit codes, interruption, resume; two at once."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from oneaxis.multirun.record import Plan, multirun_folder, read_plan, read_status

from .conftest import environment, git, ran
from .test_job import assert_all_free, at_stage, at_work, wait_until

ALPHAS = "quantize.smooth.alpha=0.5,0.8"


def start(project: Path, *arguments: str, **variables: str) -> "subprocess.Popen[str]":
    """`oneaxis run -m ...` as a shell starts it, in a process group of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "oneaxis.cli", "run", "-m", *arguments], cwd=project, text=True,
        env={**environment(project), **variables}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True,
    )  # fmt: skip


def run(project: Path, *arguments: str, **variables: str) -> tuple[int, str, str]:
    """Its exit code, output and errors."""
    process = start(project, *arguments, **variables)
    said, errors = process.communicate(timeout=240)
    return process.returncode, said, errors


def only_multirun(project: Path) -> Plan:
    (found,) = (project / "multirun").glob("*/plan.json")
    return read_plan(found.parent)


def states(project: Path, plan: Plan) -> dict[str, str]:
    folder = multirun_folder(project, plan.id)
    found = {}
    for job in plan.jobs:
        status = read_status(folder / "points" / job.point / f"r{job.repetition}")
        found[f"{job.point}-r{job.repetition}"] = status.state if status else "none"
    return found


def test_a_multirun_says_its_plan_runs_what_differs_and_leaves_records_and_refs(project: Path) -> None:
    (project / "notes.py").write_text("uncommitted = True\n", encoding="utf-8")
    code, said, errors = run(project, ALPHAS)
    assert code == 0, said + errors
    assert "runs fetch_model 1x, calibrate 1x, quantize 2x" in said
    assert re.search(
        r"\[2/2\] alpha=0.8 r0: done in [\d.]+ s \(ran quantize [\d.]+; waited 0.0; overhead [\d.]+\)", said
    )
    assert ran(project) == ["fetch_model", "calibrate", "quantize", "quantize"]
    plan = only_multirun(project)
    assert states(project, plan) == {"alpha=0.5-r0": "done", "alpha=0.8-r0": "done"}
    assert git(project, "show", f"{plan.snapshot}:notes.py") == "uncommitted = True"
    listed = git(project, "for-each-ref", "--format=%(refname)", "refs/oneaxis").splitlines()
    assert listed == [f"refs/oneaxis/{plan.id}/{name}" for name in ("alpha=0.5-r0", "alpha=0.8-r0", "snapshot")]
    assert git(project, "status", "--porcelain") == "?? notes.py"
    assert_all_free(project)


def test_a_dry_run_and_refusals_run_and_leave_nothing(project: Path) -> None:
    code, said, _ = run(project, ALPHAS, "--dry-run")
    assert code == 0
    assert "alpha=0.8  single" in said
    for overrides, words in (
        (["quantize.smooth.alpha=0.5,7"], "quantize.smooth.alpha=7"),
        (["quantize.smooth.alpha=0.5,0.8", "calibrate.num_sequences=4,8"], "num_sequences"),
        (["--resume", "none"], "none: no such multirun"),
        ([ALPHAS, "experiment.targets=[sweep]"], "sweep"),
    ):
        code, _, errors = run(project, *overrides)
        assert code == 2, errors
        assert words in errors
        assert errors.count("\n") == 1
    assert ran(project) == []
    assert not (project / "multirun").exists()


def test_a_plain_run_ends_at_the_targets_of_the_experiment(project: Path) -> None:
    variables = {key: value for key, value in environment(project).items() if key != "MLFLOW_TRACKING_URI"}
    command = [sys.executable, "-m", "oneaxis.cli", "run", "experiment.targets=[calibrate]"]
    done = subprocess.run(command, cwd=project, env=variables, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ran(project) == ["fetch_model", "calibrate"]
    assert "no report: experiment.targets ends before it" in done.stdout


def test_a_failing_job_stops_no_other_and_a_resume_runs_only_it(project: Path) -> None:
    fail = project.parent / "fail-quantize"
    fail.write_text("0.5", encoding="utf-8")
    code, _, errors = run(project, ALPHAS)
    assert code == 1
    assert "alpha=0.5 repetition 0 failed: quantize failed: the engine died" in errors
    plan = only_multirun(project)
    assert states(project, plan) == {"alpha=0.5-r0": "failed", "alpha=0.8-r0": "done"}
    fail.unlink()
    before = ran(project)
    (project / "conf" / "gate" / "cpu.yaml").write_text("changed since then", encoding="utf-8")
    code, said, errors = run(project, "--resume", plan.id)
    assert code == 0, errors
    assert "1 jobs are done; 1 to run" in said
    assert ran(project)[len(before) :] == ["quantize"]
    assert states(project, plan) == {"alpha=0.5-r0": "done", "alpha=0.8-r0": "done"}
    code, _, errors = run(project, "quantize.smooth.alpha=0.5,0.9", "--resume", plan.id)
    assert code == 2
    assert "was planned with" in errors


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_in_130_with_the_way_on(project: Path, number: signal.Signals) -> None:
    hold = project.parent / "hold-quantize"
    hold.touch()
    process = start(project, ALPHAS)
    wait_until(lambda: at_stage(project, "quantize"))
    plan = only_multirun(project)
    code, _, errors = run(project, "--resume", plan.id)
    assert code == 2
    assert f"is running now (process {process.pid}" in errors
    process.send_signal(number)
    _, errors = process.communicate(timeout=90)
    assert process.returncode == 130
    assert f"oneaxis run -m --resume {plan.id}" in errors
    assert "Traceback" not in errors
    assert_all_free(project)
    hold.unlink()
    code, _, errors = run(project, "--resume", plan.id)
    assert code == 0, errors
    assert ran(project) == ["fetch_model", "calibrate", "quantize", "quantize", "quantize"]


@pytest.mark.slow
def test_two_multiruns_and_a_plain_run_at_once_share_what_they_have_in_common(project: Path) -> None:
    first = start(project, ALPHAS, STAGE_SECONDS="1")
    second = start(project, "quantize.smooth.alpha=0.8,0.9", STAGE_SECONDS="1")
    plain = subprocess.Popen([sys.executable, "-m", "dvc", "repro", "-q"], cwd=project, env=environment(project))
    for process in (first, second):
        said, errors = process.communicate(timeout=240)
        assert process.returncode == 0, said + errors
    assert plain.wait(timeout=60) == 0
    # The plain run takes no lock of ours and may compute what a job computes at the same time.
    assert 1 <= ran(project).count("fetch_model") <= 2
    assert ran(project).count("quantize") <= 4
    assert len(list((project / "multirun").glob("*/plan.json"))) == 2
    assert_all_free(project)


@pytest.mark.slow
def test_kill_9_at_many_moments_then_a_resume_ends_in_the_same_records(project: Path) -> None:
    """Moments spread over a whole multirun; after each it is resumed and killed again, and at last completed."""
    process = start(project, ALPHAS, STAGE_SECONDS="0.3")
    wait_until(lambda: list((project / "multirun").glob("*/plan.json")))
    plan = only_multirun(project)
    for delay in (0.2, 0.9, 1.7, 2.6, 3.6, 4.7):
        time.sleep(delay)
        process.kill()
        process.communicate(timeout=30)
        wait_until(lambda: at_work(project) == [], 40)
        process = start(project, "--resume", plan.id, STAGE_SECONDS="0.3")
    said, errors = process.communicate(timeout=240)
    assert process.returncode == 0, said + errors
    assert set(states(project, plan).values()) == {"done"}
    assert_all_free(project)
    left = [path for path in project.rglob(".tmp-*") if path.is_dir()]
    assert left == []


def test_the_terminal_says_whom_a_job_waits_for_and_only_while_it_waits(tmp_path: Path) -> None:
    from oneaxis.multirun.run import _waits_for

    log = tmp_path / "alpha=0.5-r0.log"
    assert _waits_for(log) == ""
    line = (
        "oneaxis: waiting for cpu 0-1 for itself (60 s): held by process 7 (python stages/serve.py), since 12:00:01 UTC"
    )
    log.write_text(f"Running stage 'serve'\n{line}\n", encoding="utf-8")
    said = "waiting for cpu 0-1 for itself: held by process 7 (python stages/serve.py), since 12:00:01 UTC"
    assert _waits_for(log) == said
    log.write_text(f"{line}\nloading\n", encoding="utf-8")
    assert _waits_for(log) == ""
