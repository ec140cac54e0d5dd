"""What training did in every point of a multirun: the displacement verdicts side by side, and curves over the steps.

The verdicts of a multirun compare points with the baseline; whether the baseline itself was displaced, and whether a
point that beats it is healthy or only less displaced, stands here. Pure functions of the artifacts; the first
repetition of each point is read.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import MaxNLocator

from oneaxis.artifacts import ARTIFACTS
from oneaxis.multirun.record import job_folder
from oneaxis.report import text
from oneaxis.report.plots import INK, LINES, MARKERS, SERIES, Plot, draw
from oneaxis.report.records import Multirun
from oneaxis.report.results import Results, read_results
from oneaxis.report.tables import Link, Table

DRAWN_POINTS = len(SERIES)
"""Beside the baseline."""
TONES = {"healthy": "good", "displacement": "bad", "severe": "bad"}


def between_points(folder: Path, multirun: Multirun) -> tuple[list[Plot], list[Table]]:
    """The curves and the table; both empty unless two points were trained.

    Args:
        folder: of the multirun.
        multirun: its record.
    """
    trained = {}
    for point in multirun.plan.points:
        job = next(job for job in multirun.plan.jobs if job.point == point.name)
        results = read_results(job_folder(folder, job) / ARTIFACTS)
        if results.document("train_dpo", "displacement.json"):
            trained[point.name] = results
    if len(trained) < 2:
        return [], []
    curves = _curves(trained, multirun.plan.baseline.name)
    return [curves] if curves else [], [_table(trained)]


def _table(trained: Mapping[str, Results]) -> Table:
    rows: list[list[str | Link]] = []
    tones = []
    for name, results in trained.items():
        found: Mapping[str, Any] = results.document("train_dpo", "displacement.json") or {}
        level = " → ".join(
            text.nats(results.metrics.get(f"train_dpo/chosen_logp_{when}")) for when in ("before", "after")
        )
        changes = [_change(found.get(side)) for side in ("chosen", "rejected", "margin")]
        rows.append([name, str(found["verdict"]), level, *changes, _refusals(found)])
        tones.append(TONES.get(str(found["verdict"]), ""))
    first: Mapping[str, Any] = next(iter(trained.values())).document("train_dpo", "displacement.json") or {}
    return Table(
        ("Point", "verdict", "chosen: level", "change", "rejected", "margin", "refusals, points"), rows, "lsrrrrr",
        caption="What training did in each point", tones=tones,
        note=f"Held-out responses, nats per response: mean change by DPO from its reference, with the "
        f"{text.percent(first.get('confidence'), 0)} interval over {text.count(first.get('n'))} pairs. Where SFT came "
        "first, before is after SFT. Refusals: change of the share of benign prompts that are refused, answered "
        "greedily, from the fetched model.",
    )  # fmt: skip


def _change(found: Mapping[str, Any] | None) -> str:
    if not found:
        return text.NONE
    return " ".join(text.effect(found.get("effect"), found.get("ci_low"), found.get("ci_high")))


def _refusals(found: Mapping[str, Any]) -> str:
    change = (found.get("answers") or {}).get("refusal")
    return _change({end: 100 * change[end] for end in ("effect", "ci_low", "ci_high")} if change else None)


def _curves(trained: Mapping[str, Results], baseline: str) -> Plot | None:
    """How far the chosen responses of the batches have moved from the reference, over the steps: below 0 they fell."""
    series: list[tuple[str, Sequence[int], np.ndarray]] = []
    for name, results in trained.items():
        log, beta = results.table("train_dpo", "train_log.parquet"), results.section("train").get("beta")
        if log is not None and beta and "rewards/chosen" in log.columns:
            # TRL's reward is beta times the log-ratio of policy and reference.
            series.append((name, log["step"].to_list(), log["rewards/chosen"].to_numpy() / float(beta)))
    # The baseline first, so that it has the ink; without it the others mean nothing.
    series.sort(key=lambda one: one[0] != baseline)
    if not series or series[0][0] != baseline:
        return None
    drawn = series[: 1 + DRAWN_POINTS]

    def paint(canvas: Canvas) -> None:
        axes = canvas.subplots()
        axes.axhline(0, color=INK, linewidth=0.9, linestyle=(0, (4, 3)))
        for i, (name, steps, moved) in enumerate(drawn):
            look: dict[str, Any] = (
                {"color": INK, "linewidth": 2.2, "marker": "*", "markersize": 7, "linestyle": "-"} if i == 0 else
                {"color": SERIES[i - 1], "marker": MARKERS[i - 1], "linestyle": LINES[i - 1]}
            )  # fmt: skip
            axes.plot(steps, moved, label=text.shorten(name, 24), **look)
        axes.set_xlabel("step of DPO")
        axes.set_ylabel("chosen, change in nats")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        canvas.legend(loc="outside upper left", ncols=3)

    left = f" The first {DRAWN_POINTS} candidates." if len(series) > len(drawn) else ""
    return draw("trained", f"Change of the chosen log-probability over the steps of {len(drawn)} points.",
                "Means over the batches trained on since the last log. Below the dashed line the chosen responses "
                f"have become less likely than they began.{left}", paint)  # fmt: skip
