"""A multirun from its overrides to its verdicts: `oneaxis run -m ...`.

Plan (points, jobs), snapshot of what is on disk, every point checked, then the jobs through a launcher, and at the end
the verdicts, the report and MLflow. `plan.json` is written before the first job, each job's record when it ends: so a
multirun that died is resumed from what lies on disk.
"""

import itertools
import os
import re
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from oneaxis.config.compose import compose, write_params
from oneaxis.config.schema import Config, Measure
from oneaxis.errors import UserError
from oneaxis.multirun.flight import runs_each_time, stage_keys, stage_order
from oneaxis.multirun.job import log_file
from oneaxis.multirun.launch import check_launcher, launch, launcher_of, runs_elsewhere
from oneaxis.multirun.locks import take
from oneaxis.multirun.node import job_task
from oneaxis.multirun.plan import make_plan
from oneaxis.multirun.record import MULTIRUN, Job, Plan, Status, job_folder, read_status, write_plan
from oneaxis.multirun.slots import PLANNING, bring_files, end_left_overs, free_slots, take_slot
from oneaxis.multirun.snapshot import has_commit, make_snapshot, pin
from oneaxis.pipeline import check_draws, check_inputs
from oneaxis.stage import STATE

RUNNING = "running"


def run_multirun(root: Path, overrides: Sequence[str], resume: str | None, dry_run: bool) -> int:
    """Run or resume a multirun.

    Returns:
        0; 1 when a job failed, a comparison is INVALID, or claims were declared and no candidate was accepted.

    Raises:
        UserError: before anything runs: more than one axis, a mistake in any point, another process at work on it.
        KeyboardInterrupt: when interrupted; the jobs that had ended are kept, and the words for resuming are printed.
    """
    plan = make_plan(root, overrides, resume=resume, now=datetime.now(UTC))
    if resume:
        if not has_commit(root, plan.snapshot):
            raise UserError(f"--resume {resume}: its snapshot {plan.snapshot[:10]} is not in this repository; allowed: "
                            "a multirun of this clone")  # fmt: skip
        with hold(root, resume):
            return _execute(root, plan, dry_run=dry_run)
    plan = replace(plan, snapshot=make_snapshot(root))
    with hold_new(root, plan) as named:
        return _execute(root, named, dry_run=dry_run)


def _execute(root: Path, plan: Plan, *, dry_run: bool) -> int:
    """Check, announce and run what is left of a plan, then judge, report and track it."""
    folder = root / MULTIRUN / plan.id
    with free_slots(root) as free:
        for tree in free:
            end_left_overs(tree)
    todo = [number for number, job in enumerate(plan.jobs) if not _is_done(folder, job)]
    checked = check_points(root, plan, [plan.jobs[number] for number in todo] or plan.jobs[:1])
    check_launcher(root / "conf", plan.launcher, checked.configs)
    print(announce(plan, checked.runs if todo else Counter(), len(todo)), flush=True)
    if dry_run:
        return 0
    folder.mkdir(parents=True, exist_ok=True)
    pin(root, plan.id, "snapshot", plan.snapshot)
    write_plan(folder, plan)
    failed = _run_jobs(root, folder, plan, todo, checked.configs)
    judged = _conclude(root, folder)
    if failed:
        print(f"oneaxis: `oneaxis run -m --resume {plan.id}` runs what failed again", file=sys.stderr, flush=True)
    return 1 if failed else judged


@contextmanager
def hold(project: Path, multirun: str) -> Iterator[None]:
    """One process at a time runs a multirun; the kernel frees a dead one's lock.

    Raises:
        UserError: naming the process that runs it.
    """
    path = project / STATE / RUNNING / f"{multirun}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = take(path)
    if lock is None:
        holder = path.read_text(encoding="utf-8").strip()
        raise UserError(f"multirun {multirun}: is running now ({holder}); wait for it or stop it")
    with lock:
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {socket.gethostname()}, since {datetime.now(UTC):%H:%M:%S} UTC")
        lock.flush()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


@contextmanager
def hold_new(project: Path, plan: Plan) -> Iterator[Plan]:
    """Hold a plan that has not run yet, under another id where one of the same second has its own."""
    with ExitStack() as held:
        for number in itertools.count(1):
            name = plan.id if number == 1 else f"{plan.id}-{number}"
            try:
                held.enter_context(hold(project, name))
            except UserError:
                continue
            if not (project / MULTIRUN / name).exists():
                break
            held.close()
        yield replace(plan, id=name, session=name if plan.session == plan.id else plan.session)


def _is_done(folder: Path, job: Job) -> bool:
    status = read_status(job_folder(folder, job))
    return status is not None and status.state == "done"


# --- before the first job --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Checked:
    """What the check of all points found."""

    configs: Sequence[Config]
    """Of the points that are to run."""
    runs: Counter[str]
    """Stage -> how many different things it would compute; what the cache holds already is restored instead."""


def check_points(root: Path, plan: Plan, jobs: Sequence[Job]) -> Checked:
    """Compose and check every job's settings and inputs as its slot will, before any of them starts.

    Raises:
        UserError: the first mistake found.
    """
    from dvc.repo import Repo

    configs: dict[str, Config] = {}
    keys: dict[str, set[str]] = {}
    each_time: Counter[str] = Counter()
    hashes: dict[str, str] = {}
    with take_slot(root, plan.snapshot, name=PLANNING) as slot:
        for job in jobs:
            if job.point not in configs:
                configs[job.point] = compose(slot.root / "conf", plan.point(job.point).overrides)
                check_inputs(root, configs[job.point], here=not runs_elsewhere(plan.launcher))
            measure = Measure(session=plan.session, repetition=job.repetition)
            settings = configs[job.point].model_copy(update={"measure": measure})
            check_draws(root, settings)
            write_params(settings, slot.root)
            with Repo(str(slot.root)) as repo:
                order = stage_order(repo, plan.experiment["targets"])
                bring_files(root, slot.root, order)
                for stage, (name, key) in zip(order, stage_keys(repo, order, hashes).items(), strict=True):
                    keys.setdefault(name, set()).add(key)
                    each_time[name] += runs_each_time(stage)
    runs = Counter({stage: each_time[stage] or len(found) for stage, found in keys.items()})
    return Checked(list(configs.values()), runs)


def announce(plan: Plan, runs: Counter[str], left: int) -> str:
    """The plan in a few lines: the points, and how many times each stage runs in all."""
    about = f"axis {plan.axis}" if plan.axis else "several single changes"
    lines = [f"multirun {plan.id}: {about}, {len(plan.points)} points, {len(plan.jobs)} jobs"]
    width = max(len(point.name) for point in plan.points)
    for point in plan.points:
        moved = ", ".join(f"{axis.name}: {axis.before} -> {axis.after}" for axis in point.axes)
        lines.append(f"  {point.name:{width}}  {point.role}{'  ' if moved else ''}{moved}")
    if left < len(plan.jobs):
        lines.append(f"  {len(plan.jobs) - left} jobs are done; {left} to run")
    if runs:
        counts = ", ".join(f"{stage} {count}x" for stage, count in runs.items())
        lines.append(f"  runs {counts}; what the cache holds is restored instead")
    lines.append(f"  snapshot {plan.snapshot[:10]}, timing session {plan.session}")
    return "\n".join(lines)


# --- the jobs --------------------------------------------------------------------------------------------------


def _run_jobs(root: Path, folder: Path, plan: Plan, todo: Sequence[int], configs: Sequence[Config]) -> list[str]:
    """Run the jobs; returns one line for each that failed."""
    from oneaxis.track import open_parent

    open_parent(root, plan)
    statuses: list[Status] = []
    with _interruptible(plan.id), _progress(folder, plan, todo):
        if todo:
            jobs = [plan.point(plan.jobs[number].point).overrides for number in todo]
            task = job_task(root, plan, todo, launcher_of(plan.launcher))
            statuses = launch(root / "conf", plan.launcher, jobs, task)
    failed = []
    for number, status in zip(todo, statuses, strict=True):
        if status.state != "done":
            job = plan.jobs[number]
            failed.append(f"{job.point} repetition {job.repetition} failed: {status.message}")
            print(f"oneaxis: {failed[-1]}; words: {log_file(folder, job)}", file=sys.stderr, flush=True)
    return failed


@contextmanager
def _interruptible(multirun: str) -> Iterator[None]:
    """SIGTERM interrupts as Ctrl-C does; the way to go on is said."""

    def interrupt(_number: int, _frame: Any) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    except KeyboardInterrupt:
        print(f"oneaxis: `oneaxis run -m --resume {multirun}` goes on from here", file=sys.stderr, flush=True)
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _progress(folder: Path, plan: Plan, todo: Sequence[int]) -> Iterator[None]:
    """One line when a job starts, waits or ends, read from its log and record: so for every launcher alike."""
    begun, ended, since = set[int](), set[int](), time.time()
    waiting: dict[int, str] = {}
    stop = threading.Event()

    def look() -> None:
        for number in todo:
            job = plan.jobs[number]
            log = log_file(folder, job)
            if number not in begun and log.is_file() and log.stat().st_mtime >= since - 1:
                begun.add(number)
                print(f"[{len(begun)}/{len(todo)}] {job.point} r{job.repetition}: started", flush=True)
            if number in begun - ended and (why := _waits_for(log)) != waiting.get(number, ""):
                waiting[number] = why
                if why:
                    print(f"  {job.point} r{job.repetition}: {why}", flush=True)
            status = read_status(job_folder(folder, job)) if number in begun - ended else None
            if status:
                ended.add(number)
                print(f"[{len(ended)}/{len(todo)}] {job.point} r{job.repetition}: {describe(status)}", flush=True)

    def watch() -> None:
        while not stop.wait(0.2):
            look()

    thread = threading.Thread(target=watch, daemon=True, name="progress")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        look()


def _waits_for(log: Path) -> str:
    """What the last words of a job's log say that it waits for; empty when it does not wait."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 600))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    said = lines[-1] if lines else ""
    # The time waited so far changes from minute to minute: who is waited for does not.
    return re.sub(r" \(\d+ s\)", "", said).removeprefix("oneaxis: ") if "waiting for " in said[:40] else ""


def describe(status: Status) -> str:
    """How a job ended and what it took; the overhead is what is neither a stage nor waiting."""
    ran = ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in status.stage_seconds.items()) or "nothing"
    overhead = status.seconds - sum(status.stage_seconds.values()) - status.waited_s
    took = f"{status.seconds:.1f} s (ran {ran}; waited {status.waited_s:.1f}; overhead {overhead:.1f})"
    return f"{status.state} in {took}" + (f": {status.message}" if status.message else "")


# --- after the last job ------------------------------------------------------------------------------------------


def _conclude(root: Path, folder: Path) -> int:
    """Verdicts, report and MLflow from the records, whatever is there of them; returns the verdicts' exit code."""
    from oneaxis.judge.multirun import exit_code, judge_multirun
    from oneaxis.judge.text import verdict_text
    from oneaxis.report.multirun import write_multirun_report
    from oneaxis.track import finish_multirun

    verdicts = judge_multirun(folder)
    page = write_multirun_report(folder)
    run = finish_multirun(root, folder)
    said = f"{verdict_text(verdicts)}\n\n" if verdicts else "nothing was compared\n"
    print(f"\n{said}report: {page}", flush=True)
    if run:
        print(f"MLflow run {run}: `oneaxis ui {folder.name}` shows it", flush=True)
    return exit_code(verdicts)
