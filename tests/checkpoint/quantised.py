"""A stand-in for `quantize`: every linear of a checkpoint rounded to nearest on its scheme's grid, nothing smoothed."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from oneaxis.checkpoint.compressed import ignored_linears, quantization_config, routers_of
from oneaxis.checkpoint.load import read_tensors
from oneaxis.checkpoint.writer import CheckpointWriter
from oneaxis.quantize.families import decoder
from oneaxis.quantize.kv import kv_scale
from oneaxis.quantize.linears import linear_from, round_weight, weight_grid


def write_quantised(
    policy: Path,
    out: Path,
    settings: Any,
    *,
    input_absmax: float = 8.0,
    kv_absmax: tuple[float, float] = (6.0, 3.0),
    halved: bool = False,
) -> Path:
    """Write `out`; static scales cover `input_absmax`, the scales of layer n's KV cache (n + 1) times `kv_absmax`.

    `halved`: INT8 levels go to 63 only, which x86 without VNNI multiplies without saturating.
    """
    family, tensors = decoder(AutoConfig.from_pretrained(policy)), read_tensors(policy)
    linears = {family.stored_name(layer, name) for layer in range(family.num_layers) for name in family.linears(layer)}
    ignored = set() if settings.kind == "none" else ignored_linears(family, settings.ignore)
    writer = CheckpointWriter(policy, out)
    for name, tensor in sorted(tensors.items()):
        module = name.removesuffix(".weight")
        if settings.kind == "none" or module not in linears - ignored:
            writer.add(name, tensor)
            continue
        grid = weight_grid(tensor, settings)
        grid = replace(grid, scale_OG=grid.scale_OG * 127 / 63) if halved else grid
        linear = linear_from(round_weight(tensor, grid), grid, None, settings, input_absmax)
        for part, stored in linear.stored().items():
            writer.add(f"{module}.{part}", stored)
    for layer in range(family.num_layers if settings.kv == "fp8" else 0):
        for part, absmax in zip("kv", kv_absmax, strict=True):
            scale = kv_scale(absmax * (layer + 1))
            writer.add(family.stored_name(layer, f"self_attn.{part}_scale"), scale.clone())
    writer.finish(quantization_config(settings, routers_of(family)), settings.model_dump())
    return out


def log_probabilities(model: Any, ids_ST: torch.Tensor) -> torch.Tensor:
    """Of each token but the first, [S, T - 1]."""
    logits_STV = model(ids_ST).logits[:, :-1].float()
    return logits_STV.log_softmax(-1).gather(2, ids_ST[:, 1:, None])[..., 0]
