"""report: every stage's artifacts as one page and one card, and as the MLflow run of this state."""

from oneaxis.artifacts import ARTIFACTS
from oneaxis.stage import Stage, run


def work(stage: Stage) -> dict[str, float]:
    """Write report.html and card.md; tell MLflow, whose failure is not this stage's."""
    from oneaxis.report import write_report
    from oneaxis.track import track_in_stage

    metrics = write_report(stage.root / ARTIFACTS, stage.out, stage.config.report.title)
    track_in_stage(stage.root, report=stage.out, report_metrics=metrics)
    return metrics


if __name__ == "__main__":
    run("report", work)
