"""Every scorer on literal tables, worked by hand in the comments."""

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from oneaxis.score.metrics import (
    accuracy,
    compare,
    flat_metrics,
    letter_probabilities,
    letter_summary,
    letter_votes,
    option_scores,
    score_items,
    summarise,
)
from oneaxis.score.table import SCHEMA


def row(item: str, context: str, option: int, logprob: float, **facts: Any) -> dict[str, Any]:
    """A row of the table; what a test does not speak of has a default."""
    default = {"item_id": item, "task": "t", "topic": None, "answer": 1, "option": option, "context": context,
               "rotation": 0, "variant": 0, "letter": None, "prompt": "?", "continuation": " x", "token_ids": [7],
               "logprobs": [logprob], "logprob": logprob, "chars": 1, "bytes": 1, "tokens": 1, "prompt_tokens": 1,
               "boundary": "clean", "truncated": 0}  # fmt: skip
    line = {**default, **facts}
    return {"answers": [line["answer"]], **line}


def table_of(rows: list[dict[str, Any]]) -> pl.DataFrame:
    """Rows in the table's schema."""
    return pl.DataFrame(rows, schema=SCHEMA)


def letters(item: str, probabilities: list[list[float]], *, mass: float = 1.0, **facts: Any) -> list[dict[str, Any]]:
    """Letter rows from probabilities[rotation][letter]: at rotation r letter j stands for option (j + r) mod n."""
    n = len(probabilities)
    return [
        row(item, "letter", (letter + rotation) % n, math.log(mass * p), rotation=rotation, letter=letter, **facts)
        for rotation, line in enumerate(probabilities)
        for letter, p in enumerate(line)
    ]


# One item on which the scorers part. L: after the question; P: after the premise.
#            L   P      chars bytes tokens | acc  norm  bytes   token  pmi_dc
# option 0  -6  -5      2     2     1      | -6   -3    -3      -6     -1
# option 1  -8  -10     4     8     4      | -8   -2    -1      -2     +2
# option 2  -7  -6.5    2     8     1      | -7   -3.5  -0.875  -7     -0.5
CLOZE_ITEM = [
    row("i", "question", 0, -6.0, chars=2, bytes=2, tokens=1),
    row("i", "question", 1, -8.0, chars=4, bytes=8, tokens=4),
    row("i", "question", 2, -7.0, chars=2, bytes=8, tokens=1),
    row("i", "premise", 0, -5.0, chars=2, bytes=2, tokens=1),
    row("i", "premise", 1, -10.0, chars=4, bytes=8, tokens=4),
    row("i", "premise", 2, -6.5, chars=2, bytes=8, tokens=1),
]


def test_cloze_scores_by_hand() -> None:
    scores = option_scores(table_of(CLOZE_ITEM))
    assert scores["acc"].to_list() == [-6, -8, -7]
    assert scores["acc_norm"].to_list() == [-3, -2, -3.5]
    assert scores["acc_bytes"].to_list() == [-3, -1, -0.875]
    assert scores["acc_per_token"].to_list() == [-6, -2, -7]
    assert scores["pmi_dc"].to_list() == [-1, 2, -0.5]


def test_cloze_choices_by_hand() -> None:
    (item,) = score_items(table_of(CLOZE_ITEM)).to_dicts()
    chosen = {name: item[f"{name}_predicted"] for name in ("acc", "acc_norm", "acc_bytes", "acc_per_token", "pmi_dc")}
    assert chosen == {"acc": 0, "acc_norm": 1, "acc_bytes": 2, "acc_per_token": 1, "pmi_dc": 1}
    assert [item[f"{name}_correct"] for name in chosen] == [False, True, False, True, True]
    assert item["letter_predicted"] is None
    assert item["letter_correct"] is None


def test_options_that_score_alike_go_to_the_first_whatever_the_order_of_rows() -> None:
    rows = [row("i", kind, option, -2.0) for kind in ("question", "premise") for option in (2, 0, 1)]
    (item,) = score_items(table_of(rows)).to_dicts()
    assert [item[f"{name}_predicted"] for name in ("acc", "acc_norm", "acc_bytes", "acc_per_token", "pmi_dc")] == [
        0
    ] * 5


def test_acc_norm_is_lm_evals() -> None:
    """lm-eval: argmax(lls / [len(choice) ...]) over choices without the delimiter; acc_bytes with UTF-8 lengths."""
    draw = random.Random(0)
    rows, norm, per_byte = [], [], []
    for number in range(60):
        choices = ["".join(draw.choice("abcéß日") for _ in range(draw.randint(1, 9))) for _ in range(4)]
        lls = np.array([-20 * draw.random() for _ in choices])
        norm.append(int(np.argmax(lls / np.array([float(len(choice)) for choice in choices]))))
        per_byte.append(int(np.argmax(lls / np.array([float(len(choice.encode())) for choice in choices]))))
        for kind in ("question", "premise"):
            for option, (choice, logprob) in enumerate(zip(choices, lls, strict=True)):
                size = {"chars": len(choice), "bytes": len(choice.encode())}
                rows.append(row(f"i{number:02}", kind, option, float(logprob), **size))
    items = score_items(table_of(rows))
    assert items["acc_norm_predicted"].to_list() == norm
    assert items["acc_bytes_predicted"].to_list() == per_byte


# Three options, the right one is 1. Rotation r: letters A, B, C stand for options r, r + 1, r + 2 (mod 3).
# rotation 0 (0, 1, 2): A .5 -> option 0.   rotation 1 (1, 2, 0): A .5 -> option 1.
# rotation 2 (2, 0, 1): C .6 -> option 1.   Votes: option 1 twice, option 0 once.
MAJORITY = letters("m", [[0.5, 0.3, 0.2], [0.5, 0.25, 0.25], [0.3, 0.1, 0.6]])
# A always wins: each option has one vote. Summed: option 0 .5+.1+.3 = .9, 1 .3+.6+.1 = 1.0, 2 .2+.3+.6 = 1.1.
POSITION = letters("p", [[0.5, 0.3, 0.2], [0.6, 0.3, 0.1], [0.6, 0.3, 0.1]])
# Option 1 wins wherever it stands.
STEADY = letters("s", [[0.1, 0.8, 0.1], [0.8, 0.1, 0.1], [0.1, 0.1, 0.8]])


def test_letter_probabilities_are_among_the_letters_and_name_their_options() -> None:
    """Letters hold 40% of the belief: the probabilities are renormalised, the mass is kept."""
    frame = letter_probabilities(
        table_of(letters("m", [[0.5, 0.3, 0.2], [0.5, 0.25, 0.25], [0.3, 0.1, 0.6]], mass=0.4))
    )
    assert frame.select("rotation", "letter", "option").rows() == [
        (0, 0, 0), (0, 1, 1), (0, 2, 2), (1, 0, 1), (1, 1, 2), (1, 2, 0), (2, 0, 2), (2, 1, 0), (2, 2, 1)
    ]  # fmt: skip
    assert frame["probability"].to_list() == pytest.approx([0.5, 0.3, 0.2, 0.5, 0.25, 0.25, 0.3, 0.1, 0.6])
    assert frame["mass"].to_list() == pytest.approx([0.4] * 9)


def test_letter_probabilities_do_not_underflow() -> None:
    rows = [row("u", "letter", (j + r) % 2, -2000.0 - j, rotation=r, letter=j) for r in range(2) for j in range(2)]
    expected = 1 / (1 + math.exp(-1))
    assert letter_probabilities(table_of(rows))["probability"].to_list() == pytest.approx(
        [expected, 1 - expected, expected, 1 - expected]
    )


def test_votes_by_hand() -> None:
    votes = letter_votes(table_of(MAJORITY + POSITION + STEADY)).to_dicts()
    assert [(v["item_id"], v["letter"], v["letter_permuted"], v["tied"], v["moved"]) for v in votes] == [
        ("m", 0, 1, False, True),
        ("p", 0, 2, True, True),
        ("s", 1, 1, False, False),
    ]


def test_the_order_of_rows_changes_nothing() -> None:
    rows = CLOZE_ITEM + MAJORITY + POSITION + STEADY
    shuffled = random.Random(0).sample(rows, len(rows))
    assert score_items(table_of(rows)).equals(score_items(table_of(shuffled)))
    assert letter_votes(table_of(rows)).equals(letter_votes(table_of(shuffled)))


def whole_table() -> pl.DataFrame:
    """Cloze and letter rows of three items with 3 options, answer 1."""
    cloze = [
        {**line, "item_id": item, "boundary": boundary, "truncated": truncated}
        for item, boundary, truncated in (("m", "clean", 0), ("p", "backed_off:2", 0), ("s", "clean", 4))
        for line in CLOZE_ITEM
    ]
    return table_of(cloze + MAJORITY + POSITION + STEADY)


def test_summary_and_metrics_by_hand() -> None:
    table = whole_table()
    items = score_items(table)
    summary = summarise(table, items)
    metrics = flat_metrics(table, summary)
    # letter chose 0, 0, 1 and permuted 1, 2, 1, where 1 is right: 1 of 3 and 2 of 3; stderr sqrt(2/9 / 2) = 1/3.
    assert metrics["score/t/letter"] == pytest.approx(1 / 3)
    assert metrics["score/t/letter_permuted"] == pytest.approx(2 / 3)
    assert metrics["score/t/letter_stderr"] == pytest.approx(1 / 3)
    assert metrics["score/t/letter_permuted_stderr"] == pytest.approx(1 / 3)
    assert metrics["score/t/letter_moved_share"] == pytest.approx(2 / 3)
    # The three items have the same cloze rows: all right or all wrong.
    assert [metrics[f"score/t/{name}"] for name in ("acc", "acc_norm", "acc_bytes", "acc_per_token", "pmi_dc")] == [
        0, 1, 0, 1, 1
    ]  # fmt: skip
    assert metrics["score/t/acc_stderr"] == 0
    assert metrics["score/t/n"] == metrics["score/t/letter_n"] == 3
    assert metrics["score/boundary_backed_off"] == 1
    assert metrics["score/truncated"] == 1
    letter = summary["t"]["letter"]
    assert letter["ties"] == 1
    assert letter["mass"] == pytest.approx(1)
    # A: (.5 + .5 + .3 + .5 + .6 + .6 + .1 + .8 + .1) / 9 = 4.0 / 9; B: 2.55 / 9; C: 2.45 / 9.
    assert letter["prior"]["3"] == pytest.approx({"A": 4.0 / 9, "B": 2.55 / 9, "C": 2.45 / 9})


def test_comparisons_are_paired_and_on_common_items() -> None:
    compared = {(c["first"], c["second"]): c for c in compare(score_items(whole_table()))}
    # 5 cloze scorers and 4 by letter: no unconditional rows, no content-free ones.
    assert len(compared) == 9 * 8 / 2
    # acc is wrong on all three, letter_permuted right on two: 2 discordant, p = 2 / 4.
    pair = compared[("acc", "letter_permuted")]
    assert (pair["n"], pair["only_first"], pair["only_second"], pair["p_value"]) == (3, 0, 2, 0.5)
    assert compared[("acc_norm", "pmi_dc")]["p_value"] == 1
    without_letters = score_items(whole_table().filter(pl.col("context") != "letter"))
    assert len(compare(without_letters)) == 10


def test_accuracy_and_its_standard_error() -> None:
    # 3 of 4: sqrt(.75 * .25 / 3) = .25, which is lm-eval's sample standard deviation over sqrt(n).
    correct = [True, True, False, True]
    assert accuracy(pl.Series([*correct, None])) == {"n": 4, "accuracy": 0.75, "stderr": pytest.approx(0.25)}
    assert accuracy(pl.Series(correct))["stderr"] == pytest.approx(np.std(correct, ddof=1) / 2)
    assert accuracy(pl.Series([True])) == {"n": 1, "accuracy": 1.0, "stderr": None}


def test_without_letters_there_is_no_letter_metric() -> None:
    table = table_of(CLOZE_ITEM)
    items = score_items(table)
    assert letter_summary(table, items) is None
    metrics = flat_metrics(table, summarise(table, items))
    assert not [name for name in metrics if "letter" in name]
    # One item has no standard error; nothing undefined is reported.
    assert not [name for name in metrics if "stderr" in name]


def test_tasks_do_not_mix_even_where_item_ids_do() -> None:
    other = [
        {**line, "task": "u", "answer": 0, "answers": [0]}
        for line in CLOZE_ITEM + letters("i", [[0.9, 0.1], [0.4, 0.6]])
    ]
    table = table_of(CLOZE_ITEM + other)
    metrics = flat_metrics(table, summarise(table, score_items(table)))
    assert (metrics["score/t/acc"], metrics["score/u/acc"]) == (0, 1)
    assert (metrics["score/t/pmi_dc"], metrics["score/u/pmi_dc"]) == (1, 0)
    assert "score/t/letter" not in metrics
    assert metrics["score/u/letter"] == 1


def test_the_parquet_alone_gives_every_number_again(tmp_path: Path) -> None:
    table = whole_table()
    table.write_parquet(tmp_path / "table.parquet")
    again = pl.read_parquet(tmp_path / "table.parquet")
    assert again.schema == SCHEMA
    items, items_again = score_items(table), score_items(again)
    assert items.equals(items_again)
    assert summarise(table, items) == summarise(again, items_again)
