"""lm-eval's output as a run that a verdict reads: `samples_<task>_<date>.jsonl`, and the `results_<date>.json` beside.

Of each task the newest file is taken. Its samples become the rows of `items_scored.parquet`: an item is known by
lm-eval's hash of its document, so that two runs are paired by what they asked and not by its order. `acc`, `acc_norm`
and `acc_bytes` are right or wrong as lm-eval says; one that a task did not ask for is computed from the logged
log-probabilities, and so is `pmi` (lm-eval's `acc_mutual_info`, which stops with an error where an item has several
right answers). A task that lm-eval scored by a rule of its own has only what it logged.

What a run was: the model with its arguments, few-shot examples, chat template and prompts, are settings like ours, in
sections `model` and `score`. Without `results_*.json` nobody knows them, and that is said.
"""

import ast
import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import polars as pl

from oneaxis.artifacts import ARTIFACTS, read_json, write_json, write_manifest
from oneaxis.config.schema import Claim
from oneaxis.errors import UserError
from oneaxis.judge.records import Record, find_records
from oneaxis.sources.records import Record as Line
from oneaxis.sources.records import parse_jsonl

SAMPLES = re.compile(r"samples_(?P<task>.+)_(?P<date>\d{4}-\d{2}-\d{2}T\d{2}-\d{2}-\d{2}(\.\d+)?)\.jsonl")
SCORERS = ("acc", "acc_norm", "acc_bytes", "pmi")
LOGGED = {"acc": "acc", "acc_norm": "acc_norm", "acc_bytes": "acc_bytes", "pmi": "acc_mutual_info"}
HEADLINES = ("acc_bytes", "acc_norm", "acc")
"""What is compared where nothing is claimed: the first of them that both runs have, per task."""
NO_AXES = ("device", "batch_size", "max_batch_size")
"""Arguments of lm-eval's models that say how a score is computed and not of what; they count as conditions."""
TOLD = ("config", "n-shot", "versions", "lm_eval_version", "transformers_version", "chat_template_sha",
        "system_instruction_sha", "fewshot_as_multiturn")  # fmt: skip
"""What is taken of a results_*.json; its scores are computed from the samples."""
ITEM_SCHEMA: dict[str, pl.DataType | type[pl.DataType]] = {
    "task": pl.String,
    "item_id": pl.String,
    "topic": pl.String,
    "answers": pl.List(pl.Int64),  # right options; null where the log does not say
    **{f"{name}_predicted": pl.Int64 for name in SCORERS},
    **{f"{name}_correct": pl.Boolean for name in SCORERS},
}


@dataclass(frozen=True)
class Output:
    """Of a run of lm-eval the newest samples of each task."""

    path: Path
    files: Mapping[str, Path]
    """Task -> its samples."""
    older: int
    """Files left aside, since a newer one is there."""


@dataclass(frozen=True)
class Sample:
    """One line of a file of samples."""

    line: Line
    texts: tuple[str, ...]
    """The continuations as they follow the prompt."""
    logprobs: tuple[float, ...]
    """After the question."""
    unconditional: tuple[float, ...]
    """After no prompt; empty where it was not asked."""
    answers: tuple[int, ...] | None
    logged: Mapping[str, bool | None]
    """Scorer -> right or wrong; None: not logged, or not as right or wrong."""


# --- which files ----------------------------------------------------------------------------------------------------


def is_output(path: Path) -> bool:
    """Whether this is a file of samples, or a folder with some in it or in its folders (one a model)."""
    return bool(_found(path))


def _found(path: Path) -> list[Path]:
    if path.is_file():
        return [path] if SAMPLES.fullmatch(path.name) else []
    if not path.is_dir() or (path / ARTIFACTS).is_dir():
        return []
    files = [*path.glob("samples_*.jsonl"), *path.glob("*/samples_*.jsonl")]
    return sorted(file for file in files if SAMPLES.fullmatch(file.name))


def find_output(path: Path) -> Output:
    """The files of one run.

    Raises:
        UserError: for a folder that holds the output of several models.
    """
    files: dict[str, list[tuple[str, Path]]] = {}
    found = _found(path)
    folders = sorted({file.parent for file in found})
    if len(folders) > 1:
        raise UserError(f"{path}: holds samples of {len(folders)} models; allowed: one of "
                        f"{', '.join(str(folder) for folder in folders)}")  # fmt: skip
    for file in found:
        match = SAMPLES.fullmatch(file.name)
        assert match
        files.setdefault(match["task"], []).append((match["date"], file))
    newest = {task: max(own)[1] for task, own in sorted(files.items())}
    return Output(path, newest, len(found) - len(newest))


# --- samples to items -----------------------------------------------------------------------------------------------


def read_items(file: Path, task: str) -> pl.DataFrame:
    """The items of one file of samples (`ITEM_SCHEMA`).

    Raises:
        UserError: `file:line` for a line that is none of lm-eval's multiple choice, or a file that holds none.
    """
    samples = [_sample(line) for line in parse_jsonl(file.read_bytes(), file.name)]
    if not samples:
        raise UserError(f"{file}: holds no samples; allowed: what lm-eval --log_samples writes")
    filters = {str(sample.line.value.get("filter", "none")) for sample in samples}
    if len(filters) > 1:
        raise UserError(f"{file}: its samples passed {len(filters)} filters ({', '.join(sorted(filters))}); allowed: "
                        "one, as multiple choice has")  # fmt: skip
    # A task with a rule of its own (process_results) would not be understood by what is computed here.
    own_rule = any(
        sample.logged["acc"] is None or (sample.answers is not None and _right(sample, "acc") != sample.logged["acc"])
        for sample in samples
        if sample.line.value.get("acc") is not None
    )
    seen: Counter[str] = Counter()
    rows = []
    for sample in samples:
        value = sample.line.value
        known = str(value.get("doc_hash") or f"doc {value.get('doc_id')}")[:16]
        seen[known] += 1
        doc: Any = value.get("doc") if isinstance(value.get("doc"), dict) else {}
        topic = next((doc[key] for key in ("topic", "subject", "category") if isinstance(doc.get(key), str)), None)
        chosen = {name: None if own_rule else _chosen(sample, name) for name in SCORERS}
        right = {}
        for name in SCORERS:
            # lm-eval's `acc_mutual_info` knows one right answer only.
            logged = sample.logged[name] if own_rule or name != "pmi" else None
            right[name] = logged if own_rule or logged is not None else _right(sample, name)
        rows.append({
            "task": task, "item_id": known if seen[known] == 1 else f"{known}#{seen[known]}", "topic": topic or None,
            "answers": None if sample.answers is None else list(sample.answers),
            **{f"{name}_predicted": chosen[name] for name in SCORERS},
            **{f"{name}_correct": right[name] for name in SCORERS},
        })  # fmt: skip
    items = pl.DataFrame(rows, schema=ITEM_SCHEMA)
    if not any(items[f"{name}_correct"].count() for name in SCORERS):
        raise UserError(f"{file}: no sample says right or wrong; allowed: a task with acc, acc_norm or acc_bytes")
    return items


def _sample(line: Line) -> Sample:
    """One line, checked."""
    given, answered = line.value.get("arguments"), line.value.get("filtered_resps")
    if not isinstance(given, dict) or not isinstance(answered, list) or len(given) != len(answered):
        raise UserError(f"{line.where}: has no arguments with as many filtered_resps; allowed: what lm-eval "
                        "--log_samples writes of a multiple_choice task")  # fmt: skip
    try:
        requests = [(str(each["arg_0"]), str(each["arg_1"])) for each in given.values()]
        logprobs = [float(one[0]) for one in answered]
    except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
        raise UserError(f"{line.where}: its answers are no log-probabilities ({str(answered)[:60]}); allowed: samples "
                        "of a multiple_choice task") from error  # fmt: skip
    if len(requests) < 2 or any(math.isnan(value) for value in logprobs):
        fault = f"has {len(requests)} options" if len(requests) < 2 else "has a log-probability of NaN"
        raise UserError(f"{line.where}: {fault}; allowed: two options or more, each with a number")
    num = len(requests)
    half = num // 2
    doubled = num % 2 == 0 and requests[0][0] != "" and all(context == "" for context, _ in requests[half:])
    texts = tuple(text for _, text in requests[: half if doubled else num])
    logged = {scorer: _flag(line.value.get(name)) for scorer, name in LOGGED.items()}
    unconditional = tuple(logprobs[half:]) if doubled else ()
    answers = _answers(str(line.value.get("target")), texts)
    return Sample(line, texts, tuple(logprobs[: len(texts)]), unconditional, answers, logged)


def _flag(value: Any) -> bool | None:
    """Right or wrong, where a logged metric is either."""
    return bool(value) if value in (0, 1) else None


def _answers(target: str, texts: Sequence[str]) -> tuple[int, ...] | None:
    """The right options that a logged target names; None where it does not say (the options stand in the prompts)."""
    if len(set(texts)) < len(texts):
        return None
    try:
        value = ast.literal_eval(target)
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        value = target
    named = [place for place, text in enumerate(texts) if text.strip() == str(value).strip()]
    if isinstance(value, str):
        return (named[0],) if len(named) == 1 else None
    places = value if isinstance(value, list) else [value]
    if not places or any(type(place) is not int or not 0 <= place < len(texts) for place in places):
        return None
    return tuple(sorted(places))


def _chosen(sample: Sample, scorer: str) -> int | None:
    """The option that a scorer chooses; None where it was not asked, or the options stand in the prompts."""
    if sample.answers is None or (scorer == "pmi" and not sample.unconditional):
        return None
    # lm-eval puts one space between prompt and option, unless the task says otherwise, and counts it for neither.
    delimited = all(text[:1] == " " for text in sample.texts)
    options = [text[1:] if delimited else text for text in sample.texts]
    if not all(options):
        return None
    divisor = {
        "acc": [1] * len(options),
        "acc_norm": [len(text) for text in options],
        "acc_bytes": [len(text.encode("utf-8", "surrogatepass")) for text in options],
        "pmi": [1] * len(options),
    }[scorer]
    prior = sample.unconditional if scorer == "pmi" else [0.0] * len(options)
    scores = [(one - less) / by for one, less, by in zip(sample.logprobs, prior, divisor, strict=True)]
    return scores.index(max(scores))


def _right(sample: Sample, scorer: str) -> bool | None:
    chosen = _chosen(sample, scorer)
    return None if chosen is None or sample.answers is None else chosen in sample.answers


# --- a run as a verdict reads it --------------------------------------------------------------------------------------


def read_arms(baseline: Path, candidate: Path, scratch: Path) -> dict[str, list[Record]]:
    """Two outputs of lm-eval as the arms of a comparison.

    Args:
        scratch: an empty folder, which must live as long as the records.

    Raises:
        UserError: when only one of the two is lm-eval's, for a broken file, or when no task is in both.
    """
    paths = {"baseline": baseline, "candidate": candidate}
    outputs = {side: find_output(path) for side, path in paths.items() if is_output(path)}
    if len(outputs) < 2:
        other = next(path for side, path in paths.items() if side not in outputs)
        raise UserError(f"{other}: holds no samples_*.jsonl of lm-eval, as the other does; allowed: two of lm-eval; "
                        f"or `python -m oneaxis.score.export {other}/artifacts/score OUT` and its OUT")  # fmt: skip
    shared = sorted(outputs["baseline"].files.keys() & outputs["candidate"].files.keys())
    if not shared:
        told = " and ".join(", ".join(output.files) for output in outputs.values())
        raise UserError(f"{baseline} and {candidate}: no task is in both ({told}); allowed: runs of the same tasks")
    known = {side: found for side, output in outputs.items() if (found := _settings(output, shared))}
    if len(known) < 2:
        known = {side: {"model": {"output": str(output.path)}, "score": {}} for side, output in outputs.items()}
    elif known["baseline"]["score"] == known["candidate"]["score"]:
        # Few-shot examples and chat templates change the prompts and have a name; other prompts are an axis themselves.
        for side, prompts in _prompts(outputs["baseline"], outputs["candidate"], shared).items():
            known[side]["score"]["prompts"] = prompts
    return {side: [_record(output, shared, known[side], scratch / side)] for side, output in outputs.items()}


def _prompts(baseline: Output, candidate: Output, tasks: Sequence[str]) -> dict[str, str]:
    """A digest of the prompts of both arms, over the documents that both were asked."""
    found: dict[str, list[str]] = {"baseline": [], "candidate": []}
    for task in tasks:
        arms = []
        for output in (baseline, candidate):
            lines = parse_jsonl(output.files[task].read_bytes(), output.files[task].name)
            arms.append({str(line.value.get("doc_hash")): str(line.value.get("prompt_hash")) for line in lines})
        for document in sorted(arms[0].keys() & arms[1].keys()):
            for side, arm in zip(found, arms, strict=True):
                found[side].append(f"{task} {document} {arm[document]}")
    return {side: hashlib.sha256("\n".join(own).encode()).hexdigest()[:16] for side, own in found.items()}


def notes(outputs: Sequence[Path]) -> list[str]:
    """What is to be kept in mind of the files themselves."""
    said = []
    for output in map(find_output, outputs):
        if output.older:
            said.append(f"{output.path}: {output.older} older files of samples are left aside")
        if not all(_results(file) for file in output.files.values()):
            said.append(
                f"{output.path}: no results_*.json beside its samples: what differs between the runs is unknown"
            )
    return said


def headline_claims(arms: Mapping[str, Sequence[Record]]) -> list[Claim]:
    """Of each task the first of `HEADLINES` that both arms have, without a bar."""
    shared = set.intersection(*(set(arm[0].results.metrics) for arm in arms.values()))
    tasks = sorted({name.split("/")[1] for name in shared})
    chosen = [next(f"score/{task}/{name}" for name in (*HEADLINES, "pmi") if f"score/{task}/{name}" in shared)
              for task in tasks]  # fmt: skip
    return [Claim(metric=name, better="higher", expected=None, bar=0.0) for name in chosen]


def _results(file: Path) -> Mapping[str, Any] | None:
    """What lm-eval says of the run that a file of samples belongs to."""
    match = SAMPLES.fullmatch(file.name)
    assert match
    path = file.parent / f"results_{match['date']}.json"
    if not path.is_file():
        return None
    found = read_json(path)
    if not isinstance(found, dict) or not isinstance(found.get("config"), dict):
        raise UserError(f"{path}: has no config; allowed: what lm-eval writes")
    if not isinstance(found.get("n-shot", {}), dict):
        raise UserError(f"{path}: n-shot is {str(found['n-shot'])[:40]}; allowed: examples by task")
    told = {key: found[key] for key in TOLD if key in found}
    try:
        json.dumps(told, allow_nan=False)
    except ValueError as error:
        raise UserError(f"{path}: holds NaN or Infinity; allowed: finite numbers in {', '.join(TOLD)}") from error
    return told


def _settings(output: Output, tasks: Sequence[str]) -> dict[str, Any] | None:
    """What decided the scores, as sections `model` and `score`; None where a task's results are not there."""
    models, score = [], {}
    shots = {}
    for task in tasks:
        found = _results(output.files[task])
        if found is None:
            return None
        arguments = {key: value for key, value in _arguments(found["config"]).items() if key not in NO_AXES}
        models.append({"model": found["config"].get("model"), **arguments})
        shots[task] = found.get("n-shot", {}).get(task)
        for key in ("chat_template_sha", "system_instruction_sha", "fewshot_as_multiturn"):
            score[key] = found.get(key)
    if any(model != models[0] for model in models):
        raise UserError(
            f"{output.path}: its tasks were run with different models or arguments; allowed: one run's files"
        )
    score["num_fewshot"] = _one(shots)
    return {"model": models[0], "score": score}


def _arguments(config: Mapping[str, Any]) -> dict[str, Any]:
    """`model_args`, which lm-eval keeps as it was given: a mapping, or `key=value,key=value`."""
    given = config.get("model_args") or {}
    if isinstance(given, dict):
        return {str(key): value for key, value in given.items()}
    pairs = [part.partition("=") for part in str(given).split(",") if part]
    return {key.strip(): value.strip() for key, _, value in pairs}


def _one(by_task: Mapping[str, Any]) -> Any:
    """A setting that is the same for every task, or each task's own in one string: it is one setting either way."""
    values = list(by_task.values())
    if all(value == values[0] for value in values):
        return values[0]
    return ", ".join(f"{task}: {value}" for task, value in by_task.items())


def _record(output: Output, tasks: Sequence[str], settings: Mapping[str, Any], folder: Path) -> Record:
    """The artifacts that stage score would have written of it, read as a record."""
    items = pl.concat([read_items(output.files[task], task) for task in tasks])
    metrics, counts = {}, {}
    for task in tasks:
        own = items.filter(pl.col("task") == task)
        counts[task] = {"n": own.height}
        for name in SCORERS:
            right = own[f"{name}_correct"].drop_nulls()
            if len(right):
                metrics[f"score/{task}/{name}"] = float(right.sum()) / len(right)
    score = folder / "score"
    score.mkdir(parents=True)
    items.write_parquet(score / "items_scored.parquet")
    write_json(score / "summary.json", {"tasks": counts})
    write_manifest(score, stage="score", params=settings, notes={"lm_eval": True})
    write_json(folder / "score.metrics.json", metrics)
    write_json(folder / "score.provenance.json", _provenance(output, tasks))
    (record,) = find_records(folder)
    return replace(record, name=str(output.path))


def _provenance(output: Output, tasks: Sequence[str]) -> dict[str, Any]:
    """Versions and conditions that lm-eval recorded; those of its first task."""
    found = _results(output.files[tasks[0]])
    if found is None:
        return {}
    versions = {key: found.get(key) for key in ("lm_eval_version", "transformers_version")}
    config = found["config"]
    facts = {key: config.get(key) for key in ("model_dtype", "batch_size", "device")}
    return {"versions": {**versions, **facts, "task_versions": found.get("versions")}}
