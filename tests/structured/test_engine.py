"""The whole way through the real engine on a random model: what its answers are, and that the kept mass is right.

Oracles: vLLM's own structured outputs for the answers; `transformers.generate` in this process, with the mass taken in
float64 from its logits and the legal tokens found by trying every token of the vocabulary, for the numbers.
"""

import json
import math
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
import xgrammar

from oneaxis.checkpoint.load import load_tokenizer
from oneaxis.config import compose
from oneaxis.config.schema import ExtractDocuments
from oneaxis.structured.documents import make_documents
from oneaxis.structured.extraction import Prompter, ask_documents, started
from oneaxis.structured.generate import KeptMassProcessor
from oneaxis.structured.grammar import Grammars
from oneaxis.structured.prompts import schema_of
from oneaxis.structured.results import tables
from tests.serve.tiny import random_llama, serve

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]
DOCUMENTS = make_documents(records=2, lists=1, lengths=[1], seed=3)
# In float32, so that an answer does not depend on what it is computed beside.
SERVE = serve(dtype="float32", max_model_len=1500, threads=1)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random, with room for prompts of a byte a token."""
    return random_llama(tmp_path_factory.mktemp("structured") / "checkpoint", max_position_embeddings=2048)


def settings(**changes: Any) -> ExtractDocuments:
    """Of the group's choice, small; a byte tokenizer has no chat template."""
    given = [f"extract.{key}={json.dumps(value)}" for key, value in {
        "chat_template": False, "example": False, "max_tokens": 160, "row_tokens": 120, "whitespace": "compact",
        **changes,
    }.items()]  # fmt: skip
    section = compose(ROOT / "conf", ["extract=records", *given]).extract
    assert isinstance(section, ExtractDocuments)
    return section


def ask(checkpoint: Path, own: ExtractDocuments, folder: Path, **changes: Any) -> pl.DataFrame:
    """All documents, by an engine of their own."""
    prompter = Prompter(load_tokenizer(checkpoint), own)
    masses = folder / "masses"
    return ask_documents(
        DOCUMENTS, prompter, own, seed=0, folder=folder / "parts", masses=masses, observed={},
        engine=lambda: started(checkpoint, SERVE, own, masses=masses, log=folder / "log", observed={}),
    )  # fmt: skip


def test_answers_are_those_of_the_engines_own_grammar_and_masses_those_of_transformers(
    checkpoint: Path, tmp_path: Path
) -> None:
    own = settings()
    ours = ask(checkpoint, own, tmp_path / "processor")
    theirs = ask(checkpoint, settings(grammar="engine"), tmp_path / "engine")
    same = ["document_id", "condition", "text", "finished", "token_ids"]
    assert ours.select(same).equals(theirs.select(same))
    # A random model ends a record, whose length is bounded, and no list.
    assert ours["finished"].to_list() == [True] * 4 + [False]
    assert theirs["kept"].list.drop_nulls().list.len().sum() == 0
    # Before the mask and after it: p / kept is what the engine says where the mask came first.
    for before, after in zip(ours.iter_rows(named=True), theirs.iter_rows(named=True), strict=True):
        renormalised = [logp - math.log(kept) for logp, kept in
                        zip(before["logprobs"], before["kept_at_one"], strict=True)]  # fmt: skip
        assert renormalised == pytest.approx(after["logprobs"], abs=2e-3)

    for document, said in list(zip(DOCUMENTS, ours.iter_rows(named=True), strict=True))[1:3]:
        schema = json.dumps(schema_of(document, own))
        expected, generated = by_transformers(
            checkpoint, Prompter(load_tokenizer(checkpoint), own).first(document), schema
        )
        assert generated == said["token_ids"]
        assert said["kept"] == pytest.approx(expected, rel=2e-3, abs=1e-6)
        assert said["kept"] == said["kept_at_one"]
    answers, fields = tables(DOCUMENTS, ours, load_tokenizer(checkpoint), own)
    assert answers["truncated"].to_list() == [0, 0, 0, 0, 1]
    # In strings with a length limit xgrammar 0.2.8 lets control characters stand, which are no JSON.
    broken = [any(ord(character) < 32 for character in text) for text in answers["text"][:4]]
    assert answers["parse_failed"].to_list() == [*map(float, broken), 1.0]
    known = fields.filter(pl.col("value").is_not_null() & (pl.col("value") != '""'))
    assert known.height == 3 * broken.count(False) - fields.filter(value='""').height
    assert known["kept"].null_count() == 0
    assert (known["kept"] <= known["kept_first"]).all()


def by_transformers(checkpoint: Path, prompt: tuple[int, ...], schema: str) -> tuple[list[float], list[int]]:
    """The kept mass at every token of the greedy answer under the grammar, and the answer's tokens."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    tokenizer = load_tokenizer(checkpoint)
    grammars = Grammars(tokenizer, model.config.vocab_size)
    processor = KeptMassProcessor(grammars, schema, "compact", prompt_tokens=len(prompt))
    ids = torch.tensor([prompt])
    made = model.generate(ids, attention_mask=torch.ones_like(ids), logits_processor=[processor], do_sample=False,
                          max_new_tokens=200, pad_token_id=1)[0].tolist()  # fmt: skip
    answer = made[len(prompt) :]
    with torch.inference_mode():
        logits = model(torch.tensor([made])).logits[0].double()
    matcher = xgrammar.GrammarMatcher(grammars.compile(schema, "compact"))
    expected = []
    for place, token in enumerate(answer):
        legal = []
        for candidate in range(model.config.vocab_size):
            if matcher.accept_token(candidate):
                legal.append(candidate)
                matcher.rollback()
        weights = torch.softmax(logits[len(prompt) + place - 1], dim=-1)
        expected.append(float(weights[legal].sum()))
        assert token in legal
        matcher.accept_token(token)
    assert processor.kept[0] == pytest.approx(expected, rel=1e-4, abs=1e-7)
    return expected, answer


def test_without_a_mask_the_mass_is_watched_until_the_answer_leaves_the_grammar(
    checkpoint: Path, tmp_path: Path
) -> None:
    raw = ask(checkpoint, settings(grammar="none", temperature=0.5, frequency_penalty=0.2, first="reasoning",
                                   reasoning_tokens=12), tmp_path)  # fmt: skip
    for said in raw.iter_rows(named=True):
        # A random model leaves it at once: the first position is known, no other.
        assert said["kept"][0] is not None
        assert said["kept"][1:] == [None] * (len(said["kept"]) - 1)
        assert said["kept"][0] != said["kept_at_one"][0]
        assert said["reasoning_tokens"] == 12 or said["reasoning"]
