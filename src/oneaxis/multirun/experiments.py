"""`oneaxis experiments`: what can be asked, from the files of `conf/experiment/` to a list for people or programs.

Each file is composed with the defaults and checked by the schema, so a broken one is found here and not in a run.
"""

import json
import shlex
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from oneaxis.config import compose
from oneaxis.config.axes import settings
from oneaxis.config.compose import Composed
from oneaxis.errors import UserError
from oneaxis.multirun.plan import CONF, shown

EXPERIMENTS = Path(CONF) / "experiment"


@dataclass(frozen=True)
class Listed:
    """One experiment, as the list shows it."""

    name: str
    question: str
    axis: str | None
    """None: single changes, each of which moves an axis of its own."""
    values: Sequence[str]
    """Of the axis, or the names of the changes; the baseline is the first."""
    combine: bool
    targets: Sequence[str]
    """Empty: the whole pipeline."""
    claims: Sequence[str]
    """The metrics that are judged."""
    runs: int
    """Points times repetitions."""
    cost: str
    """As written in the file."""
    deadline: str | None


def list_experiments(root: Path, *, as_json: bool) -> int:
    """Print every experiment of `conf/experiment/`; a broken file is named in one line on stderr.

    Returns:
        0; 2 when a file is broken.
    """
    files = sorted((root / EXPERIMENTS).glob("*.yaml"))
    if not files:
        raise UserError(f"{root / EXPERIMENTS}: holds no experiment; allowed: one YAML file a question")
    found, broken = [], []
    for file in files:
        try:
            found.append(read_experiment(root, file.stem))
        except UserError as error:
            broken.append(f"{EXPERIMENTS / file.name}: {error}")
    if as_json:
        print(json.dumps([asdict(one) for one in found], indent=2, ensure_ascii=False))
    else:
        print("\n\n".join(map(_block, found)))
    for line in broken:
        print(f"oneaxis: {line}", file=sys.stderr)
    return 2 if broken else 0


def read_experiment(root: Path, name: str) -> Listed:
    """The experiment of one file, composed and checked.

    Raises:
        UserError: when it does not compose, or has another name, no question, or nothing to compare.
    """
    experiment = compose(root / CONF, [f"experiment={name}"]).experiment
    if experiment.name != name:
        raise UserError(f"experiment.name={experiment.name}: allowed: {name}, as the file is called")
    if not experiment.question:
        raise UserError("experiment.question is empty; allowed: a sentence that says what is asked")
    if not experiment.changes and len(experiment.values) < 2:
        raise UserError("experiment has nothing to compare; allowed: axis with two values at least, or changes")
    values = [shown(value) for value in experiment.values]
    if experiment.changes:
        values = ["baseline", *(change.name for change in experiment.changes)]
        values += ["+".join(change.name for change in experiment.combined())] if experiment.combine else []
    return Listed(
        name=name,
        question=experiment.question,
        axis=experiment.axis,
        values=values,
        combine=experiment.combine,
        targets=list(experiment.targets),
        claims=[claim.metric for claim in experiment.claims],
        runs=len(values) * experiment.repetitions,
        cost=experiment.cost,
        deadline=experiment.deadline,
    )


def one_point(composed: Composed) -> str:
    """That a plain run of an experiment compares nothing, in a line; empty where nothing is to be compared."""
    experiment = composed.config.experiment
    if not experiment.changes and len(experiment.values) < 2:
        return ""
    others = [change.name for change in experiment.changes] or [shown(value) for value in experiment.values]
    axis = experiment.axis or ""
    now = composed.choices.get(axis, settings(composed).get(axis)) if axis else None
    what = (
        "the baseline point"
        if experiment.changes or now == experiment.values[0]
        else f"one point, {axis}={shown(now)},"
    )
    command = shlex.join(["oneaxis", "run", "-m", *composed.overrides])
    return f"experiment {experiment.name}: this runs {what} only; `{command}` compares {', '.join(others)}"


def _block(one: Listed) -> str:
    compared = f"{one.axis or 'changes'}: {', '.join(one.values)}"
    rows = [
        ("asks", one.question),
        ("compares", compared),
        ("runs", f"{one.runs}, to {', '.join(one.targets) or 'the whole pipeline'}"),
        ("judges", ", ".join(one.claims) or "the headline metrics"),
        ("cost", one.cost or "not stated"),
        *([("by", one.deadline)] if one.deadline else []),
    ]
    lines = [
        textwrap.fill(text, 110, initial_indent=f"  {label:<9} ", subsequent_indent=" " * 12, break_on_hyphens=False)
        for label, text in rows
    ]
    return "\n".join([one.name, *lines])
