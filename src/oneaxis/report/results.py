"""What the stages left behind, read from the artifact folder: manifests, metrics, provenance, tables, documents.

A stage or a file that is not there reads as None or empty: the page then says "not run" instead of failing.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from oneaxis.artifacts import MANIFEST, read_json
from oneaxis.config import STAGE_SECTIONS

STAGES = tuple(stage for stage in STAGE_SECTIONS if stage != "report")


@dataclass(frozen=True)
class Results:
    """The artifacts of all stages but the report."""

    folder: Path
    manifests: Mapping[str, Mapping[str, Any]]
    metrics: Mapping[str, float]
    """All stages' metrics, flat: their names carry the stage."""
    provenance: Mapping[str, Mapping[str, Any]]

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
        """A parquet table of a stage; None when it is absent or has no rows."""
        path = self.folder / stage / name
        if not path.is_file():
            return None
        table = pl.read_parquet(path)
        return table if table.height else None

    def document(self, stage: str, name: str) -> Any | None:
        """A JSON file of a stage; None when it is absent."""
        path = self.folder / stage / name
        return read_json(path) if path.is_file() else None


def read_results(folder: Path) -> Results:
    """Read `artifacts/`.

    Raises:
        UserError: for a JSON file that is broken.
    """
    manifests, metrics, provenance = {}, {}, {}
    for stage in STAGES:
        if (folder / stage / MANIFEST).is_file():
            manifests[stage] = read_json(folder / stage / MANIFEST)
        if (folder / f"{stage}.metrics.json").is_file():
            metrics.update(read_json(folder / f"{stage}.metrics.json"))
        if (folder / f"{stage}.provenance.json").is_file():
            provenance[stage] = read_json(folder / f"{stage}.provenance.json")
    return Results(folder=folder, manifests=manifests, metrics=metrics, provenance=provenance)
