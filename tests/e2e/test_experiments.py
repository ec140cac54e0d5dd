"""Every file of conf/experiment/ runs small, as a user runs it, with `profile=tiny`: real stages, real engine.

All run in one clone and share its cache, so a stage that several experiments need runs once. A verdict needs only to
be one that the evidence allows: with one repetition no timing may be accepted.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from oneaxis.artifacts import read_json
from oneaxis.config import STAGE_SECTIONS
from oneaxis.installed import engine_device
from oneaxis.judge.multirun import judge_multirun
from oneaxis.judge.units import kind_of
from oneaxis.multirun.record import job_folder, read_plan, read_status
from tests.e2e.clone import clone

ROOT = Path(__file__).parents[2]
ELSEWHERE = {"prefix_caching", "prefix_caching_repeated", "batch_limit", "schemes_under_load", "speculation_ngram",
             "speculation_draft", "chunked_prefill", "ches_filter", "nll_anchor", "gptq_rounding", "smoothing_sites",
             "divergence_dtype", "divergence_prefix_caching", "field_order", "kept_mass", "frequency_penalty",
             "frequency_penalty_grammar", "repetition_penalty", "whitespace", "json_example",
             "reasoning_first", "async_scheduling", "step_overhead", "preference_training", "int8_dynamic"}  # fmt: skip
"""Only planned (tests/multirun/test_experiments.py), since a minute each is too much: other experiments run the same
stages, and tests of the load and the engine run what is their own."""
NAMES = sorted(path.stem for path in (ROOT / "conf" / "experiment").glob("*.yaml") if path.stem not in ELSEWHERE)
ONCE = ["experiment.repetitions=1"]
SMALLER = {
    "smoothquant_alpha": ["quantize.smooth.alpha=0.5,0.8"],
    # The schemes that no other experiment runs.
    "quantize_schemes": ["experiment.values=[none,w8a8_fp8]"],
    "alpha_auto": ["quantize.smooth.alpha=0.5,auto"],
    # What no other experiment has: a control.
    "displacement": [
        "train=dpo_tiny",
        "experiment.combine=false",
        "experiment.changes=[{name: ches, overrides: ['pairs=ches'], control: random}, "
        "{name: random, overrides: ['pairs=random']}]",
    ],
    "prefix_caching_hidden": [*ONCE, "load.rates_rps=[4.0]"],
    "divergence_reproducible": [
        "diverge.prompts=6",
        "diverge.output_tokens=16",
        "diverge.repeats=2",
        "diverge.concurrency=4",
    ],
    # Both tasks, so that all metrics of the stage are seen.
    "way_out": ["extract.records=3", "extract.lists=1", "extract.lengths=[2]", "extract.max_tokens=64"],
    # Prompts longer than a block, so that a block moves.
    "prefill_decode_split": [*ONCE, "split.requests=3", "split.prompt_tokens=200", "split.output_tokens=8"],
}
INVALID = {
    "prefix_caching_hidden": "guard 1, unique prompts",
}
"""Experiments whose verdict must be INVALID, and what its reason must name."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    # MLflow reads its own store by a loader that SQLAlchemy means to retire.
    pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SADeprecationWarning"),
]


@pytest.fixture(scope="module")
def project(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A clone of what is on disk: tracked and new files, committed."""
    here = clone(root, tmp_path_factory.mktemp("experiments") / "oneaxis")
    yield here
    shutil.rmtree(here)


@pytest.mark.parametrize("name", NAMES)
def test_experiment_runs_small(project: Path, name: str) -> None:
    if name == "prefill_decode_split" and find_spec("nixl") is None:
        pytest.skip("nixl is optional, and not installed")
    if name == "divergence_batch_invariant" and engine_device() == "cpu":
        pytest.skip("its kernels are for GPUs")
    before = set((project / "multirun").glob("*/plan.json"))
    done = subprocess.run(
        [sys.executable, "-m", "oneaxis.cli", "run", "-m", f"experiment={name}", "profile=tiny",
         *SMALLER.get(name, [])],
        cwd=project, capture_output=True, text=True, timeout=500, check=False,
        env={
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": str(project / "src"),
        },
    )  # fmt: skip
    words = done.stdout[-4000:] + done.stderr[-4000:]
    # 1 is the gate's no: a random model does what it does.
    assert done.returncode in (0, 1), words
    [file] = set((project / "multirun").glob("*/plan.json")) - before
    check_record(file.parent, combined=name == "anchor_and_filter", invalid=INVALID.get(name))


def check_record(folder: Path, *, combined: bool, invalid: str | None = None) -> None:
    """Every job ended, has the metrics that are claimed, and every verdict is one that the evidence allows."""
    plan = read_plan(folder)
    claimed = [claim["metric"] for claim in plan.experiment["claims"]]
    for job in plan.jobs:
        status = read_status(job_folder(folder, job))
        assert status is not None, job
        assert status.state == "done", status.message
        assert set(claimed) <= set(recorded_metrics(job_folder(folder, job) / "artifacts")), job

    verdicts = {(verdict.point, verdict.metric): verdict for verdict in judge_multirun(folder)}
    assert set(verdicts) == {(point.name, metric) for point in plan.points[1:] for metric in claimed}
    for (point, metric), verdict in verdicts.items():
        assert verdict.valid == (invalid is None), verdict.reasons
        assert [axis.name for axis in verdict.axes] == [axis.name for axis in plan.point(point).axes]
        if invalid:
            assert any(invalid in reason for reason in verdict.reasons), verdict.reasons
        elif kind_of(metric) == "exact":
            assert verdict.n == 1
        elif kind_of(metric) == "repetitions":
            assert verdict.decision == "unresolved"
            assert any("1 repetition" in reason for reason in verdict.reasons), verdict.reasons
        elif metric == "quantize/copy_exact_after":
            # A random model copies nothing, so the suite cannot tell, and says so.
            assert verdict.decision == "unresolved"
            assert any("cannot tell" in reason for reason in verdict.reasons), verdict.reasons
        else:
            assert verdict.n > 1
    assert any(plan.point(point).role == "combination" for point, _ in verdicts) == combined
    controlled = {point.name for point in plan.points if point.control}
    assert {point for (point, _), verdict in verdicts.items() if verdict.against_control} == controlled


def recorded_metrics(artifacts: Path) -> dict[str, float]:
    """All metrics of one job."""
    files = [artifacts / f"{stage}.metrics.json" for stage in STAGE_SECTIONS]
    return {name: value for file in files if file.is_file() for name, value in read_json(file).items()}


def test_their_metrics_are_those_that_a_claim_may_name(project: Path) -> None:
    """Holds `metric_names` to what the stages really give, over every job that ran above."""
    from oneaxis.config import compose
    from oneaxis.multirun.metric_names import metric_names

    seen = 0
    for file in (project / "multirun").glob("*/plan.json"):
        plan = read_plan(file.parent)
        for point in plan.points:
            config = compose(project / "conf", point.overrides)
            [job] = [job for job in plan.jobs if job.point == point.name]
            given = recorded_metrics(job_folder(file.parent, job) / "artifacts")
            known = {name for stage in STAGE_SECTIONS for name in metric_names(config, stage)}
            assert set(given) <= known, json.dumps(sorted(set(given) - known))
            seen += 1
    assert seen >= len(NAMES)
