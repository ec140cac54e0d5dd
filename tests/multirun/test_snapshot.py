"""What is on disk becomes a commit, and nothing of the user's changes."""

import subprocess
from pathlib import Path

import pytest

from oneaxis.errors import UserError
from oneaxis.multirun.snapshot import LARGEST_BYTES, has_commit, make_snapshot, pin, point_commit, refs

from .conftest import git, sh


def state(project: Path) -> tuple[str, ...]:
    """What a snapshot must not touch: status, staged content, stash, HEAD."""
    commands = (["status", "--porcelain"], ["diff", "--cached"], ["diff"], ["stash", "list"], ["rev-parse", "HEAD"])
    return tuple(git(project, *command) for command in commands)


def test_a_clean_tree_is_its_own_snapshot_and_settings_do_not_count(project: Path) -> None:
    head = git(project, "rev-parse", "HEAD")
    assert make_snapshot(project) == head
    (project / "params.yaml").write_text("seed: 7\n", encoding="utf-8")
    (project / "dvc.lock").write_text("stages: {}\n", encoding="utf-8")
    assert make_snapshot(project) == head


def test_changed_staged_new_and_removed_files_are_in_it_and_ignored_ones_are_not(project: Path) -> None:
    (project / "stages" / "stage.py").write_text("print('changed')\n", encoding="utf-8")
    (project / "staged.py").write_text("staged = 1\n", encoding="utf-8")
    git(project, "add", "staged.py")
    (project / "staged.py").write_text("staged = 2\n", encoding="utf-8")
    (project / "new with spaces.py").write_text("new = 1\n", encoding="utf-8")
    (project / "conf" / "model" / "hub.yaml").unlink()
    (project / "private").mkdir()
    (project / "private" / "data.jsonl").write_text("{}\n", encoding="utf-8")
    before = state(project)
    snapshot = make_snapshot(project)
    assert state(project) == before
    assert git(project, "show", f"{snapshot}:stages/stage.py") == "print('changed')"
    assert git(project, "show", f"{snapshot}:staged.py") == "staged = 2"
    assert git(project, "show", f"{snapshot}:new with spaces.py") == "new = 1"
    listed = git(project, "ls-tree", "-r", "--name-only", snapshot).splitlines()
    assert "conf/model/hub.yaml" not in listed
    assert not [name for name in listed if name.startswith(("private", ".oneaxis", "multirun"))]
    assert git(project, "rev-parse", f"{snapshot}^") == git(project, "rev-parse", "HEAD")
    assert git(project, "show", f"{snapshot}:params.yaml") == git(project, "show", "HEAD:params.yaml")


def test_our_own_folders_stay_out_where_git_does_not_ignore_them(project: Path) -> None:
    (project / ".gitignore").write_text("/artifacts/\n", encoding="utf-8")
    for name in (".oneaxis/slots/0/x", "multirun/m/plan.json"):
        (project / name).parent.mkdir(parents=True)
        (project / name).write_text("x", encoding="utf-8")
    listed = git(project, "ls-tree", "-r", "--name-only", make_snapshot(project)).splitlines()
    assert ".gitignore" in listed
    assert not [name for name in listed if name.startswith((".oneaxis", "multirun"))]


def test_without_identity_on_a_detached_head_in_a_linked_work_tree_and_a_subfolder(
    project: Path, tmp_path: Path
) -> None:
    git(project, "checkout", "-q", "--detach")
    sh(project, "git", "worktree", "add", "-q", "--detach", str(tmp_path / "linked"))
    linked = tmp_path / "linked"
    (linked / "new.py").write_text("1\n", encoding="utf-8")
    snapshot = make_snapshot(linked)
    assert git(project, "show", f"{snapshot}:new.py") == "1"
    # A project may be a folder of a larger repository: all of it is in the snapshot.
    (project / "beside.txt").write_text("beside", encoding="utf-8")
    within = make_snapshot(project / "conf")
    assert git(project, "show", f"{within}:beside.txt") == "beside"


def test_a_repository_without_a_commit_has_a_snapshot_and_a_bare_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="in no git repository"):
        make_snapshot(tmp_path)
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / "a.txt").write_text("a", encoding="utf-8")
    assert git(tmp_path, "show", f"{make_snapshot(tmp_path)}:a.txt") == "a"


def test_a_huge_new_file_is_refused_by_name(project: Path) -> None:
    with (project / "weights.bin").open("wb") as file:
        file.truncate(LARGEST_BYTES + 1)
    with pytest.raises(UserError, match=r"weights.bin: 100 MiB and not ignored.*gitignore"):
        make_snapshot(project)
    (project / ".gitignore").write_text("weights.bin\n", encoding="utf-8")
    make_snapshot(project)


def test_a_points_commit_holds_its_files_and_a_ref_keeps_it(project: Path) -> None:
    snapshot = make_snapshot(project)
    (project.parent / "m.json").write_text('{"a": 1}', encoding="utf-8")
    files = {"artifacts/quantize.metrics.json": project.parent / "m.json"}
    commit = point_commit(project, snapshot, files, "a point")
    assert git(project, "show", f"{commit}:artifacts/quantize.metrics.json") == '{"a": 1}'
    assert git(project, "rev-parse", f"{commit}^") == snapshot
    ref = pin(project, "m1", "alpha=0.5-r0", commit)
    assert refs(project, "m1") == [ref]
    assert refs(project, "m") == []
    git(project, "gc", "-q", "--prune=now")
    assert has_commit(project, commit)
    assert not has_commit(project, "0" * 40)
