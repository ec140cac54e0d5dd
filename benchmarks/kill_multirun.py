"""Kill a small multirun with SIGKILL at random moments, resume it each time, and compare what comes out.

    python benchmarks/kill_multirun.py --kills 50 --out kills.md

Each round starts in a clone of what is on disk, with a cache that holds the stages up to `calibrate` only. A multirun
of two points (`profile=tiny`: a random model on the real engine) quantises, and in every fourth round serves too. One
process of its tree is chosen at random (the multirun itself, a job, DVC, the stage, the engine) and killed at a random
moment. Then: no process of the tree may live on; `--resume` has to end in exit 0 with the metrics of an undisturbed run
(timings left out) and leave no process, no held lock and no half artifact. One row of the table is one kill.
"""

import argparse
import fcntl
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.e2e.clone import clone  # noqa: E402

UPSTREAM = ["profile=tiny", "train=none", "experiment.targets=[calibrate]"]
COMMAND = ["-m", "profile=tiny", "train=none", "quantize.smooth.alpha=0.5,0.8"]
TARGETS = ["quantize", "serve"]
SERVE_EVERY = 4
TIMED = ("serve/cold_start_s",)


def forget(project: Path, cache: Path) -> None:
    """Back to the beginning, with what `cache` holds."""
    for name in ("multirun", "artifacts", ".oneaxis", "mlflow.db", "mlartifacts", ".dvc/cache", ".dvc/tmp", "dvc.lock"):
        path = project / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    shutil.copytree(cache, project / ".dvc" / "cache")
    subprocess.run(["git", "-C", str(project), "worktree", "prune"], check=True)
    subprocess.run(["git", "-C", str(project), "checkout", "-q", "--", "."], check=True)


def start(project: Path, arguments: Sequence[str]) -> "subprocess.Popen[bytes]":
    """`oneaxis run`, in a session of its own, its words in `run.log`."""
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(project / "src"),
    }
    with (project.parent / "run.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "oneaxis.cli", "run", *arguments],
            cwd=project, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip


def finish(project: Path, arguments: Sequence[str]) -> float:
    """Run to the end, expect success; seconds."""
    began = time.monotonic()
    code = start(project, arguments).wait(timeout=900)
    assert code == 0, (project.parent / "run.log").read_text(encoding="utf-8", errors="replace")[-3000:]
    return time.monotonic() - began


def belonging(project: Path) -> list[psutil.Process]:
    """Living processes that work in the project or were told of it."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        words = " ".join(process.info["cmdline"] or [])
        try:
            inside = Path(process.cwd()).is_relative_to(project)
        except (psutil.Error, OSError):
            inside = False
        if process.info["status"] != psutil.STATUS_ZOMBIE and (inside or str(project) in words):
            found.append(process)
    return found


def called(process: psutil.Process, top: int) -> str:
    """What a process is, in a word or two."""
    try:
        words = process.cmdline()
    except psutil.Error:
        return "gone"
    if process.pid == top:
        return "multirun"
    joined = " ".join(words)
    for word in words:
        if word.startswith("stages/"):
            return Path(word).stem
    if "guard.py" in joined:
        return "engine's keeper"
    if "vllm" in joined or "launch.py" in joined:
        return "engine"
    return "job" if "oneaxis" in joined else Path(words[0]).name if words else "?"


def outcome(project: Path) -> dict[str, dict[str, float]]:
    """Metrics of the only multirun by point, timings left out."""
    (folder,) = [path.parent for path in (project / "multirun").glob("*/plan.json")]
    found = {}
    for job in sorted(folder.glob("points/*/r0")):
        assert json.loads((job / "status.json").read_text(encoding="utf-8"))["state"] == "done", job
        merged: dict[str, float] = {}
        for path in sorted((job / "artifacts").glob("*.metrics.json")):
            merged.update(json.loads(path.read_text(encoding="utf-8")))
        found[job.parent.name] = {name: value for name, value in merged.items() if name not in TIMED}
    return found


def left(project: Path) -> list[str]:
    """Half artifacts, and locks that someone holds."""
    problems = [str(path.relative_to(project)) for path in project.glob("**/.tmp-*") if ".git" not in path.parts]
    for path in project.glob(".oneaxis/**/*.lock"):
        with path.open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                problems.append(f"{path.relative_to(project)} is held")
    for path in project.glob(".git/**/index.lock"):
        problems.append(str(path.relative_to(project)))
    for artifacts in project.glob(".oneaxis/slots/*/artifacts"):
        for folder in artifacts.iterdir():
            if folder.is_dir() and not (folder / "manifest.json").is_file():
                problems.append(f"{folder.relative_to(project)} has no manifest")
    return problems


def gone(project: Path, seconds: float) -> float | None:
    """Seconds until no process of the project lives; None when some live on."""
    started = time.monotonic()
    while time.monotonic() - started < seconds:
        if not belonging(project):
            return time.monotonic() - started
        time.sleep(0.1)
    return None


@dataclass(frozen=True)
class Undisturbed:
    """What a multirun gives, and how long it takes, when nothing is killed."""

    seconds: float
    metrics: dict[str, dict[str, float]]


def command_for(target: str) -> list[str]:
    """The multirun's arguments."""
    return [*COMMAND, f"experiment.targets=[{target}]"]


def one_kill(project: Path, cache: Path, target: str, undisturbed: "Undisturbed", draw: random.Random) -> list[str]:
    """A round; returns its row. Raises AssertionError with the reason when anything is not as it should be."""
    forget(project, cache)
    (project.parent / "run.log").unlink(missing_ok=True)
    command = command_for(target)
    top = start(project, command)
    moment = draw.uniform(0.2, undisturbed.seconds)
    time.sleep(moment)
    alive = belonging(project)
    if not alive or top.poll() is not None:
        # This time it was faster than undisturbed: no kill, so the round does not count.
        return one_kill(project, cache, target, replace(undisturbed, seconds=moment), draw)
    victim = draw.choice(alive)
    kind, at_work = called(victim, top.pid), [called(process, top.pid) for process in alive]
    stage = next((name for name in at_work if (project / "stages" / f"{name}.py").is_file()), "between stages")
    victim.send_signal(signal.SIGKILL)
    first = top.wait(timeout=600)
    cleared = gone(project, 30)
    assert cleared is not None, f"alive after the kill of {kind}: {[called(p, top.pid) for p in belonging(project)]}"
    plans = sorted((project / "multirun").glob("*/plan.json"))
    began = time.monotonic()
    again = start(project, ["-m", "--resume", plans[0].parent.name] if plans else command)
    code = again.wait(timeout=900)
    resumed = time.monotonic() - began
    assert code == 0, f"the resume ended in {code}: " + (project.parent / "run.log").read_text(errors="replace")[-1500:]
    assert outcome(project) == undisturbed.metrics, "other metrics"
    assert gone(project, 10) is not None, "processes left after the resume"
    problems = left(project)
    assert not problems, problems
    return [f"{moment:.1f}", kind, stage, str(first), f"{cleared:.1f}", f"{resumed:.0f}", "same"]


def main() -> int:
    """Run the rounds, print and write the table; 1 when a round failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("kills.md"))
    options = parser.parse_args()
    draw = random.Random(options.seed)
    rows, failures = [], 0
    head = ["kill", "after s", "killed", "at work", "exit", "all gone after s", "resume s", "metrics"]
    with tempfile.TemporaryDirectory(prefix="oneaxis-kill-") as folder:
        project = clone(ROOT, Path(folder) / "project")
        cache = Path(folder) / "cache"
        finish(project, UPSTREAM)
        shutil.copytree(project / ".dvc" / "cache", cache)
        undisturbed = {}
        for target in TARGETS:
            forget(project, cache)
            seconds = finish(project, command_for(target))
            undisturbed[target] = Undisturbed(seconds, outcome(project))
            print(f"undisturbed, to {target}: {seconds:.0f} s", flush=True)
        for number in range(1, options.kills + 1):
            try:
                target = TARGETS[number % SERVE_EVERY == 0]
                row = one_kill(project, cache, target, undisturbed[target], draw)
            except (AssertionError, subprocess.TimeoutExpired) as error:
                failures += 1
                row = ["", "", "", "", "", "", f"FAILED: {error}"]
                for process in belonging(project):
                    process.kill()
            rows.append([str(number), *row])
            print("| " + " | ".join(rows[-1]) + " |", flush=True)
            lines = ["| " + " | ".join(cells) + " |" for cells in [head, ["---"] * len(head), *rows]]
            options.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{options.kills - failures} of {options.kills} rounds ended in the same metrics with nothing left behind")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
