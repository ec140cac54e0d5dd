"""NLL and perplexity against log-softmax in float64, and their paired difference on literal numbers."""

import math
from collections.abc import Callable

import polars as pl
import pytest
import torch
from transformers import PreTrainedModel

from oneaxis.quantize.nll import HEAD_ROWS, compare, hidden_nll, perplexity, whole_model_nll
from oneaxis.quantize.text import Sequences
from tests.quantize.models import tiny, token_ids


def from_hidden(model: PreTrainedModel, sequences: Sequences) -> pl.DataFrame:
    hidden_STD = model.model(sequences.token_ids_ST, use_cache=False).last_hidden_state
    return hidden_nll(model.get_output_embeddings(), hidden_STD, sequences)


@pytest.mark.parametrize("measure", [from_hidden, whole_model_nll])
def test_nll_is_that_of_the_whole_model(measure: Callable[[PreTrainedModel, Sequences], pl.DataFrame]) -> None:
    """Oracle: the model's own logits in float64, one sequence at a time. More positions than the head takes at once."""
    ids = token_ids(9, 100)
    assert ids.numel() > HEAD_ROWS
    sequences = Sequences(ids, torch.arange(100).expand(9, -1) // 60, ["x", "y"], num_prefix=2)
    table = measure(tiny("qwen2"), sequences)
    model = tiny("qwen2").double()
    expected = [-model(row[None]).logits[0].log_softmax(-1)[range(1, 99), row[2:]] for row in ids]
    assert table["position"].to_list() == list(range(2, 100)) * 9
    assert table["source"].to_list()[:98] == ["x"] * 58 + ["y"] * 40
    torch.testing.assert_close(torch.tensor(table["nll"].to_list()), torch.cat(expected).float(), rtol=1e-4, atol=1e-4)
    assert perplexity(table) == pytest.approx(math.exp(torch.cat(expected).mean()), rel=1e-5)


def table_of(*sequences: list[float]) -> pl.DataFrame:
    rows = [(s, t, "x", nll) for s, values in enumerate(sequences) for t, nll in enumerate(values)]
    return pl.DataFrame(rows, schema=["sequence", "position", "source", "nll"], orient="row")


def test_difference_is_paired_by_sequence() -> None:
    before, after = table_of([1.0, 3.0], [4.0, 4.0], [0.0, 2.0]), table_of([1.2, 3.0], [4.2, 4.2], [0.3, 2.3])
    found = compare(before, after)
    # Differences of the sequence means: 0.1, 0.2, 0.3; mean 0.2, deviation 0.1, t(2, 0.975) = 4.302653.
    margin = 4.302653 * 0.1 / math.sqrt(3)
    assert found["delta_nll"]["effect"] == pytest.approx(0.2)
    assert found["delta_nll"]["ci_low"] == pytest.approx(0.2 - margin, rel=1e-5)
    assert found["delta_nll"]["ci_high"] == pytest.approx(0.2 + margin, rel=1e-5)
    assert found["before"] == pytest.approx(math.exp(14 / 6))
    assert found["ratio"] == pytest.approx(math.exp(0.2))
    assert (found["n"], found["num_tokens"]) == (3, 6)


def test_one_sequence_has_an_effect_and_no_interval() -> None:
    delta = compare(table_of([1.0, 2.0]), table_of([1.5, 2.5]))["delta_nll"]
    assert delta == {"effect": 0.5, "ci_low": None, "ci_high": None}
