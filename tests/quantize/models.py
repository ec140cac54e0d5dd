"""Tiny random decoders in float32, of every known family, some with grouped queries, some with biases."""

from typing import Any

import torch
from torch import nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from oneaxis.quantize.experts import split_experts
from oneaxis.quantize.families import Decoder, check_layer, decoder

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": True}),
    "llama_biases": (LlamaForCausalLM, LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "llama_mha": (LlamaForCausalLM, LlamaConfig, {"num_key_value_heads": 4}),
    "mistral": (MistralForCausalLM, MistralConfig, {"head_dim": 12}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 16}),
    # transformers' default attention leaves out the cap on scores.
    "gemma2": (Gemma2ForCausalLM, Gemma2Config, {"head_dim": 12, "sliding_window": 8, "attn_implementation": "eager"}),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig, {"head_dim": 16, "sliding_window": 8,
               "layer_types": ["sliding_attention", "full_attention"]}),
    "phi3": (Phi3ForCausalLM, Phi3Config, {}),
    "mixtral": (MixtralForCausalLM, MixtralConfig, {"num_local_experts": 4, "num_experts_per_tok": 2}),
    # Layer 0 has experts, layer 1 is dense.
    "qwen3_moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig, {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
                  "moe_intermediate_size": 24, "norm_topk_prob": True, "mlp_only_layers": [1]}),
    "olmo2": (Olmo2ForCausalLM, Olmo2Config, {"num_key_value_heads": 4}),
    "opt": (OPTForCausalLM, OPTConfig, {"ffn_dim": 48, "word_embed_proj_dim": 32, "init_std": 0.3}),
    "gpt2": (GPT2LMHeadModel, GPT2Config, {"n_inner": 48}),
}  # fmt: skip


def tiny(family: str = "llama", seed: int = 0, **more: Any) -> PreTrainedModel:
    """A model whose biases and norm weights are random too, and whose channels differ in scale by orders."""
    model_class, config_class, extra = MODELS[family]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config_class(**{**SIZES, **extra, **more})).float().eval()
        offset = 1.0 if family.startswith("gemma") else 0.0
        for name, parameter in model.named_parameters():
            if name.endswith(("norm.weight", "ln_1.weight", "ln_2.weight", "ln_f.weight")):
                parameter.data = torch.exp(torch.randn_like(parameter)) - offset
            elif name.endswith(".bias"):
                parameter.data = torch.randn_like(parameter)
            elif "mlp.gate.weight" in name:
                parameter.data = torch.randn_like(parameter) * 0.1
    return model.requires_grad_(False)


def token_ids(num_sequences: int, num_tokens: int, seed: int = 1) -> torch.Tensor:
    """Random ids [num_sequences, num_tokens]."""
    return torch.randint(
        1, SIZES["vocab_size"], (num_sequences, num_tokens), generator=torch.Generator().manual_seed(seed)
    )


def split(model: PreTrainedModel) -> Decoder:
    """Split the experts of a model in place, and describe it."""
    description = decoder(model.config)
    for index, layer in enumerate(layers_of(model, description)):
        check_layer(description, index, split_experts(layer))
    return description


def layers_of(model: PreTrainedModel, description: Decoder) -> list[nn.Module]:
    """Its decoder layers."""
    return list(model.get_submodule(description.layers_path))  # type: ignore[call-overload]


@torch.inference_mode()
def site_inputs(model: PreTrainedModel, description: Decoder, token_ids_ST: torch.Tensor) -> dict[str, torch.Tensor]:
    """What the linears of each site read, `layers.<n>.<site>` -> [N, C]; of an expert no token reached, [0, C]."""
    found: dict[str, list[torch.Tensor]] = {}
    handles = []
    for index, layer in enumerate(layers_of(model, description)):
        for site in description.sites(index):
            module: Any = layer.get_submodule(site.tap)
            width = layer.get_submodule(site.readers[0]).in_features
            seen = found.setdefault(f"layers.{index}.{site.name}", [torch.zeros(0, width)])
            handles.append(
                module.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0].flatten(0, -2).clone()))
            )
    model(token_ids_ST)
    for handle in handles:
        handle.remove()
    return {name: torch.cat(tensors) for name, tensors in found.items()}


def statistics_of(
    model: PreTrainedModel, description: Decoder, inputs: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Those that scales are made of, with the names in stats.safetensors."""
    found = {}
    for index, layer in enumerate(layers_of(model, description)):
        for site in description.sites(index):
            name = f"layers.{index}.{site.name}"
            x_NC = inputs[name] if len(inputs[name]) else torch.zeros(1, inputs[name].shape[1])
            weights = [layer.get_submodule(linear).weight.abs().amax(dim=0) for linear in site.readers]
            found[f"{name}.weight_absmax"] = torch.stack(weights).amax(dim=0)
            found[f"{name}.absmax"], found[f"{name}.min"] = x_NC.abs().amax(dim=0), x_NC.amin(dim=0)
            found[f"{name}.max"] = x_NC.amax(dim=0)
    return found
