"""The table of a scoring run as lm-eval has it: a task that asks the same, and the samples that it would log.

    python -m oneaxis.score.export artifacts/score OUT
    lm_eval run --model hf --model_args pretrained=CHECKPOINT,dtype=float32 --include_path OUT \\
        --tasks oneaxis_piqa --log_samples --output_path THEIRS
    oneaxis judge OUT THEIRS

Of each task `oneaxis_<task>.yaml` and its questions `oneaxis_<task>.jsonl` go to OUT, and
`samples_oneaxis_<task>_<date>.jsonl` with our log-probabilities. The prompts are those that the model read, so that no
template, few-shot example or chat setting of lm-eval's is to be added. What lm-eval logs and the table does not know,
whether an option was the greedy one, is "None".
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import yaml

from oneaxis.artifacts import read_json
from oneaxis.errors import UserError
from oneaxis.score.contexts import DELIMITER

PREFIX = "oneaxis_"
"""lm-eval has tasks of the same names, with prompts of its own."""
METRICS = ("acc", "acc_norm", "acc_bytes")
NO_DATE = "1970-01-01T00-00-00.000000"

Document = dict[str, Any]


def documents(table: pl.DataFrame) -> dict[str, list[Document]]:
    """Per task what its items ask, in the order of the table.

    A document has the keys item_id, prompt, choices (without the delimiter), answers, topic.
    """
    asked: dict[str, list[Document]] = {}
    for rows in _items(table, "question"):
        first = rows.row(0, named=True)
        asked.setdefault(first["task"], []).append(
            {
                "item_id": first["item_id"],
                "prompt": first["prompt"],
                "choices": [text[len(text) - chars :] for text, chars in rows["continuation", "chars"].iter_rows()],
                "answers": first["answers"],
                "topic": first["topic"] or "",
            }
        )
    return asked


def write_tasks(table: pl.DataFrame, folder: Path) -> list[str]:
    """Write the tasks for `lm_eval --include_path FOLDER`, and return their names.

    Args:
        table: of a run.
        folder: its absolute path goes into the tasks.
    """
    delimiter = _delimiter(table)
    names = []
    for task, asked in documents(table).items():
        name = PREFIX + task
        data = (folder / f"{name}.jsonl").resolve()
        data.write_text("".join(map(_line, asked)), encoding="utf-8")
        several = any(len(document["answers"]) > 1 for document in asked)
        settings = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(data)}},
            "test_split": "test",
            "output_type": "multiple_choice",
            "doc_to_text": "prompt",
            "doc_to_choice": "choices",
            "doc_to_target": "answers" if several else "{{answers[0]}}",
            "target_delimiter": delimiter,
            "metric_list": [
                {"metric": metric, "aggregation": "mean", "higher_is_better": True} for metric in METRICS
            ],
            "metadata": {"version": 1},
        }  # fmt: skip
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
        names.append(name)
    return names


def write_samples(table: pl.DataFrame, folder: Path, date: str = NO_DATE) -> list[Path]:
    """Write `samples_oneaxis_<task>_<date>.jsonl` of every task, and return the files.

    `acc_mutual_info` is there, with its requests after no prompt, where every item of the task was scored without one.
    (It is right where any of several answers is chosen; lm-eval 0.4.13 never counts those.)

    Args:
        table: of a run.
        folder: where to.
        date: of the run, as lm-eval has it in file names: 2026-01-02T03-04-05.000000.
    """
    asked = documents(table)
    several = {task: any(len(document["answers"]) > 1 for document in own) for task, own in asked.items()}
    without = {(rows[0, "task"], rows[0, "item_id"]): rows for rows in _items(table, "bos")}
    lines: dict[str, list[str]] = {}
    for rows in _items(table, "question"):
        task = rows[0, "task"]
        place = len(lines.setdefault(task, []))
        document = asked[task][place]
        everywhere = all((task, other["item_id"]) in without for other in asked[task])
        unconditional = without[task, document["item_id"]] if everywhere else None
        lines[task].append(_line(_sample(place, document, several[task], rows, unconditional)))
    files = []
    for task, own in lines.items():
        files.append(folder / f"samples_{PREFIX}{task}_{date}.jsonl")
        files[-1].write_text("".join(own), encoding="utf-8")
    return files


def _sample(
    place: int, document: Document, several: bool, rows: pl.DataFrame, unconditional: pl.DataFrame | None
) -> dict[str, Any]:
    """What lm-eval logs of one item."""
    answers = document["answers"]
    target = str(answers if several else answers[0])
    scores = rows["logprob"].to_numpy()
    chosen = {
        "acc": scores,
        "acc_norm": scores / rows["chars"].to_numpy(),
        "acc_bytes": scores / rows["bytes"].to_numpy(),
    }
    requests = list(rows["prompt", "continuation", "logprob"].iter_rows())
    if unconditional is not None:
        chosen["acc_mutual_info"] = scores - unconditional["logprob"].to_numpy()
        requests += unconditional["prompt", "continuation", "logprob"].iter_rows()
    answered = [[str(logprob), "None"] for _, _, logprob in requests]
    return {
        "doc_id": place,
        "doc": document,
        "target": target,
        "arguments": {
            f"gen_args_{number}": {"arg_0": prompt, "arg_1": continuation}
            for number, (prompt, continuation, _) in enumerate(requests)
        },
        "resps": [[answer] for answer in answered],
        "filtered_resps": answered,
        "filter": "none",
        "metrics": list(chosen),
        "doc_hash": _hash(json.dumps(document, indent=2, ensure_ascii=False)),
        "prompt_hash": _hash(requests[0][0]),
        "target_hash": _hash(target),
        **{name: float(int(np.argmax(values)) in answers) for name, values in chosen.items()},
    }


def _items(table: pl.DataFrame, context: str) -> Iterator[pl.DataFrame]:
    """The rows of each item in one context, options in their own order."""
    own = table.filter(pl.col("context") == context)
    for rows in own.partition_by("task", "item_id", maintain_order=True):
        yield rows.sort("option")


def _delimiter(table: pl.DataFrame) -> str:
    """What stands between prompt and option: one for all of a run."""
    row = table.filter(pl.col("context") == "question").row(0, named=True)
    return DELIMITER if len(row["continuation"]) > row["chars"] else ""


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def _line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False) + "\n"


def main(words: Sequence[str] | None = None) -> int:
    """The command of the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m oneaxis.score.export", description="A scoring run for lm-eval.")
    parser.add_argument("run", type=Path, metavar="RUN", help="artifacts/score, or another folder with table.parquet")
    parser.add_argument("out", type=Path, metavar="OUT", help="a folder, made where it is missing")
    options = parser.parse_args(words)
    path = options.run / "table.parquet"
    try:
        if not path.is_file():
            raise UserError(f"{path}: missing; allowed: the folder that the stage score wrote")
        provenance = options.run.resolve().with_suffix(".provenance.json")
        started = read_json(provenance)["started_at"] if provenance.is_file() else NO_DATE
        options.out.mkdir(parents=True, exist_ok=True)
        table = pl.read_parquet(path)
        names = write_tasks(table, options.out)
        files = write_samples(table, options.out, started.partition("+")[0].replace(":", "-"))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{options.out}: tasks {', '.join(names)}, and {len(files)} files of samples")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
