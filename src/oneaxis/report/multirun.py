"""From `multirun/<id>/` (plan, records, verdicts) to its `report.html` and `card.md`.

Like the page of one run: same records, same bytes; it loads nothing and runs nothing; text from outside is escaped.
Claims and the first metrics are shown in full, the rest folded; beyond a number of rows a metric has its table alone,
so that the page of sixty points still opens at once.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from oneaxis.report import effects, scores, trained, verdicts
from oneaxis.report.page import environment
from oneaxis.report.plots import Plot
from oneaxis.report.records import Multirun, missing, read_multirun
from oneaxis.report.tables import Table
from oneaxis.report.verdicts import WORDS, Comparison

CARD = "card.md"
PAGE = "report.html"
SHOWN_METRICS = 6
"""Unless more are claimed."""
PLOTTED_ROWS = 240
"""Over all effect plots of a page."""
SHOWN_CARDS, ALL_CARDS = 12, 120


@dataclass(frozen=True)
class Part:
    """A metric's part of the page."""

    id: str
    title: str
    summary: str
    lead: str
    plots: list[Plot]
    tables: list[Table]


def write_multirun_report(folder: Path) -> Path:
    """Write the page and the cards of what `folder` holds, also of a multirun that is not complete.

    Returns:
        The path of `report.html`.

    Raises:
        UserError: when `plan.json` is missing or a JSON file of the record is broken, naming it.
    """
    multirun = read_multirun(folder)
    compared = verdicts.comparisons(multirun)
    answers, training = scores.between_points(folder, multirun), trained.between_points(folder, multirun)
    _write(folder / PAGE, render(multirun, compared, answers, training))
    _write(folder / CARD, card_text(multirun, compared))
    return folder / PAGE


def _write(path: Path, words: str) -> None:
    temporary = path.with_name(f".{path.name}-{os.getpid()}")
    temporary.write_text(words, encoding="utf-8")
    os.replace(temporary, path)


def question(multirun: Multirun) -> str:
    """What the multirun asks, in its own words or in ours."""
    asked = str(multirun.plan.experiment.get("question") or "").strip()
    return asked or f"What does {axis(multirun)} change?"


def axis(multirun: Multirun) -> str:
    """The one axis, or the axes of the single changes."""
    if multirun.plan.axis:
        return multirun.plan.axis
    names = dict.fromkeys(found.name for point in multirun.candidates for found in point.axes)
    return ", ".join(list(names)[:4]) + (" …" if len(names) > 4 else "")


def card_text(multirun: Multirun, compared: list[Comparison]) -> str:
    """All result cards as Markdown, under the question; what is missing is said."""
    parts = [f"# {' '.join(question(multirun).split())}", f"[{PAGE}]({PAGE})"]
    parts += [f"Missing: {line}." for line in missing(multirun)]
    parts += [card.plain for card in verdicts.cards(multirun, compared)]
    return "\n\n".join(parts) + "\n"


def render(
    multirun: Multirun, compared: list[Comparison], answers: list[Table], training: tuple[list[Plot], list[Table]]
) -> str:
    """The page as HTML text.

    Args:
        answers: which items changed, where they were scored.
        training: what it did in each point, where points were trained.
    """
    claimed = sum(comparison.claimed for comparison in compared)
    shown = max(claimed, SHOWN_METRICS)
    room = PLOTTED_ROWS
    parts = []
    for comparison in compared:
        plotted = len(comparison.rows) <= room
        room -= len(comparison.rows) if plotted else 0
        parts.append(_part(multirun, comparison, plotted=plotted))
    cards = verdicts.cards(multirun, compared)
    combination = verdicts.combinations(multirun, compared)
    controls = verdicts.controls(multirun, compared)
    everywhere = verdicts.everywhere(compared)
    certainty, notes = verdicts.certainty(multirun), verdicts.notes(multirun)
    failures = verdicts.failures_table(multirun)
    points = [verdicts.axes_table(multirun), *verdicts.leaves_tables(multirun), *([failures] if failures else []),
              verdicts.jobs_table(multirun)]  # fmt: skip
    nav = [("training", "Training")] if training[1] else []
    nav += [(part.id, part.title) for part in parts[:shown]]
    nav += [("further", "Further metrics")] if parts[shown:] else []
    nav += [("cards", "Cards")] if cards else []
    nav += [("controls", "Controls")] if controls else []
    nav += [("combination", "Combination")] if combination else []
    nav += [("answers", "Answers")] if answers else []
    nav += (
        [("points", "Points")]
        + ([("certainty", "Certainty")] if certainty or notes else [])
        + [("provenance", "Provenance")]
    )
    return environment().get_template("multirun.html").render(
        id=multirun.plan.id, name=multirun.plan.experiment.get("name") or "multirun", axis=axis(multirun),
        question=question(multirun), words=WORDS, tally=verdicts.tally(compared), missing=missing(multirun),
        random=_random(multirun), nav=nav,
        lines=[(comparison, verdicts.verdict_line(comparison)) for comparison in compared[:shown]],
        asked=verdicts.asked(multirun), cards=cards[:SHOWN_CARDS], more_cards=cards[SHOWN_CARDS:ALL_CARDS],
        cards_left=max(0, len(cards) - ALL_CARDS), shown=parts[:shown], folded=parts[shown:], controls=controls,
        combination=combination, answers=answers, everywhere=everywhere, training=training, points=points,
        certainty=certainty, notes=notes, provenance=verdicts.provenance_tables(multirun),
    )  # fmt: skip


def _part(multirun: Multirun, comparison: Comparison, *, plotted: bool) -> Part:
    baseline = multirun.plan.baseline.name
    plots: list[Plot] = []
    tables = [verdicts.effect_table(multirun, comparison) if plotted else verdicts.short_table(multirun, comparison)]
    guards = verdicts.guards_table(comparison)
    tables += [guards] if guards else []
    measured = verdicts.repetitions(multirun, comparison.metric)
    if measured and plotted:
        tables.append(verdicts.repetitions_table(comparison.metric, measured))
    lead = ""
    if plotted and multirun.verdicts is not None:
        plots.append(effects.forest(comparison))
        values = verdicts.axis_values(multirun)
        over = effects.over_axis(comparison, str(multirun.plan.axis), values, baseline) if values else None
        plots += [over] if over else []
        plots += effects.in_run_order(comparison, measured, baseline) if measured else []
    elif not plotted:
        lead = f"The table alone: plots above already have {PLOTTED_ROWS} rows. verdicts.json has everything."
    return Part(comparison.id, comparison.metric, verdicts.verdict_line(comparison), lead, plots, tables)


def _random(multirun: Multirun) -> bool:
    """Whether any job ran a model with random weights."""
    models = [facts["fetch_model"].get("params", {}).get("model", {}) for record in multirun.records
              if "fetch_model" in (facts := record.provenance)]  # fmt: skip
    return any(model.get("kind") == "random" for model in models)
