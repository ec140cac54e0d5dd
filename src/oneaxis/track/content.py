"""From a folder that holds `params.yaml`, `dvc.lock` and `artifacts/` to what MLflow is told of it.

The folder is a work tree, or the record of a multirun's job, which has the same layout. Nothing here knows MLflow's
client: `Content` is plain data, so that a run that was restored, ran on another node or while MLflow was away says the
same as one that was logged as it went.
"""

import hashlib
import io
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from oneaxis.artifacts import ARTIFACTS, MANIFEST, read_json
from oneaxis.config import STAGE_SECTIONS, read_params
from oneaxis.live import CURVES, mlflow_key, redacted
from oneaxis.names import model_name, scheme_name

LONGEST_PARAM = 6000
LONGEST_TAG = 7900
CUT = " ... (cut: params.yaml, under Artifacts, has it whole)"
NAMED = ("displacement.json", "mass.json", "perplexity.json", "quality.json", "copying.json", "coverage.json",
         "realised.json", "smoke.json", "guards.json", "summary.json", "distribution.csv")  # fmt: skip
"""Small files of the stages that a run keeps, beside manifest and provenance."""
DATASETS = {
    "calibration": ("calibrate", "calibration"),
    "heldout": ("calibrate", "perplexity"),
    "items": ("score", "evaluation"),
    "pairs": ("filter_pairs", "training"),
    "probes": ("train_dpo", "probe"),
}
"""Table of prepare_data (pairs: also of sample_pairs) -> the stage that reads it, and what for (MLflow's context of a
dataset)."""
SECRET = (r"(?:[\w-]*(?:api[_-]?key|passw(?:or)?d|secret|access[_-]?key)"
          r"|(?:[\w-]*(?:hf|hub|auth|access|api|bearer)[_-])?token)")  # fmt: skip
"""Names whose values are not shown (`api_key`, `hf_token`; not `max_tokens`)."""


@dataclass
class Content:
    """Everything a run says; MLflow's names, nothing cut away twice."""

    metrics: dict[str, float] = field(default_factory=dict)
    params: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    curves: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    """Training curves: name -> (step, value)."""
    system: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    """Machine load while stages ran: name -> (Unix time in ms, value)."""
    datasets: list[dict[str, str]] = field(default_factory=list)
    """name, digest, source_type, source, profile, context; the texts as MLflow's `Dataset` takes them."""
    files: dict[str, bytes] = field(default_factory=dict)
    """Path below the run's artifacts -> content."""


# --- settings ------------------------------------------------------------------------------------------------


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested settings as `section.key: text`; lists and empty mappings as JSON; secrets as `***`."""
    found: dict[str, str] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            found.update(flat(value, f"{name}."))
            continue
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        text = "***" if _is_secret(str(key)) and value else without_secrets(text)
        found[mlflow_key(name)] = text if len(text) <= LONGEST_PARAM else text[: LONGEST_PARAM - len(CUT)] + CUT
    return found


def _is_secret(name: str) -> bool:
    return re.fullmatch(SECRET, name, re.IGNORECASE) is not None


def without_secrets(text: str) -> str:
    """Text of any kind (JSON, YAML, HTML, overrides) without passwords in URIs and values of secret settings."""
    quoted = rf"""(?ix) ( (["']?) \b{SECRET} \2 \s*[:=]\s* ) (?: "[^"\n]+" | '[^'\n]+' )"""
    line = rf"""(?im)^(\s*(?:-\s+)?{SECRET}:[ \t]+)(?!null\s*$|['"{{\[])\S+[ \t]*$"""
    override = rf"""(?i)(\b{SECRET}=)(?!["'\s])[^\s"',}}\]]+"""
    text = re.sub(quoted, r'\1"***"', redacted(text))
    return re.sub(override, r"\1***", re.sub(line, r"\1'***'", text))


def locked_stages(folder: Path) -> dict[str, Any]:
    """The entries of `dvc.lock`, without `report`. Empty when DVC has not run here."""
    path = folder / "dvc.lock"
    if not path.is_file():
        return {}
    document = YAML(typ="safe", pure=True).load(path.read_text(encoding="utf-8")) or {}
    return {name: entry for name, entry in document.get("stages", {}).items() if name != "report"}


def lock_text(stages: Mapping[str, Any]) -> str:
    """`dvc.lock` without the report's entry, which DVC writes only after the report has logged this."""
    buffer = io.StringIO()
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.dump({"schema": "2.0", "stages": dict(stages)}, buffer)
    return buffer.getvalue()


# --- numbers -------------------------------------------------------------------------------------------------


def collect_metrics(folder: Path, report_metrics: Mapping[str, float] | None = None) -> dict[str, float]:
    """All stages' metrics under MLflow's names, the seconds each stage took, and the headline numbers."""
    plain: dict[str, float] = {}
    seconds: dict[str, float] = {}
    for stage in STAGE_SECTIONS:
        path = folder / ARTIFACTS / f"{stage}.metrics.json"
        if path.is_file() and not (stage == "report" and report_metrics is not None):
            plain.update(read_json(path))
        path = folder / ARTIFACTS / f"{stage}.provenance.json"
        if path.is_file() and stage != "report":
            seconds[f"time/{stage}_s"] = float(read_json(path)["duration_s"])
    plain.update(report_metrics or {})
    if seconds:
        seconds["time/total_s"] = round(sum(seconds.values()), 3)
    everything = {**headline(plain), **plain, **seconds}
    return {mlflow_key(name): float(value) for name, value in everything.items() if math.isfinite(value)}


def headline(metrics: Mapping[str, float]) -> dict[str, float]:
    """The few numbers that a table of runs opens with: short names without a stage, as columns are narrow.

    `ppl` is of the model that is served; means are over tasks, `goodput_tok_s` is the best and `attainment` the worst
    of the loads.
    """
    found: dict[str, float] = {}

    def take(name: str, *sources: str) -> None:
        for source in sources:
            if source in metrics:
                found[name] = metrics[source]
                return

    def over(name: str, pattern: str, combine: Callable[[list[float]], float]) -> None:
        values = [value for key, value in metrics.items() if re.fullmatch(pattern, key)]
        if values:
            found[name] = combine(values)

    take("ppl", "quantize/perplexity_after", "calibrate/perplexity")
    take("ppl_base", "quantize/perplexity_before", "calibrate/perplexity")
    take("chosen_nats", "train_dpo/chosen_delta")
    take("reject_nats", "train_dpo/rejected_delta")
    over("goodput_tok_s", r"sweep/.+/goodput_tok_s", max)
    over("attainment", r"sweep/.+/attainment", min)
    over("acc_bytes", r"score/[^/]+/acc_bytes", _mean)
    over("acc_pmi_dc", r"score/[^/]+/pmi_dc", _mean)
    take("valid", "report/valid")
    return found


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def training_curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """The numeric columns of `train_log.parquet`, whether the training ran here or was restored."""
    path = folder / ARTIFACTS / "train_dpo" / "train_log.parquet"
    if not path.is_file():
        return {}
    import polars as pl

    table, found = pl.read_parquet(path), {}
    for column, kind in table.schema.items():
        if column != "step" and kind.is_numeric():
            rows = table.select("step", pl.col(column).cast(pl.Float64)).drop_nulls().iter_rows()
            found[mlflow_key(CURVES + column)] = [(int(step), value) for step, value in rows if math.isfinite(value)]
    return found


def system_load(folder: Path, computed: list[str]) -> dict[str, list[tuple[int, float]]]:
    """What the machine did while the `computed` stages ran, as one course of time.

    A restored stage ran at another time, perhaps on another machine: its load stays in its provenance.
    """
    found: dict[str, list[tuple[int, float]]] = {}
    for stage in computed:
        path = folder / ARTIFACTS / f"{stage}.provenance.json"
        series = read_json(path).get("system") if path.is_file() else None
        times = (series or {}).get("at_s", [])
        for name, values in (series or {}).items():
            if name not in ("at_s", "period_s"):
                points = [(int(at * 1000), value) for at, value in zip(times, values, strict=True) if value is not None]
                found.setdefault(f"system/{name}", []).extend(points)
    return {name: sorted(points) for name, points in found.items()}


# --- what it was made from, and what it says of itself --------------------------------------------------------


def datasets(folder: Path) -> list[dict[str, str]]:
    """The prepared tables that a stage of this run has read: named by their hashes, with source and rows."""
    path = folder / ARTIFACTS / "prepare_data" / MANIFEST
    if not path.is_file():
        return []
    manifest = read_json(path)
    metrics = folder / ARTIFACTS / "prepare_data.metrics.json"
    rows = read_json(metrics) if metrics.is_file() else {}
    told, files = manifest.get("notes", {}).get("tables", {}), manifest.get("files", {})
    sampled = _sampled_pairs(folder)
    found = []
    for name, (reader, context) in DATASETS.items():
        if not (folder / ARTIFACTS / reader).is_dir():
            continue
        table = told.get(name) or told.get("prose" if name in ("calibration", "heldout") else name) or {}
        facts, stage, count = files.get(f"{name}.parquet"), "prepare_data", rows.get(f"prepare_data/{name}_rows")
        if name == "pairs" and sampled:
            facts, stage, count, table = sampled
        if facts is None:
            continue
        profile = {"num_rows": int(count)} if count is not None else {}
        source = {"uri": f"{ARTIFACTS}/{stage}/{name}.parquet", "sha256": facts["sha256"],
                  "from": table.get("sources", [])}  # fmt: skip
        found.append({"name": name, "digest": facts["sha256"][:16], "source_type": "local", "context": context,
                      "source": without_secrets(json.dumps(source)), "profile": json.dumps(profile)})  # fmt: skip
    return found


def _sampled_pairs(folder: Path) -> tuple[Mapping[str, Any], str, float | None, Mapping[str, Any]] | None:
    """Where pairs come from the model itself: the facts of their file, the stage, their number, the stage's notes."""
    path = folder / ARTIFACTS / "sample_pairs" / MANIFEST
    # An artifact of other settings may lie there where these have no need of the stage.
    if read_params(folder).get("sample", {}).get("kind", "none") == "none" or not path.is_file():
        return None
    manifest = read_json(path)
    facts = manifest["files"].get("pairs.parquet")
    if facts is None:
        return None
    notes = manifest["notes"]
    return facts, "sample_pairs", notes["train_pairs"] + notes["heldout_pairs"], notes


def describe(folder: Path, params: Mapping[str, Any], stages: Mapping[str, Any]) -> dict[str, str]:
    """Tags to read and to filter by, of any run: model, scheme, training, DVC's hashes, the served checkpoint."""
    tags = {
        "model": model_name(params["model"]),
        "model.source": str(params["model"]["kind"]),
        "quantize": scheme_name(params["quantize"]),
        "quantize.kind": str(params["quantize"]["kind"]),
        "train.kind": str(params["train"]["kind"]),
        "session": str(params["measure"]["session"]),
        "oneaxis.dvc_lock": hashlib.sha256(lock_text(stages).encode()).hexdigest(),
    }
    for stage, entry in stages.items():
        # DVC's hash of a stage's payload: runs with the same one hold the same bytes.
        for out in entry.get("outs", []) if isinstance(entry, Mapping) else []:
            if isinstance(out, Mapping) and out.get("path") == f"{ARTIFACTS}/{stage}" and out.get("md5"):
                tags[f"dvc.{stage}"] = str(out["md5"])
    displacement = folder / ARTIFACTS / "train_dpo" / "displacement.json"
    tags["displacement"] = str(read_json(displacement)["verdict"]) if displacement.is_file() else "not trained"
    if params["model"]["kind"] == "random":
        tags["claim"] = "none: random weights, for tests"
    tags.update(checkpoint(folder, params))
    return {key: redacted(value)[:LONGEST_TAG] for key, value in tags.items()}


def checkpoint(folder: Path, params: Mapping[str, Any]) -> dict[str, str]:
    """A pointer to the checkpoint that is served: its path in the project and the hash of its weights."""
    served = Path(str(params.get("paths", {}).get("served", "")))
    manifest = folder / ARTIFACTS / (served.parts[1] if len(served.parts) > 1 else "") / MANIFEST
    if not manifest.is_file():
        return {}
    files = read_json(manifest).get("files", {})
    weights = sorted(f"{name} {facts['sha256']}" for name, facts in files.items() if name.endswith(".safetensors"))
    if not weights:
        return {}
    digest = weights[0].split()[1] if len(weights) == 1 else hashlib.sha256("\n".join(weights).encode()).hexdigest()
    return {"checkpoint": str(served), "checkpoint.sha256": digest}


def made_here(folder: Path, lines: list[Mapping[str, Any]]) -> list[str]:
    """The stages whose artifact was made by an execution that `lines` of the trace tell of.

    A stage writes its line in the trace right after its provenance; a restored provenance is older.
    """
    found = []
    for stage in STAGE_SECTIONS:
        path = folder / ARTIFACTS / f"{stage}.provenance.json"
        if not path.is_file():
            continue
        made = datetime.fromisoformat(read_json(path)["finished_at"])
        if any(line["stage"] == stage and 0 <= (datetime.fromisoformat(line["at"]) - made).total_seconds() < 60
               for line in lines):  # fmt: skip
            found.append(stage)
    return found


def small_files(folder: Path, report: Path | None = None) -> dict[str, bytes]:
    """Settings, lock, manifests, provenance, small results and the report, without secrets."""
    artifacts, found = folder / ARTIFACTS, {}
    for stage in STAGE_SECTIONS:
        if stage == "report":
            continue
        paths = [artifacts / stage / name for name in (MANIFEST, *NAMED)] + [artifacts / f"{stage}.provenance.json"]
        found.update({f"{stage}/{path.name}": path for path in paths if path.is_file()})
    for name in ("report.html", "card.md"):
        path = (report or artifacts / "report") / name
        if path.is_file():
            found[name] = path
    found["params.yaml"] = folder / "params.yaml"
    texts = {name: without_secrets(path.read_text(encoding="utf-8")).encode() for name, path in found.items()}
    return {**texts, "dvc.lock": lock_text(locked_stages(folder)).encode()}


def card(folder: Path, report: Path | None = None) -> str:
    """The result card, as MLflow shows it on the run's page, where a relative link leads nowhere."""
    path = (report or folder / ARTIFACTS / "report") / "card.md"
    if not path.is_file():
        return ""
    return path.read_text(encoding="utf-8").replace("[report.html](report.html)", "`report.html`, under Artifacts")


def collect(folder: Path, *, computed: list[str], report: Path | None = None,
            report_metrics: Mapping[str, float] | None = None) -> Content:  # fmt: skip
    """All that the folder says, but for the run's own name and identity.

    Args:
        folder: holds `params.yaml`, `dvc.lock`, `artifacts/`. computed: the stages that really ran for this run.
        report: the report stage's folder while that stage is still at work (else its artifact).
        report_metrics: that stage's metrics, likewise.
    """
    params = read_params(folder)
    tags = describe(folder, params, locked_stages(folder))
    metrics = collect_metrics(folder, report_metrics)
    if "report/valid" in metrics:
        tags["valid"] = "true" if metrics["report/valid"] else "false"
    words = card(folder, report)
    if words:
        tags["mlflow.note.content"] = words[:LONGEST_TAG]
    return Content(metrics, flat(params), tags, training_curves(folder), system_load(folder, computed),
                   datasets(folder), small_files(folder, report))  # fmt: skip
