"""What the stages left behind, read from the artifact folder: manifests, metrics, provenance, tables, documents.

A stage or a file that is not there reads as None or empty: the page then says "not run" instead of failing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any

import polars as pl

from oneaxis.artifacts import MANIFEST, sha256_file
from oneaxis.config import STAGE_SECTIONS
from oneaxis.errors import UserError
from oneaxis.recorded import NUMBER, Kinds, Whole, check_sections, read_manifest, read_metrics, read_object, read_rows

HASHED_BYTES = 64 << 20
"""Files that are larger are left to `oneaxis verify`: no verdict reads them."""
STAGES = tuple(stage for stage in STAGE_SECTIONS if stage != "report")

CELL = Whole(shape=str, level=str, warmup_requests=int, warmup_ok=int, prefix_cache_reset=bool)
PROVENANCE: Kinds = {
    "params": dict, "versions": dict, "observed": {"cells": [CELL]},
    "hardware": {"boot_id": (str, NoneType), "cpus": (int, NoneType)},
    "git": {"commit": (str, NoneType), "dirty": (bool, NoneType)},
    "lease": (Whole(device=str, exclusive=(bool, NoneType), waited_s=NUMBER), NoneType),
    "load_before": ([NUMBER], NoneType),
}  # fmt: skip
MEMBERS: dict[str, Kinds] = {
    "realised.json": {"asked": dict, "resolved": dict, "differences": list, "cautions": list, "unverified": list},
    "summary.json": {"tasks": dict, "invalid": list, "warnings": list},
    "displacement.json": {"verdict": str, "reasons": list, "warnings": list, "stopped": (dict, NoneType)},
}
"""Documents that are objects -> what some of their members are."""
ROWS: dict[str, Kinds] = {
    "guards.json": {"guard": int, "name": str, "valid": bool, "reason": str, "evidence": dict},
    "smoke.json": {"prompt": str, "sane": bool},
}
"""Documents that are lists -> what each of their rows has."""


@dataclass(frozen=True)
class Results:
    """The artifacts of all stages but the report."""

    folder: Path
    manifests: Mapping[str, Mapping[str, Any]]
    metrics: Mapping[str, float]
    """All stages' metrics, flat: their names carry the stage."""
    provenance: Mapping[str, Mapping[str, Any]]
    _tables: dict[Path, pl.DataFrame] = field(default_factory=dict, repr=False, compare=False)
    """Those that were read: a verdict asks for the requests of a run once a claim and guard."""
    _changed: dict[str, list[str]] = field(default_factory=dict, repr=False, compare=False)
    """By stage, what `changed` found: a verdict asks once a claim."""

    def section(self, name: str) -> Mapping[str, Any]:
        """A section of the settings, as the stage that read it recorded it; empty when none did."""
        for manifest in self.manifests.values():
            if name in manifest.get("params", {}):
                return dict(manifest["params"][name])
        return {}

    def notes(self, stage: str) -> Mapping[str, Any]:
        """What a stage's manifest says; empty when it did not run."""
        return dict(self.manifests.get(stage, {}).get("notes", {}))

    def observed(self, stage: str) -> Mapping[str, Any]:
        """What a stage measured about its own run; empty when it did not run."""
        return dict(self.provenance.get(stage, {}).get("observed", {}))

    def table(self, stage: str, name: str) -> pl.DataFrame | None:
        """A parquet table of a stage; None when it is absent or has no rows.

        Raises:
            UserError: when the file is no such table.
        """
        path = self.folder / stage / name
        if path in self._tables:
            return self._tables[path]
        if not path.is_file():
            return None
        try:
            table = pl.read_parquet(path)
        except pl.exceptions.PolarsError as error:
            said = str(error).splitlines()[0]
            raise UserError(
                f"{path}: no parquet table that can be read ({said}); `dvc checkout` restores it"
            ) from error
        if not table.height:
            return None
        return self._tables.setdefault(path, table)

    def changed(self, stage: str) -> list[str]:
        """Files of a stage that are not what its manifest recorded, of those up to `HASHED_BYTES`."""
        if stage not in self._changed:
            recorded = self.manifests.get(stage, {}).get("files", {})
            paths = {name: self.folder / stage / name for name in recorded}
            self._changed[stage] = [
                name
                for name, path in paths.items()
                if path.is_file()
                and path.stat().st_size <= HASHED_BYTES
                and sha256_file(path) != recorded[name]["sha256"]
            ]
        return self._changed[stage]

    def document(self, stage: str, name: str) -> Any | None:
        """A JSON file of a stage; None when it is absent.

        Raises:
            UserError: when the file is broken, or is not of the kind that its name says.
        """
        path = self.folder / stage / name
        if not path.is_file():
            return None
        return read_rows(path, ROWS[name]) if name in ROWS else read_object(path, MEMBERS.get(name, {}))


def read_results(folder: Path) -> Results:
    """Read `artifacts/`.

    Raises:
        UserError: for a JSON file that is broken, or holds something else than its kind.
    """
    manifests, metrics, provenance = {}, {}, {}
    for stage in STAGES:
        if (folder / stage / MANIFEST).is_file():
            manifests[stage] = read_manifest(folder / stage / MANIFEST)
            check_sections(folder / stage / MANIFEST, manifests[stage].get("params", {}))
        if (folder / f"{stage}.metrics.json").is_file():
            metrics.update(read_metrics(folder / f"{stage}.metrics.json"))
        if (folder / f"{stage}.provenance.json").is_file():
            path = folder / f"{stage}.provenance.json"
            provenance[stage] = read_object(path, PROVENANCE)
            check_sections(path, provenance[stage].get("params", {}))
    return Results(folder=folder, manifests=manifests, metrics=metrics, provenance=provenance)
