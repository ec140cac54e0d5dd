"""quantize: the policy and its statistics to an INT8 checkpoint, and what each step cost.

Layer by layer: scales from the statistics, fold, round. Then the written checkpoint is read back, and held-out text
runs through it with its activations rounded as an engine rounds them. What is lost is split into the fold (float32
rounding only), the weights and the outputs of each linear.
"""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.func import functional_call
from tqdm import tqdm
from transformers import PreTrainedModel

from oneaxis.artifacts import read_json, write_json
from oneaxis.checkpoint.compressed import ignored_modules, quantization_config
from oneaxis.checkpoint.load import load_for_measuring
from oneaxis.config.schema import QuantizeInt8
from oneaxis.errors import UserError
from oneaxis.quantize.decoder import LINEARS, NORMS, SITES, Heads, decoder_layers, heads
from oneaxis.quantize.int8 import Int8Linear, dequantize_weight, quantize_weight, static_scale
from oneaxis.quantize.nll import compare, heldout_nll
from oneaxis.quantize.smooth import fold_layer, layer_scales
from oneaxis.quantize.text import Sequences, sequences_from_frame

PROBE_SEQUENCES = 2
"""Held-out sequences whose hidden states the errors of each layer are measured on."""
BATCH_TOKENS = 2048
COPIED = ("*.json", "*.jinja", "*.model", "*.txt", "LICEN[CS]E*")
"""Files of a checkpoint beside its weights."""


@dataclass(frozen=True)
class QuantizedLayer:
    """One decoder layer after fold and rounding; names are those inside the layer."""

    folded: dict[str, Tensor]
    """Every tensor, float32, smoothed and not rounded (but norms hold what is stored)."""
    linears: dict[str, Int8Linear]
    """The quantised ones."""


def quantize(
    policy: Path, calibrated: Path, settings: QuantizeInt8, out: Path
) -> tuple[dict[str, float], dict[str, Any]]:
    """Write `checkpoint/`, layers.parquet, heldout_nll.parquet and perplexity.json to `out`.

    Args:
        policy: the checkpoint to quantise. calibrated: the folder that `calibrate` wrote for it.

    Returns:
        metrics and the notes of the manifest.

    Raises:
        UserError: the model's family is not supported, `ignore` does not fit it, or the statistics are another's.
    """
    unseen = sequences_from_frame(pl.read_parquet(calibrated / "heldout_tokens.parquet"))
    before = pl.read_parquet(calibrated / "heldout_nll.parquet")
    model, _ = load_for_measuring(policy, torch.float32)
    decoder_layers(model)  # A family that cannot be smoothed is refused here, before its missing statistics are.
    with safe_open(calibrated / "stats.safetensors", framework="pt") as file:
        statistics = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    dtype = stored_dtype(policy)
    ignored = ignored_modules([name for name, module in model.named_modules() if isinstance(module, nn.Linear)],
                              settings.ignore)  # fmt: skip
    tensors, layers = quantize_model(model, statistics, settings, ignored, dtype, unseen)
    checkpoint = out / "checkpoint"
    write_checkpoint(policy, checkpoint, tensors, quantization_config(settings))
    layers.write_parquet(out / "layers.parquet")
    del model, tensors

    model, _ = load_for_measuring(checkpoint, torch.float32)
    after = heldout_nll(model, unseen, max(1, BATCH_TOKENS // unseen.token_ids_ST.shape[1]))
    after.write_parquet(out / "heldout_nll.parquet")
    comparison = compare(before, after)
    write_json(out / "perplexity.json", comparison)

    delta = comparison["delta_nll"]
    metrics = {
        "perplexity_before": comparison["before"],
        "perplexity_after": comparison["after"],
        "perplexity_ratio": comparison["ratio"],
        "delta_nll": delta["effect"],
        "delta_nll_ci_low": delta["ci_low"],
        "delta_nll_ci_high": delta["ci_high"],
        "fold_error_max": layers["fold_error"].max(),
        "weight_error_max": layers["weight_error"].max(),
        "output_error_max": layers["output_error"].max(),
        "num_quantized_linears": layers["weight_error"].count(),
        "checkpoint_bytes": sum(path.stat().st_size for path in checkpoint.glob("*.safetensors")),
    }
    notes = {
        "scheme": settings.kind,
        "alpha": settings.smooth.alpha,
        "sites": list(settings.smooth.sites),
        "ignore": list(settings.ignore),
        "num_quantized_linears": layers["weight_error"].count(),
        "stored_dtype": str(dtype).removeprefix("torch."),
    }
    return {f"quantize/{name}": float(value) for name, value in metrics.items() if value is not None}, notes


def stored_dtype(policy: Path) -> torch.dtype:
    """The dtype of a checkpoint's norm weights: what is not quantised is stored in it again."""
    for path in sorted(policy.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                if name.endswith(f"{NORMS['qkv']}.weight"):
                    return file.get_tensor(name).dtype
    raise UserError(f"{policy}: no tensor is named *.{NORMS['qkv']}.weight; allowed: a supported decoder")


@torch.inference_mode()
def quantize_model(
    model: PreTrainedModel,
    statistics: Mapping[str, Tensor],
    settings: QuantizeInt8,
    ignored: set[str],
    dtype: torch.dtype,
    unseen: Sequences,
) -> tuple[dict[str, Tensor], pl.DataFrame]:
    """The tensors of the INT8 checkpoint, and a row per decoder layer and per linear with its errors.

    Args:
        model: the policy in float32. ignored: names of linears that stay as they are. dtype: of what is not quantised.

    Returns:
        tensors by name; table of layer i64, module str (`layer` for the whole), site str, quantized bool, fold_error
        (largest change of the decoder layer's output by the fold alone, relative to the output's absmax),
        weight_error and output_error (Frobenius norm of the change by rounding, relative to that of the unrounded).
    """
    layers = decoder_layers(model)
    if f"layers.{len(layers) - 1}.down.absmax" not in statistics or f"layers.{len(layers)}.down.absmax" in statistics:
        raise UserError(f"artifacts/calibrate: its statistics are not of this model of {len(layers)} layers; allowed: "
                        "those of the policy, which `dvc repro` makes")  # fmt: skip
    prefixes = {id(module): name for name, module in model.named_modules()}
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    tensors = {name: tensor.to(dtype) for name, tensor in model.state_dict().items() if name not in tied}
    inputs = _layer_inputs(model, layers, unseen.token_ids_ST[:PROBE_SEQUENCES])
    rows = []
    for index, layer in enumerate(tqdm(layers, desc="quantize", unit="layer", delay=3)):
        prefix = prefixes[id(layer)]
        high = {name for name in LINEARS if f"{prefix}.{name}" in ignored}
        done = quantize_layer(dict(layer.state_dict()), statistics, index, settings, high, heads(model), dtype)
        tensors |= {f"{prefix}.{name}": tensor.to(dtype) for name, tensor in done.folded.items()}
        for name, linear in done.linears.items():
            tensors[f"{prefix}.{name}.weight"] = linear.weight
            tensors[f"{prefix}.{name}.weight_scale"] = linear.weight_scale
            if linear.input_scale is not None:
                tensors[f"{prefix}.{name}.input_scale"] = linear.input_scale
        rows += layer_errors(layer, index, done, *inputs[index])
    # Tensors are written as they lie in memory: none may be a view of another.
    return {name: tensor.clone().contiguous() for name, tensor in tensors.items()}, pl.DataFrame(rows, LAYER_SCHEMA)


LAYER_SCHEMA = {
    "layer": pl.Int64,
    "module": pl.String,
    "site": pl.String,
    "quantized": pl.Boolean,
    "fold_error": pl.Float64,
    "weight_error": pl.Float64,
    "output_error": pl.Float64,
}


def quantize_layer(
    tensors: Mapping[str, Tensor],
    statistics: Mapping[str, Tensor],
    index: int,
    settings: QuantizeInt8,
    high: set[str],
    shape: Heads,
    dtype: torch.dtype,
) -> QuantizedLayer:
    """Smooth and round one layer.

    A site whose linears all stay in high precision is not smoothed: there is no rounding to help.

    Args:
        tensors: the layer's, float32. high: its linears that stay in high precision.
    """
    sites = [site for site in settings.smooth.sites if not high.issuperset(SITES[site])]
    scales = layer_scales(
        statistics, index, tensors, alpha=settings.smooth.alpha, sites=sites, heads=shape, dtype=dtype
    )
    folded = fold_layer(tensors, scales, shape)
    for norm in NORMS.values():
        folded[f"{norm}.weight"] = folded[f"{norm}.weight"].to(dtype).float()
    linears = {}
    for site, names in SITES.items():
        absmax_C = statistics[f"layers.{index}.{site}.absmax"]
        smoothed_C = absmax_C / scales[site] if site in scales else absmax_C
        input_scale = static_scale(float(smoothed_C.max())) if settings.kind == "w8a8_int8_static" else None
        for name in names:
            if name not in high:
                bias = folded.get(f"{name}.bias")
                linears[name] = Int8Linear(*quantize_weight(folded[f"{name}.weight"]), bias, input_scale)
    return QuantizedLayer(folded, linears)


def _layer_inputs(
    model: PreTrainedModel, layers: list[nn.Module], token_ids_ST: Tensor
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """What each decoder layer is called with on these sequences."""
    found: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def keep(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.append((args, kwargs))

    handles = [layer.register_forward_pre_hook(keep, with_kwargs=True) for layer in layers]
    try:
        model.model(input_ids=token_ids_ST, use_cache=False)  # type: ignore[operator]
    finally:
        for handle in handles:
            handle.remove()
    return found


def layer_errors(
    layer: nn.Module, index: int, done: QuantizedLayer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[dict[str, Any]]:
    """Errors of one decoder layer and its linears on given inputs (rows of `quantize_model`'s table)."""
    read: dict[str, Tensor] = {}

    def hook(name: str) -> Any:
        def see(_module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            read[name] = inputs[0]

        return see

    plain = _first(layer(*args, **kwargs))
    handles = [layer.get_submodule(name).register_forward_pre_hook(hook(name)) for name in LINEARS]
    try:
        smoothed = _first(functional_call(layer, done.folded, args, kwargs))
    finally:
        for handle in handles:
            handle.remove()
    fold_error = float((smoothed - plain).abs().max() / plain.abs().max())
    rows: list[dict[str, Any]] = [{"layer": index, "module": "layer", "quantized": False, "fold_error": fold_error}]
    for site, names in SITES.items():
        for name in names:
            row = {"layer": index, "module": name, "site": site, "quantized": name in done.linears}
            if name in done.linears:
                linear, weight = done.linears[name], done.folded[f"{name}.weight"]
                exact = nn.functional.linear(read[name], weight, done.folded.get(f"{name}.bias"))
                row["weight_error"] = _relative(dequantize_weight(linear.weight, linear.weight_scale), weight)
                row["output_error"] = _relative(linear(read[name]), exact)
            rows.append(row)
    return [{key: row.get(key) for key in LAYER_SCHEMA} for row in rows]


def _first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def _relative(changed: Tensor, exact: Tensor) -> float:
    size = float(exact.norm())
    return float((changed - exact).norm()) / size if size else 0.0


def write_checkpoint(policy: Path, out: Path, tensors: dict[str, Tensor], quantization: dict[str, Any]) -> None:
    """Write an INT8 checkpoint: the policy's files beside its weights, its config with `quantization`, the tensors."""
    out.mkdir()
    for path in sorted({path for pattern in COPIED for path in policy.glob(pattern) if path.is_file()}):
        if path.name not in ("config.json", "model.safetensors.index.json"):
            shutil.copyfile(path, out / path.name)
    write_json(out / "config.json", {**read_json(policy / "config.json"), "quantization_config": quantization})
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    for path in out.iterdir():
        path.chmod(0o644)
