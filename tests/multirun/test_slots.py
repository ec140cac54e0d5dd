"""A slot holds the snapshot whatever was there before, shares the cache, and one job at a time has it."""

import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from oneaxis.errors import UserError
from oneaxis.multirun.flight import stage_order
from oneaxis.multirun.slots import bring_files, cache_dir, free_slots, limit, remove, take_slot
from oneaxis.multirun.snapshot import make_snapshot

from .conftest import environment, git, sh

# Of the library in which DVC keeps the paths of outputs.
pytestmark = pytest.mark.filterwarnings("ignore:_NoneStep.value:DeprecationWarning")


def test_a_slot_is_the_snapshot_and_keeps_artifacts_and_what_dvc_knows_of_them(project: Path) -> None:
    first = make_snapshot(project)
    (project / "stages" / "new.py").write_text("1\n", encoding="utf-8")
    second = make_snapshot(project)
    with take_slot(project, second) as slot:
        assert slot.tree == project / ".oneaxis" / "slots" / "0"
        assert (slot.root / "stages" / "new.py").is_file()
        (slot.root / "artifacts").mkdir()
        (slot.root / "artifacts" / "kept").touch()
        (slot.root / "dvc.lock").write_text("schema: '2.0'\nstages: {}\n", encoding="utf-8")
        (slot.root / "stray.txt").touch()
        (slot.root / ".oneaxis" / "scratch" / "train_dpo").mkdir(parents=True)
        (slot.root / ".oneaxis" / "failure.json").touch()
        (slot.root / "dvc.yaml").write_text("broken", encoding="utf-8")
    with take_slot(project, first) as slot:
        assert not (slot.root / "stages" / "new.py").exists()
        assert not (slot.root / "stray.txt").exists()
        assert "fetch_model" in (slot.root / "dvc.yaml").read_text(encoding="utf-8")
        assert (slot.root / "artifacts" / "kept").exists()
        assert (slot.root / "dvc.lock").is_file()
        assert (slot.root / ".oneaxis" / "scratch" / "train_dpo").is_dir()
        assert not (slot.root / ".oneaxis" / "failure.json").exists()
    assert git(project, "status", "--porcelain") == "?? stages/new.py"


@pytest.mark.parametrize(
    "damage", ["no .git", "half checked out", "index.lock", "half dvc.lock", "gone", "unregistered"]
)
def test_a_slot_that_a_kill_broke_is_repaired_or_made_anew(project: Path, damage: str) -> None:
    snapshot = make_snapshot(project)
    with take_slot(project, snapshot) as slot:
        tree = slot.tree
        (tree / ".dvc" / "tmp").mkdir(exist_ok=True)
    administration = Path(git(tree, "rev-parse", "--absolute-git-dir"))
    match damage:
        case "no .git":
            (tree / ".git").unlink()
        case "half checked out":
            (tree / "dvc.yaml").unlink()
            shutil.rmtree(tree / "conf")
            (administration / "HEAD.lock").touch()
        case "index.lock":
            (administration / "index.lock").touch()
            (tree / ".dvc" / "tmp" / "rwlock").write_text('{"write": {"/x', encoding="utf-8")
        case "half dvc.lock":
            (tree / "dvc.lock").write_text("schema: '2.0'\nstages:\n  quantize:\n    cmd: [", encoding="utf-8")
        case "gone":
            shutil.rmtree(tree)
        case "unregistered":
            shutil.rmtree(administration)
    with take_slot(project, snapshot) as slot:
        assert slot.tree == tree
        assert git(slot.tree, "status", "--porcelain") == ""
        assert git(slot.tree, "rev-parse", "HEAD") == snapshot
        assert (slot.root / "conf" / "config.yaml").is_file()
        assert not (slot.root / "dvc.lock").exists()
        assert not (slot.root / ".dvc" / "tmp" / "rwlock").exists()


def test_jobs_wait_for_a_free_slot_and_a_dead_holders_is_free(project: Path) -> None:
    snapshot = make_snapshot(project)
    hold = (
        "import sys, time; from pathlib import Path; from oneaxis.multirun.slots import take_slot\n"
        "with take_slot(Path(sys.argv[1]), sys.argv[2]): print('held', flush=True); time.sleep(600)"
    )
    variables = {**environment(project), "ONEAXIS_SLOTS": "1"}
    holder = subprocess.Popen([sys.executable, "-c", hold, str(project), snapshot], stdout=subprocess.PIPE, text=True,
                              env=variables)  # fmt: skip
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with free_slots(project) as free:
        assert free == []
    killer = threading.Timer(1.0, holder.kill)
    killer.start()
    with take_slot(project, snapshot, name="0") as slot:
        assert slot.waited_s > 0.5
    holder.communicate()


def test_the_number_of_slots_is_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONEAXIS_SLOTS", "3")
    assert limit() == 3
    monkeypatch.setenv("ONEAXIS_SLOTS", "none")
    with pytest.raises(UserError, match="ONEAXIS_SLOTS=none: allowed"):
        limit()


def test_a_slot_has_the_projects_dvc_settings_with_their_paths_and_its_cache(project: Path, tmp_path: Path) -> None:
    sh(project, "dvc", "remote", "add", "-q", "-d", "near", "../near")
    sh(project, "dvc", "remote", "add", "-q", "--local", "far", "s3://bucket/x")
    sh(project, "dvc", "remote", "modify", "--local", "far", "secret_access_key", "s3cret=#,x")
    sh(project, "dvc", "cache", "dir", "--local", str(tmp_path / "elsewhere"))
    assert cache_dir(project) == tmp_path / "elsewhere"
    with take_slot(project, make_snapshot(project)) as slot:
        assert cache_dir(slot.root) == tmp_path / "elsewhere"
        assert sh(slot.root, "dvc", "config", "cache.type") == "reflink,copy"
        assert sh(slot.root, "dvc", "config", "remote.far.secret_access_key") == "s3cret=#,x"
        listed = sh(slot.root, "dvc", "remote", "list")
        assert str(project.parent / "near") in listed
        assert (slot.root / ".dvc" / "config.local").stat().st_mode & 0o077 == 0
        assert git(slot.root, "status", "--porcelain") == ""


def test_a_project_whose_path_is_not_ascii_has_slots_on_its_cache(template: Path, tmp_path: Path) -> None:
    here = tmp_path / "größe und mehr"
    shutil.copytree(template, here)
    with take_slot(here, make_snapshot(here)) as slot:
        assert cache_dir(slot.root) == here / ".dvc" / "cache"


def order_of(root: Path) -> list[object]:
    from dvc.repo import Repo

    with Repo(str(root)) as repo:
        return list(stage_order(repo, []))


def test_ignored_files_that_stages_read_come_along_and_follow_changes(project: Path) -> None:
    yaml = (project / "dvc.yaml").read_text(encoding="utf-8")
    with_data = yaml.replace("data/SOURCES.md]", "private/mine.jsonl, private/folder]")
    (project / "dvc.yaml").write_text(with_data, encoding="utf-8")
    (project / "private" / "folder" / "deep").mkdir(parents=True)
    (project / "private" / "mine.jsonl").write_text("first", encoding="utf-8")
    (project / "private" / "folder" / "deep" / "a").write_text("a", encoding="utf-8")
    snapshot = make_snapshot(project)
    with take_slot(project, snapshot) as slot:
        bring_files(project, slot.root, order_of(slot.root))
        assert (slot.root / "private" / "mine.jsonl").read_text(encoding="utf-8") == "first"
        assert (slot.root / "private" / "folder" / "deep" / "a").is_file()
    (project / "private" / "mine.jsonl").unlink()
    (project / "private" / "mine.jsonl").write_text("second", encoding="utf-8")
    (project / "private" / "folder" / "deep" / "a").unlink()
    with take_slot(project, snapshot) as slot:
        bring_files(project, slot.root, order_of(slot.root))
        assert (slot.root / "private" / "mine.jsonl").read_text(encoding="utf-8") == "second"
        assert not (slot.root / "private" / "folder" / "deep" / "a").exists()


def test_data_that_dvc_tracks_comes_from_the_cache_when_the_workspace_has_it_not(project: Path) -> None:
    (project / "data" / "big.txt").write_text("big", encoding="utf-8")
    sh(project, "dvc", "add", "-q", "data/big.txt")
    (project / "data" / "big.txt").unlink()
    yaml = (project / "dvc.yaml").read_text(encoding="utf-8")
    (project / "dvc.yaml").write_text(yaml.replace("data/SOURCES.md", "data/big.txt"), encoding="utf-8")
    with take_slot(project, make_snapshot(project)) as slot:
        bring_files(project, slot.root, order_of(slot.root))
        assert (slot.root / "data" / "big.txt").read_text(encoding="utf-8") == "big"


def test_a_path_that_leaves_the_project_is_refused(project: Path) -> None:
    yaml = (project / "dvc.yaml").read_text(encoding="utf-8")
    (project / "dvc.yaml").write_text(yaml.replace("data/SOURCES.md", "../mine.jsonl"), encoding="utf-8")
    with take_slot(project, make_snapshot(project)) as slot:
        with pytest.raises(UserError, match=r"\.\./mine.jsonl: leaves the project, and fetch_model reads it"):
            bring_files(project, slot.root, order_of(slot.root))


def test_what_a_killed_job_left_at_work_is_ended_before_its_slot_is_used_again(project: Path) -> None:
    snapshot = make_snapshot(project)
    with take_slot(project, snapshot) as slot:
        tree = slot.tree
    left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"],
                            env={**os.environ, "DVC_ROOT": str(tree)})  # fmt: skip
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"],
                             env={**os.environ, "DVC_ROOT": str(project)})  # fmt: skip
    time.sleep(0.3)
    try:
        with take_slot(project, snapshot):
            assert left.poll() is not None or psutil.Process(left.pid).status() == psutil.STATUS_ZOMBIE
            assert other.poll() is None
    finally:
        for process in (left, other):
            process.kill()
            process.wait()


def test_a_removed_slot_leaves_no_registration(project: Path) -> None:
    with take_slot(project, make_snapshot(project)) as slot:
        tree = slot.tree
    with free_slots(project) as free:
        assert free == [tree]
        remove(project, tree)
    assert not tree.exists()
    assert len(git(project, "worktree", "list").splitlines()) == 1
    assert list((project / ".oneaxis" / "slots").iterdir()) == []
