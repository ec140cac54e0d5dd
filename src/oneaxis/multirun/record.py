"""What a multirun leaves in `multirun/<id>/`: its plan, one folder a job, its verdicts and its report.

    plan.json                        the question, the points and the order of the jobs; written before the first starts
    points/<point>/r<repetition>/    one job: status.json, params.yaml, dvc.lock, artifacts/ (all but large files)
    verdicts.json                    one verdict per candidate and metric
    report.html, card.md             for the person who decides

A *point* is a configuration; a *job* is one run of it (repetition 0, 1, ...). `status.json` is written last, so a job
folder without it is one that did not end.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any, Literal

from oneaxis.artifacts import read_json, write_json
from oneaxis.errors import UserError
from oneaxis.recorded import Kinds, read_object

MULTIRUN = "multirun"
PLAN = "plan.json"
STATUS = "status.json"
LARGEST_KEPT_BYTES = 8 * 2**20
"""Artifact files up to this size are kept in a job's folder: tables, documents, reports; not checkpoints."""


@dataclass(frozen=True)
class Axis:
    """What differs between two configurations in one respect."""

    name: str
    """The key (`quantize.smooth.alpha`) or the group (`quantize`)."""
    kind: Literal["key", "group"]
    before: Any
    after: Any
    leaves: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Every setting that it moves: dotted key -> [before, after]; a key's own leaf too."""


@dataclass(frozen=True)
class Point:
    """One configuration of a multirun."""

    name: str
    """Short, unique, and safe in a file name and a git ref: `baseline` is never needed, `alpha=0.5` is."""
    role: Literal["baseline", "single", "combination"]
    overrides: Sequence[str]
    """All Hydra overrides that make it, those of the command included; `measure.*` is not among them."""
    axes: Sequence[Axis]
    """In which it differs from the baseline; empty for the baseline."""
    parts: Sequence[str] = ()
    """Of a combination: the names of the points that are its single changes."""
    control: str = ""
    """Of a single change: the point that it has to beat besides the baseline, on the same axis; empty: none."""


@dataclass(frozen=True)
class Job:
    """One run of a point."""

    point: str
    repetition: int


@dataclass(frozen=True)
class Plan:
    """A multirun as decided before its first job."""

    id: str
    created_at: str
    """ISO time, UTC."""
    overrides: Sequence[str]
    """Of the command, sweeps included."""
    launcher: Sequence[str]
    """Hydra's own overrides (`hydra/launcher=joblib`, `hydra.launcher.n_jobs=2`)."""
    experiment: Mapping[str, Any]
    gate: Mapping[str, Any]
    axis: str | None
    """The one axis, or None where the points change different ones (declared `changes` or a combination)."""
    session: str
    """`default`, or the multirun's id where timings are judged: its timings are then its own."""
    snapshot: str
    """The commit that every job runs from."""
    points: Sequence[Point]
    jobs: Sequence[Job]
    """In the order in which they start."""

    def point(self, name: str) -> Point:
        """The point of that name."""
        return next(point for point in self.points if point.name == name)

    @property
    def baseline(self) -> Point:
        """The point that the others are compared with."""
        return next(point for point in self.points if point.role == "baseline")


@dataclass(frozen=True)
class Status:
    """How a job ended."""

    state: Literal["done", "failed", "interrupted"]
    exit_code: int
    """As of `oneaxis run`: 0; 1 failed or INVALID; 2 refused."""
    message: str
    """Of a failure, one line; else empty."""
    ran: Sequence[str]
    """Stages that really ran; the others of the targets were unchanged or restored."""
    stage_seconds: Mapping[str, float]
    """Wall time of each stage that ran, in its own process."""
    seconds: float
    """Wall time of the job."""
    waited_s: float
    """Of it, waiting for a slot, for another job's stage or for the device."""
    commit: str
    """The commit that holds this job's code, params.yaml, dvc.lock and metrics (`refs/oneaxis/<id>/...`)."""
    node: str
    """Host name."""
    slot: str
    """The work tree that it ran in."""
    finished_at: str


def multirun_folder(project: Path, multirun: str) -> Path:
    """`multirun/<id>/`.

    Raises:
        UserError: when there is none of that id, naming those that there are.
    """
    folder = project / MULTIRUN / multirun
    if not (folder / PLAN).is_file():
        known = sorted(path.parent.name for path in (project / MULTIRUN).glob(f"*/{PLAN}"))
        raise UserError(f"{multirun}: no such multirun; allowed: {', '.join(known) or 'none has run here yet'}")
    return folder


def job_folder(folder: Path, job: Job) -> Path:
    """Where a job's record lies in its multirun's folder."""
    return folder / "points" / job.point / f"r{job.repetition}"


def write_plan(folder: Path, plan: Plan) -> None:
    """Write `plan.json`."""
    write_json(folder / PLAN, asdict(plan))


PLAN_KINDS: Kinds = {
    "id": str, "created_at": str, "overrides": [str], "launcher": [str], "experiment": {"claims": [dict]}, "gate": dict,
    "axis": (str, NoneType), "session": str, "snapshot": str, "points": [dict], "jobs": [dict],
}  # fmt: skip


def read_plan(folder: Path) -> Plan:
    """Read `plan.json`.

    Raises:
        UserError: when it is missing or not a plan.
    """
    held = read_object(folder / PLAN, PLAN_KINDS)
    try:
        return _plan(held)
    except (TypeError, KeyError, AttributeError) as error:
        raise UserError(f"{folder / PLAN}: not the plan of a multirun of this version; allowed: the file as "
                        "`oneaxis run -m` wrote it") from error  # fmt: skip


def _plan(held: dict[str, Any]) -> Plan:
    points = [Point(**{**point, "axes": [Axis(**axis) for axis in point["axes"]]}) for point in held.pop("points")]
    jobs = [Job(**job) for job in held.pop("jobs")]
    if not jobs or [point.role for point in points].count("baseline") != 1:
        raise TypeError("a plan has jobs, and one baseline")
    return Plan(**held, points=points, jobs=jobs)


def write_status(folder: Path, status: Status) -> None:
    """Write a job's `status.json`."""
    write_json(folder / STATUS, asdict(status))


def read_status(folder: Path) -> Status | None:
    """A job's `status.json`; None when it has not ended.

    Raises:
        UserError: when the file is not what a job leaves.
    """
    if not (folder / STATUS).is_file():
        return None
    try:
        return Status(**read_json(folder / STATUS))
    except TypeError as error:
        raise UserError(f"{folder / STATUS}: not what a job leaves; remove the folder, and `oneaxis run -m --resume` "
                        "runs the job again") from error  # fmt: skip
