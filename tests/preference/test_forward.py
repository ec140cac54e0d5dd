"""Batches, padding, and summed log-probabilities against one sequence at a time in float64."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oneaxis.preference.forward import batches, padded, response_logps
from oneaxis.preference.pairs import Sequence

from .conftest import small_model


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 120))
def test_batches_hold_every_index_once_and_stay_within_the_budget(lengths: list[int], budget: int) -> None:
    parts = batches(lengths, budget)
    assert sorted(index for part in parts for index in part) == list(range(len(lengths)))
    assert all(len(part) == 1 or len(part) * max(lengths[i] for i in part) <= budget for part in parts)


def test_batches_by_hand() -> None:
    assert batches([3, 9, 3, 4], 12) == [[1], [3, 0, 2]], "4 x 3 = 12 fits, 9 x 2 does not"


def test_padding_by_hand() -> None:
    """Prompt 5 6, response 7 8; prompt 4, response 9. Predicting: the last prompt token to the second-to-last."""
    sequences = [Sequence([5, 6, 7, 8], 2), Sequence([4, 9], 1)]
    inputs, predicts = padded(sequences)
    assert inputs["input_ids"].tolist() == [[5, 6, 7, 8], [4, 9, 0, 0]]
    assert inputs["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert predicts.int().tolist() == [[0, 1, 1, 0], [1, 0, 0, 0]]


def naive(model64: Any, sequence: Sequence) -> float:
    """One sequence alone, float64, a loop over its response tokens."""
    with torch.no_grad():
        logits = model64(torch.tensor([sequence.ids])).logits[0]
    total = 0.0
    for position in range(sequence.start, len(sequence.ids)):
        row = logits[position - 1]
        total += float(row[sequence.ids[position]] - torch.log(torch.exp(row).sum()))
    return total


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10_000), batch_tokens=st.integers(1, 300))
def test_response_logps_match_the_naive_sum_whatever_the_batch(seed: int, batch_tokens: int) -> None:
    random = np.random.default_rng(seed)
    sequences = []
    for _ in range(7):
        start, size = int(random.integers(1, 12)), int(random.integers(1, 20))
        sequences.append(Sequence(random.integers(3, 300, size=start + size).tolist(), start))
    model, model64 = small_model(), small_model().double()
    found = response_logps(model, sequences, batch_tokens=batch_tokens)
    assert found == pytest.approx([naive(model64, sequence) for sequence in sequences], abs=1e-4)


def test_response_logps_leave_the_training_mode_as_it_was() -> None:
    model = small_model().train()
    response_logps(model, [Sequence([3, 4, 5], 1)])
    assert model.training
    model.eval()
    response_logps(model, [Sequence([3, 4, 5], 1)])
    assert not model.training
