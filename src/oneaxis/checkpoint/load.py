"""From a checkpoint folder to a model that computes what an engine computes with it, for measuring on a CPU.

A plain folder becomes the model in the dtype asked for. A quantised folder in the compressed-tensors format becomes the
same model with an `Int8Linear`, `Int4Linear` or `Fp8Linear` in place of each quantised linear, so that activations are
rounded as the scheme says, and with keys and values rounded where the KV cache is FP8.
Local files only, safetensors only, and never a model's own code.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from oneaxis.checkpoint.compressed import Scheme, read_scheme
from oneaxis.checkpoint.problems import first_line, misfits, other_shape, require_whole
from oneaxis.errors import UserError
from oneaxis.quantize import int4
from oneaxis.quantize.experts import split_experts
from oneaxis.quantize.families import FAMILIES, decoder
from oneaxis.quantize.fp8 import Fp8Linear
from oneaxis.quantize.int8 import Int8Linear
from oneaxis.quantize.kv import ATTENTION, SCALES, is_attention, kv_rounding
from oneaxis.quantize.linears import QuantizedLinear


def load_for_measuring(folder: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a checkpoint, plain or quantised as `oneaxis.quantize` writes it, and its tokenizer, ready to run.

    Args:
        folder: config.json, *.safetensors, tokenizer.
        dtype: of everything that is not quantised; levels are summed in float32 whatever it is.

    Raises:
        UserError: something is missing, does not fit, needs the model's own code, or is quantised in another format.
    """
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder}: no config.json; allowed: a folder with config.json, *.safetensors and a tokenizer")
    if not list(folder.glob("*.safetensors")):
        raise UserError(
            f"{folder}: no *.safetensors; allowed: a folder with config.json, *.safetensors and a tokenizer"
        )
    tokenizer = load_tokenizer(folder)
    config, quantization = read_config(folder)
    if quantization is None:
        model = _load_plain(folder, config, dtype)
    else:
        model = _load_quantized(folder, config, quantization, dtype)
    model.eval()
    model.requires_grad_(False)
    return model, tokenizer


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a checkpoint folder.

    Raises:
        UserError: there is none, or it does not load.
    """
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")):
        raise UserError(f"{folder}: no tokenizer; allowed: a folder with tokenizer.json (or tokenizer.model, "
                        "vocab.json, vocab.txt) beside the weights; copy it from the base model")  # fmt: skip
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        # transformers and tokenizers raise what they like here, bare Exception included.
        raise UserError(f"{folder}: the tokenizer does not load: {first_line(error)}") from error


def read_config(folder: Path) -> tuple[PretrainedConfig, dict[str, Any] | None]:
    """The model's configuration without its quantisation, and the `quantization_config` (None: a plain checkpoint).

    Raises:
        UserError: config.json is missing or broken, or names a model that transformers does not know.
    """
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        # As for the tokenizer: a value that a model's config refuses may be anything.
        raise UserError(f"{folder / 'config.json'}: does not load: {first_line(error)}") from error
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None:
        del config.quantization_config
        if not isinstance(quantization, dict):
            quantization = quantization.to_dict()
    return config, quantization


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a folder's safetensors, by name.

    Raises:
        UserError: a file is broken.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(
            f"{folder}: no *.safetensors; allowed: a folder with config.json, *.safetensors and a tokenizer"
        )
    tensors: dict[str, Tensor] = {}
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                tensors.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
        except SafetensorError as error:
            raise UserError(f"{path}: not a whole safetensors file: {first_line(error)}") from error
    return tensors


def _load_plain(folder: Path, config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            **_attention(config, Scheme("none")),
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    except Exception as error:
        # transformers raises what it likes on a config that makes no sense.
        raise UserError(f"{folder}: the model does not load: {first_line(error)}") from error
    require_whole(str(folder), misfits(report))
    return model


def _attention(config: PretrainedConfig, scheme: Scheme) -> dict[str, str]:
    """Our own attention where transformers' would leave something out: the rounding of a cache, a cap on scores."""
    capped = getattr(config, "attn_logit_softcapping", None)
    return {"attn_implementation": ATTENTION} if scheme.kv == "fp8" or capped else {}


def stored_shapes(scheme: Scheme, out_features: int, in_features: int) -> dict[str, tuple[int, ...]]:
    """The tensors beside a quantised linear's name, and their shapes."""
    if scheme.kind != "w4a16":
        shapes: dict[str, tuple[int, ...]] = {"weight": (out_features, in_features), "weight_scale": (out_features, 1)}
        return {**shapes, "input_scale": (1,)} if scheme.kind == "w8a8_int8_static" else shapes
    assert scheme.group_size is not None
    groups, packed = in_features // scheme.group_size, -(-in_features // int4.PER_INT32)
    shapes = {"weight_packed": (out_features, packed), "weight_scale": (out_features, groups), "weight_shape": (2,)}
    return shapes if scheme.symmetric else {**shapes, "weight_zero_point": (-(-out_features // int4.PER_INT32), groups)}


def linear_of(
    scheme: Scheme, name: str, tensors: Mapping[str, Tensor], *, out_features: int, in_features: int, where: str
) -> QuantizedLinear:
    """A quantised linear from its tensors in a checkpoint.

    Args:
        name: its stored name, and `where` the checkpoint, for messages.
        tensors: those beside its name (`weight`, `weight_scale`, ...); `bias` may be among them.

    Raises:
        UserError: a tensor is missing, too many, or has another shape or dtype than the scheme says.
    """
    shapes, bias_O = stored_shapes(scheme, out_features, in_features), tensors.get("bias")
    given = {part: tensor for part, tensor in tensors.items() if part != "bias"}
    wrong = [f"{name}.{part} is missing" for part in shapes.keys() - given.keys()]
    wrong += [f"{name}.{part} is there" for part in given.keys() - shapes.keys()]
    wrong += [other_shape(f"{name}.{part}", tensor.shape, shapes[part]) for part, tensor in given.items()
              if part in shapes and tuple(tensor.shape) != shapes[part]]  # fmt: skip
    wanted = {"w4a16": torch.int32, "w8a8_fp8": torch.float8_e4m3fn}.get(scheme.kind, torch.int8)
    wrong += [f"{name}.{part} holds {tensor.dtype}, not {wanted}" for part, tensor in given.items()
              if part in ("weight", "weight_packed", "weight_zero_point") and tensor.dtype != wanted]  # fmt: skip
    if wrong:
        raise UserError(f"{where}: {min(wrong)}; allowed: what config.json says ({scheme.kind})")
    if scheme.kind == "w4a16":
        levels_OI = int4.unpack(given["weight_packed"], in_features)
        packed = given.get("weight_zero_point")
        zero_OG = None if packed is None else int4.unpack(packed.T, out_features).T.contiguous()
        return int4.Int4Linear(levels_OI, given["weight_scale"], zero_OG, bias_O)
    if scheme.kind == "w8a8_fp8":
        return Fp8Linear(given["weight"], given["weight_scale"], bias_O)
    return Int8Linear(given["weight"], given["weight_scale"], bias_O, given.get("input_scale"))


def quantized_names(names: Iterable[str]) -> list[str]:
    """The stored names of the quantised linears of a checkpoint, from those of its tensors."""
    return sorted(name.removesuffix(".weight_scale") for name in names if name.endswith(".weight_scale"))


def _load_quantized(
    folder: Path, config: PretrainedConfig, quantization: dict[str, Any], dtype: torch.dtype
) -> PreTrainedModel:
    scheme = read_scheme(quantization, str(folder / "config.json"))
    tensors = read_tensors(folder)
    attention = _attention(config, scheme)
    # Random weights are drawn and overwritten; the caller's random state is not touched by it.
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False, **attention)
    tensors = _as_in_the_model(model, config, tensors)
    _take_kv_scales(model, scheme, tensors, str(folder))
    shapes, tied = (
        {name: tensor.shape for name, tensor in model.state_dict().items()},
        model.all_tied_weights_keys or {},
    )
    expected = shapes.keys() - tied.keys()
    for name in quantized_names(tensors):
        module = dict(model.named_modules()).get(name)
        if not isinstance(module, nn.Linear):
            raise UserError(f"{folder}: {name} is unknown to this model; allowed: the linears that config.json gives")
        parts = {part: tensors.pop(f"{name}.{part}") for part in PARTS if f"{name}.{part}" in tensors}
        if "bias" in parts:
            parts["bias"] = parts["bias"].to(dtype)
        if ("bias" in parts) != (module.bias is not None):
            require_whole(str(folder), [f"{name}.bias is {'unknown to this model' if 'bias' in parts else 'missing'}"])
        sizes = {"out_features": module.out_features, "in_features": module.in_features}
        model.set_submodule(name, linear_of(scheme, name, parts, **sizes, where=str(folder)))
        expected -= {f"{name}.weight", f"{name}.bias"}
    given = tensors.keys() - tied.keys()
    wrong = [f"{name} is missing" for name in sorted(expected - given)]
    wrong += [f"{name} is unknown to this model" for name in sorted(given - expected)]
    wrong += [other_shape(name, tensors[name].shape, shapes[name]) for name in sorted(expected & given)
              if tensors[name].shape != shapes[name]]  # fmt: skip
    require_whole(str(folder), wrong)
    model.load_state_dict(tensors, strict=False)
    model.tie_weights()
    return model


PARTS = ("weight", "weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "input_scale", "bias")
"""What may stand beside a quantised linear's name."""


def _as_in_the_model(model: PreTrainedModel, config: PretrainedConfig, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors by their names in the model, whose experts are split so that each linear is one."""
    if config.model_type not in FAMILIES:
        return tensors
    family, layers = decoder(config), model.get_submodule(decoder(config).layers_path)
    ours: dict[str, str] = {}
    for index, layer in enumerate(layers.children()):
        for name, _ in split_experts(layer).named_modules():
            ours[family.stored_name(index, name)] = f"{family.layers_path}.{index}.{name}"

    def renamed(name: str) -> str:
        module, _, part = name.rpartition(".")
        return f"{ours.get(module, module)}.{part}"

    return {renamed(name): tensor for name, tensor in tensors.items()}


def _take_kv_scales(model: PreTrainedModel, scheme: Scheme, tensors: dict[str, Tensor], where: str) -> None:
    """Take the scales of keys and values out of `tensors`, and let every attention round as the cache does."""
    if scheme.kv == "none":
        return
    for name, module in model.named_modules():
        if not is_attention(module):
            continue
        require_whole(where, [f"{name}.{part} is missing" for part in SCALES if f"{name}.{part}" not in tensors])
        module.kv_functions = [kv_rounding({part: tensors.pop(f"{name}.{part}") for part in SCALES})]
