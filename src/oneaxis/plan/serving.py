"""Serving: ceilings of decode and prefill, what fits in memory, prefix routing, transfer of a cache, experts.

    roofline   intensity of B tokens in flight: 2B / bytes_per_weight FLOP/byte; compute-bound from
               B* = (peak / bandwidth) x bytes_per_weight / 2 on
    decode     one stream: at most bandwidth / W tokens/s; a batch of b: T = t0 + (W + b K) / bandwidth, each user 1/T,
               the fleet b/T, which tends to bandwidth / K
    KV         2 x layers x kv_heads x head_dim x dtype_bytes a token
    routing    hit rate of round-robin over n workers, share s of the prompt common to all: s + (1 - s) / n
    transfer   (kv_bytes_per_token / link) / (2 params / (gpus x flops)): the prompt's length cancels
    slots      decode slots held (Little) = rate x output tokens x TPOT; loop time lost = rate x set-up a request
    experts    distinct ones that a step of b tokens reaches, uniform routing: E (1 - (1 - k/E)^b)

Sources: Williams et al. (2009), the roofline model; Little (1961).
"""

import math

from oneaxis.errors import UserError
from oneaxis.plan.units import positive, shares

SCHEMES: dict[str, tuple[float, str]] = {
    "f32": (4.0, "f32"),
    "bf16": (2.0, "bf16"),
    "w8a16_fp8": (1.0, "bf16"),
    "w8a8_fp8": (1.0, "fp8"),
    "w8a8_int8": (1.0, "int8"),
    "w4a16": (0.5, "bf16"),
}
"""Scheme -> bytes of a weight (scales left out), and the arithmetic that its products run in."""

SLOTS_USED = 0.8
"""Of `max_num_seqs`: decode slots held should stay under this share."""


# --- roofline ------------------------------------------------------------------------------------------------


def ridge(flops_per_s: float, bytes_per_s: float) -> float:
    """FLOP/byte above which a kernel is bound by compute."""
    positive(flops_per_s=flops_per_s, bytes_per_s=bytes_per_s)
    return flops_per_s / bytes_per_s


def crossover_tokens(flops_per_s: float, bytes_per_s: float, bytes_per_weight: float) -> float:
    """Tokens in flight from which a weight-stationary GEMM is bound by compute."""
    positive(bytes_per_weight=bytes_per_weight)
    return ridge(flops_per_s, bytes_per_s) * bytes_per_weight / 2


def attainable_flops(tokens: float, flops_per_s: float, bytes_per_s: float, bytes_per_weight: float) -> float:
    """FLOP/s that the roofline allows a GEMM of `tokens` tokens."""
    positive(tokens=tokens, bytes_per_weight=bytes_per_weight)
    return min(flops_per_s, 2 * tokens / bytes_per_weight * bytes_per_s)


# --- decode --------------------------------------------------------------------------------------------------


def step_s(weights_bytes: float, kv_bytes: float, batch: float, bytes_per_s: float, overhead_s: float = 0.0) -> float:
    """T = t0 + (W + b K) / B: seconds of a decode step.

    Args:
        kv_bytes: K, of one sequence. overhead_s: t0.
    """
    positive(weights_bytes=weights_bytes, batch=batch, bytes_per_s=bytes_per_s)
    for name, value in (("kv_bytes", kv_bytes), ("overhead_s", overhead_s)):
        if not 0 <= value < math.inf:
            raise UserError(f"{name}={value:g}: allowed: 0 or more")
    return overhead_s + (weights_bytes + batch * kv_bytes) / bytes_per_s


# --- memory --------------------------------------------------------------------------------------------------


def block_bytes(kv_bytes_per_token: float, block_tokens: int) -> float:
    """Of one block of the KV cache, over all layers."""
    positive(kv_bytes_per_token=kv_bytes_per_token, block_tokens=block_tokens)
    return kv_bytes_per_token * block_tokens


def cache_tokens(cache_bytes: float, kv_bytes_per_token: float, block_tokens: int) -> int:
    """Tokens that an engine's KV cache holds: whole blocks only."""
    positive(cache_bytes=cache_bytes)
    return math.floor(cache_bytes / block_bytes(kv_bytes_per_token, block_tokens)) * block_tokens


# --- prefix routing, transfer, slots --------------------------------------------------------------------------


def round_robin_hit_rate(shared: float, workers: int) -> float:
    """s + (1 - s) / n: the common part hits everywhere, the rest one time in n. To first order: no eviction."""
    shares(shared=shared)
    positive(workers=workers)
    return shared + (1 - shared) / workers


def transfer_s(kv_bytes_per_token: float, tokens: int, link_bytes_per_s: float) -> float:
    """Seconds to send the cache of a prompt, at line rate and without overlap: the worst case."""
    positive(kv_bytes_per_token=kv_bytes_per_token, tokens=tokens, link_bytes_per_s=link_bytes_per_s)
    return kv_bytes_per_token * tokens / link_bytes_per_s


def dense_prefill_s(num_parameters: float, tokens: int, gpus: int, flops_per_s: float) -> float:
    """2 x params x tokens / (gpus x flops): without attention's own term, so short for long prompts."""
    positive(num_parameters=num_parameters, tokens=tokens, gpus=gpus, flops_per_s=flops_per_s)
    return 2 * num_parameters * tokens / (gpus * flops_per_s)


def transfer_ratio(
    kv_bytes_per_token: float, link_bytes_per_s: float, num_parameters: float, gpus: int, flops_per_s: float
) -> float:
    """Transfer by prefill time, whatever the prompt's length."""
    return transfer_s(kv_bytes_per_token, 1, link_bytes_per_s) / dense_prefill_s(num_parameters, 1, gpus, flops_per_s)


def decode_slots(rate_rps: float, output_tokens: float, tpot_s: float) -> float:
    """Requests that decode at once, by Little's law."""
    positive(rate_rps=rate_rps, output_tokens=output_tokens, tpot_s=tpot_s)
    return rate_rps * output_tokens * tpot_s


def loop_share(rate_rps: float, setup_s: float) -> float:
    """Share of an engine loop's time that goes into setting requests up; 1 or more: it cannot keep up."""
    positive(rate_rps=rate_rps, setup_s=setup_s)
    return rate_rps * setup_s


# --- experts -------------------------------------------------------------------------------------------------


def distinct_experts(experts: int, per_token: int, batch: int) -> float:
    """Expected number of experts that a step reaches. Real tokens agree, so fewer are reached."""
    positive(experts=experts, per_token=per_token, batch=batch)
    if per_token > experts:
        raise UserError(f"per_token={per_token}: allowed: up to experts={experts}")
    return experts * (1 - (1 - per_token / experts) ** batch)
