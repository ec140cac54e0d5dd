"""An FP8 (E4M3) cache of keys and values: one calibrated scale per layer for each, and what the cache gives back.

A value is stored as `to_fp8(x / scale)` and read as `level * scale`. Scales stand in the checkpoint as `k_scale` and
`v_scale` beside the attention module's name. In transformers, keys and values are rounded (and seen) by an attention
function of our own, after rotary embedding, where an engine's cache stands.

On a GPU vLLM rounds to nearest. Its CPU kernel (0.32, `float_to_fp8e4m3_scalar`; read in the compiled library too) cuts
the bits that do not fit, so values shrink, by 4% on average and 11% at most. What is measured is what the installed
engine does, or rounding to nearest where none is installed.

Dims: B sequences, K key/value heads, T tokens, H size of a head.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from oneaxis.errors import UserError
from oneaxis.installed import engine_device
from oneaxis.quantize.fp8 import FP8_MAX, to_fp8

RoundKV = Callable[[str, Tensor], Tensor]
"""From "k" or "v" and its values [B, K, T, H] to what a cache gives back."""

ATTENTION = "oneaxis_kv"
"""transformers' name for scaled dot-product attention whose keys and values can be seen and rounded."""

QUERY_BLOCK = 64
"""Queries that look at their keys together: what lies after the last of them is left out. Measured: 32 to 128 differ
little."""

SCALES = ("k_scale", "v_scale")


def kv_scale(absmax: float) -> Tensor:
    """The scale [1], float32, whose level 448 is `absmax`; 1 for a tensor that was always zero."""
    return torch.tensor([absmax / FP8_MAX if absmax > 0 else 1.0], dtype=torch.float32)


def round_kv(x: Tensor, scale: Tensor | float, *, cut: bool = False) -> Tensor:
    """What an FP8 cache gives back of keys or values; what lies beyond the calibrated range is clipped.

    Args:
        cut: towards zero, as vLLM's CPU kernel, not to nearest.
    """
    level = x.float() / scale
    level = cut_to_fp8(level) if cut else to_fp8(level).float()
    return (level * scale).to(x.dtype)


def cut_to_fp8(x: Tensor) -> Tensor:
    """E4M3 numbers (as float32) towards zero, at most 448 in size."""
    # 2^-120 moves float32's exponents onto E4M3's, subnormal ones too; the 20 lowest bits are those that do not fit.
    small = x.clamp(-FP8_MAX, FP8_MAX) * 2.0**-120
    return (small.view(torch.int32) & ~0xFFFFF).view(torch.float32) * 2.0**120


def engine_cuts() -> bool:
    """Whether the installed vLLM is a CPU build."""
    try:
        return engine_device() == "cpu"
    except UserError:
        return False


def kv_rounding(scales: Mapping[str, Tensor], *, cut: bool | None = None) -> RoundKV:
    """The rounding of one layer's cache from its `k_scale` and `v_scale`; `cut` is None: as the installed engine."""
    values = {name: float(scales[f"{name}_scale"]) for name in ("k", "v")}
    towards_zero = engine_cuts() if cut is None else cut
    return lambda name, x_BKTH: round_kv(x_BKTH, values[name], cut=towards_zero)


def is_attention(module: nn.Module) -> bool:
    """Whether a module is one that calls the attention function."""
    return hasattr(module, "layer_idx") and hasattr(module, "head_dim")


def attention_of(layer: nn.Module) -> nn.Module:
    """The attention module of a decoder layer."""
    (found,) = filter(is_attention, layer.modules())
    return found


def _attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any) -> Any:
    """sdpa, with the module's `kv_functions` before it; key and value are [B, K, T, H].

    transformers' sdpa leaves out the soft cap on scores that Gemma 2 was trained with, and engines have.
    """
    for function in getattr(module, "kv_functions", ()):
        key, value = function("k", key), function("v", value)
    if kwargs.get("softcap"):
        return _capped(query, key, value, mask, float(kwargs["scaling"]), float(kwargs["softcap"])), None
    if mask is None and _is_plain(module, query, key, value, kwargs):
        return _causal(query, key, value, float(kwargs["scaling"])), None
    return sdpa_attention_forward(module, query, key, value, mask, **kwargs)


def _is_plain(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, kwargs: Mapping[str, Any]) -> bool:
    """Whether a call without a mask is causal attention over whole sequences on a CPU, and nothing else is asked."""
    causal = kwargs.get("is_causal")
    return (
        query.device.type == "cpu"
        and not torch.is_grad_enabled()
        and bool(getattr(module, "is_causal", True) if causal is None else causal)
        and query.shape[2] == key.shape[2] > 1
        and query.shape[3] == value.shape[3]
        and kwargs.get("scaling") is not None
        and not kwargs.get("dropout")
        and not any(kwargs.get(name) is not None for name in ("position_bias", "cache", "s_aux"))
    )


def _causal(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """softmax(q k^T * scaling) v, each token looking at itself and those before it: [B, T, heads, H].

    A block of queries after another, with scores and softmax in float32, in memory that all blocks share: fresh memory
    costs as much as the arithmetic. For 4 x 512 tokens of SmolLM2-135M it takes 0.6 of the time of torch's own kernel,
    in float32 and in bfloat16, on two cores with AVX512_BF16.
    """
    batch, heads, length, size = query.shape
    pairs, groups = batch * key.shape[1], heads // key.shape[1]
    key_PHT = key.reshape(pairs, length, size).float().transpose(1, 2)
    value_PTH = value.reshape(pairs, length, size)
    after = torch.full((QUERY_BLOCK, QUERY_BLOCK), -torch.inf).triu(1)
    scores = torch.empty(pairs * groups * min(QUERY_BLOCK, length) * length)
    weights = scores if value.dtype == scores.dtype else torch.empty_like(scores, dtype=value.dtype)
    attended = torch.empty(batch, length, heads, size, dtype=query.dtype)
    for first in range(0, length, QUERY_BLOCK):
        last = min(first + QUERY_BLOCK, length)
        rows = last - first
        count = pairs * groups * rows * last
        rows_PRH = query[:, :, first:last].reshape(pairs, -1, size).float() * scaling
        scores_PRT = torch.bmm(rows_PRH, key_PHT[:, :, :last], out=scores[:count].view(pairs, -1, last))
        scores_PGRT = scores_PRT.view(pairs, groups, rows, last)
        scores_PGRT[..., first:].add_(after[:rows, :rows])
        torch.softmax(scores_PGRT, dim=-1, out=scores_PGRT)
        weights_PRT = weights[:count].view_as(scores_PRT)
        if weights is not scores:
            weights_PRT.copy_(scores_PRT)
        seen = torch.bmm(weights_PRT, value_PTH[:, :last]).view(batch, heads, rows, size)
        attended[:, first:last] = seen.transpose(1, 2)
    return attended


def _capped(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float, cap: float) -> Tensor:
    """softmax(cap * tanh(q k^T * scaling / cap)) v, [B, T, heads, H]; `mask` is True where a token may look."""
    groups, length = query.shape[1] // key.shape[1], key.shape[2]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = (query @ key.transpose(2, 3)).float().mul_(scaling / cap).tanh_().mul_(cap)
    if mask is None:
        mask = torch.ones(length, length, dtype=torch.bool).tril()[-query.shape[2] :]
    weights = scores.masked_fill_(~mask, -torch.inf).softmax(dim=-1).to(query.dtype)
    return (weights @ value).transpose(1, 2).contiguous()


AttentionInterface.register(ATTENTION, _attend)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
