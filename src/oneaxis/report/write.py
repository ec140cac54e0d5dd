"""From `artifacts/` to the report stage's folder: `report.html` (self-contained), `card.md`, and flat metrics.

Same artifacts, same bytes: nothing here reads the clock. The page loads nothing: styles and plots are inside it, and
its content policy forbids scripts and requests. Every text from outside passes through Jinja's autoescape; only the
plots, whose own text is escaped by matplotlib, are marked safe.
"""

from pathlib import Path

from oneaxis.judge.validity import Validity, judge_run
from oneaxis.report.facts import (
    accuracy,
    card,
    cells,
    findings,
    latency,
    quality_and_preference,
    question,
    what_ran,
)
from oneaxis.report.page import environment
from oneaxis.report.results import STAGES, Results, read_results
from oneaxis.report.sections import Section, all_sections
from oneaxis.report.served import Evidence, latency_intervals
from oneaxis.track import run_name


def write_report(artifacts: Path, out: Path, title: str) -> dict[str, float]:
    """Write the page and the card of what `artifacts` holds.

    Args:
        artifacts: the folder of all stages. out: an existing folder. title: of the page.

    Returns:
        Flat metrics: `report/valid` (1 or 0), counts of reasons, warnings and missing stages.

    Raises:
        UserError: for a broken JSON artifact, naming it.
    """
    results = read_results(artifacts)
    verdict = judge_run(results)
    name = short_name(results)
    (out / "report.html").write_text(render(results, verdict, all_sections(results), title, name), encoding="utf-8")
    (out / "card.md").write_text(card(results, verdict, name), encoding="utf-8")
    return {
        "report/valid": float(verdict.valid),
        "report/reasons": float(len(verdict.reasons)),
        "report/warnings": float(len(verdict.warnings)),
        "report/stages_missing": float(sum(stage not in results.manifests for stage in STAGES)),
    }


def short_name(results: Results) -> str:
    """The name that the run has in MLflow too; of a folder that lacks stages, what is known."""
    sections = {name: results.section(name) for name in ("model", "quantize", "train")}
    return run_name(sections) if all(sections.values()) else "incomplete run"


def render(results: Results, verdict: Validity, sections: list[Section], title: str, name: str) -> str:
    """The page as HTML text."""
    return (
        environment()
        .get_template("report.html")
        .render(
            title=title,
            name=name,
            question=question(results),
            verdict=verdict,
            random=results.section("model").get("kind") == "random",
            what=what_ran(results),
            findings=findings(results),
            headline=[
                table
                for table in (
                    quality_and_preference(results),
                    latency(results, latency_intervals(Evidence(results))),
                    accuracy(results),
                )
                if table.rows
            ],
            cells=len(cells(results)),
            sections=sections,
        )
    )
