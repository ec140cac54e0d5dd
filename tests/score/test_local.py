"""Shared-prefix scoring against a naive forward of each sequence alone, in float64, on tiny random models."""

import copy
import random
from typing import Any

import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from oneaxis.errors import UserError
from oneaxis.packing import ROW_TOKENS
from oneaxis.quantize.int8 import Int8Linear, quantize_weight
from oneaxis.score.boundary import Target
from oneaxis.score.local import check_head, log_probabilities
from tests.quantize.models import MODELS, split, tiny

TOLERANCE = 5e-5
"""Nats: what float32 agrees to between one at a time, batched and with a shared prefix."""


def naive(model: Any, target: Target) -> list[float]:
    """The definition: log_softmax of the model's own logits, each sequence alone, in float64, no cache."""
    model = model.double()
    with torch.inference_mode():
        logprobs = torch.log_softmax(model(torch.tensor([target.ids]), use_cache=False).logits[0], dim=-1)
    model.float()
    return [float(logprobs[place - 1, target.ids[place]]) for place in range(target.start, len(target.ids))]


def assert_naive(model: Any, targets: list[Target], scored: list[list[float]], tolerance: float = TOLERANCE) -> None:
    """Every target has what the definition gives it."""
    for target, values in zip(targets, scored, strict=True):
        assert values == pytest.approx(naive(model, target), abs=tolerance)


def random_targets(seed: int, vocabulary: int = 400) -> list[Target]:
    """Groups of every awkward sort: one-token options, nested ones, equal ones, later and earlier starts, alone."""
    draw = random.Random(seed)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(draw.randrange(vocabulary) for _ in range(count))

    targets = []
    for group in range(12):
        prompt = tokens(draw.randint(1, 40))
        for _ in range(draw.randint(1, 6)):
            option = tokens(draw.randint(1, 7))
            start = draw.randint(1, len(prompt))
            targets.append(Target(f"g{group}", prompt + option, start))
        nested = targets[-1]
        targets.append(Target(nested.group, nested.ids + tokens(2), nested.start))
        targets.append(nested)
    # A group whose sequences share nothing, not even the first token.
    targets += [Target("odd", (token, *tokens(5)), 2) for token in (1, 2)]
    return targets


@pytest.mark.parametrize("batch_tokens", [64, 300, 100_000])
def test_equals_the_naive_forward_at_any_batch_size(llama: LlamaForCausalLM, batch_tokens: int) -> None:
    targets = random_targets(0)
    scored, _ = log_probabilities(llama, targets, batch_tokens)
    assert_naive(llama, targets, scored)


def test_order_and_company_of_the_targets_do_not_matter(llama: LlamaForCausalLM) -> None:
    targets = random_targets(1)
    together, _ = log_probabilities(llama, targets, 512)
    shuffled = random.Random(0).sample(range(len(targets)), len(targets))
    again, _ = log_probabilities(llama, [targets[index] for index in shuffled], 512)
    for place, index in enumerate(shuffled):
        assert again[place] == pytest.approx(together[index], abs=TOLERANCE)
        alone, _ = log_probabilities(llama, [targets[index]], 512)
        assert alone[0] == pytest.approx(together[index], abs=TOLERANCE)


def test_what_padding_holds_does_not_matter(llama: LlamaForCausalLM) -> None:
    targets = random_targets(2)
    assert log_probabilities(llama, targets, 512, pad_id=0) == log_probabilities(llama, targets, 512, pad_id=399)


def test_a_sliding_window_sees_the_prefix_at_its_true_distance() -> None:
    """Prompts are longer than the window of 8, and padded to each other."""
    torch.manual_seed(0)
    config = MistralConfig(vocab_size=400, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
                           num_attention_heads=4, num_key_value_heads=2, sliding_window=8,
                           initializer_range=0.15)  # fmt: skip
    model = MistralForCausalLM(config).eval()
    targets = random_targets(3)
    scored, _ = log_probabilities(model, targets, 2048)
    assert_naive(model, targets, scored)


@pytest.mark.parametrize("family", [family for family in MODELS if family != "gemma2"])
@pytest.mark.parametrize("sliding_window", [8, 4096])
def test_every_known_family_sees_its_prefix_and_nothing_of_other_branches(family: str, sliding_window: int) -> None:
    more = {"sliding_window": sliding_window} if "sliding_window" in MODELS[family][1]().to_dict() else {}
    model = tiny(family, **more)
    split(model)  # The joined experts do not multiply float64.
    targets = random_targets(8, vocabulary=90)
    scored, work = log_probabilities(model, targets, 512)
    shared = getattr(model.config, "sliding_window", None) != 8
    assert (work.tokens < work.naive_tokens / 2) == shared
    assert_naive(model, targets, scored, 2e-3)


def test_a_model_of_another_family_has_a_row_for_each_sequence() -> None:
    """BLOOM adds its positions to the mask, which it must make itself."""
    torch.manual_seed(0)
    model = BloomForCausalLM(BloomConfig(vocab_size=400, hidden_size=64, n_layer=2, n_head=4)).eval()
    targets = random_targets(9)
    scored, _ = log_probabilities(model, targets, 512)
    assert_naive(model, targets, scored)


def test_a_group_of_many_branches_goes_on_in_further_rows(llama: LlamaForCausalLM) -> None:
    """A premise of 5 tokens before 600 endings of 2 that are read: 2.4 rows of 512 with the premise in each."""
    draw = random.Random(10)
    pairs = draw.sample([(a, b) for a in range(400) for b in range(400)], 600)
    targets = [Target("premise", (1, 2, 3, 4, 5, *pair, draw.randrange(400)), 5) for pair in pairs]
    scored, work = log_probabilities(llama, targets, 100_000)
    assert work.tokens == 3 * 5 + 600 * 2
    assert work.padded_tokens <= 3 * ROW_TOKENS
    for index in draw.sample(range(600), 20):
        assert scored[index] == pytest.approx(naive(llama, targets[index]), abs=TOLERANCE)


def test_a_model_that_changes_its_logits_after_the_head_is_refused() -> None:
    torch.manual_seed(0)
    config = Gemma2Config(vocab_size=400, hidden_size=64, intermediate_size=96, num_hidden_layers=2, head_dim=16,
                          num_attention_heads=4, num_key_value_heads=2, final_logit_softcapping=0.5)  # fmt: skip
    model = Gemma2ForCausalLM(config).eval()
    with pytest.raises(UserError, match="Gemma2ForCausalLM changes its logits after lm_head; allowed: vllm"):
        check_head(model)


def test_a_shared_prompt_is_computed_once_and_single_tokens_cost_nothing(llama: LlamaForCausalLM) -> None:
    """Prompt of 10, options of 1, 1 and 3 tokens. One at a time 10 + 10 + 12 are read; shared, 10 + 2."""
    prompt = tuple(range(10))
    targets = [Target("g", prompt + option, 10) for option in ((50,), (51,), (52, 53, 54))]
    _, work = log_probabilities(llama, targets, 512)
    assert (work.tokens, work.padded_tokens, work.naive_tokens) == (12, 12, 32)


@pytest.mark.parametrize("batch_tokens", [512, 2048])
def test_of_four_options_after_long_prompts_little_more_is_computed_than_must_be(
    llama: LlamaForCausalLM, batch_tokens: int
) -> None:
    """Of each item P + k o tokens must be read (the last of an option is not), k (P + o) one option at a time."""
    draw = random.Random(7)
    targets, least, naive = [], 0, 0
    for item in range(48):
        prompt = [draw.randrange(400) for _ in range(draw.randint(80, 120))]
        options = [[draw.randrange(400) for _ in range(draw.randint(2, 8))] for _ in range(4)]
        targets += [Target(f"i{item}", (*prompt, *option), len(prompt)) for option in options]
        least += len(prompt) + sum(map(len, options))
        naive += sum(len(prompt) + len(option) for option in options)
    _, work = log_probabilities(llama, targets, batch_tokens)
    assert work.tokens <= least
    assert work.padded_tokens <= 1.1 * least
    assert work.naive_tokens == naive - len(targets)
    assert naive / work.padded_tokens > 3


def test_equal_sequences_are_computed_once(llama: LlamaForCausalLM) -> None:
    """A premise of 3 before 50 times the same option of 4 tokens: 3 + 3 tokens, and equal scores."""
    targets = [Target("premise", (1, 2, 3, 4, 5, 6, 7), 3)] * 50
    scored, work = log_probabilities(llama, targets, 512)
    assert work.tokens == 6
    assert all(values == scored[0] for values in scored)


def test_bfloat16_scores_are_close_and_their_softmax_is_float32(llama: LlamaForCausalLM) -> None:
    model = copy.deepcopy(llama)
    targets = random_targets(5)
    exact, _ = log_probabilities(model, targets, 512)
    coarse, _ = log_probabilities(model.to(torch.bfloat16), targets, 512)
    flat = [(a, b) for one, other in zip(exact, coarse, strict=True) for a, b in zip(one, other, strict=True)]
    assert max(abs(a - b) for a, b in flat) < 0.5
    # bfloat16 has 8 bits: its own numbers between 4 and 8 are 1/32 apart, those of a float32 softmax are not.
    assert any(b * 32 != round(b * 32) for _, b in flat if 4 < -b < 8)


def test_int8_layers_with_scales_per_token_score_the_same_in_company(llama: LlamaForCausalLM) -> None:
    """Scales per token depend on no neighbour, so a shared prefix changes nothing here either."""
    model = copy.deepcopy(llama)
    for name, module in list(model.model.named_modules()):
        if isinstance(module, torch.nn.Linear):
            model.model.set_submodule(name, Int8Linear(*quantize_weight(module.weight.data), None, None))
    targets = random_targets(6)
    scored, _ = log_probabilities(model, targets, 512)
    for target, values in zip(targets, scored, strict=True):
        with torch.inference_mode():
            logprobs = torch.log_softmax(model(torch.tensor([target.ids]), use_cache=False).logits[0], dim=-1)
        own = [float(logprobs[place - 1, target.ids[place]]) for place in range(target.start, len(target.ids))]
        assert values == pytest.approx(own, abs=TOLERANCE)
