"""Which models can be calibrated and quantised, and what the others are told."""

import pytest
import torch
from transformers import GemmaConfig, GemmaForCausalLM, GPT2Config, GPT2LMHeadModel

from oneaxis.errors import UserError
from oneaxis.quantize.decoder import Heads, decoder_layers, heads
from tests.quantize.models import FAMILIES, SIZES, tiny


@pytest.mark.parametrize("family", FAMILIES)
def test_supported(family: str) -> None:
    model = tiny(family)
    assert len(decoder_layers(model)) == 2
    shape = heads(model)
    assert shape.num_heads * shape.head_dim == model.model.layers[0].self_attn.o_proj.in_features
    assert shape.num_kv_heads * shape.head_dim == model.model.layers[0].self_attn.v_proj.out_features


def test_heads_of_a_model_with_grouped_queries() -> None:
    assert heads(tiny("llama")) == Heads(num_heads=4, num_kv_heads=2, head_dim=8)


def test_same_names_with_another_meaning_are_refused() -> None:
    """Gemma has every name that Llama has, but stores its norm weights as 1 + w."""
    model = GemmaForCausalLM(GemmaConfig(**SIZES, head_dim=8))
    with pytest.raises(UserError, match=r"model_type='gemma'.*self_attn\.q_proj.*allowed: llama, mistral, qwen2"):
        decoder_layers(model)


def test_another_architecture_is_refused() -> None:
    """GPT-2 has a nonlinearity between the two layers of its MLP: its down projection has no such fold."""
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=32, n_positions=32, pad_token_id=0))
    with pytest.raises(UserError, match=r"model_type='gpt2'.*nothing at model\.layers.*allowed: llama"):
        decoder_layers(model)


def test_a_linear_that_no_site_covers_is_refused() -> None:
    model = tiny("llama")
    model.model.layers[1].mlp.router = torch.nn.Linear(4, 4)
    with pytest.raises(UserError, match=r"model\.layers\.1 holds .*mlp\.router"):
        decoder_layers(model)
