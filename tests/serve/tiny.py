"""A random Llama of two layers with a byte tokenizer: a whole checkpoint in a few hundred kilobytes."""

import json
from pathlib import Path
from typing import Any

from oneaxis.config.schema import Serve

HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 128, 256, 2, 2, 1, 64


def byte_tokenizer(folder: Path) -> int:
    """Write a tokenizer with one token a byte and two special ones; the size of its vocabulary, a multiple of 64."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocab = {"<s>": 0, "</s>": 1}
    for character in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[character] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return 320


def random_llama(folder: Path, **more: Any) -> Path:
    """Write a random checkpoint in BF16; `more` goes to its config.json."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    vocab_size = byte_tokenizer(folder)
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": vocab_size,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    (folder / "config.json").write_text(json.dumps(config | more), encoding="utf-8")
    generator = torch.Generator().manual_seed(0)

    def normal(*dims: int) -> torch.Tensor:
        return (torch.randn(dims, generator=generator) * 0.3).to(torch.bfloat16)

    tensors = {"model.embed_tokens.weight": normal(vocab_size, HIDDEN), "lm_head.weight": normal(vocab_size, HIDDEN)}
    tensors["model.norm.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{norm}.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
        tensors[f"{prefix}.self_attn.q_proj.weight"] = normal(HEADS * HEAD_DIM, HIDDEN)
        tensors[f"{prefix}.self_attn.k_proj.weight"] = normal(KV_HEADS * HEAD_DIM, HIDDEN)
        tensors[f"{prefix}.self_attn.v_proj.weight"] = normal(KV_HEADS * HEAD_DIM, HIDDEN)
        tensors[f"{prefix}.self_attn.o_proj.weight"] = normal(HIDDEN, HEADS * HEAD_DIM)
        for name in ("gate_proj", "up_proj"):
            tensors[f"{prefix}.mlp.{name}.weight"] = normal(INTERMEDIATE, HIDDEN)
        tensors[f"{prefix}.mlp.down_proj.weight"] = normal(HIDDEN, INTERMEDIATE)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def serve(**changes: Any) -> Serve:
    """A `serve` section that fits the tiny checkpoint, with changes."""
    values: dict[str, Any] = {
        "kind": "vllm",
        "dtype": "bfloat16",
        "max_model_len": 512,
        "max_num_seqs": 8,
        "kv_cache_gib": 0.5,
        "kv_cache_dtype": "auto",
        "prefix_caching": False,
        "enforce_eager": True,
        "threads": 3,
        "port": 0,
        "start_timeout_s": 240.0,
        "max_restarts": 0,
        "engine_args": {},
    }
    return Serve(**(values | changes))
