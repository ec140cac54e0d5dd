"""Who else used the machine during a block: CPU time of other processes, and processes on its GPUs (guard 10).

A lease keeps other runs of ours away; this sees what takes no lease. CPU time is summed over all processes that are not
this one, its children, or theirs, nor those of the engine (which may be forked from elsewhere), with what those
processes have inherited from children of their own that ended, so that a compiler that comes and goes is seen too. It
is read twice, before and after: reading it in between would take time from a load client in this process.
"""

import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import psutil

SHOWN = 3


@contextmanager
def other_work(engine: Sequence[int] = ()) -> Iterator[dict[str, Any]]:
    """Measure the block. When it has ended the mapping holds `cpus` (of this process's affinity), `other_cpus` (mean
    number of CPUs that others kept busy), `busiest` (their names, most CPU time first) and `seconds`.

    `engine`: the processes at the head of what serves; with all below them they are no others.
    """
    found: dict[str, Any] = {"cpus": len(os.sched_getaffinity(0))}
    before, began = _others(engine), time.monotonic()
    try:
        yield found
    finally:
        after, seconds = _others(engine), max(time.monotonic() - began, 1e-9)
        total = sum(used for used, _ in after.values()) - sum(used for used, _ in before.values())
        grown: dict[str, float] = {}
        for key, (used, name) in after.items():
            grown[name] = grown.get(name, 0.0) + used - before.get(key, (0.0, ""))[0]
        busiest = sorted((name for name in grown if grown[name] > 0.01 * seconds), key=lambda name: -grown[name])
        found.update(other_cpus=max(total, 0.0) / seconds, busiest=busiest[:SHOWN], seconds=seconds)


def _others(engine: Sequence[int]) -> dict[tuple[int, float], tuple[float, str]]:
    """(process id, start) -> (CPU seconds, its ended children's included; name) of every process but our own."""
    own = set()
    for head in (os.getpid(), *engine):
        with suppress(psutil.NoSuchProcess):
            own |= {head, *(child.pid for child in psutil.Process(head).children(recursive=True))}
    found = {}
    for process in psutil.process_iter(["create_time", "cpu_times", "name"]):
        times = process.info["cpu_times"]
        if process.pid in own or times is None:
            continue
        used = times.user + times.system + times.children_user + times.children_system
        found[process.pid, process.info["create_time"]] = (used, str(process.info["name"]))
    return found


def gpu_processes() -> list[str]:
    """`NAME (process ID, MEMORY)` of each process that computes on a GPU of this machine; empty without one."""
    query = ["nvidia-smi", "--query-compute-apps=pid,process_name,used_memory", "--format=csv,noheader"]
    try:
        listed = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    rows = [line.split(", ") for line in listed.stdout.splitlines() if line.count(", ") == 2]
    return [f"{name} (process {pid}, {memory})" for pid, name, memory in rows] if listed.returncode == 0 else []
