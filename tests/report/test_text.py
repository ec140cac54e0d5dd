"""Numbers as the page shows them, against literals."""

import pytest

from oneaxis.report import text


@pytest.mark.parametrize(
    ("value", "shown"),
    [(15.39, "15.4"), (-4.5, "−4.50"), (0.0, "0"), (1234.5, "1,234"), (0.018, "0.0180"), (None, "–"),
     (float("nan"), "–"), (float("inf"), "–"), (999.7, "1,000")],
)  # fmt: skip
def test_number(value: float | None, shown: str) -> None:
    assert text.number(value) == shown


def test_small_numbers_keep_their_digits() -> None:
    """A fold error of 3.1e-6 must not read as 0.000003 or 0."""
    assert text.number(3.1e-6) == "3.10e−6"
    assert text.number(-2.5e-8, 2) == "−2.5e−8"


@pytest.mark.parametrize(("value", "shown"), [(0.385, "38.5%"), (-0.001, "−0.1%"), (None, "–")])
def test_percent(value: float | None, shown: str) -> None:
    assert text.percent(value) == shown


def test_signs_and_units() -> None:
    assert (text.nats(-42.25), text.signed_nats(-4.5), text.signed_nats(0.0004)) == ("−42.25", "−4.50", "+0.00")
    assert text.signed_percent(0.0183) == "+1.8%"
    assert text.milliseconds(9.96) == "10.0"
    assert text.milliseconds(1403.2) == "1,403"
    assert text.seconds(75.2) == "1 min 15 s"
    assert text.count(46592) == "46,592"


def test_evidence_in_one_line() -> None:
    facts = {"hit_rate": 0.0, "within": True, "seen": [1, 2], "missing": None, "parts": {"a_b": 0.5}}
    assert text.evidence(facts) == "hit rate: 0; within: yes; seen: 1, 2; missing: not set; parts: a b: 0.5"
    assert text.value_text(list(range(20))) == "0, 1, 2, 3, 4, 5, 6, 7, … (20 in all)"
    assert text.value_text(-1.25) == "−1.25"
    assert text.value_text(17730.0) == "17,730"


@pytest.mark.parametrize(
    ("given", "shown"),
    [((-0.31, -0.4, -0.22), ("−0.31", "[−0.40, −0.22]")), ((0.0, -0.24, 0.24), ("0.00", "[−0.24, +0.24]")),
     ((-1234.5, -1300.0, -1169.0), ("−1,234", "[−1,300, −1,169]")), ((-0.3, None, -0.2), ("−0.300", "no interval")),
     ((None, None, None), ("–", "–")), ((float("nan"), 0.0, 1.0), ("–", "–")),
     ((3e-9, 1e-9, 5e-9), ("+3.00e−9", "[+1.00e−9, +5.00e−9]"))],
)  # fmt: skip
def test_effect_and_interval_share_their_places(given: tuple[float | None, ...], shown: tuple[str, str]) -> None:
    """Two digits of the interval's width: 0.18 wide gives hundredths, 131 wide gives units."""
    assert text.effect(*given) == shown


def test_units_in_the_plural() -> None:
    assert [text.plural(n, "item") for n in (1, 16, None)] == ["1 item", "16 items", "–"]
    assert (text.plural(3, None), text.plural(1234, "series")) == ("3", "1,234 series")


def test_long_names_keep_both_ends() -> None:
    assert text.shorten("serve.engine_args.max_num_batched_tokens=4096", 21) == "serve.engi…okens=4096"
    assert text.shorten("two\nlines", 20) == "two lines"
