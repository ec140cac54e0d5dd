"""Multiple choice on the page: what each scorer finds, whether scorers or runs really differ, and which items flipped.

Pure functions of the artifacts. Every accuracy stands with n and its error, every difference with an interval and a
p-value that is corrected over the table it stands in.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import polars as pl

from oneaxis.artifacts import ARTIFACTS
from oneaxis.errors import UserError
from oneaxis.multirun.record import job_folder
from oneaxis.report import text
from oneaxis.report.records import Multirun
from oneaxis.report.results import Results
from oneaxis.report.tables import Table
from oneaxis.score import competition, flips, significance
from oneaxis.score.metrics import SCORERS

BASE = "acc_bytes"
"""The scorer that the others are compared with: the default of this project."""
ALPHA = 1 - significance.CONFIDENCE
KIND_TITLES = {"question": "the question", "premise": "the premise", "bos": "no prompt", "letter": "letters",
               "content_free": "a text that asks nothing"}  # fmt: skip


class Evidence:
    """What is computed from the items of a run, once for all that is said of it: bootstraps take seconds."""

    def __init__(self, results: Results):
        self.results = results

    @cached_property
    def compared(self) -> list[dict[str, Any]]:
        """Every scorer against BASE (`significance.compare_scorers`)."""
        items = self.results.table("score", "items_scored.parquet")
        return [] if items is None else significance.compare_scorers(items, BASE)

    @cached_property
    def competition(self) -> dict[str, Any] | None:
        """`competition.summary` of the tasks whose items all have a rival; None without any."""
        items = self.results.table("score", "items_scored.parquet")
        table = self.results.table("score", "table.parquet")
        if items is None or table is None:
            return None
        parts = [part for part in table.partition_by("task", maintain_order=True) if competition.has_rivals(part)]
        return competition.summary(pl.concat(parts)) if parts else None


def tables(evidence: Evidence) -> list[Table]:
    """What the scoring section shows below its plot, in order."""
    results = evidence.results
    summary = results.document("score", "summary.json") or {}
    tasks = summary.get("tasks") or {}
    found = [premises(results, summary), letters(tasks), clustered(results), scorers_compared(evidence),
             *competing(evidence), prompts(tasks)]  # fmt: skip
    return [table for table in found if table is not None and table.rows]


def words(evidence: Evidence) -> str:
    """Where dividing by the premise hurts or does nothing, and what surface forms cost; empty without items."""
    said = significance.pmi_words(evidence.compared)
    if evidence.competition is not None:
        said.append(competition.summary_words(evidence.competition))
    return " ".join(said)


def premises(results: Results, summary: Mapping[str, Any]) -> Table | None:
    """Every premise of pmi_dc with the accuracy it gives, and how much that choice moves."""
    given = results.section("score").get("premises", {})
    rows = []
    for task, facts in (summary.get("tasks") or {}).items():
        several = facts.get("premises")
        if not several:
            text_or_list = given.get(task, given.get("default", ""))
            first = text_or_list if isinstance(text_or_list, str) else (list(text_or_list) or [""])[0]
            rows.append([task, repr(first), _share(facts["scorers"].get("pmi_dc")), text.NONE, text.NONE])
            continue
        for place, one in enumerate(several["premises"]):
            ends = [f"{100 * several['spread']:.1f} points", text.percent(several["moved_share"], 0)]
            rows.append(
                [task if not place else "", repr(one["premise"]), _share(one), *(ends if not place else ["", ""])]
            )
    note = (f"Scored by {summary.get('engine', '?')} in {summary.get('dtype', '?')}. The first premise of a task is "
            "ranked. Spread: highest less lowest accuracy, on the items scored after all premises.")  # fmt: skip
    if difference := summary.get("batch_difference"):
        note += (f" {difference['sequences']} sequences scored again by themselves: up to "
                 f"{text.number(difference['max_nats'])} nats away.")  # fmt: skip
    return Table(("Task", "premise of pmi_dc", "accuracy", "spread", "answers that move"), rows, "llrrr",
                 caption="Premises", note=note)  # fmt: skip


def letters(tasks: Mapping[str, Any]) -> Table | None:
    """The letter format's prior, how often answers move with the position, and the recalls' spread per scorer."""
    rows = []
    for task, facts in tasks.items():
        letter = facts.get("letter")
        for options, prior in (letter or {}).get("prior", {}).items():
            shares = ", ".join(f"{name} {text.percent(share, 0)}" for name, share in prior.items())
            spreads = ", ".join(f"{name} {text.number(value, 2)}" for name, value in letter.get("rstd", {}).items())
            rows.append([task, options, shares, text.percent(letter["moved_share"], 0), text.count(letter["ties"]),
                         spreads or text.NONE, text.count(letter["n"])])  # fmt: skip
    return Table(
        ("Task", "options", "letter prior, over all rotations", "answers that move", "tied votes", "RStd", "n"), rows,
        "lrlrrwr", caption="Letter format",
        note="A fair model's prior is flat. An answer moves when the rotations of its options do not all agree. RStd: "
        "standard deviation of the recalls by the letter of the right answer; 0 for a model without a taste.",
    )  # fmt: skip


def clustered(results: Results) -> Table | None:
    """The error of BASE where items come in topics, beside the one that takes them as independent."""
    items = results.table("score", "items_scored.parquet")
    rows = []
    for (task,), own in () if items is None else items.sort("task").group_by("task", maintain_order=True):
        found = significance.with_error(own[f"{BASE}_correct"], own["topic"])
        if found["clusters"] and 1 < found["clusters"] < found["n"]:
            errors = [f"± {100 * (found[name] or 0):.1f}" for name in ("stderr", "stderr_clustered")]
            rows.append([str(task), text.percent(found["accuracy"]), *errors, text.count(found["clusters"]),
                         text.count(found["n"])])  # fmt: skip
    return Table(
        ("Task", BASE, "error, items", "error, topics", "topics", "n"), rows, "lrrrrr", caption="Items in topics",
        note="Answers to items of one topic are no independent draws. The error over topics is the one to quote.",
    )  # fmt: skip


def scorers_compared(evidence: Evidence) -> Table | None:
    """Every scorer against BASE, item by item."""
    found = evidence.compared
    if not found:
        return None
    rows = [
        [row["task"], row["second"], text.points(row["effect"]), between(row),
         f"{row['only_second']} / {row['only_first']}",
         p_value(row["p_value"]), p_value(row["p_holm"]), text.count(row["n"])]
        for row in found
    ]  # fmt: skip
    return Table(
        ("Task", "scorer", f"against {BASE}", "95% interval", "only it / only the other", "p", "p, Holm", "n"), rows,
        "llrrrrrr", caption=f"Scorers against {BASE}", note=how(found), tones=[_tone(row) for row in found],
        folded=True,
    )  # fmt: skip


def how(found: Sequence[Mapping[str, Any]]) -> str:
    """By which tests and intervals the rows were made."""
    if not found:
        return ""
    said = ["Paired by item: McNemar's exact test, bootstrap interval."]
    if num := sum(row["clusters"] is not None for row in found):
        said.append(
            f"{num} of {len(found)} rows have topics: there whole topics are drawn, and the test flips their signs."
        )
    if any(row["interval"] == "score" for row in found):
        said.append("Where no item is discordant the interval is Tango's.")
    said.append(
        f"Holm's correction is over the {found[0]['num_tests']} rows of this table; the plain p is not corrected."
    )
    return " ".join(said)


def competing(evidence: Evidence) -> list[Table]:
    """Surface-form competition, where every item scored has a rival."""
    found = evidence.competition
    if found is None:
        return []
    rows = [
        [row["scorer"], *(text.percent(row[view]["accuracy"]) for view in competition.VIEWS),
         f"{text.percent(row['both']['accuracy'])} ± {100 * (row['both']['stderr'] or 0):.1f}",
         text.count(row["turned"]),
         f"{text.points(row['swing']['effect'])} (p {p_value(row['swing']['p_holm'])})",
         _survival(row["survival"]), text.count(row["both"]["n"])]
        for row in found["scorers"]
    ]  # fmt: skip
    split = found["mass"]
    return [Table(
        ("Scorer", "right form alone", "rival alone", "both, one key", "both, two keys", "right with either form",
         "form decides", "rival − right",
         f"either form, against {competition.BASE}", "n"), rows, "lrrrrrrrrr", caption="Surface-form competition",
        note="Each answer can be said in two ways. The commoner form holds "
        f"{text.percent(split['share_of_the_commoner'], 0)} of what both have in the median item, and more than ten "
        f"times the other in {split['tenfold']} of {split['n']}; "
        f"{split['costs']} answers lose to a distractor for being split. Best survivor first. p: McNemar, Holm over "
        f"{len(rows)} scorers.",
    )]  # fmt: skip


def _survival(found: Mapping[str, Any] | None) -> str:
    return (
        text.NONE
        if found is None
        else f"{text.points(found['effect'])}, {between(found)} (p {p_value(found['p_holm'])})"
    )


def prompts(tasks: Mapping[str, Any]) -> Table | None:
    """What the model read: the first item of each task in each context."""
    rows = [
        [task, KIND_TITLES.get(kind, kind), repr(one["prompt"]), repr(one["continuations"][0])]
        for task, facts in tasks.items()
        for kind, one in (facts.get("shown") or {}).items()
    ]
    return Table(("Task", "after", "prompt", "first continuation"), rows, "llww", caption="What the model reads",
                 folded=True)  # fmt: skip


# --- between the points of a multirun -------------------------------------------------------------------------


def between_points(folder: Path, multirun: Multirun) -> list[Table]:
    """Which items each candidate answers otherwise than the baseline, and what those have in common.

    The scorers are those of the claims, else BASE; the first repetition of each point is read.

    Args:
        folder: of the multirun.
        multirun: its record.
    """
    claims = (str(claim["metric"]).split("/") for claim in multirun.plan.experiment.get("claims", []))
    scorers = tuple(
        dict.fromkeys(name[2] for name in claims if len(name) == 3 and name[0] == "score" and name[2] in SCORERS)
    )
    scorers = scorers or (BASE,)
    baseline = _scored(folder, multirun, multirun.plan.baseline.name)
    if baseline is None:
        return []
    found: list[dict[str, Any]] = []
    common: list[list[str]] = []
    unlike: list[str] = []
    for point in multirun.candidates:
        candidate = _scored(folder, multirun, point.name)
        if candidate is None:
            continue
        try:
            rows = significance.compare_runs(baseline[0], candidate[0], scorers)
        except UserError as error:
            unlike.append(f"{point.name}: {error}.")
            continue
        for row in rows:
            here = pl.col("task") == row["task"]
            moved = flips.flips(baseline[0].filter(here), candidate[0].filter(here), row["scorer"])
            counts = {change: moved.filter(pl.col("change") == change).height for change in ("lost", "gained", "moved")}
            found.append({**row, **counts, "point": point.name})
            if baseline[1] is None:
                continue
            known = flips.features(baseline[1].filter(here), row["scorer"])
            where = [point.name, row["task"], row["scorer"]]
            common += [[*where, *_shared_cells(one)] for one in flips.shared(moved, known)]
    found = significance.corrected(found) if found else []
    return [table for table in (_flip_table(found, unlike), _common_table(common)) if table.rows]


def _flip_table(found: Sequence[Mapping[str, Any]], unlike: Sequence[str]) -> Table:
    rows = [
        [row["point"], row["task"], row["scorer"], text.points(row["effect"]), between(row), text.count(row["lost"]),
         text.count(row["gained"]), text.count(row["moved"]), p_value(row["p_value"]), p_value(row["p_holm"]),
         text.count(row["n"])]
        for row in found
    ]  # fmt: skip
    return Table(
        ("Point", "task", "scorer", "against the baseline", "95% interval", "lost", "gained", "moved", "p", "p, Holm",
         "n"), rows, "lllrrrrrrrr", caption="Answers that changed",
        note=" ".join([how(found), "Moved: wrong before and after, with another option.", *unlike]),
        tones=[_tone(row) for row in found],
    )  # fmt: skip


def _common_table(rows: Sequence[Sequence[str]]) -> Table:
    return Table(
        ("Point", "task", "scorer", "what", "items that changed", "items that did not", "p, Holm"), rows, "llllwwr",
        caption="What changed answers have in common", folded=True,
        note="Medians, or the share of each value's items that changed. Permutation tests of which items changed, "
        "corrected over the features of a row's point, task and scorer.",
    )  # fmt: skip


def _shared_cells(row: Mapping[str, Any]) -> list[str]:
    title = flips.FEATURES[row["feature"]]
    if "levels" not in row:
        return [title, text.number(row["flipped"]), text.number(row["kept"]), p_value(row["p_holm"])]
    levels = sorted(row["levels"].items(), key=lambda item: (-item[1]["flipped"] / item[1]["n"], item[0]))[:6]
    shown = ", ".join(f"{value}: {level['flipped']} of {level['n']}" for value, level in levels)
    return [title, shown, text.NONE, p_value(row["p_holm"])]


def _scored(folder: Path, multirun: Multirun, point: str) -> tuple[pl.DataFrame, pl.DataFrame | None] | None:
    """A point's scored items, and its table where it was kept."""
    for record in multirun.of(point):
        own = job_folder(folder, record.job) / ARTIFACTS / "score"
        if record.state == "done" and (own / "items_scored.parquet").is_file():
            table = own / "table.parquet"
            return pl.read_parquet(own / "items_scored.parquet"), pl.read_parquet(table) if table.is_file() else None
    return None


# --- cells ----------------------------------------------------------------------------------------------------


def between(row: Mapping[str, Any]) -> str:
    """An interval in points."""
    return f"{text.points(row['low']).removesuffix(' points')} to {text.points(row['high'])}"


def p_value(p: float) -> str:
    """Two digits; what is smaller than any reader cares for says so."""
    return "< 0.0001" if p < 1e-4 else text.number(p, 2)


def _tone(row: Mapping[str, Any]) -> str:
    if row["p_holm"] >= ALPHA:
        return ""
    return "good" if row["effect"] > 0 else "bad"


def _share(found: Mapping[str, Any] | None) -> str:
    if not found:
        return text.NONE
    error = "" if found["stderr"] is None else f" ± {100 * found['stderr']:.1f}"
    return f"{text.percent(found['accuracy'])}{error} (n {found['n']})"
