"""Artifacts against their manifest, the settings and dvc.lock. Oracle: DVC's own hashes, of a real small project."""

import subprocess
import sys
from pathlib import Path

import pytest

from oneaxis.artifacts import ARTIFACTS, write_json, write_manifest
from oneaxis.cli import main
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


def test_what_is_missing_is_said(project: Path) -> None:
    (project / ARTIFACTS / "x.metrics.json").unlink()
    assert "x.metrics.json: missing, and dvc.lock has it" in verify(project)[0]


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("dvc.lock", "a: [", "dvc.lock: not YAML"),
        ("dvc.lock", "5", "dvc.lock: holds 5; allowed: an object with stages"),
        ("dvc.lock", "", "dvc.lock: holds null; allowed"),
        ("dvc.lock", "stages: 5", "dvc.lock: stages is 5; allowed: an object"),
        ("dvc.lock", "stages: {x: [1]}", "dvc.lock: stages.x is [1]; allowed: an object"),
        ("dvc.lock", "stages: {x: {outs: 5}}", "dvc.lock: stages.x.outs holds 5; allowed: objects with a path"),
        ("artifacts/x/manifest.json", "[]", "manifest.json: holds []; allowed: an object"),
        (
            "artifacts/x/manifest.json",
            '{"files": {}}',
            "manifest.json: has no params; `dvc repro -f -s x` makes it anew",
        ),
        ("artifacts/x/manifest.json", '{"files": {"data": 5}}', "manifest.json: files.data is 5; allowed: an object"),
        ("dvc.lock", None, "dvc.lock: missing: nothing says what artifacts should be"),
        ("artifacts/x/manifest.json", None, "nothing was made yet: there is no artifacts/*/manifest.json"),
    ],
)
def test_what_cannot_be_read_or_compared_is_one_line(
    tmp_path: Path, file: str, text: str | None, said: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    for name in ("conf/config.yaml", "dvc.yaml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "dvc.lock").write_text("stages: {}", encoding="utf-8")
    folder = tmp_path / ARTIFACTS / "x"
    folder.mkdir(parents=True)
    write_manifest(folder, stage="x", params={"a": {"alpha": 0.5}}, notes={})
    monkeypatch.chdir(tmp_path)
    assert main(["verify"]) == 0
    capsys.readouterr()
    if text is None:
        (tmp_path / "dvc.lock").unlink()
        (tmp_path / file).unlink(missing_ok=True)
    else:
        (tmp_path / file).write_text(text, encoding="utf-8")
    assert main(["verify"]) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert said in printed.err
