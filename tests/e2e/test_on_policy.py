"""Pairs from the model itself as a user makes them, with `profile=tiny`: real DVC, real engine, random weights.

A random model knows no sums, but ends some of its answers within the limit and not others. One project is taken through
a run, a no-op, a run that goes on from what a killed one left, and back to other pairs; the tests run in their order.
"""

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import polars as pl
import pytest

from tests.e2e.clone import clone

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

# As hot as the engine takes: some one in twenty answers then ends within 80 tokens.
OVERRIDES = ("profile=tiny", "pairs=on_policy", "sample=mine", "sample.path=prompts.jsonl", "sample.temperature=2.0",
             "sample.max_tokens=80", "sample.heldout_pairs=2", "experiment.targets=[train_dpo]")  # fmt: skip
NUM_PROMPTS = 40


@pytest.fixture(scope="module")
def project(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    here = clone(root, tmp_path_factory.mktemp("clone") / "oneaxis")
    rows = [{"prompt": f"Word {number}?", "rule": "words", "max_words": 99} for number in range(NUM_PROMPTS)]
    (here / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return here


def environment(project: Path) -> dict[str, str]:
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(project / "src")}  # fmt: skip


def run(project: Path, *command: str) -> list[str]:
    """Run to the end, expect success, and return the stages that really ran."""
    trace = project / ".oneaxis" / "ran.jsonl"
    before = len(trace.read_text(encoding="utf-8").splitlines()) if trace.is_file() else 0
    done = subprocess.run([sys.executable, *command], cwd=project, env=environment(project), text=True,
                          capture_output=True, timeout=500, check=False)  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return [json.loads(line)["stage"] for line in trace.read_text(encoding="utf-8").splitlines()[before:]]


def payload(project: Path) -> dict[str, bytes]:
    folder = project / "artifacts" / "sample_pairs"
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def keep_first_part(project: Path, kept: Path, done: threading.Event) -> None:
    """Copy the first part as soon as it is there: what a run that is killed then would leave."""
    while not done.wait(0.02):
        for part in (project / ".oneaxis" / "sample_pairs").glob("*/part-00000.parquet"):
            if not kept.exists():
                (kept / part.parent.name).mkdir(parents=True)
                shutil.copy2(part, kept / part.parent.name / part.name)


def test_pairs_are_sampled_filtered_and_trained_on_and_a_killed_run_goes_on_to_the_same_bytes(
    project: Path, tmp_path: Path
) -> None:
    kept, done = tmp_path / "kept", threading.Event()
    watcher = threading.Thread(target=keep_first_part, args=(project, kept, done))
    watcher.start()
    try:
        ran = run(project, "-m", "oneaxis.cli", "run", *OVERRIDES)
    finally:
        done.set()
        watcher.join()
    # What comes first of fetch_model and prepare_data is DVC's matter.
    assert sorted(ran) == ["fetch_model", "filter_pairs", "prepare_data", "sample_pairs", "train_dpo"]
    first = payload(project)
    sampled = pl.read_parquet(project / "artifacts" / "sample_pairs" / "pairs.parquet")
    filtered = pl.read_parquet(project / "artifacts" / "filter_pairs" / "pairs.parquet")
    assert filtered.select(sampled.columns).equals(sampled)
    assert not set(sampled.filter(split="train")["prompt"]) & set(sampled.filter(split="heldout")["prompt"])
    responses = pl.read_parquet(project / "artifacts" / "sample_pairs" / "responses.parquet")
    assert responses.height == responses["seed"].n_unique() == NUM_PROMPTS * 8
    assert set(responses.filter("passed")["said"].str.split(" ").list.last()) == {"99"}
    assert (project / "artifacts" / "train_dpo" / "checkpoint").is_dir()

    assert run(project, "-m", "oneaxis.cli", "run", *OVERRIDES) == []

    # 40 prompts of 8 are two parts; only the second is missing now.
    assert [path.name for path in kept.glob("*/*")] == ["part-00000.parquet"]
    shutil.copytree(kept, project / ".oneaxis" / "sample_pairs", dirs_exist_ok=True)
    shutil.rmtree(project / "artifacts" / "sample_pairs")
    assert run(project, "stages/sample_pairs.py") == ["sample_pairs"]
    assert payload(project) == first
    provenance = json.loads((project / "artifacts" / "sample_pairs.provenance.json").read_text(encoding="utf-8"))
    assert (provenance["observed"]["parts"], provenance["observed"]["parts_found"]) == (2, 1)
    assert list((project / ".oneaxis" / "sample_pairs").iterdir()) == []


def test_with_other_pairs_nothing_is_sampled(project: Path) -> None:
    ran = run(project, "-m", "oneaxis.cli", "run", "profile=tiny", "experiment.targets=[filter_pairs]")
    assert ran == ["filter_pairs"]
    ran = run(project, "-m", "oneaxis.cli", "run", "profile=tiny", "experiment.targets=[sample_pairs]")
    assert ran == ["sample_pairs"]
    assert list(payload(project)) == ["manifest.json"]
    metrics = json.loads((project / "artifacts" / "sample_pairs.metrics.json").read_text(encoding="utf-8"))
    assert metrics == {"sample_pairs/pairs": 0.0}
