"""Recurrent state in numbers: what rounding it does, and that replaying inputs is exact.

A small linear recurrence stands for the layers of hybrid models (Mamba2, linear attention), which all have its form:

    S_t = a S_{t-1} + k_t v_t^T        y_t = S_t^T q_t

**Precision.** A state that is rounded at every token takes up a rounding error each time, and old ones decay with it:
in a steady state their power is u^2 / (1 - a^2), u the rounding's own. Held in low precision for a window of w tokens,
with the updates kept aside in high precision and folded in once a window, it takes up one error in w tokens. The mean
power is then u^2 / (w (1 - a^2)): the error falls by sqrt(w), by more where single updates are too small to change a
rounded state at all.

**Replay.** Speculation with copies keeps a state for every draft position and goes back to the last one accepted. With
replay nothing is copied: a checkpoint of the state and a log of the accepted inputs since give every output, in
parallel form; a rejected draft never enters the log, and the log is folded into the checkpoint when it is full. Both
are computed here in float64 from the same random drafts and rejections.

Tensor dims: T tokens, K key width, V value width.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from oneaxis.errors import UserError

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32, "fp8_e4m3": torch.float8_e4m3fn}


@dataclass(frozen=True)
class Inputs:
    """Of a sequence, float64."""

    keys_TK: Tensor
    values_TV: Tensor
    queries_TK: Tensor


def draw_inputs(tokens: int, width: int, generator: torch.Generator) -> Inputs:
    """Standard normal, keys and queries scaled to unit length on average."""

    def normal() -> Tensor:
        return torch.randn(tokens, width, generator=generator, dtype=torch.float64)

    return Inputs(normal() / math.sqrt(width), normal(), normal() / math.sqrt(width))


def outputs(inputs: Inputs, decay: float, dtype: torch.dtype | None = None, window: int = 1) -> Tensor:
    """y [T, V] with the state rounded to `dtype` at the end of every `window` tokens; None: never."""
    tokens, width = inputs.keys_TK.shape[0], inputs.keys_TK.shape[1]
    state_KV = torch.zeros(width, inputs.values_TV.shape[1], dtype=torch.float64)
    found_TV = torch.empty_like(inputs.values_TV)
    for token in range(tokens):
        state_KV = decay * state_KV + torch.outer(inputs.keys_TK[token], inputs.values_TV[token])
        if dtype is not None and (token + 1) % window == 0:
            state_KV = state_KV.to(dtype).to(torch.float64)
        found_TV[token] = state_KV.T @ inputs.queries_TK[token]
    return found_TV


@dataclass(frozen=True)
class Rounding:
    """The error of the outputs with one window."""

    window: int
    error: float
    """RMS error by RMS output, over the second half of the tokens."""
    gain: float | None
    """By how much less than with rounding at every token; None where there is no error."""
    expected: float
    """sqrt(window)."""


def rounding_errors(
    decay: float, tokens: int, width: int, dtype: str, windows: Sequence[int], seed: int
) -> list[Rounding]:
    """Against the recurrence in float64.

    Raises:
            raise UserError(f"dtype={dtype}: the state outgrows it; allowed: less decay, fewer tokens, or more bits")
            the dtype.
    """
    if dtype not in DTYPES:
        raise UserError(f"dtype={dtype}: allowed: {', '.join(DTYPES)}")
    if not 0 < decay <= 1:
        raise UserError(f"decay={decay:g}: allowed: above 0, up to 1")
    if tokens < 2 * max(windows):
        raise UserError(f"tokens={tokens}: allowed: {2 * max(windows)} and up, two of the longest windows")
    inputs = draw_inputs(tokens, width, torch.Generator().manual_seed(seed))
    exact_TV, half = outputs(inputs, decay), tokens // 2

    def error(window: int) -> float:
        off_TV = (outputs(inputs, decay, DTYPES[dtype], window) - exact_TV)[half:]
        return float(off_TV.square().mean().sqrt() / exact_TV[half:].square().mean().sqrt())

    each_token = error(1)
    found = []
    for window in windows:
        own = each_token if window == 1 else error(window)
        found.append(Rounding(window, own, each_token / own if own else None, math.sqrt(window)))
    return found


# --- replay --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Replayed:
    """Replay against state copies."""

    steps: int
    kept: int
    """Tokens."""
    difference: float
    """Largest of any output, rejected ones too, and of the last state, by the largest output."""
    against_plain: float
    """The same of replay against the recurrence over the kept tokens alone."""
    copies_written: int
    """States."""
    replay_written: int
    longest_log: int


def replay_against_copies(
    decay: float, steps: int, width: int, drafts: int, acceptance: float, window: int, seed: int
) -> Replayed:
    """`steps` verifications of `drafts` random drafts, each accepted with this probability while all before it were.

    Each step takes the drafts that were accepted and one token of the target's own.
    """
    generator = torch.Generator().manual_seed(seed)
    state_KV = torch.zeros(width, width, dtype=torch.float64)
    checkpoint_KV, log = state_KV.clone(), draw_inputs(0, width, generator)
    kept: list[Inputs] = []
    worst = largest = 0.0
    kept_outputs: list[Tensor] = []
    folds = longest = 0
    for _ in range(steps):
        drawn = draw_inputs(drafts + 1, width, generator)
        accepted = 0
        while accepted < drafts and torch.rand((), generator=generator).item() < acceptance:
            accepted += 1

        # With copies: a state after each draft.
        copies, copied = [state_KV], []
        for place in range(drafts):
            copies.append(decay * copies[-1] + torch.outer(drawn.keys_TK[place], drawn.values_TV[place]))
            copied.append(copies[-1].T @ drawn.queries_TK[place])
        own = _take(drawn, [drafts])
        state_KV = decay * copies[accepted] + torch.outer(own.keys_TK[0], own.values_TV[0])
        copied.append(state_KV.T @ own.queries_TK[0])

        # With replay: the outputs of all drafts from the checkpoint, the log and the drafts themselves.
        replayed_TV = _parallel(checkpoint_KV, log, _take(drawn, range(drafts)), decay)
        taken = _take(drawn, [*range(accepted), drafts])
        own_V = _parallel(checkpoint_KV, log, taken, decay)[-1]
        log = _join(log, taken)
        longest = max(longest, log.keys_TK.shape[0])
        if log.keys_TK.shape[0] >= window:
            checkpoint_KV, log, folds = _fold(checkpoint_KV, log, decay), draw_inputs(0, width, generator), folds + 1

        copied_TV = torch.stack(copied)
        largest = max(largest, float(copied_TV.abs().max()))
        worst = max(worst, float((copied_TV - torch.cat([replayed_TV, own_V[None]])).abs().max()))
        kept.append(taken)
        kept_outputs += [*replayed_TV[:accepted], own_V]
    worst = max(worst, float((_fold(checkpoint_KV, log, decay) - state_KV).abs().max()))
    plain_TV = outputs(_join(*kept), decay)
    off = float((torch.stack(kept_outputs) - plain_TV).abs().max())
    return Replayed(
        steps, len(kept_outputs), worst / largest, off / largest, copies_written=steps * (drafts + 1),
        replay_written=folds, longest_log=longest,
    )  # fmt: skip


def _take(inputs: Inputs, places: Sequence[int] | range) -> Inputs:
    chosen = list(places)
    return Inputs(inputs.keys_TK[chosen], inputs.values_TV[chosen], inputs.queries_TK[chosen])


def _join(*parts: Inputs) -> Inputs:
    return Inputs(
        torch.cat([part.keys_TK for part in parts]),
        torch.cat([part.values_TV for part in parts]),
        torch.cat([part.queries_TK for part in parts]),
    )


def _parallel(checkpoint_KV: Tensor, log: Inputs, new: Inputs, decay: float) -> Tensor:
    """Outputs [T, V] of `new` after `log` after the checkpoint, without a state in between: weights of all pairs."""
    past, count = log.keys_TK.shape[0], new.keys_TK.shape[0]
    seen = _join(log, new)
    place_T = torch.arange(past, past + count, dtype=torch.float64)
    age_TS = place_T[:, None] - torch.arange(past + count, dtype=torch.float64)
    weight_TS = torch.where(age_TS >= 0, decay ** age_TS.clamp(min=0), 0.0) * (new.queries_TK @ seen.keys_TK.T)
    carried_TV = (decay ** (place_T + 1))[:, None] * (new.queries_TK @ checkpoint_KV)
    return carried_TV + weight_TS @ seen.values_TV


def _fold(checkpoint_KV: Tensor, log: Inputs, decay: float) -> Tensor:
    """The state after the log."""
    count = log.keys_TK.shape[0]
    weight_T = decay ** torch.arange(count - 1, -1, -1, dtype=torch.float64)
    return decay**count * checkpoint_KV + (log.keys_TK * weight_T[:, None]).T @ log.values_TV
