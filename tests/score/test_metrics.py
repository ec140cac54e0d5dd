"""Every scorer on literal tables, worked by hand in the comments."""

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from oneaxis.score.calibration import content_free_prior, letter_calibrated, pride, pride_prior, recalls, rstd
from oneaxis.score.metrics import (
    LETTER,
    accuracy,
    compare,
    flat_metrics,
    letter_probabilities,
    letter_summary,
    letter_votes,
    option_scores,
    premise_choices,
    premise_summary,
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


def test_pmi_divides_by_no_prompt_and_rare_strings_win() -> None:
    """After nothing option 1 is all but impossible: L - U = -6 + 1, -8 + 12, -7 + 3 = -5, 4, -4."""
    bos = [row("i", "bos", option, logprob) for option, logprob in enumerate((-1.0, -12.0, -3.0))]
    scores = option_scores(table_of(CLOZE_ITEM + bos))
    assert scores["pmi"].to_list() == [-5, 4, -4]
    (item,) = score_items(table_of(CLOZE_ITEM + bos)).to_dicts()
    assert (item["pmi_predicted"], item["pmi_correct"]) == (1, True)
    (item,) = score_items(table_of(CLOZE_ITEM)).to_dicts()
    assert (item["pmi_predicted"], item["pmi_correct"]) == (None, None)


def test_any_of_several_right_answers_is_right() -> None:
    """Options 0 and 2 are right. The scorers choose 0, 1, 2, 1, 1 (above): only acc and acc_bytes are right."""
    rows = [{**line, "answer": 0, "answers": [0, 2]} for line in CLOZE_ITEM]
    table = table_of(rows)
    (item,) = score_items(table).to_dicts()
    assert {name: item[f"{name}_correct"] for name in ("acc", "acc_norm", "acc_bytes", "acc_per_token", "pmi_dc")} == {
        "acc": True, "acc_norm": False, "acc_bytes": True, "acc_per_token": False, "pmi_dc": False
    }  # fmt: skip
    assert summarise(table, score_items(table))["t"]["several_answers"] == 1


# A second premise: -9, -8, -7. Then L - P is 3, 0, 0 and option 0 is chosen, where the first premise chose option 1.
OTHER_PREMISE = [row("i", "premise", option, -9.0 + option, variant=1, prompt="So:") for option in range(3)]


def test_the_first_premise_is_ranked_and_the_others_show_the_spread() -> None:
    table = table_of(CLOZE_ITEM + OTHER_PREMISE)
    assert premise_choices(table).select("variant", "predicted", "correct").rows() == [(0, 1, True), (1, 0, False)]
    items = score_items(table)
    assert items.select("pmi_dc_predicted", "premise_moved").rows() == [(1, True)]
    assert premise_summary(table, items) == {
        "n": 1, "spread": 1.0, "moved_share": 1.0,
        "premises": [{"premise": "?", "n": 1, "accuracy": 1.0, "stderr": None},
                     {"premise": "So:", "n": 1, "accuracy": 0.0, "stderr": None}],
    }  # fmt: skip
    metrics = flat_metrics(table, summarise(table, items))
    assert (metrics["score/t/pmi_dc"], metrics["score/t/pmi_dc_spread"]) == (1, 1)
    assert metrics["score/t/pmi_dc_moved_share"] == 1


def test_items_with_one_premise_play_no_part_in_the_spread() -> None:
    """Item j has the first premise only: it counts for pmi_dc, and not for what premises do."""
    alone = [{**line, "item_id": "j"} for line in CLOZE_ITEM]
    table = table_of(CLOZE_ITEM + OTHER_PREMISE + alone)
    items = score_items(table)
    summary = premise_summary(table, items)
    assert summary is not None
    assert (summary["n"], [one["n"] for one in summary["premises"]]) == (1, [1, 1])
    assert items["premise_moved"].to_list() == [True, None]
    only = table_of(CLOZE_ITEM)
    assert premise_summary(only, score_items(only)) is None


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


def test_the_mean_over_rotations_and_the_majority_can_part() -> None:
    """Votes: option 0 at rotations 0 and 1 (.4 against .35), option 1 at rotation 2 (.9): two to one for option 0.

    Summed: option 0 .4 + .4 + .05 = .85, option 1 .35 + .35 + .9 = 1.6, option 2 .25 + .25 + .05 = .55.
    """
    rows = letters("x", [[0.4, 0.35, 0.25], [0.35, 0.25, 0.4], [0.05, 0.05, 0.9]])
    (votes,) = letter_votes(table_of(rows)).to_dicts()
    assert (votes["letter_permuted"], votes["letter_averaged"], votes["tied"]) == (0, 1, False)
    # A tie of means goes to the first option.
    (votes,) = letter_votes(table_of(letters("y", [[0.5, 0.5], [0.5, 0.5]]))).to_dicts()
    assert votes["letter_averaged"] == 0


def content_free(item: str, probabilities: list[list[float]], masses: list[float]) -> list[dict[str, Any]]:
    """Rows from probabilities[text][letter], which hold so much of the belief each."""
    return [
        row(item, "content_free", letter, math.log(mass * p), variant=variant, letter=letter)
        for variant, (line, mass) in enumerate(zip(probabilities, masses, strict=True))
        for letter, p in enumerate(line)
    ]


# Unnormalised means: A (.6 + .2) / 2 = .4, B (.2 + .2) / 2 = .2, C (.2 + .1) / 2 = .15; divided by .75: 8, 4, 3 of 15.
CONTENT_FREE = content_free("m", [[0.6, 0.2, 0.2], [0.4, 0.4, 0.2]], [1.0, 0.5])


def test_contextual_calibration_by_hand() -> None:
    """p = .5, .3, .2 at rotation 0; p / p_cf = .9375, 1.125, 1: B, option 1. Normalised first it would be a tie.

    The oracle is the paper's `W = inv(diag(p_cf)); argmax(W @ p)`.
    """
    prior = content_free_prior(table_of(CONTENT_FREE))
    assert prior["p_cf"].to_list() == pytest.approx([8 / 15, 4 / 15, 3 / 15])
    table = table_of(CLOZE_ITEM + MAJORITY + CONTENT_FREE)
    probabilities = letter_probabilities(table)
    chosen = letter_calibrated(probabilities, table.filter(pl.col("context") == "content_free"))
    assert chosen.rows() == [("t", "m", 1)]
    weights = np.linalg.inv(np.diag(prior["p_cf"].to_numpy()))
    assert int(np.argmax(weights @ np.array([0.5, 0.3, 0.2]))) == 1


def test_contextual_calibration_does_not_underflow() -> None:
    rows = [row("m", "content_free", j, -2000.0 - j, letter=j) for j in range(2)]
    expected = 1 / (1 + math.exp(-1))
    assert content_free_prior(table_of(rows))["p_cf"].to_list() == pytest.approx([expected, 1 - expected])


def test_pride_by_hand() -> None:
    """Geometric means over the two rotations: A sqrt(7/10 * 48/55), B sqrt(3/10 * 7/55), which stand 4 to 1: a prior of
    .8 and .2. At rotation 0: .7 / .8 = .875 against .3 / .2 = 1.5, so B, which is option 1, where letter chooses A.
    """
    table = table_of(letters("e", [[0.7, 0.3], [48 / 55, 7 / 55]]) + letters("f", [[0.7, 0.3], [48 / 55, 7 / 55]]))
    probabilities = letter_probabilities(table)
    prior = pride_prior(probabilities, 0.5, 0)
    assert prior["prior"].to_list() == pytest.approx([0.8, 0.2])
    (used,) = prior["items"][0].to_list()
    (other,) = {"e", "f"} - {used}
    assert pride(probabilities, 0.5, 0).rows() == [("t", other, 1)]
    assert letter_votes(table)["letter"].to_list() == [0, 0]


def test_prides_prior_is_the_mean_over_the_drawn_items_of_their_task_and_number_of_options() -> None:
    firsts = {f"i{k}": 0.5 + k / 20 for k in range(8)}
    two = [line for item, p in firsts.items() for line in letters(item, [[p, 1 - p]] * 2)]
    three = [line for item in ("t0", "t1") for line in letters(item, [[0.2, 0.3, 0.5]] * 3)]
    other = [{**line, "task": "u"} for line in letters("i0", [[0.1, 0.9]] * 2)]
    probabilities = letter_probabilities(table_of(two + three + other))
    prior = pride_prior(probabilities, 0.25, seed=3)
    a, b, *rest = prior.iter_rows(named=True)
    assert (len(a["items"]), a["items"]) == (2, b["items"])
    assert a["prior"] == pytest.approx(np.mean([firsts[item] for item in a["items"]]))
    assert a["prior"] + b["prior"] == pytest.approx(1)
    # Of the two with three options one gives the prior; the only item of task u has none, and is not scored.
    assert [(line["task"], line["num_options"], line["prior"]) for line in rest] == [
        ("t", 3, pytest.approx(0.2)), ("t", 3, pytest.approx(0.3)), ("t", 3, pytest.approx(0.5))
    ]  # fmt: skip
    scored = pride(probabilities, 0.25, seed=3)
    assert scored.height == 8 - 2 + 1
    assert not set(a["items"]) & set(scored["item_id"])
    seeds = {tuple(pride_prior(probabilities, 0.25, seed)["items"][0]) for seed in range(8)}
    assert len(seeds) > 1


def test_recalls_and_their_deviation_by_hand() -> None:
    """Always A: recall 1 where A is right, 0 where B is: deviation .5. Steady: 1 and 1, none."""
    always_a = [[0.9, 0.1], [0.9, 0.1]]
    steady = [[0.9, 0.1], [0.1, 0.9]], [[0.1, 0.9], [0.9, 0.1]]
    rows = [line for k in range(4) for line in letters(f"i{k}", always_a, answer=k % 2)]
    cloze = [
        row(f"i{k}", kind, o, -1.0, answer=k % 2) for k in range(4) for kind in ("question", "premise") for o in (0, 1)
    ]
    table = table_of(cloze + rows)
    found = recalls(letter_probabilities(table), score_items(table), "letter")
    assert found == {0: 1.0, 1: 0.0}
    assert rstd(found) == 0.5
    assert summarise(table, score_items(table))["t"]["letter"]["rstd"]["letter"] == 0.5
    rows = [line for k in range(4) for line in letters(f"i{k}", steady[k % 2], answer=k % 2)]
    table = table_of(cloze + rows)
    assert rstd(recalls(letter_probabilities(table), score_items(table), "letter")) == 0
    # 1 of 2 under A, 2 of 2 under B: deviation .25. One letter alone has none.
    assert rstd({0: 0.5, 1: 1.0}) == 0.25
    assert rstd({0: 0.5}) is None


def test_items_with_several_right_answers_stand_under_no_one_letter() -> None:
    rows = letters("i", [[0.9, 0.1], [0.9, 0.1]], answer=0, answers=[0, 1])
    table = table_of(
        [row("i", kind, o, -1.0, answer=0, answers=[0, 1]) for kind in ("question", "premise") for o in (0, 1)] + rows
    )
    assert recalls(letter_probabilities(table), score_items(table), "letter") == {}


def test_an_option_is_known_by_its_letter_in_whatever_order_they_are_listed() -> None:
    """A season lists options 2, 0, 1: A stands for 2 at rotation 0, for 0 at rotation 1."""
    order, probabilities = (2, 0, 1), [[0.6, 0.3, 0.1], [0.2, 0.1, 0.7], [0.3, 0.6, 0.1]]
    rows = [
        row("i", "letter", order[(letter + rotation) % 3], math.log(p), rotation=rotation, letter=letter)
        for rotation, line in enumerate(probabilities)
        for letter, p in enumerate(line)
    ]
    # Rotation 0: A .6 is option 2. Rotation 1 (0, 1, 2): C .7 is option 2. Rotation 2 (1, 2, 0): B .6 is option 2.
    (votes,) = letter_votes(table_of(rows)).to_dicts()
    assert (votes["letter"], votes["letter_permuted"], votes["letter_averaged"], votes["moved"]) == (2, 2, 2, False)


def test_the_order_of_rows_changes_nothing() -> None:
    rows = CLOZE_ITEM + OTHER_PREMISE + MAJORITY + POSITION + STEADY + CONTENT_FREE
    shuffled = random.Random(0).sample(rows, len(rows))
    assert score_items(table_of(rows)).equals(score_items(table_of(shuffled)))
    assert letter_votes(table_of(rows)).equals(letter_votes(table_of(shuffled)))
    tables = [table_of(rows), table_of(shuffled)]
    one, other = (summarise(table, score_items(table)) for table in tables)
    assert one == other


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
    # One of the three gives pride's prior; all right answers stand under B, which leaves no spread of recalls.
    assert metrics["score/t/pride_n"] == 2
    assert not [name for name in metrics if name.endswith("_rstd")]
    assert set(summary["t"]["letter"]["recalls"]) == set(LETTER) - {"letter_calibrated"}
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
