"""Cleaning removes what nobody holds, counts it, and keeps what is used."""

from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from oneaxis.errors import UserError
from oneaxis.multirun.clean import clean, size_bytes
from oneaxis.multirun.job import run_job
from oneaxis.multirun.promote import promote
from oneaxis.multirun.run import hold
from oneaxis.multirun.slots import take_slot
from oneaxis.multirun.snapshot import refs

from .conftest import git, ran, sh
from .test_job import planned, shell

pytestmark = [
    pytest.mark.usefixtures("shell"),
    # Of the library in which DVC keeps the paths of outputs.
    pytest.mark.filterwarnings("ignore:_NoneStep.value:DeprecationWarning"),
]
__all__ = ["shell"]


def test_idle_slots_stale_locks_and_half_records_go_and_held_slots_stay(project: Path) -> None:
    plan = planned(project, 0.5)
    run_job(project, plan.id, 0)
    half = project / "multirun" / plan.id / "points" / "alpha=0.5" / ".tmp-r0-1"
    half.mkdir()
    with take_slot(project, plan.snapshot, name="1"):
        said = clean(project, [], cache=False)
        assert said.startswith("1 slots removed, ")
        assert said.endswith("1 held by jobs at work stay")
        assert (project / ".oneaxis" / "slots" / "1" / "dvc.yaml").is_file()
    assert not (project / ".oneaxis" / "slots" / "0").exists()
    assert list((project / ".oneaxis" / "flight").iterdir()) == []
    assert not half.exists()
    assert clean(project, [], cache=False).startswith("1 slots removed")
    assert len(git(project, "worktree", "list").splitlines()) == 1
    # What is kept is enough to go on.
    assert list(run_job(project, plan.id, 0).ran) == []


def test_a_multiruns_record_and_refs_go_by_its_id_unless_it_runs(project: Path) -> None:
    for name in ("m1", "m2"):
        run_job(project, planned(project, 0.5, name=name).id, 0)
    with hold(project, "m1"), pytest.raises(UserError, match="multirun m1: is running now"):
        clean(project, ["m1"], cache=False)
    assert "m1: record and refs removed" in clean(project, ["m1"], cache=False)
    assert not (project / "multirun" / "m1").exists()
    assert refs(project, "m1") == []
    assert refs(project, "m2")
    with pytest.raises(UserError, match="m1: no such multirun; allowed: m2"):
        clean(project, ["m1"], cache=False)


def test_the_cache_keeps_what_the_workspace_and_the_remaining_multiruns_use(project: Path) -> None:
    sh(project, "dvc", "repro", "-q")
    for name, alpha in (("gone", 0.7), ("kept", 0.8)):
        run_job(project, planned(project, alpha, name=name).id, 0)
    computed = ran(project)
    (project / "artifacts" / "quantize").rename(project.parent / "aside")
    said = clean(project, ["gone"], cache=True)
    assert "kept what the workspace and 1 jobs of multiruns use" in said
    sh(project, "dvc", "checkout", "-q")
    assert (project / "artifacts" / "quantize" / "result.txt").read_text(encoding="utf-8") == "quantize 0.5\n"
    # The kept point is restored, its metrics too; the removed one is computed once more.
    again = planned(project, 0.8, 0.7, name="again")
    assert list(run_job(project, again.id, 0).ran) == []
    assert list(run_job(project, again.id, 1).ran) == ["quantize"]
    assert ran(project) == [*computed, "quantize"]
    promote(project, "kept", "alpha=0.8")
    assert sh(project, "dvc", "repro").endswith("Data and pipelines are up to date.")


def test_objects_that_are_gone_already_hold_nothing_up(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A lost folder listing of one multirun must neither stop the cleaning nor cost another what it has."""
    sh(project, "dvc", "repro", "-q")
    for name, alpha in (("torn", 0.7), ("kept", 0.8)):
        run_job(project, planned(project, alpha, name=name).id, 0)
    lock = yaml_of(project / "multirun" / "torn" / "points" / "alpha=0.7" / "r0" / "dvc.lock")
    out = next(out for out in lock["stages"]["quantize"]["outs"] if out["md5"].endswith(".dir"))
    (project / ".dvc" / "cache" / "files" / "md5" / out["md5"][:2] / out["md5"][2:]).unlink()
    capfd.readouterr()
    assert "kept what the workspace and 2 jobs of multiruns use" in clean(project, [], cache=True)
    assert capfd.readouterr().err == ""
    promote(project, "kept", "alpha=0.8")
    assert (project / "artifacts" / "quantize" / "result.txt").read_text(encoding="utf-8") == "quantize 0.8\n"


def yaml_of(path: Path) -> Any:
    return YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8"))


def test_hard_links_count_once(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 8192)
    one = size_bytes(tmp_path)
    assert one >= 8192
    (tmp_path / "b").hardlink_to(tmp_path / "a")
    assert size_bytes(tmp_path) == one
