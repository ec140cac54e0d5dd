"""Rules on responses whose reading was worked out by hand."""

import random
from decimal import Decimal

import pytest

from oneaxis.sample.rules import Rule, check, last_number


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("The sum is 83.", "83"),
        ("47 + 36 = 83", "83"),
        ("It is 1,234.50 in all", "1234.50"),
        ("1, 2, 3", "3"),
        ("1,2345", "2345"),
        ("10-3", "3"),
        ("10 - 3", "3"),
        ("(-3)", "-3"),
        ("x = -3", "-3"),
        ("f(2)-3", "3"),
        ("\u22127 degrees", "-7"),
        (".5", "0.5"),
        ("12 kg of H2O", "12"),
        ("007", "7"),
        ("2**3 gives 8.0", "8"),
        ("none", None),
        ("step_2", None),
    ],
)
def test_the_last_number_of_a_text(text: str, number: str | None) -> None:
    found = last_number(text)
    assert found == (None if number is None else Decimal(number))


def test_any_number_is_found_again_however_it_is_written() -> None:
    draw = random.Random(7)
    for _ in range(300):
        value = Decimal(draw.randint(-(10**9), 10**9)).scaleb(-draw.randint(0, 4))
        for written in (f"{value:f}", f"{value:,f}", f"{value:f}".replace("-", "\u2212")):
            assert last_number(f"First 17, then {written}. Done") == value


@pytest.mark.parametrize(
    ("rule", "text", "passed", "said"),
    [
        (Rule("number", Decimal(83)), "47 + 36 = 83.0", True, "83.0, as it is"),
        (Rule("number", Decimal(83)), "83 - or 84", False, "84, not 83"),
        (Rule("number", Decimal(83)), "eighty-three", False, "no number"),
        (Rule("json", ("a", "b")), ' {"b": 1, "a": [2], "c": null}\n', True, "an object with all keys"),
        (Rule("json", ("a", "b")), '{"a": 1}', False, "lacks b"),
        (Rule("json", ("a",)), '{"a": 1, "a": 2}', False, "not JSON: a key is there twice"),
        (Rule("json", ("a",)), '{"a": NaN}', False, "not JSON: NaN is no JSON"),
        (Rule("json", ("a",)), 'Here: {"a": 1}', False, "not JSON: Expecting value at character 1"),
        (Rule("json", ("a",)), "[1]", False, "JSON, but no object"),
        (Rule("json", ("a",)), "[" * 100_000, False, "not JSON: maximum recursion depth exceeded"),
        (Rule("regex", "yes|no"), " yes\n", True, "matches"),
        (Rule("regex", "yes|no"), "yes, no", False, "does not match"),
        (Rule("words", 3), "one two\n three", True, "3 words of 3"),
        (Rule("words", 3), "one two three four", False, "4 words of 3"),
        (Rule("words", 3), " \n", False, "empty"),
    ],
)
def test_what_a_rule_says(rule: Rule, text: str, passed: bool, said: str) -> None:
    reading = check(rule, text, finished=True)
    assert reading.passed == passed
    assert reading.said.startswith(said)
    cut = check(rule, text, finished=False)
    assert (cut.passed, cut.said) == (False, "cut off at the token limit")
