"""TRL's trainers on preference pairs: from a loaded model and pairs to the trained model and its log."""

import json
from pathlib import Path
from typing import Any

import datasets
import polars as pl
from transformers import PrinterCallback
from trl import DPOTrainer, SFTTrainer

from oneaxis.config.schema import TrainDpo
from oneaxis.errors import UserError
from oneaxis.preference.dpo_config import one_line
from oneaxis.preference.pairs import Sequence
from oneaxis.preference.watch import OnLog, SftWatch, Watch


def conversational(pairs: pl.DataFrame) -> bool:
    """Whether the pairs, all of one kind, are messages and no text."""
    return bool(pairs["conversational"][0])


def trl_dataset(pairs: pl.DataFrame, folder: Path) -> datasets.Dataset:
    """Pairs in TRL's preference format: text, or messages. On disk under `folder`, where TRL then caches."""
    read = json.loads if conversational(pairs) else str
    rows = [{key: read(row[key]) for key in ("prompt", "chosen", "rejected")} for row in pairs.iter_rows(named=True)]
    datasets.disable_progress_bars()
    datasets.Dataset.from_list(rows).save_to_disk(folder)
    return datasets.load_from_disk(folder)


def fit_sft(model: Any, tokenizer: Any, pairs: pl.DataFrame, arguments: Any, scratch: Path) -> pl.DataFrame:
    """Fine-tune `model` in place on prompt + chosen of `pairs`; return the log, one row per logging step.

    Raises:
        RunError: the loss is not finite.
    """
    watch = SftWatch()
    chosen = trl_dataset(pairs, scratch / "chosen").remove_columns("rejected").rename_column("chosen", "completion")
    try:
        trainer = SFTTrainer(
            model=model, args=arguments, train_dataset=chosen, processing_class=tokenizer, callbacks=[watch]
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    finally:
        watch.bar.close()
    model.eval()
    return watch.table()


def fit(
    model: Any,
    tokenizer: Any,
    pairs: pl.DataFrame,
    escapes: list[Sequence],
    arguments: Any,
    config: TrainDpo,
    scratch: Path,
    on_log: OnLog | None,
) -> pl.DataFrame:
    """Train `model` in place; return the log, one row per logging step.

    Raises:
        UserError: TRL refuses a value of `train.dpo_args`. RunError: the loss is not finite.
    """
    watch = Watch(escapes, on_log)
    try:
        trainer = DPOTrainer(
            model=model,
            args=arguments,
            train_dataset=trl_dataset(pairs, scratch / "pairs"),
            processing_class=tokenizer,
            callbacks=[watch],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    except (ValueError, NotImplementedError) as error:
        # A loss that needs another value, or an unknown one: TRL says so only here.
        if not config.dpo_args:
            raise
        raise UserError(f"params.yaml: train.dpo_args={config.dpo_args}: TRL says: {one_line(error)}") from error
    finally:
        watch.bar.close()
    model.eval()
    return watch.table()
