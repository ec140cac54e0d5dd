"""From the user's file or hub data set to records that know where they came from.

A record is a mapping with the place it was read from (`pairs.jsonl:12`), so that a mistake in it can be named. A file
that is not what its name says (broken JSON, wrong encoding) is a `UserError` with file and line; a record that is well
formed but useless (empty, without a label) raises `Drop` in its parser and is counted, never silently lost.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oneaxis.artifacts import sha256_file
from oneaxis.config.schema import Source
from oneaxis.errors import RunError, UserError


class Drop(Exception):
    """This record is left out and counted under the reason."""


@dataclass(frozen=True)
class Record:
    """One row of input and its place."""

    where: str
    value: Mapping[str, Any]

    def text(self, *keys: str, needed: bool = True) -> str | None:
        """The string under the first of `keys` that is present; null counts as absent.

        Raises:
            UserError: none is present though `needed`, or it is not a string.
        """
        for key in keys:
            value = self.value.get(key)
            if value is None:
                continue
            if not isinstance(value, str):
                raise UserError(f"{self.where}: {key} is {_shown(value)}; allowed: a string")
            return value
        if needed:
            raise UserError(f"{self.where}: has no {' or '.join(keys)} (keys: {_shown(sorted(map(str, self.value)))}); "
                            f"allowed: a string under {' or '.join(keys)}")  # fmt: skip
        return None


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def usable(text: str) -> str:
    """`text` itself, when it can be tokenized and written.

    Raises:
        Drop: it is empty, holds a NUL, or holds half a surrogate pair (JSON can say `\\ud800`; UTF-8 cannot).
    """
    if not text.strip():
        raise Drop("empty")
    if "\0" in text:
        raise Drop("NUL character")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise Drop("invalid Unicode") from error
    return text


def read_records(source: Source, *, table: str, root: Path) -> tuple[list[Record], dict[str, Any]]:
    """All records of a `file` or `hub` source, and what the manifest says of it. Relative paths start at `root`.

    Raises:
        UserError: the file is missing, of another kind, empty or broken; the data set has no such subset or split.
        RunError: the hub cannot be reached.
    """
    if source.kind == "hub":
        return _read_hub(source, table=table)
    assert source.path is not None, "the schema gives kind=file a path"
    kinds = ".jsonl, .parquet or .txt" if table == "prose" else ".jsonl or .parquet"
    return read_file(source.path, key=f"data.{table}.source.path", root=root, kinds=kinds)


def read_file(
    given: str, *, key: str, root: Path, kinds: str = ".jsonl or .parquet"
) -> tuple[list[Record], dict[str, Any]]:
    """All records of a file of the user's, and what the manifest says of it. Relative paths start at `root`.

    Args:
        given: the path, as it stands in the settings under `key`. kinds: what `key` allows, for the error.

    Raises:
        UserError: as `read_records`.
    """
    path = _existing(given, key=key, root=root)
    origin = {"file": path.name, "sha256": sha256_file(path), "licence": "the user's own"}
    if path.suffix == ".jsonl":
        records = parse_jsonl(path.read_bytes(), path.name)
    elif path.suffix == ".parquet":
        records = _read_parquet(path)
    else:
        raise UserError(f"{key}={given}: allowed: a {kinds} file")
    if not records:
        raise UserError(f"{path.name}: holds no rows; allowed: at least one")
    return records, origin


def read_text(source: Source, *, table: str, root: Path) -> tuple[str, dict[str, Any]]:
    """The text of a `.txt` source with plain line ends, and what the manifest says of it.

    Raises:
        UserError: the file is missing, empty, or not UTF-8 text.
    """
    assert source.path is not None, "the schema gives kind=file a path"
    path = _existing(source.path, key=f"data.{table}.source.path", root=root)
    data = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    if b"\0" in data:
        line = data.count(b"\n", 0, data.index(b"\0")) + 1
        raise UserError(f"{path.name}:{line}: holds a NUL byte; allowed: UTF-8 text")
    text = "\n".join(_decode(line, f"{path.name}:{number}") for number, line in enumerate(data.split(b"\n"), 1))
    if not text.strip():
        raise UserError(f"{path.name}: holds no text; allowed: at least one paragraph")
    return text.replace("\r\n", "\n").replace("\r", "\n"), {
        "file": path.name,
        "sha256": sha256_file(path),
        "licence": "the user's own",
    }


def _existing(given: str, *, key: str, root: Path) -> Path:
    path = root / Path(given).expanduser()
    if not path.is_file():
        found = "is a folder" if path.is_dir() else "no such file"
        raise UserError(f"{key}={given}: {found}; allowed: an existing file")
    return path


def _decode(line: bytes, where: str) -> str:
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: byte {error.start + 1} is not UTF-8 ({error.reason}); allowed: UTF-8 text"
                        ) from error  # fmt: skip


def parse_jsonl(data: bytes, name: str) -> list[Record]:
    """Records of JSON lines. A byte-order mark, CRLF line ends and blank lines are allowed.

    Raises:
        UserError: `name:LINE: ...` for a line that is not a JSON object in UTF-8.
    """
    records = []
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        where = f"{name}:{number}"
        text = _decode(line, where).strip()
        if not text:
            continue
        try:
            value = json.loads(text)
        except json.JSONDecodeError as error:
            raise UserError(f"{where}: not JSON: {error.msg} at character {error.colno}; allowed: one JSON object a "
                            "line") from error  # fmt: skip
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where}: not JSON that can be read: {str(error)[:120]}") from error
        if not isinstance(value, dict):
            raise UserError(f"{where}: holds {_shown(value)}; allowed: one JSON object a line")
        records.append(Record(where, value))
    return records


def _read_parquet(path: Path) -> list[Record]:
    import polars as pl

    try:
        frame = pl.read_parquet(path)
    except (pl.exceptions.PolarsError, OSError) as error:
        raise UserError(f"{path.name}: not a parquet file: {str(error).splitlines()[0][:200]}") from error
    return [Record(f"{path.name}: row {number}", row) for number, row in enumerate(frame.iter_rows(named=True), 1)]


def _read_hub(source: Source, *, table: str) -> tuple[list[Record], dict[str, Any]]:
    """Read a split through `datasets`, pinned by commit. Data sets that need code of their own are not run."""
    import datasets
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    name = f"data.{table}.source.id={source.id}"
    try:
        data = datasets.load_dataset(source.id, name=source.subset, split=source.split, revision=source.revision)
    except (ConnectionError, OfflineModeIsEnabled, HfHubHTTPError, TimeoutError) as error:
        raise RunError(f"{name}: the hub could not be reached: {_first_line(error)}; it needs the network once: "
                       f"data.{table}.source.kind=file also works") from error  # fmt: skip
    except (datasets.exceptions.DatasetNotFoundError, FileNotFoundError) as error:
        raise UserError(f"{name}: not found at revision {source.revision}: {_first_line(error)}") from error
    except (ValueError, RuntimeError) as error:
        raise UserError(f"{name}: subset={source.subset}, split={source.split}: {_first_line(error)}") from error
    records = [Record(f"{source.id}[{source.split}] row {number}", row) for number, row in enumerate(data, 1)]
    if not records:
        raise UserError(f"{name}: split {source.split} holds no rows; allowed: at least one")
    origin = {"hub": source.id, "revision": source.revision, "subset": source.subset, "split": source.split,
              "licence": data.info.license or "see the data set's card"}  # fmt: skip
    return records, origin


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
