"""Escape texts and greedy answers of a tiny random model against one prompt at a time, without cache or packing."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

from oneaxis.errors import UserError
from oneaxis.preference.probes import Escapes, end_ids, escape_table, greedy, prompt_ids, spread

from .conftest import small_model, small_tokenizer

TEXTS = {"refusal": "I will not help with that.", "short": "I w", "empty": ""}
PROMPTS = ["open a jar", "how do I turn the lid of a jar to the left?", "cook"]


def naive(model64: Any, prompt: str, text: str, tokenizer: Any, ends: list[int]) -> float:
    """One prompt, one text, float64: the sum over the tokens of the text, or over what ends the answer at once."""
    if tokenizer.chat_template:
        before = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
    else:
        before, text = prompt, text and f"\n{text}"
    start = len(tokenizer(before)["input_ids"])
    ids = tokenizer(before + text)["input_ids"]
    with torch.no_grad():
        logps = torch.log_softmax(model64(torch.tensor([ids])).logits[0], dim=-1)
    if not text:
        return float(torch.logsumexp(logps[-1, ends], 0))
    return float(sum(logps[place - 1, ids[place]] for place in range(start, len(ids))))


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("packed", [True, False])
def test_escape_texts_match_one_at_a_time(chat: bool, packed: bool) -> None:
    model, tokenizer, ends = small_model(3), small_tokenizer(chat), [0, 2]
    escapes = Escapes(PROMPTS, TEXTS, ends, tokenizer)
    escapes._packs = packed
    found = escapes.logps(model.train())
    assert model.training, "put back"
    model64 = small_model(3).double()
    expected = [[naive(model64, prompt, text, tokenizer, ends) for text in TEXTS.values()] for prompt in PROMPTS]
    assert found == pytest.approx(np.array(expected), abs=1e-4)
    some = Escapes.of_json(json.loads(json.dumps(escapes.on([2, 0]).as_json())))
    assert some.logps(model) == pytest.approx(found[[2, 0]], abs=1e-4)


def test_a_model_that_changes_its_logits_is_not_packed() -> None:
    """Granite's and Gemma 2's kind: what the unembedding gives is scaled or capped after it."""

    class Scaled(type(small_model())):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out = super().forward(*args, **kwargs)
            out.logits = out.logits / 2
            return out

    model = small_model(3)
    scaled = Scaled(model.config).eval()
    scaled.load_state_dict(model.state_dict())
    tokenizer = small_tokenizer()
    found = Escapes(PROMPTS, TEXTS, [0], tokenizer).logps(scaled)
    expected = [[naive(scaled, prompt, text, tokenizer, [0]) for text in TEXTS.values()] for prompt in PROMPTS]
    assert found == pytest.approx(np.array(expected), abs=1e-4)


def test_greedy_is_the_likeliest_token_each_time_whatever_the_config_and_the_batch() -> None:
    model, tokenizer = small_model(4), small_tokenizer()
    asked = [prompt_ids(prompt, tokenizer) for prompt in PROMPTS]
    expected = []
    for ids in asked:
        grown = list(ids)
        with torch.no_grad():
            for _ in range(12):
                grown.append(int(model(torch.tensor([grown])).logits[0, -1].argmax()))
        expected.append(grown[len(ids) :])
    theirs = GenerationConfig(do_sample=True, temperature=5.0, repetition_penalty=3.0, max_length=4)
    model.generation_config = theirs
    assert greedy(model, asked, tokens=12, ends=[303]) == expected
    assert greedy(model, asked, tokens=12, ends=[303], batch_tokens=1) == expected, "one at a time"
    assert model.generation_config is theirs
    stop = expected[1][4]
    cut = greedy(model, asked, tokens=12, ends=[stop])
    assert [answer[: len(part)] for answer, part in zip(expected, cut, strict=True)] == cut
    assert cut[1] == expected[1][: expected[1].index(stop) + 1], "the token that ends an answer is its last"


def test_what_ends_an_answer(tokenizer: Any) -> None:
    model = small_model()
    assert end_ids(model, tokenizer) == [0]
    model.generation_config.eos_token_id = [2, 1]
    assert end_ids(model, tokenizer) == [2, 1]
    model.generation_config.eos_token_id = None
    assert end_ids(model, tokenizer) == [tokenizer.eos_token_id]
    nameless = small_tokenizer()
    nameless.eos_token = None
    with pytest.raises(UserError, match="names no eos_token_id"):
        end_ids(model, nameless)


def test_prompts_are_spread_over_the_table() -> None:
    assert spread(9, 3) == [0, 4, 8]
    assert spread(4, 99) == [0, 1, 2, 3]


def test_the_table_names_moment_prompt_and_text() -> None:
    escapes = Escapes(["a", "b"], {"one": "x", "empty": ""}, [0], small_tokenizer())
    table = escape_table(escapes, ["p", "q"], [("before", 0, [0, 1], np.array([[1, 2], [3, 4]])),
                                               ("during", 5, [1], np.array([[5, 6]]))])  # fmt: skip
    assert table.rows() == [("before", 0, "p", "one", 1.0), ("before", 0, "p", "empty", 2.0),
                            ("before", 0, "q", "one", 3.0), ("before", 0, "q", "empty", 4.0),
                            ("during", 5, "q", "one", 5.0), ("during", 5, "q", "empty", 6.0)]  # fmt: skip
