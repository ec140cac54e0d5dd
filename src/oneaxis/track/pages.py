"""The addresses of MLflow's pages that show what a reader came for, without setting anything up.

MLflow keeps the state of a table or a page of charts (its filter, columns and charts) as a *view*: a tag of the
experiment, in a format of its own, which the address names. So the page of a multirun opens on its jobs, ordered along
the axis, with the axis and the judged metrics first, and with charts of exactly these.
"""

import base64
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from oneaxis.errors import RunError
from oneaxis.live import connect, first_line, mlflow_key, store_uri, where
from oneaxis.multirun.record import Plan

VIEW = "headline"
"""Key of the view of all runs (`runs_page`)."""
VIEW_TAG = "mlflow.sharedViewState."
COLUMNS = ("metrics.`acc_bytes`", "metrics.`acc_pmi_dc`", "metrics.`attainment`", "metrics.`chosen_nats`",
           "metrics.`goodput_tok_s`", "metrics.`ppl`", "metrics.`ppl_base`", "metrics.`reject_nats`", "tags.`valid`",
           "tags.`displacement`", "tags.`quantize`", "tags.`train.kind`")  # fmt: skip
HEADLINE = ("ppl", "acc_bytes", "acc_pmi_dc", "goodput_tok_s", "attainment", "chosen_nats", "reject_nats")
MOST_JUDGED = 6
"""Metrics that get a chart of their own; the table holds all."""


# --- the axis ------------------------------------------------------------------------------------------------


def axis_param(plan: Plan) -> str:
    """The parameter that holds the value of the axis in every run: its name sorts before all settings."""
    return mlflow_key(f"axis: {plan.axis}" if plan.axis else "axis")


def axis_values(plan: Plan) -> dict[str, str]:
    """Point -> its value on the axis, in the order of the axis: numbers by size, else as planned.

    Where points change different things, the value is the point's name.
    """
    if plan.axis is None:
        return {point.name: point.name for point in plan.points}
    found: dict[str, Any] = {}
    for point in plan.points:
        moved = [axis for axis in point.axes if axis.name == plan.axis]
        if moved:
            found[point.name] = moved[0].after
            found.setdefault(plan.baseline.name, moved[0].before)
    values = {point.name: found.get(point.name, point.name) for point in plan.points}
    numeric = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values.values())
    ordered = sorted(values.items(), key=lambda item: item[1]) if numeric else list(values.items())
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in ordered}


def judged_metrics(plan: Plan, verdicts: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the reader came for: the claimed metrics, then the others that were compared, in their order."""
    claimed = [str(claim["metric"]) for claim in plan.experiment.get("claims", [])]
    compared = [str(verdict["metric"]) for verdict in sorted(verdicts, key=lambda verdict: not verdict.get("claim"))]
    return list(dict.fromkeys([*claimed, *compared]))


# --- views ---------------------------------------------------------------------------------------------------


def _state(**values: Any) -> dict[str, Any]:
    """MLflow's own format of a page's state; keys that are absent take defaults."""
    columns = values["selectedColumns"]
    return {
        "searchFilter": "", "orderByKey": "attributes.start_time", "orderByAsc": False, "startTime": "ALL",
        "lifecycleFilter": "Active", "modelVersionFilter": "All Runs", "datasetsFilter": [],
        "columnWidths": dict.fromkeys(columns, 130), "columnOrder": [], "runsPinned": [],
        "runsHidden": [], "runsExpanded": {}, "runsHiddenMode": "FIRST_10_RUNS", "viewMaximized": False,
        "runListHidden": False, "groupBy": None, "groupsExpanded": {}, "runsVisibilityMap": {}, "hideEmptyCharts": True,
        **values,
    }  # fmt: skip


def _packed(name: str, created_ms: int, state: Mapping[str, Any]) -> str:
    """A view as MLflow's "Save view" writes it, so that it stands in the page's menu of views."""
    text = json.dumps(state, separators=(",", ":")).encode()
    packed = "deflate;" + base64.b64encode(zlib.compress(text, 9)).decode()
    return json.dumps({"name": name, "createdAt": created_ms, "updatedAt": created_ms, "state": packed})


def unpacked(value: str) -> dict[str, Any]:
    """The page's state that a view's tag holds."""
    state = json.loads(value)["state"].removeprefix("deflate;")
    return dict(json.loads(zlib.decompress(base64.b64decode(state))))


def multirun_view(plan: Plan, verdicts: Sequence[Mapping[str, Any]], metrics: Sequence[str]) -> dict[str, Any]:
    """The page of a multirun: its jobs along the axis; the axis, the decision and the judged metrics; their charts.

    Args:
        metrics: MLflow's names of all metrics that the jobs hold; where nothing was claimed or judged, the headline
            ones among them are shown.
    """
    axis = axis_param(plan)
    judged = [mlflow_key(name) for name in judged_metrics(plan, verdicts)] or [
        name for name in HEADLINE if name in metrics]  # fmt: skip
    effects = [f"effect/{name}" for name in judged if f"effect/{name}" in metrics]
    # A claimed metric stands beside its effect; of the others the effects come last.
    claimed = [mlflow_key(str(claim["metric"])) for claim in plan.experiment.get("claims", [])]
    pairs = [name for metric in claimed for name in (metric, f"effect/{metric}") if name in (*judged, *effects)]
    shown = list(dict.fromkeys([*pairs, *judged, *effects]))
    columns = [f"params.`{axis}`", "tags.`decision`", *(f"metrics.`{name}`" for name in shown), "tags.`valid`",
               "tags.`role`", "tags.`repetition`"]  # fmt: skip
    charts, sections = _charts(axis, judged[:MOST_JUDGED], effects[:MOST_JUDGED])
    return _state(
        searchFilter=f"tags.multirun = '{plan.id}' AND tags.role != 'parent'",
        orderByKey="metrics.`axis_order`", orderByAsc=True, selectedColumns=columns, columnOrder=columns,
        columnWidths={column: _width(column) for column in columns}, runsHiddenMode="SHOW_ALL",
        compareRunCharts=charts, compareRunSections=sections, isAccordionReordered=True,
    )  # fmt: skip


def _width(column: str) -> int:
    """Pixels that show the name; MLflow cuts the longer ones."""
    return min(230, max(100, 45 + 7 * (len(column.partition("`")[2]) - 1)))


def _charts(axis: str, judged: Sequence[str], effects: Sequence[str]) -> tuple[list[Any], list[Any]]:
    """Each judged metric along the axis, all of them in parallel coordinates, the effects and the metrics as bars."""
    charts: list[dict[str, Any]] = []
    sections: list[dict[str, Any]] = []

    def section(name: str, columns: int) -> str:
        uuid = f"oneaxis-{len(sections)}"
        sections.append({"uuid": uuid, "name": name, "display": True, "isReordered": True, "deleted": False,
                         "isGenerated": False, "columns": columns, "cardHeight": 300})  # fmt: skip
        return uuid

    def chart(of: str, kind: str, **values: Any) -> None:
        charts.append({"uuid": f"oneaxis-chart-{len(charts)}", "type": kind, "deleted": False, "isGenerated": False,
                       "metricSectionId": of, "runsCountToCompare": 100, **values})  # fmt: skip

    if judged:
        place = section("Along the axis", min(3, len(judged)))
        for name in judged:
            chart(place, "SCATTER", xaxis={"key": axis, "type": "PARAM"}, yaxis={"key": name, "type": "METRIC"})
        place = section("The axis and the judged metrics", 1)
        chart(place, "PARALLEL", selectedParams=[axis], selectedMetrics=list(judged), showAllRuns=True)
    if effects:
        place = section("Effects against the baseline", min(3, len(effects)))
        for name in effects:
            chart(place, "BAR", metricKey=name)
    if judged:
        place = section("Judged metrics", min(3, len(judged)))
        for name in judged:
            chart(place, "BAR", metricKey=name)
    return charts, sections


def write_view(client: Any, experiment: str, plan: Plan, verdicts: Sequence[Mapping[str, Any]]) -> None:
    """Keep the multirun's view (named by its id) as its runs and verdicts are now."""
    runs = client.search_runs([experiment], f"tags.multirun = '{plan.id}' AND tags.role != 'parent'", max_results=100)
    metrics = sorted({name for run in runs for name in run.data.metrics})
    state = multirun_view(plan, verdicts, metrics)
    created = int(datetime.fromisoformat(plan.created_at).timestamp() * 1000)
    name = f"{plan.experiment.get('name') or 'multirun'}: {plan.axis or 'several axes'} ({plan.id})"
    _keep(client, experiment, plan.id, _packed(name, created, state))


def _keep(client: Any, experiment: str, key: str, value: str) -> None:
    if client.get_experiment(experiment).tags.get(f"{VIEW_TAG}{key}") != value:
        client.set_experiment_tag(experiment, f"{VIEW_TAG}{key}", value)


# --- addresses -----------------------------------------------------------------------------------------------


def runs_page(root: Path, server: str) -> str:
    """The address of the table of all runs with the headline columns.

    Args:
        server: where the pages are served (`http://127.0.0.1:5000`), unless the store is a server itself.

    Raises:
        RunError: when MLflow's store cannot be used.
    """
    try:
        client, experiment, _ = connect(root)
        _keep(client, experiment, VIEW, _packed("Headline numbers", 0, _state(selectedColumns=list(COLUMNS))))
    except Exception as error:
        raise RunError(f"MLflow ({where(root)}): {first_line(error)}") from error
    return _address(root, server, experiment, VIEW)


def multirun_page(root: Path, server: str, plan: Plan) -> str:
    """The address of the charts of a multirun, along its axis; its table is one click away (and has the same view).

    Raises:
        RunError: when MLflow's store cannot be used or does not hold the multirun.
    """
    try:
        client, experiment, _ = connect(root)
        if f"{VIEW_TAG}{plan.id}" not in client.get_experiment(experiment).tags:
            write_view(client, experiment, plan, ())
    except Exception as error:
        raise RunError(f"MLflow ({where(root)}): {first_line(error)}") from error
    return _address(root, server, experiment, plan.id) + "&compareRunsMode=CHART"


def _address(root: Path, server: str, experiment: str, view: str) -> str:
    uri = store_uri(root)
    if uri.startswith(("http://", "https://")):
        server = re.sub(r"//[^/@]*@", "//", uri).rstrip("/")
    return f"{server}/#/experiments/{experiment}/runs?workflowType=machine_learning&viewStateShareKey={view}"
