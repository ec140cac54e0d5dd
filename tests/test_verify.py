"""Artifacts against their manifest, the settings and dvc.lock. Oracle: DVC's own hashes, of a real small project."""

import subprocess
import sys
from pathlib import Path

import pytest

from oneaxis.artifacts import ARTIFACTS, write_json, write_manifest
from oneaxis.errors import UserError
from oneaxis.verify import other_settings, other_than_locked, verify

DVC_YAML = """
stages:
  x:
    cmd: "true"
    params: [a, b]
    outs: [artifacts/x]
    metrics: [artifacts/x.metrics.json]
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A DVC project whose one stage has its payload and its metrics recorded."""
    (tmp_path / "dvc.yaml").write_text(DVC_YAML, encoding="utf-8")
    (tmp_path / "params.yaml").write_text("a: {alpha: 0.5, sites: [o, qkv]}\nb: 1\nc: 7\n", encoding="utf-8")
    folder = tmp_path / ARTIFACTS / "x"
    folder.mkdir(parents=True)
    (folder / "data").write_text("123", encoding="utf-8")
    write_manifest(folder, stage="x", params={"a": {"alpha": 0.5, "sites": ["o", "qkv"]}, "b": 1}, notes={})
    write_json(tmp_path / ARTIFACTS / "x.metrics.json", {"x/m": 1.0})
    for command in (["init", "-q", "--no-scm"], ["commit", "-q", "-f"]):
        subprocess.run([sys.executable, "-m", "dvc", *command], cwd=tmp_path, check=True)
    return tmp_path


def test_what_is_recorded_thrice_alike_is_in_order(project: Path) -> None:
    assert verify(project) == []


def test_other_settings_are_named(project: Path) -> None:
    text = "a: {alpha: 0.8, sites: [o, qkv]}\nb: true\nc: 8\n"
    (project / "params.yaml").write_text(text, encoding="utf-8")
    (line,) = other_settings(project)
    assert line == (f"{project / 'artifacts' / 'x'}: made with other settings: a.alpha=0.5 (params.yaml: 0.8), "
                    "b=1 (params.yaml: true); `dvc repro` makes it with these")  # fmt: skip
    (project / "params.yaml").write_text("a: {}\nb: 1\n", encoding="utf-8")
    assert "a.alpha=0.5 (params.yaml: absent)" in other_settings(project)[0]


def test_a_file_and_a_folder_that_are_not_those_of_the_lock_are_named(project: Path) -> None:
    folder = project / ARTIFACTS / "x"
    write_json(project / ARTIFACTS / "x.metrics.json", {"x/m": 2.0})
    # Made again with the same size, its manifest written anew: only DVC's list of the folder tells.
    (folder / "data").write_text("124", encoding="utf-8")
    write_manifest(folder, stage="x", params={"a": {"alpha": 0.5, "sites": ["o", "qkv"]}, "b": 1}, notes={})
    lines = verify(project)
    assert len(lines) == 2
    assert f"{folder}: its manifest is not that of dvc.lock" in lines[0]
    assert "x.metrics.json: its content is not that of dvc.lock" in lines[1]


def test_without_the_cache_a_folder_is_told_by_its_files(project: Path) -> None:
    subprocess.run(["rm", "-r", str(project / ".dvc" / "cache")], check=True)
    assert verify(project) == []
    (project / ARTIFACTS / "x" / "more").write_text("12345", encoding="utf-8")
    (line,) = other_than_locked(project)
    assert "nfiles 3, not 2" in line


def test_what_is_missing_and_a_broken_lock_are_said(project: Path) -> None:
    (project / ARTIFACTS / "x.metrics.json").unlink()
    assert "x.metrics.json: missing, and dvc.lock has it" in verify(project)[0]
    (project / "dvc.lock").write_text("a: [", encoding="utf-8")
    with pytest.raises(UserError, match=r"dvc\.lock: not YAML"):
        verify(project)
