"""The boundary between prompt and response, in text and in tokens."""

import json
from typing import Any

import pytest
from trl.trainer.dpo_trainer import DPOTrainer

from oneaxis.errors import UserError
from oneaxis.preference.pairs import common_prefix, render_pair, tokenize_continuation, tokenize_pair

from .conftest import small_tokenizer


def plain(prompt: str, chosen: str, rejected: str) -> dict[str, Any]:
    return {"pair_id": "p", "prompt": prompt, "chosen": chosen, "rejected": rejected, "conversational": False}


def chat(prompt: str, chosen: str, rejected: str) -> dict[str, Any]:
    def message(role: str, text: str) -> str:
        return json.dumps([{"role": role, "content": text}])

    row = plain(message("user", prompt), message("assistant", chosen), message("assistant", rejected))
    return {**row, "conversational": True}


def test_common_prefix() -> None:
    assert common_prefix("abcd", "abxd", "abc") == 2
    assert common_prefix([1, 2], [1, 2, 3]) == 2
    assert common_prefix([], [1]) == 0


def test_render_plain_is_the_strings_themselves(tokenizer: Any) -> None:
    assert render_pair(plain("Q: a\nA:", " yes", " no"), tokenizer) == ("Q: a\nA:", " yes", " no")


def test_render_conversational_uses_the_template(tokenizer: Any) -> None:
    assert render_pair(chat("hi", "yes", "no"), tokenizer) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", "yes<|im_end|>\n", "no<|im_end|>\n",
    )  # fmt: skip


def test_a_template_that_renders_the_prompt_alone_differently_backs_off() -> None:
    tokenizer = small_tokenizer()
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message['role'] }}:{{ message['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:<think></think>{% endif %}"
    )
    prompt, chosen, rejected = render_pair(chat("hi", "yes", "no"), tokenizer)
    assert (prompt, chosen, rejected) == ("user:hi\nassistant:", "yes\n", "no\n")


def test_conversational_without_a_template_is_one_clear_line() -> None:
    with pytest.raises(UserError, match="chat template"):
        render_pair(chat("hi", "yes", "no"), small_tokenizer(chat=False))


def test_a_template_that_refuses_a_pair_is_one_line_with_its_id() -> None:
    tokenizer = small_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('Conversation roles must alternate') }}"
    with pytest.raises(UserError, match=r"pairs\.parquet: p: .*refuses it: Conversation roles must alternate; allowed"):
        tokenize_pair(chat("hi", "yes", "no"), tokenizer, append_eos=False)


def test_a_token_across_the_join_moves_the_boundary_back(tokenizer: Any) -> None:
    """`help` and ` help` are tokens here: "I won't h" + "elp" merges, so the response begins before the join."""
    merged = tokenizer.tokenize("I won't help with that.")
    assert "Ġhelp" in merged, "the tokenizer of this test must have the merge"
    chosen, rejected = tokenize_pair(plain("I won't h", "elp with that.", "ot"), tokenizer, append_eos=False)
    assert chosen.start == rejected.start
    assert chosen.ids[: chosen.start] == rejected.ids[: rejected.start]
    assert tokenizer.decode(chosen.ids) == "I won't help with that."
    assert tokenizer.decode(chosen.ids[: chosen.start]) == "I won't"
    assert tokenizer.decode(chosen.ids[chosen.start :]) == " help with that."


@pytest.mark.parametrize(
    "row",
    [
        plain("Goal: open a jar\nAnswer:", " turn the lid.", " break it."),
        plain("I won't h", "elp with that.", "ot"),
        plain("Goal", ": ends in eos<|end|>", ": not"),
        chat("open a jar", "turn the lid", "break it"),
    ],
)
def test_tokens_are_those_that_trl_trains_on(row: dict[str, Any], tokenizer: Any) -> None:
    """Oracle: TRL's own dataset preparation, EOS included."""
    from types import SimpleNamespace

    from datasets import Dataset, disable_progress_bars

    disable_progress_bars()
    parts = {
        key: json.loads(row[key]) if row["conversational"] else row[key] for key in ("prompt", "chosen", "rejected")
    }
    trainer = SimpleNamespace(_tokenizer=tokenizer)
    arguments = SimpleNamespace(dataset_num_proc=None, max_length=None, truncation_mode="keep_start")
    theirs = DPOTrainer._prepare_dataset(trainer, Dataset.from_list([parts]), tokenizer, arguments, "train")[0]
    chosen, rejected = tokenize_pair(row, tokenizer, append_eos=True)
    assert chosen.ids == theirs["prompt_ids"] + theirs["chosen_ids"]
    assert rejected.ids == theirs["prompt_ids"] + theirs["rejected_ids"]
    assert chosen.start == rejected.start == len(theirs["prompt_ids"])


def test_no_eos_is_appended_unless_asked(tokenizer: Any) -> None:
    chosen, _ = tokenize_pair(plain("Goal:", " yes", " no"), tokenizer, append_eos=False)
    ended, _ = tokenize_pair(plain("Goal:", " yes", " no"), tokenizer, append_eos=True)
    assert ended.ids == chosen.ids + [tokenizer.eos_token_id]


def test_degenerate_sequences(tokenizer: Any) -> None:
    empty, _ = tokenize_pair(plain("Goal:", "", " no"), tokenizer, append_eos=False)
    assert empty.degenerate
    no_prompt, _ = tokenize_pair(plain("", "yes", "no"), tokenizer, append_eos=False)
    assert no_prompt.degenerate


def test_continuation_with_and_without_a_template(tokenizer: Any) -> None:
    sequence = tokenize_continuation("hi", "I will not.", tokenizer)
    assert tokenizer.decode(sequence.ids[sequence.start :]) == "I will not."
    assert tokenizer.decode(sequence.ids[: sequence.start]).endswith("<|im_start|>assistant\n")
    bare = small_tokenizer(chat=False)
    sequence = tokenize_continuation("hi ", "I will not.", bare)
    assert bare.decode(sequence.ids) == "hi\nI will not."
    assert bare.decode(sequence.ids[sequence.start :]) == "\nI will not."
