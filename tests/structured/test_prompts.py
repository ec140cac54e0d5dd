"""What is asked follows from the settings, in schema, words and example alike."""

import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from oneaxis.config import compose
from oneaxis.config.schema import ExtractDocuments
from oneaxis.errors import UserError
from oneaxis.structured.documents import make_documents
from oneaxis.structured.extraction import Prompter, check_extract_args, fitting
from oneaxis.structured.prompts import LONGEST_QUOTE, formatting_messages, messages_of, schema_of
from tests.serve.tiny import serve

ROOT = Path(__file__).parents[2]
DOCUMENTS = make_documents(records=8, lists=2, lengths=[2, 12], seed=random.randrange(10**6))


def settings(**changes: Any) -> ExtractDocuments:
    given = [f"extract.{key}={json.dumps(value)}" for key, value in changes.items()]
    section = compose(ROOT / "conf", ["extract=records", *given]).extract
    assert isinstance(section, ExtractDocuments)
    return section


@pytest.mark.parametrize("order", [["evidence", "label", "amount"], ["label", "amount", "evidence"]])
def test_order_is_the_same_in_schema_words_and_example(order: list[str]) -> None:
    own = settings(order=order)
    for document in DOCUMENTS[:4]:
        schema = schema_of(document, own)
        [message] = messages_of(document, own)
        words, _, rest = message["content"].partition("\n\nExample:\n")
        assert list(schema["properties"]) == schema["required"] == order
        assert sorted(order, key=lambda name: words.index(f'"{name}"')) == order
        shown = [json.loads(line.removeprefix("Answer: ")) for line in rest.splitlines() if line.startswith("Answer: ")]
        assert [list(answer) for answer in shown] == [order, order]
        assert shown[1] == {"evidence": None, "label": "unknown", "amount": None}
        assert rest.endswith(f"Document:\n{document.text}\nAnswer:")


def test_the_truth_is_an_answer_that_the_schema_takes_and_unknown_only_with_a_way_out() -> None:
    for way_out in (True, False):
        own = settings(way_out=way_out)
        for document in DOCUMENTS:
            check = jsonschema.Draft202012Validator(schema_of(document, own))
            given = {name: "unknown" if name == "label" and value is None else value
                     for name, value in document.truth.items()}  # fmt: skip
            assert check.is_valid(given) == (way_out or document.condition != "illegible")
            [message] = messages_of(document, own)
            if document.kind != "list":
                assert ("cannot be read" in message["content"]) == way_out
                assert len(str(document.truth["evidence"])) <= LONGEST_QUOTE
            # Nothing but the truth's own keys.
            assert not check.is_valid({**given, "more": 1})


def test_without_an_example_there_is_none_and_reasoning_comes_between() -> None:
    own = settings(example=False, first="reasoning")
    [message] = messages_of(DOCUMENTS[0], own)
    assert "Example" not in message["content"]
    roles = formatting_messages(DOCUMENTS[0], own, "Line two.")
    assert [each["role"] for each in roles] == ["user", "assistant", "user"]
    assert roles[1]["content"] == "Line two."
    assert "JSON" not in roles[0]["content"]
    assert DOCUMENTS[0].text in roles[0]["content"]


class Characters:
    """A tokenizer with a token a character, and no chat template."""

    chat_template = None

    def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
        return {"input_ids": list(map(ord, text))}


def test_a_record_that_does_not_fit_is_left_out_in_both_renderings_and_counted() -> None:
    own = settings(chat_template=False, example=False)
    prompter = Prompter(Characters(), own)
    records = [each for each in DOCUMENTS if each.kind != "list"]
    needed = sorted(prompter.tokens_needed(each) for each in records)
    limit = serve(max_model_len=needed[-1] - 1)
    kept, left_out = fitting(records, prompter, own, limit)
    assert left_out["legible"] == left_out["illegible"] > 0
    assert len(kept) == len(records) - sum(left_out.values())
    with pytest.raises(UserError, match=r"serve.max_model_len=64: none of the 8 documents of condition legible fits "
                                        rf".*allowed: {needed[-1]} and up"):  # fmt: skip
        fitting(records, prompter, own, serve(max_model_len=64))


def test_settings_that_cannot_be_are_one_line() -> None:
    with pytest.raises(UserError, match=r"extract.chat_template=true: the model's tokenizer has no chat template"):
        Prompter(Characters(), settings())
    with pytest.raises(UserError, match=r"serve.engine_args.logits_processors=\['a:B'\]: stage extract sets it"):
        check_extract_args(serve(engine_args={"logits_processors": ["a:B"]}))
    for given, words in (
        ({"records": 0}, "records and lists are both 0"),
        ({"lists": 2}, r"lists is 2 and lengths is \[\]"),
        ({"order": ["label", "amount"]}, r"order is \['label', 'amount'\]"),
        ({"lists": 1, "lengths": [2, 2]}, "values that differ"),
        ({"lists": 1, "lengths": [33]}, "32"),
        ({"temperature": -0.1}, r"extract.temperature=-0.1: allowed"),
    ):
        with pytest.raises(UserError, match=words):
            settings(**given)
    with pytest.raises(UserError, match=r"extract.kind is documents with serve=attach"):
        compose(ROOT / "conf", ["extract=records", "serve=attach", "serve.base_url=http://h:1"])
