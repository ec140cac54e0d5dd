"""The files of conf/experiment/: each composes and plans, at both sizes, and the list shows them."""

import json
import re
import shutil
from datetime import UTC, datetime
from pathlib import Path

import pytest

from oneaxis.config.compose import compose_all
from oneaxis.errors import UserError
from oneaxis.judge.units import kind_of
from oneaxis.multirun.experiments import list_experiments, one_point
from oneaxis.multirun.plan import make_plan

ROOT = Path(__file__).parents[2]
NAMES = sorted(path.stem for path in (ROOT / "conf" / "experiment").glob("*.yaml"))
NOW = datetime(2026, 1, 31, tzinfo=UTC)


@pytest.mark.parametrize("name", NAMES)
def test_every_experiment_plans_at_both_sizes(root: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # An optional package: a plan is the same where it is not installed.
    monkeypatch.setattr("oneaxis.split.nixl.check_nixl", lambda kind: None)
    # And a device that one of them needs.
    monkeypatch.setattr("oneaxis.serve.command.engine_device", lambda: "gpu")
    full = make_plan(root, [f"experiment={name}"], resume=None, now=NOW)
    # Eight layers of the tiny model's two make no draft.
    smaller = ["experiment.values=[none,layers_tiny]"] if name == "speculation_draft" else []
    small = make_plan(root, [f"experiment={name}", "profile=tiny", *smaller], resume=None, now=NOW)
    assert full.experiment["name"] == name
    assert len(full.points) > 1
    assert [point.name.removesuffix("_tiny") for point in small.points] == [point.name for point in full.points]
    assert [[axis.name for axis in point.axes] for point in small.points] == [
        [axis.name for axis in point.axes] for point in full.points
    ]
    assert len(small.experiment["claims"]) == len(full.experiment["claims"]) > 0
    timed = any(kind_of(claim["metric"]) == "repetitions" for claim in full.experiment["claims"])
    assert (full.session == full.id) == timed
    # A demonstration of what is INVALID needs a difference to show, and no more.
    pairs = 2 if "INVALID by" in full.experiment["question"] else full.gate["min_pairs"]
    assert full.experiment["repetitions"] == (pairs if timed else 1)
    assert re.search(r"\d+ min.* on 2 cores", full.experiment["cost"])


@pytest.mark.parametrize("name", NAMES)
def test_every_experiment_has_a_page_that_the_index_lists(root: Path, name: str) -> None:
    page = (root / "docs" / "experiments" / f"{name}.md").read_text(encoding="utf-8")
    assert f"oneaxis run -m experiment={name}" in page
    index = (root / "docs" / "experiments" / "index.md").read_text(encoding="utf-8")
    assert f"({name}.md)" in index


def test_what_a_cpu_has_no_kernels_for_is_refused_before_anything_runs(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oneaxis.serve.command.engine_device", lambda: "cpu")
    with pytest.raises(UserError, match=r"serve\.batch_invariant=true: vLLM has .* kernels for GPUs alone"):
        make_plan(root, ["experiment=divergence_batch_invariant"], resume=None, now=NOW)


def test_a_plain_run_of_an_experiment_says_that_it_compares_nothing(root: Path) -> None:
    said = {name: one_point(compose_all(root / "conf", [f"experiment={name}"])) for name in NAMES}
    assert said["speculation_ngram"] == (
        "experiment speculation_ngram: this runs the baseline point only; "
        "`oneaxis run -m experiment=speculation_ngram` compares none, ngram"
    )
    assert all(said.values())
    moved = one_point(compose_all(root / "conf", ["experiment=speculation_ngram", "draft=ngram"]))
    assert "this runs one point, draft=ngram, only" in moved
    assert one_point(compose_all(root / "conf", ["seed=1"])) == ""


def test_claims_follow_the_rates_of_the_profile(root: Path) -> None:
    metrics = [
        make_plan(root, ["experiment=batch_limit", *more], resume=None, now=NOW).experiment["claims"][0]["metric"]
        for more in ([], ["profile=tiny"], ["load.rates_rps=[0.5,1.5]"])
    ]
    assert metrics == [f"sweep/decode_heavy/{rate}/ttft_p50_ms" for rate in ("r2", "r8", "r1.5")]


def test_the_list_names_question_axis_values_targets_and_cost(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert list_experiments(root, as_json=True) == 0
    listed = {one["name"]: one for one in json.loads(capsys.readouterr().out)}
    assert list(listed) == NAMES
    one = listed["smoothquant_alpha"]
    assert (one["axis"], one["values"], one["targets"], one["runs"]) == (
        "quantize.smooth.alpha", ["0.5", "0.7", "0.8", "0.85"], ["quantize"], 4,
    )  # fmt: skip
    assert listed["anchor_and_filter"]["values"] == ["baseline", "anchor", "ches", "anchor+ches"]
    assert listed["int8_dynamic"]["runs"] == 12

    assert list_experiments(root, as_json=False) == 0
    text = capsys.readouterr().out
    for words in (one["question"], one["cost"], "quantize.smooth.alpha: 0.5, 0.7, 0.8, 0.85"):
        assert words in text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("experiment: [", "conf: "),
        ("experiment: {name: broken, question: '', axis: seed, values: [0, 1]}", "question is empty"),
        ("experiment: {name: other, question: q, axis: seed, values: [0, 1]}", "allowed: broken"),
        ("experiment: {name: broken, question: q, axis: seed, values: [0]}", "nothing to compare"),
        ("experiment: {name: broken, question: q, axi: seed}", "experiment.axi"),
        ("defaults:\n  - override /quantize: w3\nexperiment: {name: broken}", "allowed: none, w4a16, w8a8_fp8, "),
    ],
)
def test_a_broken_file_is_one_line_and_the_others_are_listed(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, words: str
) -> None:
    shutil.copytree(root / "conf", tmp_path / "conf")
    for name in NAMES[2:]:
        (tmp_path / "conf" / "experiment" / f"{name}.yaml").unlink()
    (tmp_path / "conf" / "experiment" / "broken.yaml").write_text(f"# @package _global_\n{text}\n", encoding="utf-8")
    assert list_experiments(tmp_path, as_json=True) == 2
    printed = capsys.readouterr()
    assert [one["name"] for one in json.loads(printed.out)] == NAMES[:2]
    [line] = printed.err.splitlines()
    assert line.startswith("oneaxis: conf/experiment/broken.yaml: ")
    assert words in line


def test_no_experiment_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no experiment"):
        list_experiments(tmp_path, as_json=False)
