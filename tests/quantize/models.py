"""Tiny random decoders in float32, of every supported family, some with grouped queries, some with biases."""

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

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
}
FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": True}),
    "llama_biases": (LlamaForCausalLM, LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "llama_mha": (LlamaForCausalLM, LlamaConfig, {"num_key_value_heads": 4}),
    "mistral": (MistralForCausalLM, MistralConfig, {"head_dim": 12}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 16}),
}


def tiny(family: str = "llama", seed: int = 0) -> PreTrainedModel:
    """A model whose biases and norm weights are random too, and whose channels differ in scale by orders."""
    model_class, config_class, extra = FAMILIES[family]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config_class(**{**SIZES, **extra})).float().eval()
        for name, parameter in model.named_parameters():
            if name.endswith(("norm.weight", "layernorm.weight")):
                parameter.data = torch.exp(torch.randn_like(parameter))
            elif name.endswith(".bias"):
                parameter.data = torch.randn_like(parameter)
    return model.requires_grad_(False)


def token_ids(num_sequences: int, num_tokens: int, seed: int = 1) -> torch.Tensor:
    """Random ids [num_sequences, num_tokens]."""
    return torch.randint(
        1, SIZES["vocab_size"], (num_sequences, num_tokens), generator=torch.Generator().manual_seed(seed)
    )
