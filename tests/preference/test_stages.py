"""The two stage scripts as DVC runs them, on a tiny model: payload, exit codes, and a kill in the middle."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import polars as pl
import pytest

from oneaxis.artifacts import verify_artifacts
from oneaxis.config import compose, write_params

from .test_dpo import PROBES, pairs

pytestmark = pytest.mark.slow


@pytest.fixture
def project(root: Path, checkpoint: Path, tmp_path: Path) -> Path:
    """A project root with what the stages read, `profile=tiny`, and no upstream stage run."""
    shutil.copytree(checkpoint, tmp_path / "artifacts" / "fetch_model" / "checkpoint")
    data = tmp_path / "artifacts" / "prepare_data"
    data.mkdir()
    pairs(24, heldout=6).drop("kept").write_parquet(data / "pairs.parquet")
    PROBES.write_parquet(data / "probes.parquet")
    settings(root, tmp_path)
    return tmp_path


def settings(root: Path, project: Path, *overrides: str) -> None:
    write_params(compose(root / "conf", ["profile=tiny", *overrides]), project)


def start(root: Path, project: Path, stage: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, str(root / "stages" / f"{stage}.py")], cwd=project, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def finish(root: Path, project: Path, stage: str) -> tuple[int, str]:
    process = start(root, project, stage)
    _, errors = process.communicate(timeout=300)
    return process.returncode, errors


def payload(project: Path) -> dict[str, bytes]:
    folder = project / "artifacts" / "train_dpo"
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_filter_then_dpo_with_a_kill_in_the_middle(root: Path, project: Path) -> None:
    code, errors = finish(root, project, "filter_pairs")
    assert code == 0, errors
    scored = pl.read_parquet(project / "artifacts" / "filter_pairs" / "pairs.parquet")
    assert scored.height == 24

    process = start(root, project, "train_dpo")
    scratch = project / ".oneaxis" / "scratch" / "train_dpo" / "dpo" / "pairs"
    deadline = time.monotonic() + 120
    while not scratch.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    _, errors = process.communicate()
    assert scratch.exists(), f"it was to be killed in the middle: {errors}"
    assert not (project / "artifacts" / "train_dpo").exists()

    code, errors = finish(root, project, "train_dpo")
    assert code == 0, errors
    after_kill = payload(project)
    assert not scratch.exists()
    code, errors = finish(root, project, "train_dpo")
    assert code == 0, errors
    assert payload(project) == after_kill
    assert verify_artifacts(project) == []
    manifest = json.loads(after_kill["manifest.json"])
    assert manifest["notes"]["policy"] == "artifacts/train_dpo/checkpoint"
    assert str(project) not in json.dumps(manifest)


def test_train_none_is_a_pointer(root: Path, project: Path) -> None:
    # profile=tiny shrinks DPO, which train=none has no keys for.
    write_params(compose(root / "conf", ["train=none"]), project)
    code, errors = finish(root, project, "train_dpo")
    assert code == 0, errors
    assert list(payload(project)) == ["manifest.json"]
    manifest = json.loads(payload(project)["manifest.json"])
    assert manifest["notes"] == {"policy": "artifacts/fetch_model/checkpoint"}
    metrics = json.loads((project / "artifacts" / "train_dpo.metrics.json").read_text())
    assert metrics == {"train_dpo/steps": 0.0}


def test_too_few_pairs_is_exit_code_2_and_one_line(root: Path, project: Path) -> None:
    settings(root, project, "pairs.rule=count", "pairs.value=2.0")
    code, errors = finish(root, project, "filter_pairs")
    assert code == 2
    said = [line for line in errors.splitlines() if line.startswith("oneaxis:")]
    assert len(said) == 1
    assert re.fullmatch(
        r"oneaxis: filter_pairs: pairs\.rule=count keeps 2 of 18 train pairs; their ln_ches goes from \S+ to \S+; "
        r"allowed: at least 4: a larger pairs\.value \(now 2\) or more pairs "
        r"\(data\.pairs\.max_pairs, sample\.max_prompts\)", said[0],
    )  # fmt: skip
    assert "Traceback" not in errors
    assert not (project / "artifacts" / "filter_pairs").exists()
