"""Packing text into sequences, with a tokenizer of one token a letter."""

from pathlib import Path

import polars as pl
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from oneaxis.errors import UserError
from oneaxis.quantize.text import pack, sequences_from_frame

LETTERS = {"<s>": 0, "</s>": 1, "\n": 2} | {letter: 3 + index for index, letter in enumerate("abcdefgh")}


def letters(template: str = "$A") -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel(LETTERS, unk_token="</s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=[("<s>", 0), ("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


DOCUMENTS = pl.DataFrame({"source": ["x", "x", "x", "y", "y"], "text": ["aa", "bb", "cc", "dd", "eee"]})


def spelled(ids: list[int]) -> str:
    names = {index: name for name, index in LETTERS.items()}
    return "".join(names[each] for each in ids)


def test_sources_take_turns_and_documents_are_joined_by_a_blank_line() -> None:
    packed = pack(DOCUMENTS, letters(), 2, 8, origin="text")
    assert [spelled(row) for row in packed.token_ids_ST.tolist()] == ["aa\n\ndd\n\n", "bb\n\neee\n"]
    assert packed.source_ids_ST.tolist() == [[0, 0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1, 1, 1]]
    assert packed.sources == ["x", "y"]
    assert packed.num_prefix == 0


@pytest.mark.parametrize("template", ["<s> $A", "<s> $A </s>"])
def test_each_sequence_starts_as_the_tokenizer_starts_a_text(template: str) -> None:
    packed = pack(DOCUMENTS, letters(template), 2, 5, origin="text")
    assert [spelled(row) for row in packed.token_ids_ST.tolist()] == ["<s>aa\n\n", "<s>dd\n\n"]
    table = packed.frame()
    assert table.filter("predicted")["position"].to_list() == [1, 2, 3, 4] * 2


def test_first_token_without_context_is_not_predicted() -> None:
    assert pack(DOCUMENTS, letters("$A </s>"), 1, 4, origin="t").frame()["predicted"].to_list() == [False] + [True] * 3


def test_too_little_text_says_how_much_there_is() -> None:
    origin = f"{Path('heldout.parquet')}: calibrate.heldout_sequences"
    # 11 letters and 5 times two line breaks.
    said = r"calibrate\.heldout_sequences=3 of 10 tokens each need 30 .* there are 21; allowed: up to 2, or more text"
    with pytest.raises(UserError, match=said):
        pack(DOCUMENTS, letters(), 3, 10, origin=origin)


def test_text_shorter_than_one_window_says_how_long_a_window_may_be() -> None:
    said = (
        r"calibrate\.num_sequences=1 of 64 .* there are 21; allowed: calibrate\.sequence_tokens up to 22, or more text"
    )
    with pytest.raises(UserError, match=said):
        pack(DOCUMENTS, letters("<s> $A"), 1, 64, origin="heldout.parquet: calibrate.num_sequences")
    with pytest.raises(UserError, match=r"of 64 tokens each need 64 .* there are 0; allowed: more text"):
        pack(DOCUMENTS.clear(), letters(), 1, 64, origin="text")


def test_frame_and_back() -> None:
    packed = pack(DOCUMENTS, letters("<s> $A"), 2, 6, origin="text")
    table = packed.frame()
    assert table.columns == ["sequence", "position", "source", "token_id", "predicted"]
    again = sequences_from_frame(table.sample(fraction=1, shuffle=True, seed=1))
    assert again.token_ids_ST.equal(packed.token_ids_ST)
    assert again.source_ids_ST.equal(packed.source_ids_ST)
    assert (again.sources, again.num_prefix) == (packed.sources, packed.num_prefix)
