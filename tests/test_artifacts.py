"""Artifact folders: whole or absent, hashed, and cleaned after a killed process."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from oneaxis.artifacts import atomic_folder, check_metrics, read_json, verify_artifacts, write_json, write_manifest
from oneaxis.errors import UserError


def test_a_folder_appears_only_when_the_block_succeeds(tmp_path: Path) -> None:
    target = tmp_path / "artifacts" / "x"

    def fail_half_way() -> None:
        with atomic_folder(target) as out:
            (out / "half").write_text("half", encoding="utf-8")
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        fail_half_way()
    assert list(target.parent.iterdir()) == []
    with atomic_folder(target) as out:
        (out / "whole").write_text("1", encoding="utf-8")
    with atomic_folder(target) as out:
        (out / "other").write_text("2", encoding="utf-8")
    assert [path.name for path in target.iterdir()] == ["other"]


def test_what_a_killed_process_left_is_removed_and_what_a_living_one_writes_is_not(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    (tmp_path / f".tmp-x-{dead.pid}").mkdir()
    alive = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    (tmp_path / f".tmp-y-{alive.pid}").mkdir()
    with atomic_folder(tmp_path / "z"):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([f".tmp-y-{alive.pid}", "z"])
    alive.communicate(b"\n")


def test_manifest_names_each_file_and_verify_finds_a_flipped_byte(tmp_path: Path) -> None:
    folder = tmp_path / "artifacts" / "x"
    with atomic_folder(folder) as out:
        (out / "sub").mkdir()
        (out / "sub" / "data").write_bytes(b"abc")
        write_manifest(out, stage="x", params={"a": 1}, notes={})
    manifest = read_json(folder / "manifest.json")
    # SHA-256 of "abc", FIPS 180-2 appendix B.1.
    assert manifest["files"] == {
        "sub/data": {
            "bytes": 3,
            "sha256": "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
        }
    }
    assert verify_artifacts(tmp_path) == []
    (folder / "sub" / "data").write_bytes(b"abd")
    (folder / "extra").write_bytes(b"")
    problems = verify_artifacts(tmp_path)
    assert len(problems) == 2
    assert "sub/data" in problems[0]
    assert "extra" in problems[1]
    (folder / "sub" / "data").unlink()
    assert "missing" in verify_artifacts(tmp_path)[0]


def test_json_is_written_whole_sorted_and_without_nan(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"b": 1, "a": "é"})
    assert path.read_text(encoding="utf-8") == '{\n  "a": "é",\n  "b": 1\n}\n'
    with pytest.raises(ValueError, match="Out of range"):
        write_json(path, {"a": float("nan")})
    assert json.loads(path.read_text(encoding="utf-8")) == {"a": "é", "b": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]


def test_broken_json_is_a_users_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="missing"):
        read_json(tmp_path / "a.json")
    (tmp_path / "a.json").write_text("{", encoding="utf-8")
    with pytest.raises(UserError, match=r"a\.json: not JSON"):
        read_json(tmp_path / "a.json")


@pytest.mark.parametrize("metrics", [{"y/a": 1.0}, {"x/a": float("nan")}, {"x/a": float("inf")}])
def test_metrics_are_finite_and_belong_to_their_stage(metrics: dict[str, float]) -> None:
    with pytest.raises(AssertionError):
        check_metrics(metrics, "x")
