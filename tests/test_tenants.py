"""What other processes did, and ours did not. Oracle: two busy processes, one of them under another parent."""

import os
import signal
import subprocess
import sys
import time

import psutil

from oneaxis.tenants import other_work

BUSY = "while True: pass"


def test_a_process_of_another_is_seen_and_one_of_ours_is_not() -> None:
    ours = subprocess.Popen([sys.executable, "-S", "-c", BUSY])
    # A shell that ends leaves its child to another parent.
    shell = f"{sys.executable} -S -c '{BUSY}' >/dev/null 2>&1 & echo $!"
    orphan = int(subprocess.run(["sh", "-c", shell], capture_output=True, text=True, check=True).stdout)
    try:
        time.sleep(0.3)
        processes = [psutil.Process(pid) for pid in (orphan, ours.pid)]
        before = [sum(process.cpu_times()[:2]) for process in processes]
        with other_work() as found:
            time.sleep(1.0)
        after = [sum(process.cpu_times()[:2]) for process in processes]
    finally:
        ours.kill()
        ours.wait()
        os.kill(orphan, signal.SIGKILL)
    used, own = ((end - start) / found["seconds"] for start, end in zip(before, after, strict=True))
    # The kernel's clock ticks are 10 ms, and other processes of this machine are others too.
    assert found["other_cpus"] >= used - 0.1
    assert used > 0.05
    assert own > 0.05
    # With our own counted as another's it would be more by that.
    others = psutil.cpu_count() or 1
    assert found["other_cpus"] < others - own + 0.2
    assert 0 < found["seconds"] < 5
