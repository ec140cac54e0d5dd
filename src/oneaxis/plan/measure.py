"""This CPU's own ceilings, with the threads that the engine uses: read bandwidth, and FLOP/s of matrix products.

Each is the best of many short tries: a ceiling is what the machine can do, and what runs beside only takes from it. So
on the same machine a figure that was better before stands.

    bandwidth   the fastest of three kernels that read a float32 array far larger than the last cache once: a sum, a dot
                product of its halves, a matrix-vector product
    f32, bf16   FLOP/s of the fastest of some square and some tall matrix products, 2 m n k each
    int8        the same, int8 x int8 -> int32 (`torch._int_mm`, oneDNN)

Measured in a process of its own: the number of threads of a library that runs already cannot be trusted.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from oneaxis.artifacts import read_json, write_json
from oneaxis.errors import RunError, UserError
from oneaxis.lease import device_lease
from oneaxis.plan.answer import Answer, Column
from oneaxis.plan.hardware import CEILINGS, IDENTITY
from oneaxis.stage import hardware

ARRAY_BYTES = 1 << 27
"""Read by the bandwidth's kernels: several times the last cache, in a few milliseconds, so that a try may be quiet."""
SHAPES = ((512, 1536, 576), (1024, 1024, 1024), (2048, 1024, 1024))
"""m, k, n of the products."""
SECONDS_EACH = 2.0
"""Of tries, for each kernel and shape."""
BUSY = 0.5
"""Load average by cores from which the answer warns."""


def measure(root: Path, threads: int, seconds_each: float = SECONDS_EACH) -> Answer:
    """Measure and store under `.oneaxis/`; other numbers of threads measured on this machine are kept.

    Raises:
        UserError: more threads than cores. RunError: the measurement itself failed.
    """
    cores = len(os.sched_getaffinity(0))
    if not 1 <= threads <= cores:
        raise UserError(f"--threads={threads}: allowed: 1 to {cores}, the cores that this process may use")
    with device_lease("timing") as lease:
        before = os.getloadavg()
        # A thread that spins while it waits takes a core from the one that it waits for, where others compute too.
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
        done = subprocess.run([sys.executable, "-m", "oneaxis.plan.measure", str(threads), str(seconds_each)],
                              env=environment, capture_output=True, text=True, timeout=300, check=False)  # fmt: skip
    if done.returncode != 0:
        raise RunError(f"the measurement failed: {(done.stderr.strip().splitlines() or ['no output'])[-1]}")
    found = json.loads(done.stdout)
    here = hardware()
    path = root / CEILINGS
    threads_before = of_this_machine(read_json(path) if path.is_file() else None, here)
    bandwidth, peaks = better(threads_before.get(str(threads)), found["bandwidth"], found["peaks"])
    entry = {
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "load_before": list(before),
        "lease": lease.as_json(),
        "kernels": found["kernels"],
        "device": {
            "name": f"{here['cpu']}, {threads} {'thread' if threads == 1 else 'threads'}",
            "memory_bytes": here["memory_gib"] * 2**30,
            "bandwidth_bytes_s": bandwidth,
            "peak_flops_s": peaks,
        },
    }
    path.parent.mkdir(exist_ok=True)
    write_json(path, {"hardware": here, "threads": threads_before | {str(threads): entry}})
    rows = [{"what": "read bandwidth", "now": f"{found['bandwidth'] / 1e9:.2f} GB/s", "best": f"{bandwidth / 1e9:.2f}",
             "kernel": found["kernels"]["bandwidth"]}]  # fmt: skip
    rows += [{"what": name, "now": f"{rate / 1e9:.1f} GFLOP/s", "best": f"{peaks[name] / 1e9:.1f}",
              "kernel": found["kernels"][name]} for name, rate in found["peaks"].items()]  # fmt: skip
    columns = [Column("what", "ceiling", "text"), Column("now", "now", "text"), Column("best", "best seen", "text"),
               Column("kernel", "of", "text")]  # fmt: skip
    notes = [f"stored in {path}"]
    if before[0] > BUSY * cores:
        notes.append(f"the machine was busy (load average {before[0]:.1f} on {cores} cores): measure again when it is "
                     "not; the better figure of each stands")  # fmt: skip
    return Answer("measure", "the best of many short tries", {"cpu": here["cpu"], "threads": threads}, columns=columns,
                  rows=rows, notes=notes)  # fmt: skip


def of_this_machine(stored: Any, here: Mapping[str, Any]) -> dict[str, Any]:
    """What is stored already, by number of threads; nothing when it is another machine's, or not what `measure` writes.

    Args:
        here: `oneaxis.stage.hardware` of this machine.
    """
    try:
        same = all(stored["hardware"][key] == here[key] for key in IDENTITY)
        return dict(stored["threads"]) if same else {}
    except (KeyError, TypeError, ValueError):
        return {}


def better(
    known: Mapping[str, Any] | None, bandwidth: float, peaks: Mapping[str, float]
) -> tuple[float, dict[str, float]]:
    """Bandwidth and peaks, each the better of what was known and what was found."""
    device: Mapping[str, Any] = known["device"] if known else {"bandwidth_bytes_s": 0.0, "peak_flops_s": {}}
    best = {name: max(rate, device["peak_flops_s"].get(name, 0.0)) for name, rate in peaks.items()}
    return max(bandwidth, device["bandwidth_bytes_s"]), best


def _worker(threads: int, seconds_each: float) -> dict[str, Any]:
    """The measurement itself, in a process of its own."""
    import torch

    torch.set_num_threads(threads)
    torch.manual_seed(0)

    def best(run: Callable[[], object], seconds: float) -> float:
        """Shortest time of one call, s; after two for warming up."""
        run()
        run()
        shortest, until = float("inf"), time.perf_counter() + seconds
        while time.perf_counter() < until:
            began = time.perf_counter()
            run()
            shortest = min(shortest, time.perf_counter() - began)
        return shortest

    rows = ARRAY_BYTES // 4 // 4096
    matrix, vector = torch.rand(rows, 4096), torch.rand(4096)
    flat = matrix.view(-1)
    half = flat.numel() // 2
    reads = {
        "sum": lambda: flat.sum(),
        "dot": lambda: torch.dot(flat[:half], flat[half:]),
        "matrix-vector": lambda: torch.mv(matrix, vector),
    }
    rates = {name: ARRAY_BYTES / best(run, seconds_each) for name, run in reads.items()}
    fastest = max(rates, key=lambda name: rates[name])
    kernels, peaks = {"bandwidth": fastest}, {}
    for name, dtype in (("f32", torch.float32), ("bf16", torch.bfloat16), ("int8", torch.int8)):
        product = torch._int_mm if dtype == torch.int8 else torch.mm
        seen: dict[str, float] = {}
        for m, k, n in SHAPES:
            a, b = (torch.randint(-128, 128, size).to(dtype) for size in ((m, k), (k, n)))
            seen[f"{m} x {k} x {n}"] = 2 * m * k * n / best(partial(product, a, b), seconds_each)
        kernels[name] = max(seen, key=lambda shape: seen[shape])
        peaks[name] = seen[kernels[name]]
    return {"bandwidth": rates[fastest], "peaks": peaks, "kernels": kernels}


if __name__ == "__main__":
    print(json.dumps(_worker(int(sys.argv[1]), float(sys.argv[2]))))
