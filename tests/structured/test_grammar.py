"""Kept mass: closed forms on a vocabulary of a few tokens, and the tokens that a grammar allows."""

import itertools
import json
import math

import pytest
import torch

from oneaxis.structured.grammar import Grammars, kept_mass, legal_tokens
from tests.serve.tiny import byte_tokenizer

LOG2, LOG3 = math.log(2), math.log(3)


def test_kept_mass_by_hand() -> None:
    # Weights 1, 2, 3, 2 of 8; at T = 1/2 they are squared: 1, 4, 9, 4 of 18; at T = 2 their roots.
    logits = torch.tensor([[0.0, LOG2, LOG3, LOG2]] * 4 + [[5.0, 5.0 + LOG2, 5.0 + LOG3, 5.0 + LOG2]])
    legal = torch.tensor([[True, True, False, False], [True, True, False, False], [False, False, True, True],
                          [True, False, False, True], [False] * 4])  # fmt: skip
    mass = kept_mass(logits, legal, torch.tensor([1.0, 0.5, 0.5, 2.0, 0.0]))
    roots = 1 + 2 * math.sqrt(2) + math.sqrt(3)
    assert mass.kept_R.tolist() == pytest.approx([3 / 8, 5 / 18, 13 / 18, (1 + math.sqrt(2)) / roots, 0.0], rel=1e-6)
    assert mass.kept_at_one_R.tolist() == pytest.approx([3 / 8, 3 / 8, 5 / 8, 3 / 8, 0.0], rel=1e-6)
    assert mass.moved_R.tolist() == [True, True, False, True, True]


def test_a_greedy_row_is_taken_at_temperature_one_and_everything_legal_keeps_everything() -> None:
    torch.manual_seed(torch.seed() % 2**31)
    logits = torch.randn(3, 97) * 20
    mass = kept_mass(logits, torch.ones(3, 97, dtype=torch.bool), torch.zeros(3))
    assert mass.kept_R.tolist() == pytest.approx([1.0] * 3, abs=1e-6)
    legal = torch.rand(3, 97) < 0.3
    mass = kept_mass(logits.bfloat16(), legal, torch.tensor([0.0, 1.0, 0.7]))
    exact = torch.softmax(logits.bfloat16().double() / torch.tensor([[1.0], [1.0], [0.7]]).double(), -1)
    assert mass.kept_R.tolist() == pytest.approx((exact * legal).sum(-1).tolist(), rel=1e-4, abs=1e-12)


def test_bits_stand_for_tokens_in_order() -> None:
    words = torch.tensor([[0b1011, 1], [-(2**31), 0]], dtype=torch.int32)
    assert [row.nonzero()[:, 0].tolist() for row in legal_tokens(words, 40)] == [[0, 1, 3, 32], [31]]


SCHEMA = json.dumps({"type": "object", "properties": {"a": {"type": "string", "enum": ["on", "off"]}},
                     "required": ["a"], "additionalProperties": False})  # fmt: skip


@pytest.fixture(scope="module")
def grammars(tmp_path_factory: pytest.TempPathFactory) -> Grammars:
    """Of a tokenizer with a token a byte, and a few that no text holds."""
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("grammar")
    size = byte_tokenizer(folder)
    return Grammars(PreTrainedTokenizerFast.from_pretrained(folder), size)


def allowed(grammars: Grammars, whitespace: str, text: str) -> str:
    """The bytes that may follow `text`, and $ where the answer may end."""
    follower = grammars.follow(SCHEMA, whitespace)  # type: ignore[arg-type]
    ids = ids_of(text)
    assert follower.advance(ids[:3])
    assert follower.advance(ids)
    bitmask = grammars.bitmask(1)
    follower.fill(bitmask, 0)
    names = {token: character for character, token in TOKENS.items()} | {1: "$"}
    return "".join(sorted(names[token] for token in legal_tokens(bitmask, 320)[0].nonzero()[:, 0].tolist()))


def ids_of(text: str) -> list[int]:
    return [TOKENS[character] for character in text]


def _tokens() -> dict[str, int]:
    """As the tokenizer's file has them: <s>, </s>, then the byte alphabet in order; a space is written U+0120."""
    from tokenizers import pre_tokenizers

    found = {character: 2 + place for place, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    return {chr(byte): found[{32: "\u0120", 10: "\u010a", 9: "\u0109", 13: "\u010d"}.get(byte, chr(byte))]
            for byte in itertools.chain(range(32, 127), (9, 10, 13))}  # fmt: skip


TOKENS = _tokens()


@pytest.mark.parametrize(
    ("whitespace", "text", "next_"),
    [
        ("compact", '{"a', '"'),
        ("compact", '{"a":"', "o"),
        ("compact", '{"a":"o', "fn"),
        ("compact", '{"a":"on"}', "$"),
        ("free", '{"a":"o', "fn"),
        ("free", '{"a": "on"}', "$"),
        ("free", '{"a":', '\t\n\r "'),
    ],
)
def test_the_grammar_allows_what_the_schema_says(grammars: Grammars, whitespace: str, text: str, next_: str) -> None:
    assert allowed(grammars, whitespace, text) == "".join(sorted(next_))


def test_an_answer_that_leaves_the_grammar_or_ends_is_followed_no_further(grammars: Grammars) -> None:
    left = grammars.follow(SCHEMA, "free")
    assert not left.advance(ids_of('{"b"'))
    assert left.left
    assert not left.advance(ids_of('{"a": "on"}'))
    ended = grammars.follow(SCHEMA, "free", [1])
    assert ended.advance(ids_of('{"a": "on"}'))
    assert not ended.advance([*ids_of('{"a": "on"}'), 1])
    assert not ended.left
