"""The decision table on literal numbers."""

import pytest

from oneaxis.judge.paired import Effect
from oneaxis.judge.statistics import paired_share_interval
from oneaxis.preference.displacement import direction, interval, share_change, verdict

UP = Effect(1.0, 0.6, 1.4, 20)
FLAT = Effect(0.1, -0.2, 0.4, 20)
SMALL = Effect(-0.3, -0.4, -0.2, 20)
UNCLEAR = Effect(-3.0, -7.0, 1.0, 20)
DOWN = Effect(-2.0, -2.5, -1.5, 20)
STEEP = Effect(-38.0, -50.0, -26.0, 20)
FLAT_SHARE = Effect(0.0, -0.1, 0.1, 48)
LIMITS = {"slight_nats": 0.5, "steep_nats": 5.0, "refusal_share": 0.05}
CHANGES = {"up": UP, "flat": FLAT, "unclear": UNCLEAR, "down": DOWN, "steep": STEEP}


def test_directions_with_slight_half_a_nat_and_steep_five() -> None:
    for name, change in CHANGES.items():
        assert direction(change, slight_nats=0.5, steep_nats=5.0) == name
    assert direction(SMALL, slight_nats=0.5, steep_nats=5.0) == "flat", "clear, but smaller than what counts as slight"
    assert direction(SMALL, slight_nats=0.2, steep_nats=5.0) == "down", "the thresholds are the settings'"
    assert direction(DOWN, slight_nats=0.5, steep_nats=1.9) == "steep"


def test_thresholds_are_inclusive() -> None:
    assert direction(Effect(0.5, 0.1, 0.9, 9), slight_nats=0.5, steep_nats=5.0) == "up"
    assert direction(Effect(-0.5, -0.9, -0.1, 9), slight_nats=0.5, steep_nats=5.0) == "down"
    assert direction(Effect(-5.0, -9.0, -1.0, 9), slight_nats=0.5, steep_nats=5.0) == "steep"
    assert direction(Effect(0.0, -0.5, 0.5, 9), slight_nats=0.5, steep_nats=5.0) == "flat"
    assert direction(Effect(0.5, 0.0, 1.0, 9), slight_nats=0.5, steep_nats=5.0) == "unclear", "an end at 0 contains 0"


TABLE = """
up       mismatch  healthy          no-clear-change  healthy       healthy
flat     mismatch  no-clear-change  no-clear-change  healthy       healthy
unclear  no-clear-change no-clear-change no-clear-change no-clear-change no-clear-change
down     mismatch  displacement     displacement     displacement  displacement
steep    severe    severe           severe           severe        severe
"""


@pytest.mark.parametrize("row", TABLE.strip().splitlines())
def test_the_table(row: str) -> None:
    chosen, *verdicts = row.split()
    for rejected, expected in zip(CHANGES, verdicts, strict=True):
        name, _ = verdict(CHANGES[chosen], CHANGES[rejected], UP, {"hedge": FLAT}, {}, **LIMITS)
        assert name == expected.replace("-", " "), f"chosen {chosen}, rejected {rejected}"


def test_published_shapes_of_the_failure() -> None:
    """Near-duplicate refusals, plain DPO: chosen -2.27 -> -8.11, rejected -6.83 -> -45.5; anchored: -2.27 -> -2.28."""
    chosen, rejected = Effect(-5.84, -7.0, -4.7, 32), Effect(-38.67, -45.0, -32.0, 32)
    assert verdict(chosen, rejected, UP, {}, {}, **LIMITS | {"steep_nats": 8.0})[0] == "displacement"
    assert verdict(chosen, rejected, UP, {}, {}, **LIMITS)[0] == "severe"
    anchored = Effect(-0.01, -0.3, 0.28, 32)
    assert verdict(anchored, Effect(-13.0, -16.0, -10.0, 32), UP, {}, {}, **LIMITS)[0] == "healthy"


def test_reasons_carry_the_numbers_and_name_the_escape_texts_that_rose() -> None:
    escapes = {"refusal": Effect(2.0, 1.0, 3.0, 16), "hedge": FLAT, "empty": Effect(0.3, 0.2, 0.4, 16)}
    name, reasons = verdict(DOWN, STEEP, UP, escapes, {"refusals": Effect(0.0, -0.04, 0.04, 48)}, **LIMITS)
    assert name == "displacement"
    assert reasons == [
        "chosen responses fell: -2.00 nats [-2.50, -1.50], n = 20",
        "rejected responses fell steeply (by 5 nats or more): -38.00 nats [-50.00, -26.00], n = 20",
        "margin: +1.00 nats [+0.60, +1.40], n = 20",
        "escape text 'refusal' rose on benign prompts: +2.00 nats [+1.00, +3.00], n = 16",
        "refusals of benign prompts, answered greedily, did not measurably change: +0.0 points [-4.0, +4.0], n = 48",
    ]
    _, calm = verdict(DOWN, STEEP, UP, escapes | {"refusal": FLAT}, {}, **LIMITS)
    assert calm[3:] == ["no escape text rose by 0.5 nats; most did 'empty': +0.30 nats [+0.20, +0.40], n = 16"]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (Effect(0.25, 0.12, 0.38, 48), "severe"),
        (Effect(0.25, -0.01, 0.45, 8), "healthy"),  # not beyond doubt
        (Effect(0.04, 0.01, 0.08, 400), "healthy"),  # beyond doubt, and smaller than what counts
        (Effect(-0.25, -0.38, -0.12, 48), "healthy"),
    ],
)
@pytest.mark.parametrize("share", ["refusals", "empty answers"])
def test_a_model_that_learnt_to_refuse_is_severe_whatever_its_log_probabilities(
    share: str, change: Effect, expected: str
) -> None:
    name, reasons = verdict(UP, DOWN, UP, {"hedge": FLAT}, {"other": FLAT_SHARE, share: change}, **LIMITS)
    assert name == expected
    if expected == "severe":
        assert reasons[1].startswith(f"{share} of benign prompts, answered greedily, rose by 5 points or more: +25.0")
    else:
        assert reasons[0].startswith("chosen responses rose")


def test_the_change_of_a_share_is_paired_by_prompt() -> None:
    """Three prompts gained and one lost, of eight. (The interval itself is tested against Tango's tables elsewhere.)"""
    before = [False, False, False, True, True, False, False, False]
    after = [True, True, True, False, True, False, False, False]
    change = share_change(before, after, 0.95)
    assert (change.effect, change.n) == (0.25, 8)
    assert (change.ci_low, change.ci_high) == paired_share_interval(3, 1, 8, 0.95)


def test_a_mismatch_says_what_it_means() -> None:
    _, reasons = verdict(UP, UP, FLAT, {}, {}, **LIMITS)
    assert reasons[1].endswith("the reference does not fit these responses yet, so training taught their common form")
    _, reasons = verdict(DOWN, UP, FLAT, {}, {}, **LIMITS)
    assert reasons[1].endswith("the policy moved against the preference")


def test_interval_is_what_the_report_reads() -> None:
    assert interval(DOWN) == {"effect": -2.0, "ci_low": -2.5, "ci_high": -1.5, "n": 20}
