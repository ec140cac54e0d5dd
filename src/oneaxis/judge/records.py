"""One run as a verdict reads it: an artifact folder, a project's root or a job's record, to settings and results.

The settings of a job's record are its `params.yaml`; elsewhere they are what the stages' manifests say they read, since
the `params.yaml` of a work tree may have moved on.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oneaxis.artifacts import ARTIFACTS
from oneaxis.config.axes import ABSENT, flatten, is_no_axis, same
from oneaxis.config.compose import PARAMS, read_params
from oneaxis.errors import UserError
from oneaxis.multirun.record import Status, read_status
from oneaxis.recorded import check_sections
from oneaxis.report.results import Results, read_results

CHECKPOINT = ("fetch_model", "prepare_data", "sample_pairs", "filter_pairs", "train_dpo", "calibrate", "quantize")
"""What an engine's checkpoint comes from."""

SERVED = (*CHECKPOINT, "make_draft")
"""The same, with a draft beside it."""

UPSTREAM: dict[str, tuple[str, ...]] = {
    "fetch_model": (),
    "prepare_data": (),
    "sample_pairs": ("fetch_model",),
    "filter_pairs": ("fetch_model", "prepare_data", "sample_pairs"),
    "train_dpo": ("fetch_model", "prepare_data", "sample_pairs", "filter_pairs"),
    "calibrate": ("fetch_model", "prepare_data", "sample_pairs", "filter_pairs", "train_dpo"),
    "quantize": ("fetch_model", "prepare_data", "sample_pairs", "filter_pairs", "train_dpo", "calibrate"),
    "make_draft": ("fetch_model", "prepare_data", "sample_pairs", "filter_pairs", "train_dpo"),
    "serve": SERVED,
    "sweep": SERVED,
    "score": CHECKPOINT,
    "diverge": SERVED,
    "split": CHECKPOINT,
    "extract": CHECKPOINT,
}
"""Stages whose payload reaches a stage; the edges of `dvc.yaml`, followed to the end."""


@dataclass(frozen=True)
class Record:
    """One run of one point."""

    name: str
    """For messages: the point and its repetition, or the folder."""
    repetition: int
    results: Results
    settings: Mapping[str, Any]
    """Section -> its settings."""
    stale: Sequence[str]
    """Stages whose manifest has other settings than the job's `params.yaml`."""
    status: Status | None
    is_job: bool
    """A job's record, which must have ended well; else a folder of artifacts, which says nothing of that."""

    @property
    def ended(self) -> bool:
        """Whether the run came to its end."""
        return not self.is_job or (self.status is not None and self.status.state == "done")


def find_records(path: Path) -> list[Record]:
    """The runs in a folder of artifacts, a project's root, a job's record, or a point with its repetitions `r0`, ...

    Raises:
        UserError: when it is none of these.
    """
    if not path.is_dir():
        raise UserError(f"{path}: not a folder; allowed: artifacts/, a project's root, or multirun/ID/points/POINT")
    repetitions = [folder for folder in path.iterdir() if folder.is_dir() and re.fullmatch(r"r\d+", folder.name)]
    if repetitions:
        ordered = sorted(repetitions, key=lambda folder: int(folder.name[1:]))
        return [read_record(folder, f"{path.name} {folder.name}", int(folder.name[1:])) for folder in ordered]
    record = read_record(path, path.name if path.name != ARTIFACTS else path.parent.name)
    if not record.results.metrics and not record.results.manifests and not record.is_job:
        raise UserError(
            f"{path}: holds no artifacts; allowed: artifacts/, a project's root, or multirun/ID/points/POINT"
        )
    return [record]


def read_record(path: Path, name: str, repetition: int | None = None) -> Record:
    """Read one run; a job that never ended has empty results and no status.

    Raises:
        UserError: for a file that is broken, naming it.
    """
    inside = path / ARTIFACTS
    results = read_results(inside if inside.is_dir() else path)
    status = read_status(path)
    recorded: dict[str, Any] = {}
    for manifest in results.manifests.values():
        recorded.update(manifest.get("params", {}))
    is_job = status is not None or repetition is not None
    settings, stale = recorded, []
    if is_job and (path / PARAMS).is_file():
        settings = {key: value for key, value in read_params(path).items() if key != "paths"}
        check_sections(path / PARAMS, settings)
        stale = [
            stage
            for stage, manifest in results.manifests.items()
            if any(
                differences({key: settings.get(key, {})}, {key: value})
                for key, value in manifest.get("params", {}).items()
            )
        ]
    if repetition is None:
        repetition = int(settings.get("measure", {}).get("repetition", 0))
    return Record(name, repetition, results, settings, stale, status, is_job)


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The settings that differ, by dotted key, without those that are no axis; a missing one is `ABSENT`."""
    one, other = flatten(before), flatten(after)
    pairs = {key: (one.get(key, ABSENT), other.get(key, ABSENT)) for key in sorted(one.keys() | other.keys())}
    return {key: pair for key, pair in pairs.items() if not is_no_axis(key) and not same(*pair)}
