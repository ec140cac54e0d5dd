"""From a checkpoint folder to a model that computes what an engine computes with it, for measuring on a CPU.

A plain folder becomes the model in the dtype asked for. An INT8 folder in the compressed-tensors format becomes the
same model with `Int8Linear` in place of each quantised linear, so that activations are rounded as the scheme says.
Local files only, safetensors only, and never a model's own code.
"""

from collections.abc import Sequence
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

from oneaxis.checkpoint.compressed import read_scheme
from oneaxis.errors import UserError
from oneaxis.quantize.int8 import Int8Linear, dequantize_weight


def load_for_measuring(folder: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a checkpoint, plain or INT8 as `oneaxis.quantize` writes it, and its tokenizer, ready for a forward pass.

    Args:
        folder: config.json, *.safetensors, tokenizer.
        dtype: of everything that is not quantised; INT8 levels are summed in float32 whatever it is.

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
        model = _load_int8(folder, config, quantization, dtype)
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
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    except Exception as error:
        # transformers raises what it likes on a config that makes no sense.
        raise UserError(f"{folder}: the model does not load: {first_line(error)}") from error
    require_whole(str(folder), misfits(report))
    return model


def misfits(report: dict[str, Any]) -> list[str]:
    """The tensors that `from_pretrained` did not find or could not use, from its `output_loading_info`.

    For those transformers draws random weights, and only says so in a log.
    """
    wrong = [f"{name} is missing" for name in sorted(report["missing_keys"])]
    return wrong + [_other_shape(*mismatch) for mismatch in sorted(report["mismatched_keys"])]


def _other_shape(name: str, stored: Sequence[int], expected: Sequence[int]) -> str:
    return f"{name} has shape {list(stored)}, not {list(expected)}"


def require_whole(where: str, wrong: list[str]) -> None:
    """Refuse, with a UserError, a model of which `wrong` names a tensor."""
    if wrong:
        others = f" ({len(wrong) - 1} more do not fit)" if len(wrong) > 1 else ""
        raise UserError(f"{where}: {wrong[0]}{others}; allowed: the tensors of the model that config.json describes")


def _load_int8(
    folder: Path, config: PretrainedConfig, quantization: dict[str, Any], dtype: torch.dtype
) -> PreTrainedModel:
    scheme = read_scheme(quantization, str(folder / "config.json"))
    tensors = read_tensors(folder)
    quantized = sorted(name.removesuffix(".weight_scale") for name in tensors if name.endswith(".weight_scale"))
    layers: dict[str, Int8Linear] = {}
    for name in quantized:
        levels_OI, scale_O1 = tensors.pop(f"{name}.weight"), tensors.pop(f"{name}.weight_scale")
        input_scale = tensors.pop(f"{name}.input_scale", None)
        if levels_OI.dtype != torch.int8 or scale_O1.shape != (len(levels_OI), 1):
            raise UserError(f"{folder}: {name} holds {levels_OI.dtype} with scales of shape {tuple(scale_O1.shape)}; "
                            "allowed: int8 with one scale per output channel")  # fmt: skip
        if (input_scale is None) != (scheme == "w8a8_int8_dynamic"):
            raise UserError(f"{folder}: {name}.input_scale is {'missing' if input_scale is None else 'there'}; "
                            f"allowed: what config.json says ({scheme})")  # fmt: skip
        bias_O = tensors.get(f"{name}.bias")
        layers[name] = Int8Linear(levels_OI, scale_O1, None if bias_O is None else bias_O.to(dtype), input_scale)
        # The model is first loaded whole, so that a tensor that is missing or too many shows.
        tensors[f"{name}.weight"] = dequantize_weight(levels_OI, scale_O1).to(dtype)
    # Random weights are drawn and overwritten; the caller's random state is not touched by it.
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    shapes, tied = (
        {name: tensor.shape for name, tensor in model.state_dict().items()},
        model.all_tied_weights_keys or {},
    )
    expected, given = shapes.keys() - tied.keys(), tensors.keys() - tied.keys()
    wrong = [f"{name} is missing" for name in sorted(expected - given)]
    wrong += [f"{name} is unknown to this model" for name in sorted(given - expected)]
    wrong += [_other_shape(name, tensors[name].shape, shapes[name]) for name in sorted(expected & given)
              if tensors[name].shape != shapes[name]]  # fmt: skip
    require_whole(str(folder), wrong)
    model.load_state_dict(tensors, strict=False)
    model.tie_weights()
    for name, layer in layers.items():
        module = model.get_submodule(name)
        assert isinstance(module, nn.Linear), f"{name} is {type(module).__name__}"
        model.set_submodule(name, layer)
    return model


def first_line(error: Exception) -> str:
    """The line of an error of transformers that tells the reason."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    # A first line that ends in a colon only announces the reason.
    return " ".join(line.strip() for line in lines[: 2 if lines[0].rstrip().endswith(":") else 1])[:200]
