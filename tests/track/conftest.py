"""An empty MLflow store, and a multirun's record made by hand: faked are the artifacts, by the stages' schemas."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from oneaxis.artifacts import write_json
from oneaxis.config import STAGE_SECTIONS, compose, write_params
from oneaxis.live import ensure_store
from oneaxis.multirun.record import Axis, Job, Plan, Point, Status, job_folder, write_plan, write_status


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated, empty store, made once: making one takes seconds."""
    folder = tmp_path_factory.mktemp("store")
    ensure_store(folder)
    return folder / "mlflow.db"


ALPHA = "quantize.smooth.alpha"
CLAIM = {"metric": "quantize/perplexity_after", "better": "lower", "expected": -0.1, "bar": 0.05}


class Record:
    """A multirun of `quantize.smooth.alpha` and its folder in a project that has a store."""

    def __init__(self, project: Path, conf: Path, values: Sequence[float] = (0.5, 0.3, 0.8), **plan: Any) -> None:
        self.project, self.conf = project, conf
        points = [
            Point(f"alpha={value}", "single" if number else "baseline", [f"{ALPHA}={value}"],
                  [Axis(ALPHA, "key", values[0], value, {ALPHA: [values[0], value]})] if number else [])
            for number, value in enumerate(values)
        ]  # fmt: skip
        self.plan = Plan(**{
            "id": "20260102-030405-alpha", "created_at": "2026-01-02T03:00:00+00:00",
            "overrides": [f"{ALPHA}={','.join(map(str, values))}"], "launcher": [],
            "experiment": {"name": "alpha", "question": "Which alpha?", "claims": [CLAIM]}, "gate": {}, "axis": ALPHA,
            "session": "default", "snapshot": "c" * 40, "points": points,
            "jobs": [Job(point.name, 0) for point in points], **plan,
        })  # fmt: skip
        self.folder = project / "multirun" / self.plan.id
        self.folder.mkdir(parents=True)
        write_plan(self.folder, self.plan)

    def run(self, number: int, *overrides: str, state: str = "done", ran: Sequence[str] = ("quantize",)) -> Job:
        """What job `number` leaves behind."""
        job = self.plan.jobs[number]
        folder = job_folder(self.folder, job)
        folder.mkdir(parents=True, exist_ok=True)
        write_params(compose(self.conf, [*self.plan.point(job.point).overrides, *overrides]), folder)
        for minute, stage in enumerate(STAGE_SECTIONS):
            if stage not in ("report", "serve", "sweep"):
                self._stage(folder, stage, minute, number)
        entry = {"outs": [{"path": "artifacts/quantize", "md5": f"{number}" * 8 + ".dir"}]}
        lock = {"schema": "2.0", "stages": {"quantize": entry, "report": {"outs": []}}}
        (folder / "dvc.lock").write_text(json.dumps(lock), encoding="utf-8")
        write_status(folder, Status(
            state=state, exit_code=0 if state == "done" else 1, message="" if state == "done" else "it broke",
            ran=list(ran), stage_seconds=dict.fromkeys(ran, 2.0), seconds=60.0, waited_s=0.0, commit="d" * 40,
            node="here", slot="0", finished_at=f"2026-01-02T03:{10 + number}:00.000+00:00",
        ))  # fmt: skip
        return job

    def _stage(self, folder: Path, stage: str, minute: int, number: int) -> None:
        payload = folder / "artifacts" / stage
        payload.mkdir(parents=True, exist_ok=True)
        names = {"prepare_data": ("pairs.parquet", "items.parquet", "prompts.parquet", "heldout.parquet"),
                 "quantize": ("checkpoint/model.safetensors",)}.get(stage, ())  # fmt: skip
        tables = {"items": {"sources": [{"wheel": "w==1", "licence": "MIT"}]}}
        write_json(payload / "manifest.json", {
            "stage": stage, "params": {}, "notes": {"tables": tables} if stage == "prepare_data" else {},
            "files": {name: {"bytes": 1, "sha256": name[0] * 64} for name in names},
        })  # fmt: skip
        metrics = {f"{stage}/number": 1.5}
        if stage == "quantize":
            metrics["quantize/perplexity_after"] = 35.0 + number
        if stage == "prepare_data":
            metrics["prepare_data/items_rows"] = 400.0
        if stage == "train_dpo":
            table = pl.DataFrame({"step": [1, 2, 3], "loss": [3.0, 2.0, 1.0]})
            table.write_parquet(payload / "train_log.parquet")
        write_json(folder / "artifacts" / f"{stage}.metrics.json", metrics)
        write_json(folder / "artifacts" / f"{stage}.provenance.json", {
            "stage": stage, "duration_s": 2.0, "finished_at": f"2026-01-02T02:{minute:02}:30.000+00:00",
            "system": {"period_s": 2.0, "at_s": [1000.0 + minute, 1002.0 + minute],
                       "cpu_utilization_percentage": [50.0, 60.0 + minute]},
        })  # fmt: skip

    def judge(self, *decisions: str) -> None:
        """`verdicts.json` (one decision a candidate), a report and a card."""
        verdicts = []
        for point, decision in zip(self.plan.points[1:], decisions, strict=True):
            verdicts.append({
                "point": point.name, "metric": CLAIM["metric"], "baseline": self.plan.baseline.name,
                "candidate": point.name, "valid": decision != "invalid", "decision": decision, "effect": -0.25,
                "ci_low": -0.5, "ci_high": None, "baseline_value": 35.0, "candidate_value": 34.75, "p_value": 0.01,
                "claim": True,
            })  # fmt: skip
        write_json(self.folder / "verdicts.json", verdicts)
        (self.folder / "report.html").write_text("<p>all points</p>", encoding="utf-8")
        (self.folder / "card.md").write_text("card of the multirun", encoding="utf-8")


@pytest.fixture
def record(tmp_path: Path, root: Path, store: Path, monkeypatch: pytest.MonkeyPatch) -> Record:
    """A planned multirun, in a project with an empty store."""
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    (tmp_path / "mlflow.db").write_bytes(store.read_bytes())
    (tmp_path / ".oneaxis").mkdir()
    return Record(tmp_path, root / "conf")
