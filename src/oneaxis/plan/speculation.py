"""Speculation: tokens a verification gives, what it costs, and when recurrent state spoils it.

    tokens      1 + sum_i prod_{j<=i} a_j for per-position acceptance a_i; (1 - a^(k+1)) / (1 - a) where it is uniform
    speed-up    tokens / (1 + c k), c = draft cost / target cost
    in flight   batch x (k + 1) tokens a step; past the roofline's crossover a verification costs more than a step
    copy rule   with state copies a step moves (1 + T) / 2 times the state of a plain one, so it pays only if
                sum_{i=0..T} p^i > (1 + T) / 2
    replay      the state is written once a window, and a step reads it and the log of inputs since

Acceptance of the standard scheme is 1 - TV(p, q). Sources: Leviathan, Kalman, Matias (2023); Chen et al. (2023);
ReplaySSM (NVIDIA and Dao, 2026).
"""

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from oneaxis.errors import UserError
from oneaxis.plan.units import positive, shares


def tokens_per_verification(acceptance: Sequence[float]) -> float:
    """Expected tokens of a verification of `len(acceptance)` drafts, the target's own among them.

    Args:
        acceptance: of each position, given that all before it were accepted.
    """
    for place, value in enumerate(acceptance, 1):
        shares(**{f"acceptance at {place}": value})
    return 1 + sum(accumulate(acceptance, mul))


def uniform_tokens(acceptance: float, drafts: int) -> float:
    """The closed form of the same for one acceptance at every position; k + 1 where it is 1."""
    shares(acceptance=acceptance)
    positive(drafts=drafts)
    return drafts + 1.0 if acceptance == 1 else (1 - acceptance ** (drafts + 1)) / (1 - acceptance)


def speed_up(tokens: float, drafts: int, draft_cost: float) -> float:
    """Against plain decoding, while a verification costs one plain step."""
    positive(tokens=tokens, drafts=drafts)
    if not draft_cost >= 0:
        raise UserError(f"draft_cost={draft_cost:g}: allowed: 0 or more, as a share of a target step")
    return tokens / (1 + draft_cost * drafts)


def tokens_in_flight(batch: int, drafts: int) -> int:
    """Of a verification step."""
    positive(batch=batch)
    return batch * (drafts + 1)


def acceptance_of(target: Sequence[float], draft: Sequence[float]) -> float:
    """1 - TV(p, q) = sum of min(p, q): of the standard scheme, from two next-token distributions."""
    if len(target) != len(draft) or abs(sum(target) - 1) > 1e-6 or abs(sum(draft) - 1) > 1e-6:
        raise UserError("acceptance: allowed: two distributions over the same tokens, each summing to 1")
    return sum(map(min, target, draft))


# --- recurrent state -----------------------------------------------------------------------------------------


def copy_rule(acceptance: float, drafts: int) -> float:
    """Tokens kept by (1 + T) / 2: above 1 speculation with state copies can win at a large batch."""
    return uniform_tokens(acceptance, drafts) / ((1 + drafts) / 2)


def state_bytes(layers: int, heads: int, head_size: int, state_size: int, dtype_bytes: int) -> int:
    """Recurrent state of a request."""
    positive(layers=layers, heads=heads, head_size=head_size, state_size=state_size, dtype_bytes=dtype_bytes)
    return layers * heads * head_size * state_size * dtype_bytes


SETUPS = ("plain", "spec", "replay", "replay+spec")


def hybrid_bytes_per_token(
    setup: str, *, weights: float, state: float, log: float, batch: int, tokens_kept: float, drafts: int, window: int
) -> float:
    """Bytes that a step moves for each token that it gives, of a batch, by setup. Keys and values are left out.

    A plain step reads and writes each state: 2. With copies a step moves (1 + T) / 2 times that. Replay reads the
    state, writes it once a window of accepted tokens, and reads the log, half full on average.

    Args:
        weights: read by a step. state: of one request. log: of one token's inputs (all bytes).
    """
    positive(weights=weights, state=state, batch=batch, tokens_kept=tokens_kept, drafts=drafts, window=window)
    kept = tokens_kept if "spec" in setup else 1.0
    replayed = state + kept * state / window + log * window / 2
    moved = {"plain": 2 * state, "spec": (1 + drafts) * state, "replay": replayed, "replay+spec": replayed}
    if setup not in moved:
        raise UserError(f"setup={setup}: allowed: {', '.join(SETUPS)}")
    return (weights + batch * moved[setup]) / (batch * kept)
