"""Leases between real processes: who may hold what beside whom, what frees it, and that nothing waits for ever.

Oracle of the random test: a log that every holder appends to after it got its lease and before it gives it back.
Faked: a host with GPUs (its `nvidia-smi`, and torch's version, by folders that come first on the paths).
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from oneaxis.config import compose, write_params
from oneaxis.errors import RunError, UserError
from oneaxis.lease import Gpu, choose_gpus, device_lease, lease_folder, physical_cores, ranges

HOLDER = """
import json, os, sys
from oneaxis.config import compose, write_params
from oneaxis.errors import RunError, UserError
from oneaxis.lease import device_lease
try:
    with device_lease(sys.argv[1], gpus=int(sys.argv[2])) as lease:
        shown = {**lease.as_json(), "cuda": os.environ.get("CUDA_VISIBLE_DEVICES")}
        print(json.dumps(shown), flush=True)
        WHILE_HELD
    print("freed", flush=True)
except (RunError, UserError) as error:
    print(f"{error}", file=sys.stderr, flush=True)
    sys.exit(error.exit_code)
"""


class Holder:
    """A process that wants a lease and holds it until told otherwise."""

    def __init__(self, purpose: str, gpus: int, environment: dict[str, str], while_held: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLDER.replace("WHILE_HELD", while_held), purpose, str(gpus)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={**os.environ, **environment},
        )  # fmt: skip

    def lease(self) -> dict[str, Any]:
        """Wait until it holds its lease."""
        assert self.process.stdout is not None
        found: dict[str, Any] = json.loads(self.process.stdout.readline())
        return found

    def waits(self) -> str:
        """Wait until it says that it waits; what it says."""
        assert self.process.stderr is not None
        return self.process.stderr.readline()

    def free(self) -> None:
        self.process.communicate("\n", timeout=20)

    def ended(self) -> tuple[int, str]:
        """Wait for its end: exit code, and its last words."""
        _, errors = self.process.communicate(timeout=20)
        return self.process.returncode, errors.strip()


Hold = Callable[..., Holder]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> Iterator[Path]:
    """The leases of this test alone, here and in what it starts."""
    before = os.environ["ONEAXIS_LEASE_DIR"]
    os.environ["ONEAXIS_LEASE_DIR"] = str(tmp_path / "leases")
    yield tmp_path / "leases"
    os.environ["ONEAXIS_LEASE_DIR"] = before


@pytest.fixture
def hold() -> Iterator[Hold]:
    started: list[Holder] = []

    def start(purpose: str, gpus: int = 0, *, while_held: str = "input()", **environment: str) -> Holder:
        started.append(Holder(purpose, gpus, environment, while_held))
        return started[-1]

    yield start
    for holder in started:
        holder.process.kill()
        holder.process.communicate()


def notes(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*note*"))


def test_a_timing_excludes_and_computing_does_not(hold: Hold) -> None:
    first, second = hold("compute"), hold("compute")
    assert [holder.lease()["exclusive"] for holder in (first, second)] == [False, False]
    timing = hold("timing")
    said = timing.waits()
    assert f"cpu {ranges(physical_cores())}" in said
    for holder in (first, second):
        assert f"process {holder.process.pid} (" in said
    first.free()
    assert timing.process.poll() is None
    second.free()
    lease = timing.lease()
    assert lease["exclusive"]
    assert lease["waited_s"] > 0
    later = hold("compute")
    assert f"held by process {timing.process.pid}" in later.waits()
    timing.free()
    assert later.lease()["waited_s"] > 0


def test_what_is_free_is_had_at_once_and_leaves_nothing_behind(folder: Path) -> None:
    with device_lease("timing") as lease:
        assert (lease.exclusive, lease.waited_s) == (True, 0.0)
        assert lease.as_json() == {"device": f"cpu {ranges(physical_cores())}", "exclusive": True, "waited_s": 0.0}
        assert len(notes(folder)) == 1
    assert notes(folder) == []
    assert "ONEAXIS_LEASE" not in os.environ


def test_kill_9_frees_it_though_a_forked_child_and_a_started_one_live_on(hold: Hold, folder: Path) -> None:
    """A fork shares its parent's locks unless it closes them; an engine is started by exec."""
    body = """
        import subprocess, time
        forked = os.fork()
        if not forked:
            time.sleep(60)
            os._exit(0)
        started = subprocess.Popen(["sleep", "60"])
        print(json.dumps([forked, started.pid]), flush=True)
        input()
"""
    killed = hold("timing", while_held=body)
    killed.lease()
    assert killed.process.stdout is not None
    children = json.loads(killed.process.stdout.readline())
    after = hold("timing")
    after.waits()
    killed.process.kill()
    try:
        assert after.lease()["exclusive"]
        for child in children:
            os.kill(child, 0)
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
    # The dead one's note is swept up by the next that waits.
    third = hold("timing")
    assert f"held by process {after.process.pid}" in third.waits()
    assert not [name for name in notes(folder) if f"-{killed.process.pid}-" in name]


def test_an_interrupt_ends_the_wait(hold: Hold, folder: Path) -> None:
    holder = hold("timing")
    holder.lease()
    waiting = hold("compute")
    waiting.waits()
    waiting.process.send_signal(signal.SIGINT)
    code, said = waiting.ended()
    assert (code, said.splitlines()[-1]) == (-signal.SIGINT, "KeyboardInterrupt")
    assert len(notes(folder)) == 1
    holder.free()
    with device_lease("timing") as lease:
        assert lease.waited_s == 0


def test_a_timing_is_not_starved_by_computing_that_keeps_coming(hold: Hold) -> None:
    """Four that compute take turns, so that there is never a moment without one."""
    script = """
import sys, time
from oneaxis.lease import device_lease
time.sleep(float(sys.argv[1]))
while True:
    with device_lease("compute"):
        time.sleep(0.2)
"""
    computing = [subprocess.Popen([sys.executable, "-c", script, str(0.05 * number)]) for number in range(4)]
    try:
        time.sleep(1)
        timing = hold("timing")
        started = time.monotonic()
        assert timing.lease()["exclusive"]
        assert time.monotonic() - started < 5
    finally:
        for process in computing:
            process.kill()
            process.wait()


def test_what_runs_below_a_holder_uses_its_lease(hold: Hold) -> None:
    with device_lease("timing"):
        with device_lease("compute") as inner:
            assert (inner.exclusive, inner.waited_s) == (True, 0.0)
        below = hold("timing")
        assert below.lease() == {
            "device": f"cpu {ranges(physical_cores())}", "exclusive": True, "waited_s": 0.0, "cuda": None
        }  # fmt: skip
        below.free()
        # Whose lease is not inherited waits.
        apart = hold("timing", ONEAXIS_LEASE="")
        assert f"held by process {os.getpid()}" in apart.waits()
    assert apart.lease()["waited_s"] > 0


def test_a_timing_below_one_that_shares_is_refused_since_it_could_wait_for_ever(hold: Hold) -> None:
    with device_lease("compute"):
        code, said = hold("timing").ended()
    assert code == 1
    assert f"exclusively, below process {os.getpid()}" in said
    assert "\n" not in said


def test_a_lease_that_has_ended_is_inherited_by_nobody() -> None:
    with device_lease("timing"):
        token = os.environ["ONEAXIS_LEASE"]
    os.environ["ONEAXIS_LEASE"] = token
    try:
        with device_lease("timing") as lease:
            assert lease.exclusive
            assert os.environ["ONEAXIS_LEASE"] != token
    finally:
        del os.environ["ONEAXIS_LEASE"]


def test_processes_with_cores_of_their_own_do_not_wait_for_each_other(hold: Hold) -> None:
    cores = physical_cores()[:2]
    pin = "os.sched_setaffinity(0, {%d}); "
    with_core = [
        subprocess.Popen(
            [sys.executable, "-c", f"import os; {pin % core}exec({HOLDER.replace('WHILE_HELD', 'input()')!r})",
             "timing", "0"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for core in cores
    ]  # fmt: skip
    devices = []
    for process in with_core:
        assert process.stdout is not None
        devices.append(json.loads(process.stdout.readline())["device"])
    both = hold("timing")
    said = both.waits()
    for process in with_core:
        assert f"process {process.pid} (" in said
        process.communicate("\n", timeout=20)
    assert devices == [f"cpu {core}" for core in cores]
    assert both.lease()["exclusive"]


def test_a_lock_file_whose_name_was_cleaned_away_is_not_trusted(hold: Hold, folder: Path) -> None:
    """Cleaners of temporary folders remove old files: who then waits on the nameless file must not hold that."""
    mask = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(mask)})
    try:
        _clean_while_one_waits(hold, folder)
    finally:
        os.sched_setaffinity(0, mask)


def _clean_while_one_waits(hold: Hold, folder: Path) -> None:
    holder = hold("timing")
    holder.lease()
    waiting = hold("timing")
    waiting.waits()
    for path in folder.glob("core*"):
        path.unlink()
    third = hold("timing")
    third.lease()
    holder.free()
    time.sleep(0.5)
    third.free()
    assert waiting.lease()["waited_s"] > 0.5


# --- many processes at random --------------------------------------------------------------------------------

WORKER = """
import os, random, sys, time
from oneaxis.lease import device_lease, physical_cores

log, rounds, draw = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND), int(sys.argv[2]), random.Random(sys.argv[3])
mask = sorted(os.sched_getaffinity(0))
for _ in range(rounds):
    os.sched_setaffinity(0, draw.sample(mask, draw.randint(1, len(mask))))
    with device_lease(draw.choice(["timing", "compute"])) as lease:
        cores = ",".join(map(str, physical_cores()))
        os.write(log, f"enter {os.getpid()} {'x' if lease.exclusive else 's'} {cores}\\n".encode())
        time.sleep(draw.random() * 0.02)
        os.write(log, f"leave {os.getpid()}\\n".encode())
"""


def violations(lines: list[str]) -> list[str]:
    """Moments at which one held exclusively what another held: read off the log in its order."""
    held: dict[str, tuple[str, set[str]]] = {}
    found = []
    for line in lines:
        words = line.split()
        if words[0] != "enter":
            held.pop(words[1], None)
            continue
        pid, kind, cores = words[1], words[2], set(words[3].split(","))
        for other, (kind_there, cores_there) in held.items():
            if other != pid and cores & cores_there and "x" in (kind, kind_there):
                found.append(f"{line} beside {other} {kind_there}")
        held[pid] = (kind, cores)
    return found


def test_the_log_is_read_right() -> None:
    assert violations(["enter 1 x 0", "leave 1", "enter 2 s 0", "enter 3 s 0,1", "enter 4 x 2"]) == []
    assert len(violations(["enter 1 s 0", "enter 2 x 0,1"])) == 1
    assert len(violations(["enter 1 x 0,1", "enter 2 s 1"])) == 1
    assert violations(["enter 1 x 0", "killing 1", "enter 2 x 0"]) == []


def test_many_processes_some_of_them_killed_never_share_what_is_exclusive_and_all_end(
    tmp_path: Path, folder: Path
) -> None:
    log, script = tmp_path / "log", tmp_path / "worker.py"
    log.touch()
    script.write_text(WORKER, encoding="utf-8")
    draw = random.Random(4)

    def start(rounds: int) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            [sys.executable, str(script), str(log), str(rounds), str(draw.random())], stderr=subprocess.PIPE
        )

    lasting = [start(25) for _ in range(4)]
    # These hold, wait and pass the turnstile for ever, until they are killed at a random moment.
    killed = [start(10**6) for _ in range(4)]
    with log.open("ab", buffering=0) as writer:
        for _ in range(16):
            time.sleep(0.05 + draw.random() * 0.15)
            victim = killed.pop(0)
            # Written first: from here on its lease may be anybody's.
            writer.write(f"killing {victim.pid}\n".encode())
            victim.kill()
            victim.communicate()
            killed.append(start(10**6))
        for victim in killed:
            writer.write(f"killing {victim.pid}\n".encode())
            victim.kill()
            victim.communicate()
    for worker in lasting:
        _, errors = worker.communicate(timeout=60)
        assert worker.returncode == 0, errors
    lines = log.read_text(encoding="utf-8").splitlines()
    assert violations(lines) == []
    assert sum(line.startswith("enter") for line in lines) >= 4 * 25
    with device_lease("timing") as lease:
        assert lease.waited_s == 0


# --- GPUs ----------------------------------------------------------------------------------------------------

LISTING = """GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-aaaa-1)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-bbbb-2)
  MIG 3g.40gb     Device  0: (UUID: MIG-cccc-3)
GPU 2: NVIDIA H100 80GB HBM3 (UUID: GPU-dddd-4)
"""


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (None, [("0", "GPU-aaaa-1"), ("1", "GPU-bbbb-2"), ("2", "GPU-dddd-4")]),
        ("2,0", [("2", "GPU-dddd-4"), ("0", "GPU-aaaa-1")]),
        ("GPU-bb", [("GPU-bb", "GPU-bbbb-2")]),
        ("MIG-cccc-3", [("MIG-cccc-3", "MIG-cccc-3")]),
        # As CUDA reads it: nothing after an entry that does not exist.
        ("1,7,0", [("1", "GPU-bbbb-2")]),
        ("GPU-", []),
        ("-1", []),
        ("", []),
    ],
)
def test_the_gpus_that_are_visible(setting: str | None, expected: list[tuple[str, str]]) -> None:
    assert choose_gpus(LISTING, setting) == [Gpu(*pair) for pair in expected]


@pytest.fixture
def gpu_host(tmp_path: Path) -> dict[str, str]:
    """The environment of a host with three GPUs and a CUDA build of torch."""
    tools, packages = tmp_path / "tools", tmp_path / "packages"
    (packages / "torch-2.13.0.dist-info").mkdir(parents=True)
    (packages / "torch-2.13.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: torch\nVersion: 2.13.0\n"
    )
    tools.mkdir()
    (tools / "nvidia-smi").write_text(f"#!/bin/sh\ncat <<'END'\n{LISTING}END\n")
    (tools / "nvidia-smi").chmod(0o755)
    source = os.pathsep.join([str(packages), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": source}


def test_each_stage_gets_the_first_free_gpu_and_the_next_waits(hold: Hold, gpu_host: dict[str, str]) -> None:
    holders = [hold(purpose, 1, **gpu_host) for purpose in ("timing",)]
    assert holders[0].lease() == {"device": "gpu 0", "exclusive": True, "waited_s": 0.0, "cuda": "0"}
    both = hold("compute", 2, **gpu_host)
    assert (both.lease()["cuda"], both.process.poll()) == ("1,2", None)
    fourth = hold("timing", 1, **gpu_host)
    said = fourth.waits()
    assert f"process {holders[0].process.pid} (" in said
    assert f"process {both.process.pid} (" in said
    both.free()
    assert fourth.lease()["cuda"] == "1"


def test_only_gpus_that_the_user_left_visible_are_taken(hold: Hold, gpu_host: dict[str, str]) -> None:
    first = hold("timing", 1, **gpu_host, CUDA_VISIBLE_DEVICES="2,1")
    assert first.lease()["cuda"] == "2"
    second = hold("timing", 1, **gpu_host, CUDA_VISIBLE_DEVICES="GPU-dddd-4")
    assert f"held by process {first.process.pid}" in second.waits()
    third = hold("timing", 1, **gpu_host, CUDA_VISIBLE_DEVICES="2,1")
    assert third.lease()["cuda"] == "1"
    first.free()
    assert second.lease()["cuda"] == "GPU-dddd-4"
    none = hold("timing", 1, **gpu_host, CUDA_VISIBLE_DEVICES="")
    assert none.lease()["device"].startswith("cpu ")
    code, said = hold("timing", 4, **gpu_host).ended()
    assert (code, said) == (2, "4 GPUs are asked for (serve.engine_args); allowed: at most 3, those that this process "
                               "may use (0, 1, 2)")  # fmt: skip


def test_what_runs_below_a_holder_of_a_gpu_has_that_one(hold: Hold, gpu_host: dict[str, str]) -> None:
    below = f"[sys.executable, '-c', {HOLDER.replace('WHILE_HELD', 'pass')!r}, 'timing', '1']"
    above = hold(
        "timing", 1, while_held=f"import subprocess; subprocess.run({below})", **gpu_host, CUDA_VISIBLE_DEVICES="1,0"
    )
    assert above.lease()["cuda"] == "1"
    assert above.lease() == {"device": "gpu 1", "exclusive": True, "waited_s": 0.0, "cuda": "1"}


# --- the folder ----------------------------------------------------------------------------------------------


def test_the_folder_is_everybodys_and_its_files_can_be_locked_by_all(folder: Path) -> None:
    with device_lease("compute"):
        assert folder.stat().st_mode & 0o7777 == 0o1777
        assert {path.stat().st_mode & 0o777 for path in folder.glob("core*")} == {0o666}


@pytest.mark.parametrize("make", [Path.write_text, Path.mkdir, os.mkfifo, Path.symlink_to])
def test_a_lock_file_that_is_none_is_refused_in_one_line(folder: Path, make: Any) -> None:
    lease_folder(os.environ)
    planted = folder / f"core{physical_cores()[0]:05d}"
    target = folder / "target"
    make(planted, *{"write_text": ["x"], "symlink_to": [target]}.get(make.__name__, []))
    if make is Path.write_text:
        with device_lease("timing"):
            assert planted.read_text() == "x"
        return
    with pytest.raises(RunError, match="set ONEAXIS_LEASE_DIR to a folder that every user"), device_lease("timing"):
        pass
    assert not target.exists()


def test_a_folder_that_cannot_be_used_is_said_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"no/leases: cannot hold the leases .* \(No such file or directory\)"):
        lease_folder({"ONEAXIS_LEASE_DIR": str(tmp_path / "no" / "leases")})
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="not a folder; allowed: a folder that every user can write to"):
        lease_folder({"ONEAXIS_LEASE_DIR": str(tmp_path / "file")})


# --- a stage -------------------------------------------------------------------------------------------------

STAGE = """
import time
from oneaxis.stage import run

def work(stage):
    lease = stage.take_device("timing")
    time.sleep(0.2)
    return {"prepare_data/rows": 3.0}

if __name__ == "__main__":
    run("prepare_data", work)
"""


def start_stage(root: Path, here: Path) -> "subprocess.Popen[str]":
    (here / "data").mkdir()
    (here / "data" / "SOURCES.md").touch()
    write_params(compose(root / "conf"), here)
    (here / "stage.py").write_text(STAGE, encoding="utf-8")
    return subprocess.Popen(
        [sys.executable, "stage.py"],
        cwd=here,
        env={**os.environ, "ONEAXIS_LEASE": ""},
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_stage_records_its_lease_and_does_not_count_the_wait(root: Path, tmp_path: Path) -> None:
    with device_lease("compute"):
        stage = start_stage(root, tmp_path)
        assert stage.stderr is not None
        assert f"held by process {os.getpid()}" in stage.stderr.readline()
        time.sleep(3)
    stage.communicate(timeout=60)
    assert stage.returncode == 0
    provenance = json.loads((tmp_path / "artifacts" / "prepare_data.provenance.json").read_text(encoding="utf-8"))
    assert provenance["lease"] == {
        "device": f"cpu {ranges(physical_cores())}", "exclusive": True, "waited_s": provenance["waited_s"]
    }  # fmt: skip
    assert provenance["waited_s"] >= 3
    assert 0.2 <= provenance["duration_s"] < 3


def test_a_stage_that_waits_can_be_interrupted(root: Path, tmp_path: Path) -> None:
    with device_lease("compute"):
        stage = start_stage(root, tmp_path)
        assert stage.stderr is not None
        stage.stderr.readline()
        stage.send_signal(signal.SIGTERM)
        _, errors = stage.communicate(timeout=20)
    assert (stage.returncode, errors.splitlines()[-1]) == (
        130, "oneaxis: prepare_data: interrupted; no artifact was written, and `dvc repro` runs this stage again"
    )  # fmt: skip
    assert not list((tmp_path / "artifacts").iterdir())
