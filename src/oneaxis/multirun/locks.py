"""Lock files between processes: held by flock, so the kernel frees what a dead process held."""

import fcntl
import os
from pathlib import Path
from typing import TextIO


def take(path: Path, *, wait: bool = False) -> TextIO | None:
    """Lock the file at `path`, made when absent; closing what is returned frees it.

    Returns:
        The open file; None when another process holds it and `wait` is false.
    """
    while True:
        lock = path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            return None
        # `oneaxis clean` and whoever is done may remove the file between our opening and locking it.
        if path.exists() and path.stat().st_ino == os.fstat(lock.fileno()).st_ino:
            return lock
        lock.close()
