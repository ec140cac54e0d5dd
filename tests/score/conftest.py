"""A byte-level BPE whose merges cross spaces, and a tiny random Llama that reads it."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 400
TEXT = (
    "Question: what do frogs eat?\nAnswer: flies\nQuestion: where is it cold?\nAnswer: at the pole\n"
    "Question: who bakes bread?\nA. a baker\nB. a nurse\nC. a pilot\nD. a fish\nAnswer: A\n"
)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """Trained on a few lines without splitting at spaces, so that it merges colons, spaces and words freely."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - 1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        max_token_length=4,
        show_progress=False,
    )
    bpe.train_from_iterator([line for line in TEXT.splitlines(keepends=True) for _ in range(3)], trainer)
    bpe.add_special_tokens(["<eos>"])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<eos>")


def random_llama(**changes: object) -> LlamaForCausalLM:
    """Two layers, float32, weights large enough that predictions differ from place to place."""
    torch.manual_seed(0)
    settings = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 256,
        "initializer_range": 0.15,
        "bos_token_id": None,
        "eos_token_id": VOCABULARY - 1,
    }
    return LlamaForCausalLM(LlamaConfig(**{**settings, **changes})).eval()


@pytest.fixture(scope="session")
def llama() -> LlamaForCausalLM:
    """The tiny model."""
    return random_llama()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> Path:
    """The tiny model and its tokenizer as a folder."""
    folder = tmp_path_factory.mktemp("tiny") / "checkpoint"
    random_llama().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
