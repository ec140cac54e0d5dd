"""Plans: what overrides become, in which order, under which names, and what is refused before anything runs."""

import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from oneaxis.config import compose
from oneaxis.errors import UserError
from oneaxis.multirun.plan import job_order, make_plan, reached_stages, read_overrides
from oneaxis.multirun.record import Job, Plan, read_plan, write_plan

NOW = datetime(2026, 1, 31, 14, 25, 30, tzinfo=UTC)
CLAIM = "{{metric: {}, better: lower, expected: null, bar: 0}}"
GAIN = CLAIM.replace("lower", "higher")


@pytest.fixture
def plan(root: Path) -> Callable[..., Plan]:
    return lambda *overrides: make_plan(root, overrides, resume=None, now=NOW)


def test_a_sweep_is_one_axis_with_the_first_value_as_the_baseline(plan: Callable[..., Plan]) -> None:
    made = plan("train=none", "quantize.smooth.alpha=0.8,0.5,0.7")
    assert (made.id, made.axis, made.session) == ("20260131-142530-alpha", "quantize.smooth.alpha", "default")
    assert [(point.name, point.role, point.overrides) for point in made.points] == [
        ("alpha=0.8", "baseline", ["train=none", "quantize.smooth.alpha=0.8"]),
        ("alpha=0.5", "single", ["train=none", "quantize.smooth.alpha=0.5"]),
        ("alpha=0.7", "single", ["train=none", "quantize.smooth.alpha=0.7"]),
    ]
    assert [axis.leaves for axis in made.points[1].axes] == [{"quantize.smooth.alpha": [0.8, 0.5]}]
    assert made.jobs == [Job("alpha=0.8", 0), Job("alpha=0.5", 0), Job("alpha=0.7", 0)]
    assert made.gate["min_pairs"] == 6


def test_a_plan_survives_its_file(plan: Callable[..., Plan], tmp_path: Path) -> None:
    made = plan("quantize=none,w8a8_int8_dynamic")
    write_plan(tmp_path, made)
    assert read_plan(tmp_path) == made


def test_what_this_machine_cannot_start_is_refused_unless_jobs_run_elsewhere(plan: Callable[..., Plan]) -> None:
    with pytest.raises(UserError, match=r"max_num_seqs=4: serve\.threads=4096: allowed: 0 to "):
        plan("serve.max_num_seqs=4,8", "serve.threads=4096")
    assert len(plan("serve.max_num_seqs=4,8", "serve.threads=4096", "hydra/launcher=ray").points) == 2


def test_jobs_alternate() -> None:
    assert "".join(f"{job.point}{job.repetition} " for job in job_order(["a", "b", "c"], 3)) == (
        "a0 b0 c0 c1 b1 a1 a2 b2 c2 "
    )


@pytest.mark.parametrize(
    ("override", "values"),
    [
        ("seed=choice(3,1)", ["seed=3", "seed=1"]),
        ("seed=range(1,3)", ["seed=1", "seed=2"]),
        ("calibrate.batch_size=range(2,5,2)", ["calibrate.batch_size=2", "calibrate.batch_size=4"]),
        ("+serve.engine_args.x=1,2", ["+serve.engine_args.x=1", "+serve.engine_args.x=2"]),
        ("report.title='a,b'", []),
        ("quantize.smooth.sites=[qkv,o]", []),
        ("quantize.smooth.sites=[qkv],[qkv,o]", ["quantize.smooth.sites=[qkv]", "quantize.smooth.sites=[qkv,o]"]),
        ("score.premises.default='a, b',c", ["score.premises.default='a, b'", "score.premises.default=c"]),
        # The default first: it is the baseline.
        ("train=glob(*)", ["train=dpo", "train=dpo_short", "train=dpo_tiny", "train=none"]),
        ("quantize=glob(w8*)", ["quantize=w8a8_int8_dynamic", "quantize=w8a8_fp8", "quantize=w8a8_int8_static"]),
    ],
)
def test_hydras_sweeps(root: Path, override: str, values: list[str]) -> None:
    asked = read_overrides(root / "conf", [override])
    assert [value.override for sweep in asked.sweeps for value in sweep.values] == values
    assert asked.held == ([] if values else [override])


def test_the_launcher_is_split_off(plan: Callable[..., Plan]) -> None:
    made = plan("hydra/launcher=joblib", "seed=0,1", "hydra.launcher.n_jobs=2")
    assert made.launcher == ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"]
    assert made.overrides == ["hydra/launcher=joblib", "seed=0,1", "hydra.launcher.n_jobs=2"]
    assert [point.overrides for point in made.points] == [["seed=0"], ["seed=1"]]


def test_without_a_sweep_the_default_is_the_baseline(plan: Callable[..., Plan]) -> None:
    made = plan("serve.max_num_seqs=8", "experiment.repetitions=2")
    assert [(p.name, p.overrides) for p in made.points] == [
        ("max_num_seqs=16", ["experiment.repetitions=2"]),
        ("max_num_seqs=8", ["serve.max_num_seqs=8", "experiment.repetitions=2"]),
    ]
    made = plan("model=hub", "model.id=a/b", "model.revision=0123456")
    assert [(p.name, [axis.name for axis in p.axes]) for p in made.points] == [
        ("model=smollm2", []),
        ("model=hub,id=a-b,revision=0123456", ["model"]),
    ]


def test_two_axes_are_refused_with_what_differs_and_how_to_allow_it(plan: Callable[..., Plan]) -> None:
    with pytest.raises(UserError) as caught:
        plan("quantize=w8a8_int8_dynamic,w8a8_int8_static", "serve.max_num_seqs=16,8")
    assert str(caught.value) == (
        "quantize=w8a8_int8_static,max_num_seqs=8 differs from quantize=w8a8_int8_dynamic,max_num_seqs=16 in 2 axes: "
        "quantize (w8a8_int8_dynamic -> w8a8_int8_static, which moves quantize.smooth.alpha, quantize.kind); "
        "serve.max_num_seqs (16 -> 8); "
        "allowed: one axis, or --combine (experiment.combine=true), which also runs each single change"
    )
    with pytest.raises(UserError, match=r"differs from default in 2 axes: seed \(0 -> 1\); serve.max_num_seqs"):
        plan("serve.max_num_seqs=8", "seed=1")


def test_a_combination_has_its_single_changes_as_parts(plan: Callable[..., Plan]) -> None:
    made = plan("train.beta=0.1,0.2,0.3", "pairs=all,ches", "experiment.combine=true")
    assert made.axis is None
    assert [(point.name, point.role, list(point.parts)) for point in made.points] == [
        ("beta=0.1,pairs=all", "baseline", []),
        ("beta=0.1,pairs=ches", "single", []),
        ("beta=0.2,pairs=all", "single", []),
        ("beta=0.2,pairs=ches", "combination", ["beta=0.2,pairs=all", "beta=0.1,pairs=ches"]),
        ("beta=0.3,pairs=all", "single", []),
        ("beta=0.3,pairs=ches", "combination", ["beta=0.3,pairs=all", "beta=0.1,pairs=ches"]),
    ]
    made = plan("seed=1", "train=none", "experiment.combine=true")
    assert [(point.name, point.role, list(point.parts)) for point in made.points] == [
        ("default", "baseline", []),
        ("seed=1", "single", []),
        ("train=none", "single", []),
        ("seed=1,train=none", "combination", ["seed=1", "train=none"]),
    ]


CHANGES = "experiment.changes=[{{name: a, overrides: ['{}']}}, {{name: b, overrides: ['{}']}}]"


def test_changes_are_points_of_their_own_and_together_with_combine(plan: Callable[..., Plan]) -> None:
    changes = CHANGES.format("train.beta=0.2", "pairs=all")
    made = plan("train.rpo_alpha=0.0", changes, "experiment.combine=true")
    assert [(p.name, p.role, list(p.parts), [axis.name for axis in p.axes]) for p in made.points] == [
        ("baseline", "baseline", [], []),
        ("a", "single", [], ["train.beta"]),
        ("b", "single", [], ["pairs"]),
        ("a+b", "combination", ["a", "b"], ["pairs", "train.beta"]),
    ]
    assert made.points[-1].overrides[-2:] == ["train.beta=0.2", "pairs=all"]
    assert plan(CHANGES.format("train.beta=0.2", "train.beta=0.3")).axis == "train.beta"


CONTROLLED = (
    "experiment.changes=[{{name: a, overrides: ['pairs=all']}}, {{name: b, overrides: ['train.beta=0.3'], "
    "control: {}}}, {{name: c, overrides: ['{}']}}]"
)


def test_a_control_is_a_point_and_no_part_of_the_combination(plan: Callable[..., Plan]) -> None:
    made = plan(CONTROLLED.format("c", "train.beta=0.4"), "experiment.combine=true")
    assert [(p.name, p.role, list(p.parts), p.control) for p in made.points] == [
        ("baseline", "baseline", [], ""),
        ("a", "single", [], ""),
        ("b", "single", [], "c"),
        ("c", "single", [], ""),
        ("a+b", "combination", ["a", "b"], ""),
    ]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([], ["nothing to compare", "key=a,b", "experiment=NAME"]),
        (["experiment.repetitions=2"], ["nothing to compare"]),
        (["serve.max_num_seqs=16"], ["max_num_seqs=16", "the same settings as default", "nothing changes"]),
        (["seed=0,1,1"], ["seed=1-", "the same settings as seed=1"]),
        (["load.duration_s=45,45.0"], ["the same settings as duration_s=45"]),
        (["seed=1,2", "seed=3"], ["seed=3", "given twice"]),
        (["seed=0,-1"], ["seed=-1: ", "greater than or equal to 0"]),
        (["quantize=none,w3"], ["quantize=w3", "allowed: none, w4a16, w8a8_fp8, w8a8_int8_dynamic, w8a8_int8_static"]),
        (["quantize=w8a8_int8_dynamic,none", "quantize.smooth.alpha=0.7"], ["quantize=none: ", "no such key"]),
        (["seed=shuffle(0,1)"], ["seed=shuffle(0,1)", "the first value is the baseline"]),
        (["train.beta=interval(0,1)"], ["interval(0,1)", "choice(1,2)"]),
        (["seed=glob(*)"], ["seed is no group"]),
        (["quantize=glob(z*)"], ["matches nothing", "w8a8_int8_static"]),
        (["seed=choice(1)"], ["seed: one value, 1", "two at least"]),
        (["seed=range(0,1000)"], ["1000 points", "at most 500"]),
        (["report.title=a,b"], ["report.title is no axis"]),
        (["gate=cpu,gpu"], ["gate is no axis"]),
        (["experiment=ches_filter,nll_anchor"], ["experiment is no axis"]),
        (["measure.session=new", "seed=0,1"], ["measure.session=new", "experiment.repetitions"]),
        (["experiment=ches_filter", "experiment.claims.0.expected=nan"], ["claims.0.expected=nan", "finite"]),
        (["hydra/sweeper=basic", "seed=0,1"], ["hydra/sweeper=basic", "hydra/launcher=NAME"]),
        (["hydra/launcher=joblib,basic", "seed=0,1"], ["hydra/launcher=NAME"]),
        (["a b=c"], ["a b=c", "not an override"]),
        (["experiment.axis=seed"], ["experiment.axis=seed", "no values", "seed=a,b"]),
        (["experiment=smoothquant_alpha", "quantize.smooth.alpha=0.6"],
         ["quantize.smooth.alpha=0.6", "the axis of smoothquant_alpha, with values 0.5, 0.7, 0.8, 0.85"]),
        (["experiment=smoothing_sites", "seed=0,1"], ["seed: sweeps beside experiment.changes"]),
        ([CONTROLLED.format("c", "train.steps=9")], ["b: moves train.beta", "c train.steps", "on the same axis"]),
        ([CONTROLLED.format("b", "train.beta=0.4")], ["b has control b", "allowed: the name of another", "a, c"]),
        ([CHANGES.format("train.beta=0.2','train.steps=9", "pairs=all")],
         ["a differs from baseline in 2 axes", "train.beta", "train.steps"]),
        ([CHANGES.format("train.beta=0.2','train.steps=9", "pairs=all"), "experiment.combine=true"],
         ["a: one change that moves 2 axes", "a file in conf/train/"]),
        ([CHANGES.format("train.beta=0.2", "train.beta=0.3"), "experiment.combine=true"],
         ["a+b", "the same settings as b"]),
        # What would run for nothing.
        (["serve.max_num_seqs=1,2", "experiment.targets=[quantize]"],
         ["no stage that runs reads serve.max_num_seqs", "serve, split, diverge, sweep, score, extract"]),
        (["quantize=w4a16", "quantize.smooth.alpha=0.5,0.8"],
         ["quantize.smooth.alpha does nothing with quantize.smooth.sites=[]"]),
        (["train.lora.alpha=8,16"], ["train.lora.alpha does nothing with train.lora.r=0"]),
        (["train.reference=start,fetched"], ["train.reference does nothing with train.sft.epochs=0"]),
        (["quantize.gptq.damping=0.1,0.2"], ["quantize.gptq.damping does nothing with quantize.rounding=rtn"]),
        (["quantize.smooth.grid=[0.5],[0.7]"], ["quantize.smooth.grid does nothing with quantize.smooth.alpha=0.5"]),
        (["seed=0,1", "experiment.targets=[quantize]", "experiment.repetitions=2"],
         ["experiment.repetitions=2", "nothing that is timed runs"]),
        # Claims on what will not be measured.
        (["seed=0,1", f"experiment.claims=[{CLAIM.format('speed/tok_s')}]"], ["no stage is named speed"]),
        (["seed=0,1", f"experiment.claims=[{GAIN.format('score/openbookqa/acc')}]", "experiment.targets=[sweep]"],
         ["score does not run in seed=0"]),
        (["quantize=none,w8a8_int8_static", f"experiment.claims=[{CLAIM.format('quantize/perplexity_afer')}]"],
         ["quantize=none has no such metric", "quantize/perplexity_after"]),
        (["train=dpo,none", f"experiment.claims=[{CLAIM.format('train_dpo/chosen_delta')}]"],
         ["train=none has no such metric"]),
        (["seed=0,1", f"experiment.claims=[{CLAIM.format('sweep/decode_heavy/r9/tpot_p50_ms')}]"],
         ["seed=0 has no such metric", "sweep/decode_heavy/r1/tpot_p50_ms"]),
        (["seed=0,1", f"experiment.claims=[{CLAIM.format('sweep/chat/rmax/tpot_p50_ms')}]"], ["no such metric"]),
        (["seed=0,1", f"experiment.claims=[{CLAIM.format('score/mmlu/acc')}]"], ["score/openbookqa/acc"]),
        (["load.rates_rps=[1.0],[2.0]", f"experiment.claims=[{CLAIM.format('sweep/decode_heavy/rmax/n')}]"],
         ["is sweep/decode_heavy/r2/n in rates_rps=2.0 and sweep/decode_heavy/r1/n in the baseline"]),
        (["seed=0,1", "experiment.claims=[" + ", ".join(CLAIM.format(f"sweep/decode_heavy/{rate}/n")
          for rate in ("rmax", "r3")) + "]"], ["sweep/decode_heavy/r3/n is claimed twice"]),
        (["+serve.engine_args.nonsense=1,2"], ["nonsense=1: serve.engine_args", "nonsense"]),
        (["data=mine", "data.pairs.source.path=no.jsonl,nope.jsonl"],
         ["path=no.jsonl: data.pairs.source.path=no.jsonl"]),
    ],
)  # fmt: skip
def test_refused_in_one_line(plan: Callable[..., Plan], overrides: list[str], words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        plan(*overrides)
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_timings_make_a_session_of_their_own(plan: Callable[..., Plan]) -> None:
    timed = plan("seed=0,1", f"experiment.claims=[{CLAIM.format('sweep/decode_heavy/rmax/ttft_p50_ms')}]")
    assert timed.session == timed.id
    assert timed.experiment["claims"][0]["metric"] == "sweep/decode_heavy/r3/ttft_p50_ms"
    assert plan("seed=0,1", f"experiment.claims=[{GAIN.format('score/openbookqa/acc')}]").session == "default"
    repeated = plan("seed=0,1", "experiment.repetitions=2")
    assert repeated.session == repeated.id
    assert [(job.point, job.repetition) for job in repeated.jobs] == [
        ("seed=0", 0), ("seed=1", 0), ("seed=1", 1), ("seed=0", 1),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("override", "name"),
    [
        ("score.premises.default='a/b: c','..','x.lock'", "default=a-b-c"),
        ("score.premises.default='x.lock',y", "default=x-lock"),
        ("score.premises.default='..',y", "default=."),
        ("train.learning_rate=1e-5,1e-6", "learning_rate=1e-05"),
        ("serve.prefix_caching=true,false", "prefix_caching=true"),
        ("quantize.smooth.sites=[],[qkv,o]", "sites=empty"),
        ("train.rpo_alpha=null,1.0", "rpo_alpha=null"),
        (f"score.premises.default={'a' * 200},b", "default=" + "a" * 63),
    ],
)
def test_points_have_names_that_files_and_refs_can_have(plan: Callable[..., Plan], override: str, name: str) -> None:
    import subprocess

    made = plan(override)
    assert made.points[0].name.startswith(name.rstrip("."))
    for point in made.points:
        assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9=.,+_-]*", point.name)
        assert len(point.name) <= 80
        subprocess.run(["git", "check-ref-format", f"refs/oneaxis/{made.id}/{point.name}"], check=True)
    assert len({point.name.casefold() for point in made.points}) == len(made.points)


def test_names_that_would_be_the_same_are_told_apart(plan: Callable[..., Plan]) -> None:
    first, second = (point.name for point in plan("score.premises.default='a b','a-b'").points)
    assert first == "default=a-b"
    assert re.fullmatch(r"default=a-b-[0-9a-f]{8}", second)


def test_the_id_is_unique(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root / "conf", tmp_path / "conf")
    for name in ("dvc.yaml", "data"):
        (tmp_path / name).symlink_to(root / name)
    first = make_plan(tmp_path, ["seed=0,1"], resume=None, now=NOW)
    (tmp_path / "multirun" / first.id).mkdir(parents=True)
    assert make_plan(tmp_path, ["seed=0,1"], resume=None, now=NOW).id == f"{first.id}-2"


def test_resume_returns_the_plan_as_written(root: Path, tmp_path: Path, plan: Callable[..., Plan]) -> None:
    made = replace(plan("seed=0,1"), snapshot="abc")
    folder = tmp_path / "multirun" / made.id
    folder.mkdir(parents=True)
    write_plan(folder, made)
    (tmp_path / "conf").symlink_to(root / "conf")
    later = datetime(2026, 2, 1, tzinfo=UTC)
    assert make_plan(tmp_path, [], resume=made.id, now=later) == made
    assert make_plan(tmp_path, ["seed=0,1"], resume=made.id, now=later) == made
    other = make_plan(tmp_path, ["hydra/launcher=joblib"], resume=made.id, now=later)
    assert other == replace(made, launcher=["hydra/launcher=joblib"])
    with pytest.raises(UserError, match=r"seed=0,2: 20260131-142530-seed was planned with seed=0,1"):
        make_plan(tmp_path, ["seed=0,2"], resume=made.id, now=later)
    with pytest.raises(UserError, match="no such multirun"):
        make_plan(tmp_path, [], resume="20260131-000000-x", now=later)


@pytest.mark.parametrize(
    ("overrides", "stages"),
    [
        (["experiment.targets=[sweep]"],
         "fetch_model prepare_data filter_pairs train_dpo calibrate quantize serve sweep"),
        (["experiment.targets=[sweep]", "train=none", "quantize=none"], "fetch_model prepare_data serve sweep"),
        (["experiment.targets=[quantize]", "train=none"], "fetch_model prepare_data calibrate quantize"),
        (["experiment.targets=[train_dpo]", "train=none"], "fetch_model prepare_data filter_pairs train_dpo"),
        (["experiment.targets=[train_dpo]", "pairs=on_policy"],
         "fetch_model prepare_data sample_pairs filter_pairs train_dpo"),
        ([],
         "fetch_model prepare_data sample_pairs filter_pairs train_dpo calibrate quantize make_draft serve split "
         "diverge sweep score extract report"),
    ],
)  # fmt: skip
def test_stages_that_the_targets_reach(root: Path, overrides: list[str], stages: str) -> None:
    assert reached_stages(root, compose(root / "conf", overrides)) == stages.split()
