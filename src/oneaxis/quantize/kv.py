"""An FP8 (E4M3) cache of keys and values: one calibrated scale per layer for each, and what the cache gives back.

A value is stored as `to_fp8(x / scale)` and read as `level * scale`. Scales stand in the checkpoint as `k_scale` and
`v_scale` beside the attention module's name. In transformers, keys and values are rounded (and seen) by an attention
function of our own, after rotary embedding, where an engine's cache stands.

Dims: B sequences, K key/value heads, T tokens, H size of a head.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from oneaxis.quantize.fp8 import FP8_MAX, to_fp8

RoundKV = Callable[[str, Tensor], Tensor]
"""From "k" or "v" and its values [B, K, T, H] to what a cache gives back."""

ATTENTION = "oneaxis_kv"
"""transformers' name for scaled dot-product attention whose keys and values can be seen and rounded."""

SCALES = ("k_scale", "v_scale")


def kv_scale(absmax: float) -> Tensor:
    """The scale [1], float32, whose level 448 is `absmax`; 1 for a tensor that was always zero."""
    return torch.tensor([absmax / FP8_MAX if absmax > 0 else 1.0], dtype=torch.float32)


def round_kv(x: Tensor, scale: Tensor | float) -> Tensor:
    """What an FP8 cache gives back of keys or values; what lies beyond the calibrated range is clipped."""
    return (to_fp8(x.float() / scale).float() * scale).to(x.dtype)


def kv_rounding(scales: Mapping[str, Tensor]) -> RoundKV:
    """The rounding of one layer's cache from its `k_scale` and `v_scale`."""
    values = {name: float(scales[f"{name}_scale"]) for name in ("k", "v")}
    return lambda name, x_BKTH: round_kv(x_BKTH, values[name])


def attention_of(layer: nn.Module) -> nn.Module:
    """The attention module of a decoder layer, which calls the attention function."""
    (found,) = [module for module in layer.modules() if hasattr(module, "layer_idx") and hasattr(module, "head_dim")]
    return found


def _attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any) -> Any:
    """sdpa, with the module's `kv_functions` before it; key and value are [B, K, T, H]."""
    for function in getattr(module, "kv_functions", ()):
        key, value = function("k", key), function("v", value)
    return sdpa_attention_forward(module, query, key, value, mask, **kwargs)


AttentionInterface.register(ATTENTION, _attend)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
