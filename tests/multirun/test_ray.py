"""Ray on a local cluster of two nodes that do not share the project's folder. Only the stages' own work is faked."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from oneaxis.multirun.promote import promote
from oneaxis.multirun.record import Status, job_folder, read_plan, read_status, write_plan
from oneaxis.multirun.snapshot import make_snapshot
from tests.multirun.conftest import environment, git, make_plan, ran, sh

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
EXECUTE = """
import sys
from pathlib import Path
from oneaxis.multirun.record import read_plan
from oneaxis.multirun.run import execute

root, name = Path(sys.argv[1]), sys.argv[2]
sys.exit(execute(root, read_plan(root / "multirun" / name)))
"""


@pytest.fixture
def cluster(project: Path) -> Iterator["subprocess.Popen[str]"]:
    """Two nodes, `a` and `b`, of one job each; the project has a DVC remote that both reach."""
    remote = project.parent / "remote"
    remote.mkdir()
    sh(project, "dvc", "remote", "add", "-q", "-d", "shared", "../../remote")
    git(project, "commit", "-qam", "remote")
    process = subprocess.Popen([sys.executable, str(HERE / "cluster.py"), str(project.parent / "nodes")],
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                               env=environment(project) | {"RAY_USAGE_STATS_ENABLED": "0"})  # fmt: skip
    assert process.stdin
    assert process.stdout
    address = process.stdout.readline().strip()
    (project.parent / "address").write_text(address, encoding="utf-8")
    yield process
    process.stdin.close()
    process.stdout.close()
    assert process.wait(timeout=60) == 0


def start(project: Path, name: str, *launcher: str, **more: str) -> "subprocess.Popen[str]":
    """A multirun of two values of the axis, as a process of its own."""
    address = (project.parent / "address").read_text(encoding="utf-8")
    plan = replace(make_plan(make_snapshot(project), [0.5, 0.7], name=name),
                   launcher=["hydra/launcher=ray", f"hydra.launcher.ray.init.address={address}", *launcher])  # fmt: skip
    folder = project / "multirun" / name
    folder.mkdir(parents=True)
    write_plan(folder, plan)
    return subprocess.Popen([sys.executable, "-c", EXECUTE, str(project), name], text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment(project) | more)  # fmt: skip


def statuses(project: Path, name: str) -> list[Status | None]:
    folder = project / "multirun" / name
    return [read_status(job_folder(folder, job)) for job in read_plan(folder).jobs]


def test_two_nodes_each_with_its_own_cache(project: Path, cluster: "subprocess.Popen[str]") -> None:
    """Records come home; what one node computed the other restores through the remote."""
    first = start(project, "m1", STAGE_SECONDS="1")
    words = first.communicate(timeout=120)[0]
    assert first.returncode == 0, words
    done = [status for status in statuses(project, "m1") if status and status.state == "done"]
    assert len({status.node for status in done}) == 2, words
    caches = sorted(path for path in (project.parent / "nodes").glob("*/*/.dvc/cache") if path.is_dir())
    assert [cache.parents[2].name for cache in caches] == ["a", "b"]
    assert not (project / ".dvc" / "cache" / "files").exists()
    for value in ("0.5", "0.7"):
        record = project / "multirun" / "m1" / "points" / f"alpha={value}" / "r0"
        assert (record / "artifacts" / "quantize" / "result.txt").read_text(encoding="utf-8") == f"quantize {value}\n"
        ref = git(project, "rev-parse", f"refs/oneaxis/m1/alpha={value}-r0")
        assert f'"quantize/value": {value}' in git(project, "show", f"{ref}:artifacts/quantize.metrics.json")
    assert ran(project).count("quantize") == 2

    # Both values on node b: what only node a computed comes to it through the remote.
    second = start(project, "m2", "+hydra.launcher.ray.remote.resources.b=0.1")
    words = second.communicate(timeout=120)[0]
    assert second.returncode == 0, words
    after = statuses(project, "m2")
    assert [list(status.ran) for status in after if status] == [[], []], words
    assert {status.node.partition(":")[2].split("/")[-2] for status in after if status} == {"b"}
    assert ran(project).count("quantize") == 2
    # And the workspace gets it from there too.
    assert "in the workspace" in promote(project, "m2", "alpha=0.7")
    assert (project / "artifacts" / "quantize" / "result.txt").read_text(encoding="utf-8") == "quantize 0.7\n"
