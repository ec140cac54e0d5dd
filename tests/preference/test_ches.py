"""CHES on literal numbers, against an independent oracle, and invariant to how it is batched."""

import functools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oneaxis.preference.ches import ches_scores
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
    sums = hidden_sums(model, [sequence, sequence], batch_tokens=64)
    n = np.array([sequence.response_tokens])
    scores = ches_scores(sums[:1], sums[1:], n, n)
    square = float((sums[0] ** 2).sum())
    assert abs(scores.ches[0]) < 1e-6 * square, "rows of one batch may differ in their last float32 bits"
    same = ches_scores(sums[:1], sums[:1], n, n)
    assert same.ches[0] == 0.0
    assert same.ln_ches[0] == 0.0
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


def oracle(model64: Any, chosen: Sequence, rejected: Sequence) -> tuple[float, float]:
    """CHES and ln-CHES of one pair: float64, batch 1, no padding, hidden_states[-1], a loop over positions."""

    def total(sequence: Sequence) -> tuple[list[float], int]:
        with torch.no_grad():
            output = model64(torch.tensor([sequence.ids]), output_hidden_states=True)
        hidden = output.hidden_states[-1][0]
        positions = range(sequence.start - 1, len(sequence.ids) - 1)
        return sum(hidden[position] for position in positions).tolist(), len(positions)

    (a, n), (b, m) = total(chosen), total(rejected)
    cross = sum(x * y for x, y in zip(a, b, strict=True))
    square = sum(x * x for x in a)
    return cross - square, cross / (n * m) - square / n**2


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


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), batch_tokens=st.integers(1, 400), side=st.sampled_from(["right", "left"]))
def test_ches_matches_the_oracle_whatever_the_batch_and_the_padding_side(
    seed: int, batch_tokens: int, side: Any
) -> None:
    model, model64 = both_models()
    pairs = random_pairs(seed, 9)
    sums = hidden_sums(model, [s for pair in pairs for s in pair], batch_tokens=batch_tokens, side=side)
    counts = np.array([[chosen.response_tokens, rejected.response_tokens] for chosen, rejected in pairs])
    scores = ches_scores(sums[0::2], sums[1::2], counts[:, 0], counts[:, 1])
    for index, (chosen, rejected) in enumerate(pairs):
        ches, ln_ches = oracle(model64, chosen, rejected)
        scale = float((sums[2 * index] ** 2).sum() + abs((sums[2 * index] * sums[2 * index + 1]).sum()))
        assert scores.ches[index] == pytest.approx(ches, abs=2e-6 * scale + 1e-9)
        shortest = counts[index].min()
        assert scores.ln_ches[index] == pytest.approx(ln_ches, abs=2e-6 * scale / shortest**2 + 1e-9)


def test_ches_hidden_states_are_those_the_unembedding_reads(model: Any) -> None:
    """The last prompt token's state times the unembedding gives the logits of the first response token."""
    sequence = Sequence([5, 6, 7, 8], 3)
    hidden = hidden_sums(model, [sequence], batch_tokens=8)[0]
    with torch.no_grad():
        logits = model(torch.tensor([sequence.ids])).logits[0, 2]
    mine = model.lm_head.weight.detach().double() @ torch.from_numpy(hidden)
    assert mine.numpy() == pytest.approx(logits.double().numpy(), abs=1e-4)
