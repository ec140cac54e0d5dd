"""Tasks that the launcher tests run in processes of their own."""

import os
import signal
import socket
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

from oneaxis.errors import RunError
from oneaxis.multirun.record import Status


def done(slot: str = "", message: str = "") -> Status:
    return Status(state="done", exit_code=0, message=message, ran=(), stage_seconds={}, seconds=0.1, waited_s=0.0,
                  commit="", node=socket.gethostname(), slot=slot,
                  finished_at=datetime.now(UTC).isoformat())  # fmt: skip


def work(folder: str, index: int) -> Status:
    """Job 1 fails; the others write who they are."""
    print(f"job {index} at work\nsecond line")
    subprocess.run([sys.executable, "-c", f"print('child of {index}')"], check=True)
    if index == 1:
        raise RunError("the engine died")
    Path(folder, str(index)).write_text(f"{os.getpid()} {os.environ.get('OMP_NUM_THREADS')} {Path.cwd()}")
    return done(slot=str(index))


def die(folder: str, index: int) -> Status:
    """Job 1 is killed whenever it starts."""
    if index == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return done(slot=str(index))


def long(folder: str, index: int) -> Status:
    """A job with a child, each for ten minutes; both say their process ids."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(folder, f"{index}.pids").write_text(f"{os.getpid()} {child.pid}")
    child.wait()
    return done()


def named(folder: str, index: int) -> Status:
    """Only says which job it is."""
    return done(slot=str(index))


def interrupted(folder: str, index: int) -> Status:
    """Is interrupted."""
    raise KeyboardInterrupt
