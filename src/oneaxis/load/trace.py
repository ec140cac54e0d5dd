"""A trace of the user's: moments and lengths of requests that somebody once served, from a file to a table.

Three layouts, told apart by their names: Mooncake's JSONL (`timestamp` in ms, `input_length`, `output_length`), Azure's
CSV (`TIMESTAMP` as a date and time, `ContextTokens`, `GeneratedTokens`) and BurstGPT's CSV (`Timestamp` in s,
`Request tokens`, `Response tokens`). Other columns are left alone; Mooncake's `hash_ids` too: prompts are unique here.
"""

import csv
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import polars as pl

from oneaxis.config.schema import HEAD_TOKENS, MAX_TOKENS
from oneaxis.errors import UserError

TRACE_SCHEMA = pl.Schema(
    {"line": pl.Int64(), "time_s": pl.Float64(), "prompt_tokens": pl.Int64(), "output_tokens": pl.Int64()}
)
"""One row per request, in the order of time; `time_s` counts from the first request, `line` is its line in the file."""


@dataclass(frozen=True)
class Layout:
    """Where a kind of trace has what is needed."""

    moment: str
    prompt: str
    output: str
    seconds: Callable[[Any], float]


def _date_s(value: Any) -> float:
    moment = datetime.fromisoformat(str(value).strip())
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


LAYOUTS = (
    Layout("timestamp", "input_length", "output_length", lambda value: float(value) / 1000),
    Layout("TIMESTAMP", "ContextTokens", "GeneratedTokens", _date_s),
    Layout("Timestamp", "Request tokens", "Response tokens", float),
)


def read_trace(given: str, root: Path) -> pl.DataFrame:
    """A trace file as `TRACE_SCHEMA`. A path that is not absolute counts from `root`.

    Raises:
        UserError: naming the file and the line that cannot be used, and what is allowed.
    """
    path, where = root / Path(given).expanduser(), f"load.trace={given}"
    rows = []
    for line, row in _rows(path, where):
        layout = next((one for one in LAYOUTS if {one.moment, one.prompt, one.output} <= row.keys()), None)
        if layout is None:
            allowed = "; ".join(f"{one.moment}, {one.prompt}, {one.output}" for one in LAYOUTS)
            raise UserError(f"{where}: line {line} has {', '.join(map(str, row))[:200]}; allowed: {allowed}")
        try:
            time_s = layout.seconds(row[layout.moment])
            if not math.isfinite(time_s):
                raise ValueError
        except (ValueError, TypeError, OverflowError):
            raise UserError(
                f"{where}: line {line}: {layout.moment} is {_shown(row[layout.moment])}; allowed: a time"
            ) from None
        prompt, output = (
            _tokens(row[name], f"{where}: line {line}: {name}", least)
            for name, least in ((layout.prompt, HEAD_TOKENS), (layout.output, 1))
        )
        rows.append((line, time_s, prompt, output))
    if not rows:
        raise UserError(f"{where}: holds no request; allowed: one or more")
    table = pl.DataFrame(rows, schema=TRACE_SCHEMA, orient="row").sort("time_s", maintain_order=True)
    return table.with_columns(pl.col("time_s") - pl.col("time_s").min())


def _tokens(value: Any, where: str, least: int) -> int:
    try:
        number = float(value)
        if not number.is_integer() or not least <= number <= MAX_TOKENS:
            raise ValueError
    except (ValueError, TypeError, OverflowError):
        raise UserError(f"{where} is {_shown(value)}; allowed: a whole number from {least} to {MAX_TOKENS}") from None
    return int(number)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _rows(path: Path, where: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Line numbers from 1 and rows; a file that begins with `{` is JSONL, another one CSV with a head."""
    if path.is_dir():
        raise UserError(f"{where}: is a folder; allowed: a JSONL or CSV file")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise UserError(f"{where}: cannot be read as text ({error}); allowed: JSONL or CSV") from error
    if text.lstrip().startswith("{"):
        for line, content in enumerate(text.splitlines(), start=1):
            if content.strip():
                try:
                    row = json.loads(content)
                except (ValueError, RecursionError) as error:
                    raise UserError(
                        f"{where}: line {line} is not JSON ({error}); allowed: one object a line"
                    ) from error
                if not isinstance(row, dict):
                    raise UserError(f"{where}: line {line} is {type(row).__name__}; allowed: one object a line")
                yield line, row
        return
    reader = csv.DictReader(text.splitlines(), skipinitialspace=True)
    while True:
        try:
            row = next(reader, None)
        except csv.Error as error:
            line = reader.reader.line_num
            raise UserError(f"{where}: line {line} is not CSV ({error}); allowed: one request a line") from error
        if row is None:
            return
        yield reader.line_num, {name: value for name, value in row.items() if name is not None}
