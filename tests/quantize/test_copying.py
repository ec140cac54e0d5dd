"""The exact-copy suite. Oracles: the drawn strings found again in the text; greedy decoding; counts done by hand."""

import polars as pl
import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from oneaxis.config.schema import Copying
from oneaxis.quantize.copying import (
    KINDS,
    TOKEN_SCHEMA,
    CopyTasks,
    compare_copies,
    discriminates,
    make_copy_tasks,
    score_copies,
)
from tests.serve.tiny import byte_tokenizer

CONTEXT = 1200


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer(folder)
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def tasks(tokenizer):
    return make_copy_tasks(tokenizer, Copying(sequences=2, context_tokens=CONTEXT), None, 0)


class Induction:
    """A causal model of three lines: after three tokens it says what followed them the first time."""

    def run(self, token_ids_ST: Tensor, batch_size: int) -> Tensor:
        said = []
        for ids in token_ids_ST.tolist():
            known: dict[tuple[int, ...], int] = {}
            for t, token in enumerate(ids):
                known.setdefault(tuple(ids[max(t - 3, 0) : t]), token)
                said.append(known.get(tuple(ids[max(t - 2, 0) : t + 1]), 0))
        return torch.tensor(said).view(*token_ids_ST.shape, 1).float()

    def logits(self, hidden_ND: Tensor) -> Tensor:
        return one_hot(hidden_ND)


def one_hot(hidden_ND: Tensor) -> Tensor:
    """Logit 10 for the token that the hidden state names, 0 for the other 299."""
    return 10.0 * torch.nn.functional.one_hot(hidden_ND[:, 0].long() % 300, 300).float()


class Copier:
    """Its hidden state is the true next token, but where told otherwise in sequences that are no retrieval."""

    def __init__(self, wrong=()):
        self.wrong = wrong

    def run(self, token_ids_ST: Tensor, batch_size: int) -> Tensor:
        following_ST = token_ids_ST.roll(-1, dims=1)
        for row, position in self.wrong if len(token_ids_ST) > 2 else ():
            following_ST[row, position - 1] += 1
        return following_ST.unsqueeze(-1).float()

    def logits(self, hidden_ND: Tensor) -> Tensor:
        return one_hot(hidden_ND)


def test_every_string_stands_in_its_context_once_and_is_asked_for_once(tokenizer, tasks):
    for kind, table in tasks.tables.items():
        for part in table.partition_by("sequence"):
            text = tokenizer.decode(part["token_id"].to_list())
            strings = [
                tokenizer.decode(one["token_id"].to_list()).strip()
                for one in part.drop_nulls("task").partition_by("task", maintain_order=True)
            ]
            assert len(strings) == len(set(strings)) > 1, kind
            assert all(text.count(string) == 2 for string in strings), kind


def test_copies_come_in_another_order_and_after_the_whole_context(tokenizer, tasks):
    for kind, table in tasks.tables.items():
        part = table.filter(pl.col("sequence") == 0)
        text = tokenizer.decode(part["token_id"].to_list())
        strings = [tokenizer.decode(one["token_id"].to_list()).strip()
                   for one in part.drop_nulls("task").partition_by("task", maintain_order=True)]  # fmt: skip
        first, second = [text.index(one) for one in strings], [text.rindex(one) for one in strings]
        assert second == sorted(second)
        assert first != sorted(first), kind
        assert max(first) < min(second)


def test_facts_stand_in_the_middle_half_of_the_long_text(tokenizer, tasks):
    text = tokenizer.decode(tasks.tables["retrieval"].filter(pl.col("sequence") == 0)["token_id"].to_list())
    body = text[: text.index("The codes that")]
    places = [
        body.index(f"The code of {line.split()[3]}") for line in text[len(body) :].splitlines() if "code of" in line
    ]
    assert len(places) >= 2
    assert min(places) > 0.15 * len(body)
    assert max(places) < 0.85 * len(body)


def test_sizes_seed_and_growth(tokenizer, tasks):
    settings = Copying(sequences=2, context_tokens=CONTEXT)
    assert make_copy_tasks(tokenizer, settings, None, 0).tokens.equals(tasks.tokens)
    assert not make_copy_tasks(tokenizer, settings, None, 1).tokens.equals(tasks.tokens)
    # More sequences leave the first ones as they are.
    more = make_copy_tasks(tokenizer, Copying(sequences=3, context_tokens=CONTEXT), None, 0).tokens
    assert more.filter(pl.col("sequence") < 2).sort(more.columns[:3]).equals(tasks.tokens.sort(more.columns[:3]))
    assert [tuple(ids.shape) for ids in tasks.groups] == [(8, 512), (2, CONTEXT)]


def test_a_short_model_shortens_the_sequences_and_it_is_said(tokenizer, capsys):
    tasks = make_copy_tasks(tokenizer, Copying(sequences=1, context_tokens=2048), 256, 0)
    assert [tuple(ids.shape) for ids in tasks.groups] == [(5, 256)]
    assert list(tasks.tables) == list(KINDS)
    said = "oneaxis: calibrate.copying.context_tokens=2048: cut to 256, the model's positions\n"
    assert capsys.readouterr().err == said


def test_exact_is_what_greedy_decoding_writes(tokenizer):
    """Oracle: decoding token by token with the argmax, from the context that stands before a target."""
    tasks = make_copy_tasks(tokenizer, Copying(sequences=1, context_tokens=512), None, 0)
    model, answers = Induction(), []
    scores = score_copies(model, tasks)
    for kind, table in tasks.tables.items():
        ids = table["token_id"].to_list()
        for (task,), part in table.drop_nulls("task").group_by("task", maintain_order=True):
            start, end = part["position"][0], part["position"][-1] + 1
            written = ids[:start]
            while len(written) < end:
                hidden_1TD = model.run(torch.tensor([written]), 1)
                written.append(int(model.logits(hidden_1TD[:, -1]).argmax()))
            row = scores.row(by_predicate=(pl.col("kind") == kind) & (pl.col("task") == task), named=True)
            assert row["num_tokens"] == end - start
            assert row["exact"] == (written == ids[:end]), (kind, task)
            answers.append(row["exact"])
    assert set(answers) == {True, False}


def test_one_wrong_token_fails_its_task_and_no_other(tasks):
    # Row 2 of the first group is the first sequence of json_keys; its third target token is spoiled.
    targets = tasks.tables["json_keys"].filter(pl.col("sequence") == 0).drop_nulls("task")
    scores = score_copies(Copier(wrong=[(2, targets["position"][2])]), tasks)
    failed = scores.filter(~pl.col("exact"))
    assert failed.select("kind", "sequence", "task").rows() == [("json_keys", 0, targets["task"][2])]
    assert score_copies(Copier(), tasks)["exact"].all()


def test_nll_of_a_copier(tasks):
    # Logit 10 for the right one of 300, 0 for the others: log(e^10 + 299) - 10.
    assert score_copies(Copier(), tasks)["nll"].to_numpy() == pytest.approx(0.0134841, abs=1e-6)


def table(*shares: str) -> pl.DataFrame:
    """One row per character, x for an exact copy: sequences of kind `digits`."""
    rows = [("digits", sequence, task, 5, mark == "x", 1.0 if mark == "x" else 3.0)
            for sequence, marks in enumerate(shares) for task, mark in enumerate(marks)]  # fmt: skip
    return pl.DataFrame(rows, schema=["kind", "sequence", "task", "num_tokens", "exact", "nll"], orient="row")


def test_changes_by_hand():
    compared = compare_copies(table("xxxx", "xx..", "xxx."), table("xx..", "x..x", "xxx."))
    found = compared["kinds"]["digits"]
    assert found == compared["all"]
    assert (found["exact_base"], found["exact_other"], found["gained"], found["lost"]) == (9 / 12, 7 / 12, 1, 3)
    # Differences of the sequences: -2/4, 0, 0: mean -1/6, deviation 0.288675, t(2) = 4.302653, / sqrt(3).
    assert found["exact"]["effect"] == pytest.approx(-1 / 6)
    assert found["exact"]["ci_low"] == pytest.approx(-1 / 6 - 4.302653 * 0.288675 / 3**0.5, abs=1e-5)
    # 4 changed tokens of 2 nats: (3 - 1) * 2 / 12.
    assert found["nll"]["effect"] == pytest.approx(2 * 2 / 12)


def test_equal_answers_still_have_an_interval():
    same = table("xx..", "xx..", "x...")
    exact = compare_copies(same, same)["all"]["exact"]
    # Tango without a discordant item: z^2 / (n + z^2) either way.
    half = 1.959964**2 / (12 + 1.959964**2)
    assert (exact["effect"], exact["ci_low"], exact["ci_high"]) == pytest.approx((0, -half, half), abs=1e-5)
    assert discriminates(same, same)["discriminates"] is False


def test_discriminates_or_says_that_it_cannot():
    base, weak = table(*["xxxxxxxx"] * 6), table(*["xx......"] * 5, "xxx.....")
    found = discriminates(base, weak)
    assert found["discriminates"] is True
    assert (
        found["why"]
        == "The suite tells a weak quantisation apart: the model copies 100.0% of 48 strings, plain static INT8 27.1%."
    )
    cannot = discriminates(weak, weak)
    assert "cannot tell" in cannot["why"]
    assert discriminates(table("xx"), table(".."))["discriminates"] is False  # One sequence: no interval.


def test_without_tasks(tokenizer):
    none = make_copy_tasks(tokenizer, Copying(sequences=0, context_tokens=128), None, 0)
    scores = score_copies(Copier(), none)
    assert none.groups == []
    assert scores.is_empty()
    assert compare_copies(scores, scores) == {}
    assert discriminates(scores, scores) == {
        "discriminates": False, "why": "There are no exact-copy tasks, so nothing is said of copying."}  # fmt: skip


def test_survives_a_file(tasks, tmp_path):
    tasks.tokens.write_parquet(tmp_path / "copy_tokens.parquet")
    again = CopyTasks(pl.read_parquet(tmp_path / "copy_tokens.parquet"))
    assert all(torch.equal(a, b) for a, b in zip(again.groups, tasks.groups, strict=True))


def test_other_tasks_are_not_compared():
    with pytest.raises(AssertionError, match="same tasks"):
        compare_copies(table("xx"), table("xxx"))


def test_half_a_suite_has_half_the_sequences_of_each_kind_and_one_at_least() -> None:
    numbers = {"digits": [0, 1, 2, 3], "base64": [4, 5, 6], "retrieval": [7]}
    rows = [(kind, sequence, 0, 1, None) for kind, several in numbers.items() for sequence in several]
    tasks = CopyTasks(pl.DataFrame(rows, schema=TOKEN_SCHEMA, orient="row"))
    assert tasks.half().tokens["sequence"].to_list() == [0, 1, 4, 5, 7]
