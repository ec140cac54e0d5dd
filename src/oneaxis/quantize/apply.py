"""quantize: the policy and its statistics to a quantised checkpoint, and what each step cost.

Layer by layer, so that one layer and the hidden states of some text are all that is in memory:

    alpha -> scales -> fold -> grid of each weight -> levels (nearest, or GPTQ) -> tensors to the writer

What is lost is split, on held-out text, into the fold (float32 rounding only), the weights, the output of each linear
with its input rounded as the scheme says, and the output of the layer. Then the written checkpoint is read back and
measured (`oneaxis.quantize.quality`).

For GPTQ, calibration text runs through the layers quantised so far. With 4-bit weights each tensor is taken after what
comes before it in its own layer is quantised, and once more as it would be if the layer were not: the difference is
repaired (`oneaxis.quantize.gptq`). The drift from earlier layers is not: asking each linear for the output that it
would have in the unquantised model made SmolLM2-135M worse. Nor is what 8 bits do inside a layer: that loss is so small
that the repair, estimated from a few thousand tokens, cost more than it (hidden states 3 layers on: 1.5 times the
error).

Dims: S sequences, B of them in a batch, T tokens, D hidden size, N tokens of a batch, O outputs, I inputs of a linear.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import torch
from torch import Tensor, nn
from tqdm import tqdm

from oneaxis.artifacts import read_json
from oneaxis.checkpoint.compressed import ignored_linears, quantization_config, routers_of
from oneaxis.checkpoint.layerwise import Hidden, Layerwise, kv_scale_names
from oneaxis.checkpoint.tensors import find_tensors, read_header
from oneaxis.checkpoint.writer import CheckpointWriter
from oneaxis.config.schema import QuantizeFp8, QuantizeInt4, QuantizeInt8, QuantizeNone, QuantizeScheme
from oneaxis.errors import UserError
from oneaxis.quantize import fp8, int8
from oneaxis.quantize.families import KINDS, Norm
from oneaxis.quantize.gptq import Moments, gptq
from oneaxis.quantize.kv import kv_scale
from oneaxis.quantize.linears import QuantizedLinear, check_groups, linear_from, round_weight, weight_grid
from oneaxis.quantize.quality import measure_quality
from oneaxis.quantize.refine import REFINE_SCHEMA, refine_scales
from oneaxis.quantize.search import SEARCH_SCHEMA, layer_alphas
from oneaxis.quantize.smooth import fold_layer, per_row, refuse_unfoldable, site_scales
from oneaxis.quantize.statistics import read_statistics, static_absmax, tensor_name
from oneaxis.quantize.text import Sequences, sequences_from_frame

PROBE_TOKENS = 256
"""The first of a held-out sequence, on which the errors of each layer are measured."""
BATCH_TOKENS = 2048
LAYER_SCHEMA = {
    "layer": pl.Int64,
    "module": pl.String,
    "site": pl.String,
    "quantized": pl.Boolean,
    "alpha": pl.Float64,
    "fold_error": pl.Float64,
    "weight_error": pl.Float64,
    "output_error": pl.Float64,
}
"""layers.parquet: a row per layer (module `layer`) and per linear, by its name inside the layer.

alpha: of the smoothing of its input (null: none). fold_error: largest change of the layer's output by the fold alone,
relative to the output's absmax. weight_error, output_error: Frobenius norm of the change by rounding, relative to that
of the unrounded; the layer's output_error is relative to what it adds to its input.
"""


def quantize(
    policy: Path, calibrated: Path, settings: QuantizeScheme | QuantizeNone, out: Path
) -> tuple[dict[str, float], dict[str, Any]]:
    """Write `checkpoint/`, the tables of `write_quantized` as parquet and what it costs in quality to `out`.

    Args:
        policy: the checkpoint to quantise. calibrated: the folder that `calibrate` wrote for it.

    Returns:
        metrics and the notes of the manifest.

    Raises:
        UserError: the family is not supported, the checkpoint is quantised already, a setting does not fit the model,
            or the statistics are another's.
    """
    model = Layerwise.open(policy, plain=True)
    checkpoint = out / "checkpoint"
    notes: dict[str, Any] = {"scheme": settings.kind, "kv": settings.kv}
    metrics: dict[str, Any] = {}
    if isinstance(settings, QuantizeNone):
        write_kv_only(model, Statistics(calibrated, model), settings, checkpoint)
    else:
        tables = write_quantized(model, calibrated, settings, checkpoint)
        for name, table in tables.items():
            table.write_parquet(out / f"{name}.parquet")
        layers, gains = tables["layers"], tables["refined"].select(pl.col("mse_after") / pl.col("mse_before"))
        linears = layers.filter(pl.col("module") != "layer")
        metrics = {
            "fold_error_max": layers["fold_error"].max(),
            "weight_error_max": linears["weight_error"].max(),
            "output_error_max": linears["output_error"].max(),
            "num_quantized_linears": int(linears["quantized"].sum()),
            "refined_mse_ratio": gains["mse_after"].median(),
        }
        notes |= {
            "alpha": settings.smooth.alpha,
            "sites": list(settings.smooth.sites),
            "rounding": settings.rounding,
            **_gptq_text(calibrated, settings),
            "ignore": list(settings.ignore),
            "num_quantized_linears": metrics["num_quantized_linears"],
            "stored_dtype": str(model.stored_dtype).removeprefix("torch."),
        }
    metrics["checkpoint_bytes"] = sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))
    metrics |= measure_quality(Layerwise.open(checkpoint), calibrated, out)
    return {f"quantize/{name}": float(value) for name, value in metrics.items() if value is not None}, notes


class Statistics:
    """What `calibrate` wrote, read one layer at a time."""

    def __init__(self, calibrated: Path, model: Layerwise):
        """Raises UserError: they are another model's."""
        self.folder = calibrated
        last = model.num_layers - 1
        tensors = {tensor_name(last, site.name) for site in model.decoder.sites(last)}
        names = read_header(calibrated / "stats.safetensors").keys()
        if not {f"{name}.absmax" for name in tensors} <= names or any(
            name.startswith(f"layers.{last + 1}.") for name in names
        ):
            raise UserError(f"artifacts/calibrate: its statistics are not of this model of {last + 1} layers; allowed: "
                            "those of the policy, which `dvc repro` makes")  # fmt: skip

    def layer(self, index: int, file: str = "stats") -> dict[str, Tensor]:
        """The tensors of one layer; `file` may be `samples`."""
        tensors = read_statistics(self.folder / f"{file}.safetensors", f"layers.{index}.")
        return {name: tensor for name, tensor in tensors.items() if not name.endswith(".token_norm")}

    def kv_scales(self, index: int, divisor_R: Tensor | float = 1.0) -> dict[str, Tensor]:
        """`k_scale` and `v_scale` [1] of a layer's FP8 cache.

        Args:
            divisor_R: what the fold has divided the values by, one for each row of v_proj.
        """
        seen = self.layer(index)
        absmax = {"k": seen[f"layers.{index}.k_absmax"], "v": seen[f"layers.{index}.v_absmax"].flatten() / divisor_R}
        return {f"{side}_scale": kv_scale(float(found.max())) for side, found in absmax.items()}


@torch.inference_mode()
def write_kv_only(model: Layerwise, statistics: Statistics, settings: QuantizeNone, out: Path) -> None:
    """The policy as it is, with scales for an FP8 cache."""
    writer = CheckpointWriter(model.folder, out)
    for name in model.names:
        writer.add(name, model.tensor(name))
    for index in range(model.num_layers):
        _add_kv_scales(writer, model, index, model.layer(index), statistics.kv_scales(index))
    writer.finish(quantization_config(settings), settings.model_dump())


def _add_kv_scales(
    writer: CheckpointWriter, model: Layerwise, index: int, layer: nn.Module, scales: Mapping[str, Tensor]
) -> None:
    for scale, name in kv_scale_names(model.decoder, index, layer).items():
        writer.add(name, scales[scale])


@torch.inference_mode()
def write_quantized(model: Layerwise, calibrated: Path, settings: QuantizeScheme, out: Path) -> dict[str, pl.DataFrame]:
    """Quantise layer by layer and write the checkpoint to `out`.

    Returns:
        the tables `layers` (LAYER_SCHEMA), `alpha` (`search.SEARCH_SCHEMA`) and `refined` (`refine.REFINE_SCHEMA`).

    Raises:
        UserError: as `quantize`.
    """
    if model.decoder.conv1d:
        raise UserError(f"quantize.kind={settings.kind}: model_type {model.decoder.model_type!r} has Conv1D layers, "
                        "whose weights lie the other way round, and engines load quantised weights of Linear only; "
                        "allowed: none")  # fmt: skip
    refuse_unfoldable(model.decoder, settings.smooth.sites)
    high = linears_left_alone(model, settings)
    _refuse_static_experts(model, settings, high)
    statistics = Statistics(calibrated, model)
    unseen = _sequences(calibrated, "heldout")
    probe = model.start(unseen.token_ids_ST[:1, :PROBE_TOKENS], 1)
    text = None
    if settings.rounding == "gptq":
        seen = _sequences(calibrated, "calibration")
        text = CalibrationText(model.start(seen.token_ids_ST[: settings.gptq.num_sequences], _batch_size(seen)))

    writer = CheckpointWriter(model.folder, out)
    prefix = f"{model.decoder.layers_path}."
    for name in model.names:
        if not name.startswith(prefix):
            writer.add(name, model.tensor(name))
    rows: list[dict[str, Any]] = []
    tried: list[dict[str, Any]] = []
    refined: list[dict[str, Any]] = []
    for index in tqdm(range(model.num_layers), desc=f"quantize, {settings.rounding}", unit="layer", delay=3):
        layer = model.layer(index)
        smoothed = smooth_layer(model, index, dict(layer.state_dict()), statistics, settings, high[index])
        tried += smoothed.tried
        refined += smoothed.refined
        errors = Errors(model, index, layer, probe)
        layer.load_state_dict(smoothed.tensors, assign=True)
        smoothed.tensors.clear()
        errors.after_fold(layer)
        _store_rounded(model, index, layer, high[index])
        if text and isinstance(settings, QuantizeInt4):
            text.enter(model, index, layer)
        for kinds in _rounded_together(settings):
            sites = [site for site in model.decoder.sites(index) if site.kind in kinds]
            names = {site.name for site in sites if not high[index].issuperset(site.readers)}
            moments = (
                text.moments(model, index, layer, names, smoothed.input_absmax, settings) if text and names else {}
            )
            for site in sites:
                for name in site.readers:
                    if name not in high[index]:
                        linear = layer.get_submodule(name)
                        rounded = round_linear(linear, smoothed.input_absmax[site.name], settings, model.stored_dtype,
                                               moments.get(site.name))  # fmt: skip
                        errors.of_linear(site.name, name, linear, rounded)
                        layer.set_submodule(name, rounded)
        errors.of_layer(layer)
        rows += errors.rows(smoothed, high[index])
        if text:
            text.leave(model, index, layer)
        _write_layer(writer, model, index, layer)
        if settings.kv == "fp8":
            _add_kv_scales(writer, model, index, layer, statistics.kv_scales(index, smoothed.values_divisor))
        # Nothing may hold this layer while the next one is read.
        linear = rounded = None  # type: ignore[assignment]
        del layer, smoothed, errors, linear, rounded
    writer.finish(quantization_config(settings, routers_of(model.decoder)), settings.model_dump())
    tables = {"layers": (rows, LAYER_SCHEMA), "alpha": (tried, SEARCH_SCHEMA), "refined": (refined, REFINE_SCHEMA)}
    return {name: pl.DataFrame(content, schema) for name, (content, schema) in tables.items()}


def linears_left_alone(model: Layerwise, settings: QuantizeScheme) -> list[set[str]]:
    """Per layer, its linears that stay in high precision, by their names inside the layer.

    Raises:
        UserError: `ignore` does not fit the model, or `group_size` not the widths of what is quantised.
    """
    description = model.decoder
    names = {description.stored_name(index, name): name for index in range(model.num_layers)
             for name in description.linears(index)}  # fmt: skip
    ignored = ignored_linears(description, settings.ignore)
    places = find_tensors(model.folder)
    widths = {name: places[f"{name}.weight"].shape[1] for name in names if name not in ignored}
    if not widths:
        raise UserError(f"quantize.ignore={settings.ignore}: leaves no linear to quantise; allowed: fewer, or "
                        "quantize=none")  # fmt: skip
    check_groups(widths, settings)
    return [{name for name in description.linears(index) if description.stored_name(index, name) in ignored}
            for index in range(model.num_layers)]  # fmt: skip


def _refuse_static_experts(model: Layerwise, settings: QuantizeScheme, high: list[set[str]]) -> None:
    """Raises UserError: experts would get static INT8 scales, which vLLM runs on no device."""
    if settings.kind != "w8a8_int8_static":
        return
    for index in range(model.num_layers):
        for name in model.decoder.linears(index):
            if ".experts." in f".{name}" and name not in high[index]:
                raise UserError(f"quantize.kind={settings.kind}: {model.decoder.stored_name(index, name)} is an "
                                "expert, and vLLM runs INT8 experts with scales per token only; allowed: "
                                "w8a8_int8_dynamic, or the experts in quantize.ignore")  # fmt: skip


@dataclass(frozen=True)
class Smoothed:
    """One layer after the fold, and what is known of the inputs of its linears."""

    tensors: dict[str, Tensor]
    """Every tensor by its name inside the layer, float32; norms hold what is stored."""
    alphas: dict[str, float]
    """By the name of the site; those that are not smoothed are not in it."""
    input_absmax: dict[str, float]
    """Largest calibrated |x| by the name of the site."""
    tried: list[dict[str, Any]]
    """Rows of `search.SEARCH_SCHEMA`."""
    refined: list[dict[str, Any]]
    """Rows of `refine.REFINE_SCHEMA`."""
    values_divisor: Tensor | float
    """What each row of v_proj was divided by."""


def smooth_layer(
    model: Layerwise,
    index: int,
    tensors: Mapping[str, Tensor],
    statistics: Statistics,
    settings: QuantizeScheme,
    high: Collection[str],
) -> Smoothed:
    """Choose alphas and fold the scales.

    A site whose linears all stay in high precision is not smoothed: there is no rounding to help.

    Args:
        tensors: the layer's, float32. high: its linears that stay in high precision.
    """
    seen, dtype = statistics.layer(index), model.stored_dtype
    samples = statistics.layer(index, "samples")
    alphas, tried = layer_alphas(model.decoder, index, tensors, seen, samples, settings, high, dtype)
    scales = site_scales(model.decoder, index, tensors, seen, alphas, settings.smooth.formula, dtype)
    refined: list[dict[str, Any]] = []
    if settings.smooth.refine_steps:
        scales, refined = refine_scales(model.decoder, index, tensors, seen, samples, scales, settings, high, dtype)
    folded = fold_layer(tensors, model.decoder.sites(index), scales)
    for site in model.decoder.sites(index):
        if isinstance(site.producer, Norm):
            weight = f"{site.producer.name}.weight"
            folded[weight] = folded[weight].to(dtype).float()
    absmax = {site.name: static_absmax(seen, tensor_name(index, site.name), scales.get(site.name))
              for site in model.decoder.sites(index)}  # fmt: skip
    [output] = [site for site in model.decoder.sites(index) if site.kind == "o"]
    divisor = per_row(scales[output.name], output.heads) if output.name in scales else 1.0
    return Smoothed(folded, alphas, absmax, tried, refined, divisor)


def _store_rounded(model: Layerwise, index: int, layer: nn.Module, high: Collection[str]) -> None:
    """Give the tensors of a layer that are not quantised the values that they will be stored with."""
    quantized = {f"{name}.weight" for name in model.decoder.linears(index) if name not in high}
    for name, tensor in layer.state_dict().items():
        if name not in quantized:
            tensor.copy_(tensor.to(model.stored_dtype))


def round_linear(
    linear: nn.Module, input_absmax: float, settings: QuantizeScheme, dtype: torch.dtype, moments: Moments | None
) -> QuantizedLinear:
    """A linear layer on its scheme's grid: rounded to nearest, or by GPTQ where the moments of its input are given.

    Args:
        linear: weight [O, I], bias [O] or None, float32. dtype: of scales that are not stored in float32.
    """
    weight_OI, bias_O = linear.weight, linear.bias
    assert isinstance(weight_OI, Tensor)
    if moments is None or not moments.num_tokens:
        grid = weight_grid(weight_OI, settings, scale_dtype=dtype)
        levels_OI = round_weight(weight_OI, grid)
    else:
        rules = settings.gptq
        grid = weight_grid(weight_OI, settings, scale_dtype=dtype, importance_I=moments.hessian_II.diagonal())
        levels_OI = gptq(moments.shifted(weight_OI, rules.damping), moments.hessian_II, grid, damping=rules.damping,
                         act_order=rules.act_order)  # fmt: skip
    bias_O = bias_O.to(dtype) if isinstance(bias_O, Tensor) else None
    return linear_from(levels_OI, grid, bias_O, settings, input_absmax, scale_dtype=dtype)


def rounded_input(x_BI: Tensor, settings: QuantizeScheme, input_absmax: float) -> Tensor:
    """The values that the scheme's kernel multiplies in place of `x_BI`."""
    if isinstance(settings, QuantizeInt8):
        static = settings.kind == "w8a8_int8_static"
        levels_BI, scale = int8.quantize_activation(x_BI, int8.static_scale(input_absmax) if static else None)
        return levels_BI * scale
    if isinstance(settings, QuantizeFp8):
        levels_BI, scale = fp8.quantize_activation(x_BI)
        return levels_BI * scale
    return x_BI


def _rounded_together(settings: QuantizeScheme) -> list[Collection[str]]:
    """Kinds of sites whose linears are rounded before the next ones' inputs are looked at.

    Four bits change what comes after them in the layer, and GPTQ has to see it. Eight bits hardly do: one pass over the
    text serves the whole layer, in place of four.
    """
    return [[kind] for kind in KINDS] if isinstance(settings, QuantizeInt4) else [KINDS]


class CalibrationText:
    """Hidden states of calibration text after the layers that have been quantised."""

    def __init__(self, start: Hidden):
        self._seen = start
        self._exact_inputs: list[dict[str, Tensor]] = []

    def enter(self, model: Layerwise, index: int, layer: nn.Module) -> None:
        """Keep what the linears of a layer that is smoothed and not quantised read, to be repaired.

        The tokens of an expert may differ between the two, so those are not kept.
        """
        self._exact_inputs = []
        for seen in _batches(self._seen.clone()):
            inputs: dict[str, Tensor] = {}

            def keep(name: str, x_BTI: Tensor, inputs: dict[str, Tensor] = inputs) -> None:
                if not name.startswith("experts."):
                    inputs[name] = x_BTI.clone()

            model.advance(seen, index, layer, keep)
            self._exact_inputs.append(inputs)

    def moments(
        self,
        model: Layerwise,
        index: int,
        layer: nn.Module,
        names: Collection[str],
        input_absmax: Mapping[str, float],
        settings: QuantizeScheme,
    ) -> dict[str, Moments]:
        """Of the inputs of some sites, by their names, where what comes before them in the layer is quantised."""
        found: dict[str, Moments] = {}
        for number, seen in enumerate(_batches(self._seen.clone())):
            inputs, left = self._exact_inputs[number] if self._exact_inputs else {}, set(names)

            def add(name: str, x_BTI: Tensor, inputs: dict[str, Tensor] = inputs, left: set[str] = left) -> None:
                if name in names:
                    x_BTI = rounded_input(x_BTI, settings, input_absmax[name])
                    found.setdefault(name, Moments(x_BTI.shape[-1])).add(x_BTI, inputs.get(name))
                    left.discard(name)
                    if not left:
                        raise _SeenEnough

            with suppress(_SeenEnough):
                model.advance(seen, index, layer, add)
        return found

    def leave(self, model: Layerwise, index: int, layer: nn.Module) -> None:
        """The layer is quantised: the text that sees it moves on by it."""
        model.advance(self._seen, index, layer)
        self._exact_inputs = []


class _SeenEnough(Exception):
    """What follows in the layer need not be computed."""


def _batches(hidden: Hidden) -> Iterator[Hidden]:
    """The batches of hidden states, each to be advanced for itself, in place."""
    for states_BTD in hidden.batches():
        yield Hidden(states_BTD, hidden.batch_size, hidden.arguments)


class Errors:
    """Errors of one layer on held-out text, whose hidden states move on by the unquantised layer."""

    def __init__(self, model: Layerwise, index: int, layer: nn.Module, probe: Hidden):
        """`layer` is the model's; `probe` what it is given."""
        self._model, self._index = model, index
        self._before = probe.clone()
        self._inputs: dict[str, list[Tensor]] = {}
        self._of_linear: dict[str, tuple[float, float | None]] = {}
        self._fold_error = self._layer_error = 0.0
        model.advance(probe, index, layer)
        self._after_STD = probe.states_STD

    def after_fold(self, layer: nn.Module) -> None:
        """Note the change by the fold alone, and what each linear is given."""
        folded = self._before.clone()

        def see(name: str, x_BTI: Tensor) -> None:
            self._inputs.setdefault(name, []).append(x_BTI.flatten(0, 1).clone())

        self._model.advance(folded, self._index, layer, see)
        change_STD = folded.states_STD - self._after_STD
        self._fold_error = float(change_STD.abs().max() / self._after_STD.abs().max())

    def of_linear(self, site: str, name: str, linear: nn.Module, rounded: QuantizedLinear) -> None:
        """Note the change of a linear and of its output."""
        weight_error = _relative(rounded.weight_values(), linear.weight)  # type: ignore[arg-type]
        pieces = self._inputs.get(site)
        if pieces is None:
            # An expert that none of these tokens was routed to.
            self._of_linear[name] = weight_error, None
            return
        x_NI = torch.cat(pieces)
        self._of_linear[name] = weight_error, _relative(rounded(x_NI), linear(x_NI))

    def of_layer(self, layer: nn.Module) -> None:
        """Note the change of the layer's output when all its linears are rounded."""
        rounded = self._before.clone()
        self._model.advance(rounded, self._index, layer)
        change_STD = rounded.states_STD - self._after_STD
        self._layer_error = float(change_STD.norm() / (self._after_STD - self._before.states_STD).norm())

    def rows(self, smoothed: Smoothed, high: Collection[str]) -> list[dict[str, Any]]:
        """Rows of LAYER_SCHEMA."""
        empty = dict.fromkeys(LAYER_SCHEMA)
        rows = [empty | {"layer": self._index, "module": "layer", "quantized": False, "fold_error": self._fold_error,
                         "output_error": self._layer_error}]  # fmt: skip
        for site in self._model.decoder.sites(self._index):
            for name in site.readers:
                row = {"layer": self._index, "module": name, "site": site.name, "quantized": name not in high,
                       "alpha": smoothed.alphas.get(site.name)}  # fmt: skip
                row["weight_error"], row["output_error"] = self._of_linear.get(name, (None, None))
                rows.append(empty | row)
        return rows


def _relative(changed: Tensor, exact: Tensor) -> float:
    size = float(exact.norm())
    return float((changed - exact).norm()) / size if size else 0.0


def _write_layer(writer: CheckpointWriter, model: Layerwise, index: int, layer: nn.Module) -> None:
    description = model.decoder
    stored: dict[str, Tensor] = {}
    for name in description.linears(index):
        module = layer.get_submodule(name)
        if not isinstance(module, nn.Linear):
            stored |= {f"{name}.{part}": tensor for part, tensor in module.stored().items()}
            if module.bias is not None:
                stored[f"{name}.bias"] = module.bias.to(model.stored_dtype)
    quantized = {name.rpartition(".")[0] for name in stored}
    for name, tensor in layer.state_dict().items():
        if name.rpartition(".")[0] not in quantized:
            stored[name] = tensor.to(model.stored_dtype)
    for name, tensor in stored.items():
        writer.add(description.stored_name(index, name), tensor)


def _gptq_text(calibrated: Path, settings: QuantizeScheme) -> dict[str, int]:
    """How many calibration sequences GPTQ had: those asked for, or all there are."""
    if settings.rounding != "gptq":
        return {}
    return {"gptq_sequences": min(settings.gptq.num_sequences, read_json(calibrated / "stats.json")["num_sequences"])}


def _sequences(calibrated: Path, kind: str) -> Sequences:
    return sequences_from_frame(pl.read_parquet(calibrated / f"{kind}_tokens.parquet"))


def _batch_size(sequences: Sequences) -> int:
    return max(1, BATCH_TOKENS // sequences.token_ids_ST.shape[1])
