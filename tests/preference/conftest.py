"""A tiny random Llama with a trained byte-level tokenizer and a ChatML template: seconds, no download."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = ["Goal: open a jar\nAnswer: turn the lid to the left.", "I will not help with that.", "I won't help with that."]


def small_tokenizer(chat: bool = True) -> PreTrainedTokenizerFast:
    """Byte-level BPE of at most 300 tokens: any string can be tokenized."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|end|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(TEXT, trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|end|>")
    wrapped.chat_template = CHATML if chat else None
    return wrapped


def small_model(seed: int = 0) -> LlamaForCausalLM:
    """Two layers, grouped-query attention, weights large enough that logits are far from uniform."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=304, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.2, tie_word_embeddings=True,
        bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return small_tokenizer()


@pytest.fixture(scope="session")
def model() -> LlamaForCausalLM:
    return small_model()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model as fetch_model lays it out: BF16 safetensors, tokenizer, chat template, generation config."""
    folder = tmp_path_factory.mktemp("tiny") / "checkpoint"
    small_model().to(torch.bfloat16).save_pretrained(folder)
    small_tokenizer().save_pretrained(folder)
    return folder
