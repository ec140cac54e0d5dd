"""Ray on a local cluster of two nodes that do not share the project's folder. Only the stages' own work is faked."""

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from oneaxis.multirun.promote import promote
from oneaxis.multirun.record import Status, job_folder, read_plan, read_status
from tests.multirun.conftest import environment, git, ran, sh

pytestmark = pytest.mark.slow
CLUSTER = Path(__file__).with_name("cluster.py")
SWEEP = "quantize.smooth.alpha=0.5,0.7"


@pytest.fixture
def cluster(project: Path) -> Iterator["subprocess.Popen[str]"]:
    """Nodes `a` and `b`, one job each at a time; the project has a DVC remote that both reach."""
    (project.parent / "remote").mkdir()
    sh(project, "dvc", "remote", "add", "-q", "-d", "shared", "../../remote")
    git(project, "commit", "-qam", "remote")
    process = subprocess.Popen(
        [sys.executable, str(CLUSTER), str(project.parent / "nodes")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=environment(project) | {"RAY_USAGE_STATS_ENABLED": "0"},
    )  # fmt: skip
    assert process.stdin
    assert process.stdout
    (project.parent / "address").write_text(process.stdout.readline().strip(), encoding="utf-8")
    yield process
    process.stdin.close()
    process.stdout.close()
    assert process.wait(timeout=60) == 0


def start(project: Path, *words: str, **more: str) -> "subprocess.Popen[str]":
    """`oneaxis run -m WORDS` as a user starts it."""
    return subprocess.Popen(
        [sys.executable, "-m", "oneaxis.cli", "run", "-m", *words], cwd=project, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment(project) | more,
    )  # fmt: skip


def on_ray(project: Path) -> Sequence[str]:
    address = (project.parent / "address").read_text(encoding="utf-8")
    return ["hydra/launcher=ray", f"hydra.launcher.ray.init.address={address}"]


def newest(project: Path) -> Path:
    return max((project / "multirun").iterdir(), key=lambda folder: (folder / "plan.json").stat().st_mtime)


def statuses(folder: Path) -> list[Status | None]:
    return [read_status(job_folder(folder, job)) for job in read_plan(folder).jobs]


def node(status: Status | None) -> str:
    """The `a` of `host:/folder/nodes/a/project-1234`."""
    assert status
    return Path(status.node.partition(":")[2]).parent.name


def test_two_nodes_each_with_its_own_cache(project: Path, cluster: "subprocess.Popen[str]") -> None:
    """Records come home; what one node computed is restored on the other; a node that dies costs its job only."""
    first = start(project, SWEEP, *on_ray(project), STAGE_SECONDS="1")
    words = first.communicate(timeout=200)[0]
    assert first.returncode == 0, words
    folder = newest(project)
    assert sorted(node(status) for status in statuses(folder)) == ["a", "b"], words
    caches = sorted(path for path in (project.parent / "nodes").glob("*/*/.dvc/cache") if path.is_dir())
    assert [cache.parents[2].name for cache in caches] == ["a", "b"]
    assert not (project / ".dvc" / "cache" / "files").exists()
    for job, value in zip(read_plan(folder).jobs, ("0.5", "0.7"), strict=True):
        result = job_folder(folder, job) / "artifacts" / "quantize" / "result.txt"
        assert result.read_text(encoding="utf-8") == f"quantize {value}\n"
        commit = git(project, "rev-parse", f"refs/oneaxis/{folder.name}/{job.point}-r0")
        assert f'"quantize/value": {value}' in git(project, "show", f"{commit}:artifacts/quantize.metrics.json")
    assert ran(project).count("quantize") == 2

    # Both on node b, which computed one of them: it gets the other through the remote.
    second = start(project, SWEEP, *on_ray(project), "+hydra.launcher.ray.remote.resources.b=0.1")
    words = second.communicate(timeout=200)[0]
    assert second.returncode == 0, words
    again = statuses(newest(project))
    assert [node(status) for status in again] == ["b", "b"]
    assert [list(status.ran) for status in again if status] == [[], []], words
    assert ran(project).count("quantize") == 2
    assert "in the workspace" in promote(project, newest(project).name, read_plan(folder).points[1].name)
    assert (project / "artifacts" / "quantize" / "result.txt").read_text(encoding="utf-8") == "quantize 0.7\n"

    # Node b dies while a job of its own holds at quantize: the job fails or moves, the rest goes on, resume ends it.
    hold = project.parent / "hold-quantize"
    hold.touch()
    third = start(project, "quantize.smooth.alpha=0.2,0.3", *on_ray(project))
    deadline = time.monotonic() + 100
    while ran(project).count("quantize") < 4 and time.monotonic() < deadline:
        time.sleep(0.2)
    assert ran(project).count("quantize") == 4
    assert cluster.stdin
    assert cluster.stdout
    cluster.stdin.write("b\n")
    cluster.stdin.flush()
    assert cluster.stdout.readline().strip() == "killed"
    hold.unlink()
    words = third.communicate(timeout=200)[0]
    states = [status.state if status else "none" for status in statuses(newest(project))]
    assert states == ["done", "done"], words
    assert {node(status) for status in statuses(newest(project))} == {"a"}
