"""Recurrent state: rounding against its closed form, and that replay is state copying, to 1e-12 in float64."""

import math

import pytest
import torch

from oneaxis.errors import UserError
from oneaxis.plan.recurrence import draw_inputs, outputs, replay_against_copies, rounding_errors


@pytest.mark.parametrize("seed", range(12))
def test_replay_is_exact(seed):
    """Random decays, drafts, acceptances and windows; the oracle is the recurrence over the kept tokens alone."""
    draw = torch.Generator().manual_seed(1000 + seed)
    decay = 0.5 + 0.5 * torch.rand((), generator=draw, dtype=torch.float64).item()
    drafts, window = (int(torch.randint(1, 17, (), generator=draw)) for _ in range(2))
    accept = torch.rand((), generator=draw).item()
    found = replay_against_copies(decay, 40, 8, drafts, accept, window, seed)
    assert found.difference < 1e-12
    assert found.against_plain < 1e-12
    assert found.copies_written == 40 * (drafts + 1)
    # A window closes with the step that fills it.
    assert found.longest_log < window + drafts + 1
    assert found.replay_written <= found.kept / window
    assert found.kept >= 40


def test_replay_with_everything_and_with_nothing_accepted():
    everything = replay_against_copies(0.9, 20, 4, 3, 1.0, 8, 0)
    nothing = replay_against_copies(0.9, 20, 4, 3, 0.0, 8, 0)
    assert (everything.kept, nothing.kept) == (80, 20)
    assert max(everything.difference, nothing.difference) < 1e-12
    # 16 tokens fill two windows of 8: a checkpoint every second step; one token a step: every eighth.
    assert (everything.replay_written, nothing.replay_written) == (10, 2)


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_folding_once_a_window_lowers_the_error_by_its_root(dtype):
    """Closed form: errors of the state have power u^2 / (w (1 - a^2)), so that of the outputs falls by sqrt(w)."""
    found = rounding_errors(0.99, 4096, 16, dtype, [1, 4, 16], seed=3)
    for one in found:
        assert one.expected == math.sqrt(one.window)
        assert one.gain == pytest.approx(one.expected, rel=0.15)


def test_the_error_of_rounding_every_token_has_the_size_that_it_should():
    """u: RMS rounding by RMS value of bfloat16, on random values; the power of the error is u^2 / (1 - a^2)."""
    values = torch.randn(200_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rounded = values.to(torch.bfloat16).to(torch.float64)
    u = float((rounded - values).square().mean().sqrt() / values.square().mean().sqrt())
    (found,) = rounding_errors(0.98, 4096, 16, "bf16", [1], seed=5)
    assert found.error == pytest.approx(u / math.sqrt(1 - 0.98**2), rel=0.1)


def test_updates_that_a_rounded_state_cannot_take_are_lost():
    """In three bits of mantissa an update is often less than half a step: rounding every token is worse than noise."""
    _, many = rounding_errors(0.99, 4096, 8, "fp8_e4m3", [1, 4], seed=1)
    assert many.gain > 1.2 * many.expected


def test_the_recurrence_by_hand():
    inputs = draw_inputs(3, 2, torch.Generator().manual_seed(0))
    k, v, q = inputs.keys_TK, inputs.values_TV, inputs.queries_TK
    # y_3 = sum over s of a^(3 - s) (q_3 . k_s) v_s
    expected = sum(0.5 ** (2 - s) * (q[2] @ k[s]) * v[s] for s in range(3))
    torch.testing.assert_close(outputs(inputs, 0.5)[2], expected)


def test_bad_settings_are_refused():
    with pytest.raises(UserError, match="dtype=int3"):
        rounding_errors(0.9, 128, 4, "int3", [1], 0)
    with pytest.raises(UserError, match="decay=1"):
        rounding_errors(1.5, 128, 4, "bf16", [1], 0)
    with pytest.raises(UserError, match="tokens=10: allowed: 128"):
        rounding_errors(0.9, 10, 4, "bf16", [1, 64], 0)
