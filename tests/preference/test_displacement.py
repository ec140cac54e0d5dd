"""The decision table on literal numbers."""

import pytest

from oneaxis.judge.paired import Effect
from oneaxis.preference.displacement import direction, interval, verdict

UP = Effect(1.0, 0.6, 1.4, 20)
FLAT = Effect(0.1, -0.2, 0.4, 20)
SMALL = Effect(-0.3, -0.4, -0.2, 20)
UNCLEAR = Effect(-3.0, -7.0, 1.0, 20)
DOWN = Effect(-2.0, -2.5, -1.5, 20)
STEEP = Effect(-38.0, -50.0, -26.0, 20)
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
        name, _ = verdict(CHANGES[chosen], CHANGES[rejected], FLAT, UP, slight_nats=0.5, steep_nats=5.0)
        assert name == expected.replace("-", " "), f"chosen {chosen}, rejected {rejected}"


def test_published_shapes_of_the_failure() -> None:
    """Near-duplicate refusals, plain DPO: chosen -2.27 -> -8.11, rejected -6.83 -> -45.5; anchored: -2.27 -> -2.28."""
    chosen, rejected = Effect(-5.84, -7.0, -4.7, 32), Effect(-38.67, -45.0, -32.0, 32)
    assert verdict(chosen, rejected, FLAT, UP, slight_nats=0.5, steep_nats=8.0)[0] == "displacement"
    assert verdict(chosen, rejected, FLAT, UP, slight_nats=0.5, steep_nats=5.0)[0] == "severe"
    anchored = Effect(-0.01, -0.3, 0.28, 32)
    assert verdict(anchored, Effect(-13.0, -16.0, -10.0, 32), FLAT, UP, slight_nats=0.5, steep_nats=5.0)[0] == "healthy"


def test_reasons_carry_the_numbers_and_the_escape() -> None:
    _, reasons = verdict(DOWN, STEEP, Effect(2.0, 1.0, 3.0, 16), UP, slight_nats=0.5, steep_nats=5.0)
    assert reasons == [
        "chosen responses fell: -2.00 nats [-2.50, -1.50], n = 20",
        "rejected responses fell steeply (by 5 nats or more): -38.00 nats [-50.00, -26.00], n = 20",
        "margin: +1.00 nats [+0.60, +1.40], n = 20",
        "escape text rose: +2.00 nats [+1.00, +3.00], n = 16; probability went to the escape text",
    ]
    _, calm = verdict(DOWN, STEEP, FLAT, UP, slight_nats=0.5, steep_nats=5.0)
    assert calm[3].endswith("n = 20")


def test_a_mismatch_says_what_it_means() -> None:
    _, reasons = verdict(UP, UP, FLAT, FLAT, slight_nats=0.5, steep_nats=5.0)
    assert reasons[1].endswith("the reference does not fit these responses yet, so training taught their common form")
    _, reasons = verdict(DOWN, UP, FLAT, FLAT, slight_nats=0.5, steep_nats=5.0)
    assert reasons[1].endswith("the policy moved against the preference")


def test_interval_is_what_the_report_reads() -> None:
    assert interval(DOWN) == {"effect": -2.0, "ci_low": -2.5, "ci_high": -1.5, "n": 20}
