"""The scoring part of a page and of a multirun's page, on items written down here: what is said, and what is not."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from oneaxis.multirun.record import job_folder
from oneaxis.report import scores, text
from oneaxis.report.records import read_multirun
from oneaxis.report.results import Results
from oneaxis.score.metrics import score_items
from oneaxis.score.table import SCHEMA


def rows(item: str, asked: list[float], premise: list[float], answers: list[int], **facts: Any) -> list[dict[str, Any]]:
    """An item's rows after question and premise, from probabilities; every option 4 bytes."""
    return [
        {"item_id": item, "task": "t", "topic": None, "answer": answers[0], "answers": answers, "option": option,
         "context": context, "rotation": 0, "variant": 0, "letter": None, "prompt": "?", "continuation": " x",
         "token_ids": [7], "logprobs": [math.log(p)], "logprob": math.log(p), "chars": 4, "bytes": 4, "tokens": 1,
         "prompt_tokens": 5 + len(item), "boundary": "clean", "truncated": 0, **facts}
        for context, values in (("question", asked), ("premise", premise))
        for option, p in enumerate(values)
    ]  # fmt: skip


def write(folder: Path, lines: list[dict[str, Any]]) -> None:
    """A scoring stage's two tables."""
    folder.mkdir(parents=True, exist_ok=True)
    table = pl.DataFrame(lines, schema=SCHEMA)
    table.write_parquet(folder / "table.parquet")
    score_items(table).write_parquet(folder / "items_scored.parquet")


def results(folder: Path) -> Results:
    return Results(folder=folder, manifests={}, metrics={}, provenance={})


def test_pmi_that_hurts_is_said(tmp_path: Path) -> None:
    """Thirty items: raw and per-byte scoring are right in all, dividing by the premise turns twelve of them wrong."""
    plain, turned = [0.25] * 4, [0.7, 0.1, 0.1, 0.1]
    write(tmp_path / "score", [line for place in range(30) for line in rows(
        f"i{place:02}", [0.4, 0.3, 0.2, 0.1], turned if place < 12 else plain, [0])])  # fmt: skip
    said = scores.words(scores.Evidence(results(tmp_path)))
    assert said.startswith("t: PMI hurts here (−40.0 points against acc_bytes, p 0.002 by Holm over 4, n 30).")
    table = scores.scorers_compared(scores.Evidence(results(tmp_path)))
    assert table is not None
    # McNemar: 12 discordant, all one way, 2 / 2^12.
    row = next(row for row in table.rows if row[1] == "pmi_dc")
    assert (row[2], row[4:]) == ("−40.0 points", ["0 / 12", "0.00049", "0.0020", "30"])
    assert "Holm's correction is over the 4 rows of this table" in table.note
    assert [table.tones[place] for place, row in enumerate(table.rows) if row[1] in ("acc", "pmi_dc")] == ["", "bad"]


def test_items_in_topics_have_an_error_of_their_own(tmp_path: Path) -> None:
    """Four items, right 1 1 0 0: sqrt(1/4 / 3) = 28.9 points by item, sqrt(2) / 4 = 35.4 in two topics of two."""
    right, wrong = [0.6, 0.4], [0.4, 0.6]
    lines = [line for place, (asked, topic) in enumerate([(right, "x"), (right, "x"), (wrong, "y"), (wrong, "y")])
             for line in rows(f"i{place}", asked, [0.5, 0.5], [0], topic=topic)]  # fmt: skip
    write(tmp_path / "score", lines)
    table = scores.clustered(results(tmp_path))
    assert table is not None
    assert table.rows == [["t", "50.0%", "± 28.9", "± 35.4", "2", "4"]]
    write(tmp_path / "score", [{**line, "topic": None} for line in lines])
    assert scores.tables(scores.Evidence(results(tmp_path)))[0].caption == "Scorers against acc_bytes"


def test_competition_is_shown_where_every_item_has_a_rival_and_only_there(tmp_path: Path) -> None:
    """Right .2, rival .4: the form decides for raw scoring. After the premise both are as rare: pmi_dc finds either."""
    rival = rows("i", [0.2, 0.3, 0.4, 0.1], [0.02, 0.3, 0.04, 0.1], [0, 2])
    again = [{**line, "item_id": "j"} for line in rival]
    write(tmp_path / "a" / "score", rival + again)
    (table,) = scores.competing(scores.Evidence(results(tmp_path / "a")))
    assert table.rows[0][0] == "pmi_dc"
    acc = next(row for row in table.rows if row[0] == "acc")
    assert acc[1:7] == ["0.0%", "100.0%", "0.0%", "100.0%", "0.0% ± 0.0", "2"]
    assert "pmi_dc survives best" in scores.words(scores.Evidence(results(tmp_path / "a")))
    write(tmp_path / "b" / "score", rival + rows("k", [0.5, 0.3, 0.2], [0.3] * 3, [0]))
    assert scores.competing(scores.Evidence(results(tmp_path / "b"))) == []
    assert scores.competing(scores.Evidence(results(tmp_path / "c"))) == []


def test_every_premise_stands_with_its_accuracy_and_the_spread(tmp_path: Path) -> None:
    one = {"n": 40, "accuracy": 0.5, "stderr": 0.08}
    several = {"n": 40, "spread": 0.1, "moved_share": 0.3, "premises": [
        {"premise": "Answer:", **one}, {"premise": "So:", "n": 40, "accuracy": 0.4, "stderr": 0.08}]}  # fmt: skip
    table = scores.premises(results(tmp_path), {
        "engine": "vllm", "dtype": "float32", "batch_difference": {"sequences": 16, "max_nats": 2e-5},
        "tasks": {"t": {"scorers": {"pmi_dc": one}, "premises": several}, "u": {"scorers": {}, "premises": None}},
    })  # fmt: skip
    assert table is not None
    assert table.rows[0] == ["t", "'Answer:'", "50.0% ± 8.0 (n 40)", "10.0 points", "30%"]
    assert table.rows[1] == ["", "'So:'", "40.0% ± 8.0 (n 40)", "", ""]
    assert table.rows[2][:3] == ["u", "''", "–"]
    assert "16 sequences scored again by themselves: up to 2.00e−5 nats away" in table.note


def test_a_multirun_says_which_answers_changed(tmp_path: Path, multirun: Callable[..., Path]) -> None:
    """Forty items, right by little in the first ten of the baseline; the candidate loses eight of those."""
    folder = multirun(tmp_path / "m", candidates={"alpha=0.5": 0.5, "alpha=0.9": 0.9}, verdicts=None,
                      metrics=["score/t/acc"], absent=("alpha=0.9",))  # fmt: skip
    near, far, lost = [0.4, 0.39, 0.21], [0.8, 0.1, 0.1], [0.39, 0.4, 0.21]
    record = read_multirun(folder)
    for point in ("alpha=0.0", "alpha=0.5"):
        lines = []
        for place in range(40):
            asked = far if place >= 10 else lost if place < 8 and point == "alpha=0.5" else near
            lines += rows(f"i{place:02}", asked, [0.3] * 3, [0])
        write(job_folder(folder, record.of(point)[0].job) / "artifacts" / "score", lines)
    changed, common = scores.between_points(folder, record)
    assert changed.rows[0][:4] == ["alpha=0.5", "t", "acc", "−20.0 points"]
    assert changed.rows[0][5:] == ["8", "0", "0", "0.0078", "0.0078", "40"]
    # log(.4 / .39) against log 8. What does not vary is not tested: nothing else is.
    assert [row[3] for row in common.rows] == ["lead of the chosen option before"]
    assert common.rows[0][4:6] == ["0.0253", "2.08"]
    assert float(common.rows[0][6]) < 0.01


def test_a_multirun_without_scores_says_nothing(tmp_path: Path, multirun: Callable[..., Path]) -> None:
    folder = multirun(
        tmp_path / "m", candidates={"alpha=0.5": 0.5}, verdicts=None, metrics=["quantize/perplexity_after"]
    )
    assert scores.between_points(folder, read_multirun(folder)) == []


def test_runs_of_other_items_are_named_and_not_compared(tmp_path: Path, multirun: Callable[..., Path]) -> None:
    folder = multirun(tmp_path / "m", candidates={"alpha=0.5": 0.5, "alpha=0.9": 0.9}, verdicts=None,
                      metrics=["score/t/acc_bytes"])  # fmt: skip
    record = read_multirun(folder)
    for point, item in (("alpha=0.0", "i"), ("alpha=0.5", "i"), ("alpha=0.9", "other")):
        own = job_folder(folder, record.of(point)[0].job) / "artifacts" / "score"
        write(own, rows(item, [0.5, 0.3], [0.5, 0.5], [0]))
    (changed,) = scores.between_points(folder, record)
    assert [row[0] for row in changed.rows] == ["alpha=0.5"]
    assert "alpha=0.9: items_scored.parquet: the two runs share no item" in changed.note


@pytest.mark.parametrize(("share", "said"), [(-0.0349, "−3.5 points"), (0.0, "0.0 points"), (0.2, "+20.0 points")])
def test_points(share: float, said: str) -> None:
    assert text.points(share) == said
