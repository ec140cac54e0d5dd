"""Prompts and probes of the user's."""

import pytest

from oneaxis.data.prompts import parse_probe, parse_prompt
from oneaxis.errors import UserError
from oneaxis.sources.records import Drop, Record


def test_a_prompt_by_either_key_with_or_without_a_topic() -> None:
    row = parse_prompt(Record("f:1", {"text": " hi ", "topic": "greetings"}), "mine")
    assert (row["text"], row["topic"], row["source"]) == ("hi", "greetings", "mine")
    assert parse_prompt(Record("f:1", {"prompt": "hi"}), "mine")["topic"] == "none"
    assert parse_prompt(Record("f:1", {"prompt": "hi"}), "mine")["prompt_id"] == row["prompt_id"]


def test_a_probe_by_either_key_with_or_without_a_category() -> None:
    row = parse_probe(Record("f:1", {"prompt": "hi ", "category": "medical"}), "mine")
    assert (row["prompt"], row["category"]) == ("hi", "medical")
    assert parse_probe(Record("f:1", {"text": "hi"}), "mine")["category"] == "none"


def test_mistakes_are_named_and_empty_ones_dropped() -> None:
    with pytest.raises(UserError, match=r"^f:1: has no text or prompt"):
        parse_prompt(Record("f:1", {"query": "hi"}), "mine")
    with pytest.raises(UserError, match=r"^f:1: category is 3"):
        parse_probe(Record("f:1", {"text": "hi", "category": 3}), "mine")
    with pytest.raises(Drop, match="empty"):
        parse_probe(Record("f:1", {"text": " "}), "mine")
