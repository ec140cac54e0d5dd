"""CHES on literal numbers, against an independent oracle, and invariant to how it is batched."""

import functools
import json
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oneaxis.config.schema import PairFilter
from oneaxis.preference.ches import Ches, ches_scores
from oneaxis.preference.filter import score_part
from oneaxis.preference.forward import hidden_sums
from oneaxis.preference.pairs import Sequence

from .conftest import small_model


def test_ches_by_hand() -> None:
    """S+ = (3, 4) over 2 tokens, S- = (1, 2) over 4 tokens.

    <S+, S-> = 3 + 8 = 11; ||S+||^2 = 25; ||S-||^2 = 5.
    CHES = 11 - 25 = -14; ln-CHES = 11 / 8 - 25 / 4 = 1.375 - 6.25 = -4.875; cosine = 11 / sqrt(125).
    """
    scores = ches_scores(np.array([[3.0, 4.0]]), np.array([[1.0, 2.0]]), np.array([2]), np.array([4]))
    assert scores.ches[0] == -14.0
    assert scores.ln_ches[0] == -4.875
    assert scores.cosine[0] == pytest.approx(0.98386991, abs=1e-8)


def test_ches_is_not_symmetric() -> None:
    a, b, n = np.array([[3.0, 4.0]]), np.array([[1.0, 2.0]]), np.array([1])
    assert ches_scores(a, b, n, n).ches[0] == -14.0
    assert ches_scores(b, a, n, n).ches[0] == 6.0  # 11 - 5


def test_ches_of_a_response_with_itself_is_zero(model: Any) -> None:
    sequence = Sequence(list(range(3, 20)), 6)
    sums, _ = hidden_sums(model, [(sequence, sequence)], batch_tokens=64)
    n = np.array([sequence.response_tokens])
    scores = ches_scores(sums[:, 0], sums[:, 1], n, n)
    assert scores.ches[0] == 0.0
    assert scores.ln_ches[0] == 0.0
    assert scores.cosine[0] == pytest.approx(1.0, abs=1e-12)


def test_the_circulated_centred_cosine_of_ches_is_minus_one_for_every_pair() -> None:
    """Centring two vectors on their own mean leaves (a-b)/2 and (b-a)/2, whose cosine is -1: no threshold drops any."""
    random = np.random.default_rng(0)
    a, b = random.normal(size=(50, 16)), random.normal(size=(50, 16))
    mean = (a + b) / 2
    first, second = a - mean, b - mean
    cosine = (first * second).sum(1) / np.linalg.norm(first, axis=1) / np.linalg.norm(second, axis=1)
    assert cosine == pytest.approx(np.full(50, -1.0), abs=1e-12)
    n = np.full(50, 3)
    assert np.ptp(ches_scores(a, b, n, n).ches) > 1


def oracle(model64: Any, chosen: Sequence, rejected: Sequence) -> tuple[float, float, float]:
    """CHES, ln-CHES and the size of their terms: float64, one sequence at a time, hidden_states[-1], a loop."""

    def total(sequence: Sequence) -> tuple[list[float], int]:
        with torch.no_grad():
            output = model64(torch.tensor([sequence.ids]), output_hidden_states=True)
        hidden = output.hidden_states[-1][0]
        positions = range(sequence.start - 1, len(sequence.ids) - 1)
        return sum(hidden[position] for position in positions).tolist(), len(positions)

    (a, n), (b, m) = total(chosen), total(rejected)
    cross = sum(x * y for x, y in zip(a, b, strict=True))
    square = sum(x * x for x in a)
    return cross - square, cross / (n * m) - square / n**2, square + abs(cross)


@functools.cache
def both_models() -> tuple[Any, Any]:
    """The same weights in float32 and in float64."""
    return small_model(), small_model().double()


def random_pairs(seed: int, count: int) -> list[tuple[Sequence, Sequence]]:
    random = np.random.default_rng(seed)
    pairs = []
    for _ in range(count):
        prompt = random.integers(3, 300, size=random.integers(1, 12)).tolist()
        responses = [random.integers(3, 300, size=random.integers(1, 25)).tolist() for _ in range(2)]
        pairs.append((Sequence(prompt + responses[0], len(prompt)), Sequence(prompt + responses[1], len(prompt))))
    return pairs


def scored(model: Any, pairs: list[tuple[Sequence, Sequence]], batch_tokens: int, side: Any) -> Ches:
    sums, _ = hidden_sums(model, pairs, batch_tokens=batch_tokens, side=side)
    counts = np.array([[chosen.response_tokens, rejected.response_tokens] for chosen, rejected in pairs])
    return ches_scores(sums[:, 0], sums[:, 1], counts[:, 0], counts[:, 1])


def agrees(found: Ches, index: int, exact: tuple[float, float, float], shortest: int) -> None:
    """Within float32's error: CHES is a difference of two terms, whose size is the third number of the oracle."""
    ches, ln_ches, scale = exact
    assert found.ches[index] == pytest.approx(ches, abs=3e-6 * scale + 1e-9)
    assert found.ln_ches[index] == pytest.approx(ln_ches, abs=3e-6 * scale / shortest**2 + 1e-9)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000), batch_tokens=st.integers(1, 400), side=st.sampled_from(["right", "left"]))
def test_ches_matches_the_oracle_whatever_the_batch_the_padding_side_and_the_order(
    seed: int, batch_tokens: int, side: Any
) -> None:
    """The oracle does not know of batches, so that equality with it for every draw is invariance too."""
    model, model64 = both_models()
    pairs = random_pairs(seed, 9)
    found = scored(model, pairs, batch_tokens, side)
    order = np.random.default_rng(seed).permutation(len(pairs))
    again = scored(model, [pairs[index] for index in order], batch_tokens, side)
    for place, index in enumerate(order):
        exact = oracle(model64, *pairs[index])
        shortest = min(sequence.response_tokens for sequence in pairs[index])
        agrees(found, index, exact, shortest)
        agrees(again, place, exact, shortest)


def test_ches_of_long_responses_whose_rows_are_apart(model: Any) -> None:
    """Prompt 5, responses 290 and 280: one row would have 573 tokens, more than 512, so each has its own (294, and 284
    padded to as many); beside them a pair that does share its row, 5 + 3 + 6 tokens that are read."""
    _, model64 = both_models()
    random = np.random.default_rng(3)
    pairs = []
    for chosen, rejected in ((290, 280), (4, 7)):
        prompt = random.integers(3, 300, size=5).tolist()
        # Told apart by their first token, so that no more than the prompt is shared.
        first, second = (random.integers(3, 300, size=size).tolist() for size in (chosen - 1, rejected - 1))
        pairs.append((Sequence([*prompt, 1, *first], 5), Sequence([*prompt, 2, *second], 5)))
    _, computed = hidden_sums(model, pairs, batch_tokens=600)
    assert computed == 2 * 294 + 14
    found = scored(model, pairs, 4096, "right")
    for index, pair in enumerate(pairs):
        agrees(found, index, oracle(model64, *pair), min(sequence.response_tokens for sequence in pair))


def text_oracle(model64: Any, tokenizer: Any, row: dict[str, Any]) -> tuple[float, float, float]:
    """From texts: the prompt is what the tokens of the prompt alone and of both wholes have in common."""
    prompt, chosen, rejected = (row[key] for key in ("prompt", "chosen", "rejected"))
    if row["conversational"]:
        messages, *responses = (json.loads(row[key]) for key in ("prompt", "chosen", "rejected"))
        texts = [tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)]
        texts += [tokenizer.apply_chat_template(messages + response, tokenize=False) for response in responses]
    else:
        texts = [prompt, prompt + chosen, prompt + rejected]
    ids = [tokenizer.encode(text) for text in texts]
    start = max(n for n in range(len(ids[0]) + 1) if ids[0][:n] == ids[1][:n] == ids[2][:n])
    return oracle(model64, Sequence(ids[1], start), Sequence(ids[2], start))


def test_ches_of_texts_plain_conversational_and_merging_across_the_prompt(model: Any, tokenizer: Any) -> None:
    """ "I won't h" + "elp" is the token " help": there the response begins a token before the join."""
    _, model64 = both_models()
    say = lambda role, text: json.dumps([{"role": role, "content": text}])  # noqa: E731
    texts = [
        ("Goal: open a jar\nAnswer:", " turn the lid.", " break it.", False),
        ("I won't h", "elp with that.", "it it", False),
        (say("user", "open a jar"), say("assistant", "turn the lid"), say("assistant", "break it with that"), True),
    ]
    rows = [
        {"pair_id": f"p{number}", "split": "train", "prompt": prompt, "chosen": chosen, "rejected": rejected,
         "conversational": conversational} for number, (prompt, chosen, rejected, conversational) in enumerate(texts)
    ]  # fmt: skip
    config = PairFilter(score="ln_ches", rule="all", value=1.0, control_seed=None, max_tokens=128, batch_tokens=256)
    table, _ = score_part(model, tokenizer, pl.DataFrame(rows), config)
    assert table["prompt_tokens"][1] == len(tokenizer.encode("I won't")), "the boundary moved back"
    found = Ches(*(table[name].to_numpy() for name in ("ches", "ln_ches", "cosine")))
    for index, row in enumerate(rows):
        shortest = min(table["chosen_tokens"][index], table["rejected_tokens"][index])
        agrees(found, index, text_oracle(model64, tokenizer, row), shortest)


def test_ches_hidden_states_are_those_the_unembedding_reads(model: Any) -> None:
    """The last prompt token's state times the unembedding gives the logits of the first response token."""
    sequence = Sequence([5, 6, 7, 8], 3)
    hidden = hidden_sums(model, [(sequence, sequence)], batch_tokens=8)[0][0, 0]
    with torch.no_grad():
        logits = model(torch.tensor([sequence.ids])).logits[0, 2]
    mine = model.lm_head.weight.detach().double() @ torch.from_numpy(hidden)
    assert mine.numpy() == pytest.approx(logits.double().numpy(), abs=1e-4)
