"""What a device has room for: weights + runtime + the cache of so many tokens <= memory.

A sequence takes whole blocks of the cache; a layer with a window keeps no more than it.
"""

import math
from dataclasses import dataclass

from oneaxis.plan.model import Model
from oneaxis.plan.units import positive


@dataclass(frozen=True)
class Room:
    """What is left for keys and values."""

    free_bytes: float
    """After weights and runtime; negative: the model does not fit."""
    longest_context: int
    """Tokens of one sequence alone, within the model's positions."""
    most_sequences: int
    """Of the context that was asked for."""


def fit(
    model: Model, memory_bytes: float, runtime_bytes: float, context: int, block_tokens: int, kv_dtype_bytes: float
) -> Room:
    """Device fit.

    Args:
        runtime_bytes: kept for the engine, its graphs and activations. context: tokens of a sequence.
    """
    positive(memory_bytes=memory_bytes, context=context, block_tokens=block_tokens, kv_dtype_bytes=kv_dtype_bytes)
    free = memory_bytes - model.weight_bytes() - runtime_bytes

    def takes(blocks: int) -> float:
        return model.kv_bytes(blocks * block_tokens, kv_dtype_bytes)

    if free <= 0:
        return Room(free, 0, 0)
    low, high = 0, math.ceil(model.max_positions / block_tokens)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if takes(middle) <= free else (low, middle - 1)
    return Room(free, min(low * block_tokens, model.max_positions),
                math.floor(free / takes(math.ceil(context / block_tokens))))  # fmt: skip
