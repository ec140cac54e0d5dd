"""What a multirun left behind, read for its page: plan, how each job ended, its metrics and provenance, the verdicts.

Whatever is missing (no verdicts yet, a job that failed or never started) reads as None or empty, and `missing` says so
in words: a multirun that was interrupted has a page too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from oneaxis.artifacts import ARTIFACTS, read_json
from oneaxis.config import STAGE_SECTIONS
from oneaxis.multirun.record import Job, Plan, Point, Status, job_folder, read_plan, read_status

VERDICTS = "verdicts.json"
Verdict = Mapping[str, Any]
"""One entry of `verdicts.json`: a candidate against the baseline in one metric."""


@dataclass(frozen=True)
class Record:
    """One job: how it ended and what it measured."""

    job: Job
    started: bool
    status: Status | None
    """None: it has not ended."""
    metrics: Mapping[str, float]
    provenance: Mapping[str, Mapping[str, Any]]
    page: str | None
    """Its own report, as a link relative to the multirun's folder."""

    @property
    def state(self) -> str:
        """One word or two: done, failed, interrupted, not ended, not started."""
        if self.status is not None:
            return self.status.state
        return "not ended" if self.started else "not started"

    @property
    def restored(self) -> list[str]:
        """Stages with a result that did not run in this job, in the order of the DAG."""
        ran = set(self.status.ran) if self.status else set()
        return [stage for stage in STAGE_SECTIONS if stage in self.provenance and stage not in ran]


@dataclass(frozen=True)
class Multirun:
    """All of it."""

    plan: Plan
    records: Sequence[Record]
    """In the order of the plan's jobs."""
    verdicts: Sequence[Verdict] | None
    """None: `verdicts.json` is not there."""

    @property
    def candidates(self) -> list[Point]:
        """All points but the baseline."""
        return [point for point in self.plan.points if point.role != "baseline"]

    def of(self, point: str) -> list[Record]:
        """The jobs of a point."""
        return [record for record in self.records if record.job.point == point]

    def ended_well(self, point: str) -> bool:
        """Whether the point has run and every job of it that ran is done."""
        states = [record.state for record in self.of(point)]
        return bool(states) and all(state == "done" for state in states)


def read_multirun(folder: Path) -> Multirun:
    """Read `multirun/<id>/`.

    Raises:
        UserError: when `plan.json` is missing, or a JSON file is broken.
    """
    plan = read_plan(folder)
    verdicts = read_json(folder / VERDICTS) if (folder / VERDICTS).is_file() else None
    return Multirun(plan=plan, records=[_record(folder, job) for job in plan.jobs], verdicts=verdicts)


def _record(folder: Path, job: Job) -> Record:
    own = job_folder(folder, job)
    metrics: dict[str, float] = {}
    provenance = {}
    for stage in STAGE_SECTIONS:
        if (path := own / ARTIFACTS / f"{stage}.metrics.json").is_file():
            metrics.update(read_json(path))
        if (path := own / ARTIFACTS / f"{stage}.provenance.json").is_file():
            provenance[stage] = read_json(path)
    page = own / ARTIFACTS / "report" / "report.html"
    return Record(job=job, started=own.is_dir(), status=read_status(own), metrics=metrics, provenance=provenance,
                  page=quote(page.relative_to(folder).as_posix()) if page.is_file() else None)  # fmt: skip


def missing(multirun: Multirun) -> list[str]:
    """What keeps the page from being whole, one line each; empty when nothing does."""
    lines = []
    counts: dict[str, list[str]] = {}
    for record in multirun.records:
        if record.state != "done":
            counts.setdefault(record.state, []).append(f"{record.job.point} r{record.job.repetition}")
    n = len(multirun.records)
    lines += [f"{len(jobs)} of {n} jobs {state}: {_some(jobs)}" for state, jobs in counts.items()]
    if multirun.verdicts is None:
        lines.append("no verdicts: the points have not been compared yet")
    else:
        judged = {verdict["candidate"] for verdict in multirun.verdicts}
        if without := [point.name for point in multirun.candidates if point.name not in judged]:
            lines.append(f"{len(without)} of {len(multirun.candidates)} points without a verdict: {_some(without)}")
        known = {verdict["metric"] for verdict in multirun.verdicts}
        if claims := [claim["metric"] for claim in multirun.plan.experiment.get("claims", [])
                      if claim["metric"] not in known]:  # fmt: skip
            lines.append(f"no verdict on what is claimed: {_some(claims)}")
    return lines


def _some(names: Sequence[str], most: int = 6) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
