"""`oneaxis judge BASELINE CANDIDATE`: two runs that are there already, compared in one metric or in their headlines.

With `--metric` it is a gate: exit code 0 only when the candidate is accepted. Without, it describes, and only an
INVALID comparison exits with 1. Two outputs of lm-eval are compared likewise (`lm_eval`), and results of `vllm bench
serve`, guidellm and AIPerf, several files a side as its repetitions (`others`).
"""

import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from oneaxis.config.axes import flatten, same
from oneaxis.config.compose import compose, compose_raw
from oneaxis.config.schema import Claim, Gate
from oneaxis.errors import UserError
from oneaxis.judge import foreign, lm_eval, others, units
from oneaxis.judge.compare import Comparison, Verdict, conclude, prepare
from oneaxis.judge.conditions import DEFAULT_SESSION, grouped_axes
from oneaxis.judge.multirun import exit_code, headline_claims
from oneaxis.judge.records import Record, differences, find_records
from oneaxis.judge.text import verdict_text
from oneaxis.multirun.record import Axis

STANDARD_GATE = Gate(confidence=0.95, floor=0.95, max_spread=0.10, min_pairs=6)
"""Outside a project, that of conf/gate/cpu.yaml."""


def judge_folders(
    baseline: Path,
    candidate: Path,
    *,
    metric: str | None,
    better: units.Better | None,
    bar: float,
    margin: float | None,
    as_json: bool,
    conf_dir: Path,
    goodput: Sequence[str] = (),
) -> int:
    """Print the verdicts of two folders and return the exit code.

    Args:
        goodput: bounds of a good request, `ttft:500`, for results of other tools (a run of ours has its own).
        conf_dir: its gate is taken where there is one.

    Raises:
        UserError: for a folder that holds no artifacts, the same folder twice, or a metric that neither has.
    """
    if not metric and (better or bar or margin is not None):
        raise UserError("--better, --bar and --margin belong to a metric; allowed: with --metric NAME")
    project = compose(conf_dir) if (conf_dir / "config.yaml").is_file() else None
    gate = project.gate if project else STANDARD_GATE
    sides = (baseline, candidate)
    bound = bound_of(goodput) if goodput else None
    if not any(map(lm_eval.is_output, sides)) and any(map(foreign.is_foreign, sides)):
        own = next((path for path in sides if path.is_dir() and not foreign.is_foreign(path)), None)
        if own is not None:
            raise UserError(f"{own}: no results of another tool, as the other has; allowed: two "
                            f"of {foreign.FORMATS}")  # fmt: skip
        bounds = others.Bounds()
        if project:
            known = project.guards
            bounds = others.Bounds(known.max_send_lag_p99_ms, known.max_prefix_hit_rate, known.max_token_disagreement)
        verdicts = others.judge_others(baseline, candidate, metric=metric, better=better, bar=bar, margin=margin,
                                       gate=gate, bounds=bounds, bound=bound)  # fmt: skip
        return _print(verdicts, as_json)
    if bound:
        raise UserError("--goodput: allowed with results of vllm bench serve, guidellm or AIPerf; a run of oneaxis has "
                        "goodput by its own load.service_class")  # fmt: skip
    if lm_eval.is_output(baseline) or lm_eval.is_output(candidate):
        if baseline.resolve() == candidate.resolve():
            raise UserError(f"{baseline} and {candidate}: the same run twice; allowed: two different runs")
        with tempfile.TemporaryDirectory() as scratch:
            arms = lm_eval.read_arms(baseline, candidate, Path(scratch))
            claims = [_claim(arms, metric, better, bar, margin)] if metric else lm_eval.headline_claims(arms)
            if not claims:
                raise UserError(f"{baseline} and {candidate}: no metric is in both; allowed: tasks with acc, "
                                "acc_norm or acc_bytes")  # fmt: skip
            noted = [units.Problem("warning", note) for note in lm_eval.notes([baseline, candidate])]
            comparisons = _compared(arms, claims, gate, (baseline, candidate), None, metric is not None)
            verdicts = [conclude(replace(each, others=[*each.others, *noted])) for each in comparisons]
        return _print(verdicts, as_json)

    arms = {"baseline": find_records(baseline), "candidate": find_records(candidate)}
    folders = [{record.results.folder.resolve() for record in arm} for arm in arms.values()]
    if folders[0] & folders[1]:
        raise UserError(f"{baseline} and {candidate}: the same run twice; allowed: two different runs")
    timed = not any(_session(record) == DEFAULT_SESSION for arm in arms.values() for record in arm)
    claims = [_claim(arms, metric, better, bar, margin)] if metric else headline_claims(arms, timed)
    if not claims:
        raise UserError(f"{baseline} and {candidate}: no headline metric is in both; allowed: --metric NAME")
    axes = found_axes(arms["baseline"][0], arms["candidate"][0], conf_dir)
    comparisons = _compared(arms, claims, gate, (baseline, candidate), axes, metric is not None)
    code = _print([conclude(comparison) for comparison in comparisons if not comparison.idle], as_json)
    if not as_json and not metric and not timed:
        print(f"\ntimings are left out: those of session `{DEFAULT_SESSION}` never support a verdict")
    return code


def bound_of(words: Sequence[str]) -> foreign.Bound:
    """Bounds as `vllm bench serve --goodput` takes them: `ttft:500 tpot:50 e2el:3000`, in milliseconds.

    Raises:
        UserError: for another name, a number that is none or not above 0, or a name that is given twice.
    """
    names = {"ttft": "ttft_ms", "tpot": "tpot_ms", "e2el": "e2e_ms"}
    found: dict[str, float] = {}
    for word in words:
        name, colon, number = word.partition(":")
        try:
            value = float(number) if colon else math.nan
        except ValueError:
            value = math.nan
        if name not in names or names[name] in found or not 0 < value < math.inf:
            raise UserError(f"--goodput {word}: allowed: ttft, tpot and e2el, each once, with milliseconds above 0, as "
                            "in ttft:500 tpot:50")  # fmt: skip
        found[names[name]] = value
    return foreign.Bound(**found)


def _compared(
    arms: Mapping[str, list[Record]],
    claims: Sequence[Claim],
    gate: Gate,
    paths: tuple[Path, Path],
    axes: Sequence[Axis] | None,
    claimed: bool,
) -> list[Comparison]:
    """Each claim over both arms."""
    return [
        prepare(
            arms["baseline"], arms["candidate"], claim, gate, names=(str(paths[0]), str(paths[1])), axes=axes,
            combination=False, written_at=None, claimed=claimed, question="",
        )
        for claim in claims
    ]  # fmt: skip


def _print(verdicts: list[Verdict], as_json: bool) -> int:
    """As text or JSON; the exit code."""
    if as_json:
        print(json.dumps([verdict.as_json() for verdict in verdicts], indent=2, sort_keys=True, allow_nan=False))
    else:
        print(verdict_text(verdicts))
    return exit_code(verdicts)


def found_axes(baseline: Record, candidate: Record, conf_dir: Path) -> list[Axis]:
    """The axes in which two runs differ, without a plan: another `kind` is another choice of its group; so are several
    settings of one section that are, in each run, exactly those of a choice of that group; anything else is a key."""
    # A run that ended early has not recorded every section.
    shared = baseline.settings.keys() & candidate.settings.keys()
    one, other = ({name: run.settings[name] for name in shared} for run in (baseline, candidate))
    axes = grouped_axes(differences(one, other))
    for section in sorted({axis.name.partition(".")[0] for axis in axes if axis.kind == "key"}):
        own = [axis for axis in axes if axis.kind == "key" and axis.name.startswith(f"{section}.")]
        if len(own) < 2:
            continue
        before, after = (_choice(conf_dir, section, settings[section]) for settings in (one, other))
        if before and after:
            leaves = {key: pair for axis in own for key, pair in axis.leaves.items()}
            axes = [axis for axis in axes if axis not in own] + [Axis(section, "group", before, after, leaves)]
    return axes


def _choice(conf_dir: Path, group: str, settings: Mapping[str, Any]) -> str | None:
    """The choice of a group that gives these settings; None where there is none."""
    for path in sorted((conf_dir / group).glob("*.yaml")):
        try:
            values = compose_raw(conf_dir, [f"{group}={path.stem}"])[group]
        except UserError:
            # A choice that needs a value of the user's is none that a file alone gives.
            continue
        if flatten(values).keys() == flatten(settings).keys() and same(values, settings):
            return path.stem
    return None


def _session(record: Record) -> str:
    return str(record.settings.get("measure", {}).get("session", DEFAULT_SESSION))


def _claim(
    arms: dict[str, list[Record]], metric: str, better: units.Better | None, bar: float, margin: float | None
) -> Claim:
    names = units.metric_names(arms)
    by_tables = ("perplexity", "nll", "copies", "items", "pairs", "escapes", "answers", "prompts")
    if metric not in names and units.kind_of(metric) not in by_tables:
        near = [name for name in names if name.rpartition("/")[2] == metric.rpartition("/")[2]]
        shown = near or [name for name in names if units.kind_of(name) != "none"]
        more = f" and {len(shown) - 12} more" if len(shown) > 12 else ""
        listed = (", ".join(shown[:12]) or "none is there") + more
        raise UserError(f"--metric={metric}: neither folder has it; allowed: {listed}")
    usual = units.better_of(metric)
    if better and usual and better != usual and not metric.startswith("train_dpo/"):
        raise UserError(
            f"--better={better}: of {metric} {usual} is better; allowed: {usual}, or --margin with what may be lost"
        )
    direction = better or usual
    if direction is None:
        raise UserError(f"--metric={metric}: its name does not say which way is better; give --better lower|higher")
    if not 0 <= bar < float("inf"):
        raise UserError(f"--bar={bar}: allowed: 0 or more, in the metric's unit")
    if margin is not None and (bar or not 0 <= margin < float("inf")):
        raise UserError(f"--margin={margin}: allowed: 0 or more, in the metric's unit, and no --bar beside it")
    if said := units.share_problem(metric, bar, margin):
        raise UserError(f"--{said}")
    return Claim.model_validate(
        {"metric": metric, "better": direction, "expected": None, "bar": float(bar), "margin": margin}
    )
