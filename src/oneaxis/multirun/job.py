"""One job of a multirun, as every launcher calls it: start its worker, wait, and hand on how it ended.

The worker is a process of its own (`multirun/worker.py`). This side sees to it that a job that was killed leaves no
process and has a record, and tells MLflow.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import psutil

from oneaxis.live import JOB_VARIABLE, job_key
from oneaxis.multirun.record import Job, Status, job_folder, multirun_folder, read_plan, read_status
from oneaxis.multirun.slots import end_processes
from oneaxis.multirun.worker import finish
from oneaxis.pipeline import no_room

LOGS = "logs"
STOP_S = 120.0
"""What a job gets to end when interrupted: an engine is stopped in it."""


def log_file(folder: Path, job: Job) -> Path:
    """Where the words of a job's stages and of DVC go."""
    return folder / LOGS / f"{job.point}-r{job.repetition}.log"


def run_job(project: Path, multirun_id: str, index: int) -> Status:
    """Run job `index` of a multirun's plan. A failure is a status, so that it stops no other job.

    Raises:
        KeyboardInterrupt: when interrupted; the job has then no record, and a resume runs it.
        UserError: when there is no such multirun.
    """
    started = time.time()
    folder = multirun_folder(project, multirun_id)
    plan = read_plan(folder)
    job = plan.jobs[index]
    target, log = job_folder(folder, job), log_file(folder, job)
    log.parent.mkdir(exist_ok=True)
    if target.exists():
        shutil.rmtree(target)
    command = [sys.executable, "-m", "oneaxis.multirun.worker", str(project), multirun_id, str(index), str(started)]
    environment = {**os.environ, "ONEAXIS_STARTER_PID": str(os.getpid()),
                   JOB_VARIABLE: job_key(multirun_id, job.point, job.repetition)}  # fmt: skip
    with log.open("w", encoding="utf-8") as output:
        # A session of its own: Ctrl-C of a terminal reaches it through us, once.
        worker = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                                  env=environment, start_new_session=True)  # fmt: skip
    try:
        code = worker.wait()
    except BaseException:
        _stop(worker)
        raise
    status = read_status(target)
    if code == 130 and status is None:
        raise KeyboardInterrupt
    if status is None:
        end_processes(_belonging_to(worker.pid))
        status = _killed(target, worker.pid, code, started, log)
    from oneaxis.track import track_job

    track_job(project, folder, plan, job)
    return status


def _stop(worker: "subprocess.Popen[bytes]") -> None:
    worker.terminate()
    try:
        worker.wait(timeout=STOP_S)
    except subprocess.TimeoutExpired:
        worker.kill()
        worker.wait()
    end_processes(_belonging_to(worker.pid))


def _belonging_to(worker: int) -> list[psutil.Process]:
    """Processes that were to end with this worker and are still there."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("ONEAXIS_PARENT_PID") == str(worker):
                found.append(process)
        except psutil.Error:
            continue
    return found


def _killed(target: Path, worker: int, code: int, started: float, log: Path) -> Status:
    """The status of a job whose worker could not write one, with a record that holds no more."""
    how = f"was killed by signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"ended with {code}"
    message = no_room([target.parent]) or f"its process {worker} {how}; {log} has its last words"
    status = Status(
        state="failed", exit_code=1, message=message, ran=[], stage_seconds={},
        seconds=round(time.time() - started, 3), waited_s=0.0, commit="", node=socket.gethostname(), slot="",
        finished_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
    )  # fmt: skip
    temporary = target.parent / f".tmp-{target.name}-{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        finish(temporary, target, status)
    except OSError:
        # A full disk takes no record either: the job counts as one that did not end.
        shutil.rmtree(temporary, ignore_errors=True)
    return status
