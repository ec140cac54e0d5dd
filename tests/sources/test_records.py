"""Records from the user's files: what is read, and that every mistake is named with its place."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from oneaxis.config.schema import Source
from oneaxis.errors import UserError
from oneaxis.sources.records import Drop, Record, parse_jsonl, read_records, read_text, usable


def file_source(path: str) -> Source:
    return Source(kind="file", path=path, id=None, revision=None, subset=None, split=None)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b'{"a": 1}\n{"a": \n', r"^f\.jsonl:2: not JSON"),
        (b'{"a": 1}\r\n\r\n[1]\r\n', r"^f\.jsonl:3: holds \[1\]; allowed: one JSON object a line"),
        (b'{"a": "x\xff"}\n', r"^f\.jsonl:1: byte 9 is not UTF-8"),
        (b'{"a": "x\0"}\n', r"^f\.jsonl:1: not JSON: Invalid control character"),
        (b"[" * 200_000, r"^f\.jsonl:1: not JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", r"^f\.jsonl:1: not JSON that can be read"),
        ('{"a": 1}'.encode("utf-16"), r"^f\.jsonl:1: byte 1 is not UTF-8"),
        (b"null\n", r"^f\.jsonl:1: holds None"),
    ],
)
def test_a_broken_line_is_named(data: bytes, says: str) -> None:
    with pytest.raises(UserError, match=says) as caught:
        parse_jsonl(data, "f.jsonl")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_mark_crlf_blank_lines_and_a_missing_last_newline_are_read() -> None:
    records = parse_jsonl(b'\xef\xbb\xbf{"a": "1"}\r\n\r\n  \n{"a": "\xc3\xa9"}', "f.jsonl")
    assert [(record.where, record.value) for record in records] == [
        ("f.jsonl:1", {"a": "1"}),
        ("f.jsonl:4", {"a": "é"}),
    ]


def test_a_huge_line_is_read_whole() -> None:
    records = parse_jsonl(b'{"text": "' + b"x" * 5_000_000 + b'"}\n', "f.jsonl")
    assert len(records[0].value["text"]) == 5_000_000


def test_a_line_separator_inside_a_string_does_not_end_the_line() -> None:
    """U+2028 and form feed end a line for str.splitlines, and not for JSONL."""
    records = parse_jsonl('{"a": "x\u2028y\x85z"}\n{"a": "w"}\n'.encode(), "f.jsonl")
    assert [record.value["a"] for record in records] == ["x\u2028y\x85z", "w"]


@pytest.mark.parametrize("value", [3, True, ["x"], {"x": 1}, 1.5])
def test_a_value_that_is_no_string_is_named_with_its_key(value: Any) -> None:
    with pytest.raises(UserError, match=r"^f\.jsonl:7: text is .*; allowed: a string$"):
        Record("f.jsonl:7", {"text": value}).text("text")


def test_a_missing_key_names_those_that_would_do_and_those_that_are_there() -> None:
    with pytest.raises(UserError, match=r"^f\.jsonl:7: has no text or prompt \(keys: \['other'\]\)"):
        Record("f.jsonl:7", {"other": "x"}).text("text", "prompt")


@pytest.mark.parametrize(
    ("text", "reason"), [("", "empty"), (" \n\t", "empty"), ("a\0b", "NUL character"), ("a\ud800b", "invalid Unicode")]
)
def test_useless_text_is_dropped_with_its_reason(text: str, reason: str) -> None:
    with pytest.raises(Drop, match=f"^{reason}$"):
        usable(text)


def test_parquet_with_nested_columns_is_read(tmp_path: Path) -> None:
    rows = [{"prompt": "p", "chosen": [{"role": "assistant", "content": "c"}]}, {"prompt": None, "chosen": []}]
    pl.DataFrame(rows).write_parquet(tmp_path / "f.parquet")
    records, origin = read_records(file_source("f.parquet"), table="pairs", root=tmp_path)
    assert [record.value for record in records] == rows
    assert records[1].where == "f.parquet: row 2"
    assert origin["file"] == "f.parquet"


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("f.jsonl", None, r"^data\.pairs\.source\.path=f\.jsonl: no such file"),
        ("f.jsonl", b"", r"^f\.jsonl: holds no rows"),
        ("f.jsonl", b"\xef\xbb\xbf\r\n\n", r"^f\.jsonl: holds no rows"),
        ("f.parquet", b"PAR1 no", r"^f\.parquet: not a parquet file"),
        ("f.parquet", b"", r"^f\.parquet: not a parquet file"),
        ("f.csv", b"a,b\n", r"^data\.pairs\.source\.path=f\.csv: allowed: a \.jsonl or \.parquet file"),
    ],
)
def test_a_file_that_is_not_what_its_name_says(tmp_path: Path, name: str, data: bytes | None, says: str) -> None:
    if data is not None:
        (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError, match=says):
        read_records(file_source(name), table="pairs", root=tmp_path)


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "f.jsonl").mkdir()
    with pytest.raises(UserError, match="is a folder"):
        read_records(file_source("f.jsonl"), table="pairs", root=tmp_path)


def test_text_with_mark_and_crlf_is_plain(tmp_path: Path) -> None:
    (tmp_path / "f.txt").write_bytes(b"\xef\xbb\xbfone\r\n\r\ntwo")
    assert read_text(file_source("f.txt"), table="prose", root=tmp_path)[0] == "one\n\ntwo"


@pytest.mark.parametrize(
    ("data", "says"),
    [(b"one\ntwo\0", r"^f\.txt:2: holds a NUL byte"), (b"one\n\ntw\xe9", r"^f\.txt:3: byte 3 is not UTF-8"),
     (b" \r\n", r"^f\.txt: holds no text")],
)  # fmt: skip
def test_text_that_is_none_is_named_with_its_line(tmp_path: Path, data: bytes, says: str) -> None:
    (tmp_path / "f.txt").write_bytes(data)
    with pytest.raises(UserError, match=says):
        read_text(file_source("f.txt"), table="prose", root=tmp_path)


HUB = """
from pathlib import Path
from oneaxis.config.schema import Source
from oneaxis.sources.records import read_records
source = Source(kind="hub", path=None, id="owner/name", revision="0123456789", subset=None, split="{split}")
try:
    records, origin = read_records(source, table="pairs", root=Path("."))
    print([(record.where, record.value) for record in records])
except Exception as error:
    print(type(error).__name__, error)
"""


def hub(folder: Path, split: str) -> str:
    """What a fresh process says of the data set owner/name with the hub out of reach."""
    done = subprocess.run([sys.executable, "-c", HUB.format(split=split)], cwd=folder, capture_output=True, text=True,
                          check=True, env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hf")}
                          )  # fmt: skip
    return done.stdout.strip()


def test_a_hub_out_of_reach_is_one_line_that_says_what_else_works(tmp_path: Path) -> None:
    said = hub(tmp_path, "train")
    assert said.startswith("RunError data.pairs.source.id=owner/name: the hub could not be reached")
    assert said.endswith("data.pairs.source.kind=file also works")
    assert "\n" not in said


def test_a_data_set_is_read_through_datasets_and_a_wrong_split_is_named(tmp_path: Path) -> None:
    """`datasets` reads a folder owner/name as it reads a repository of that name, so no hub is needed."""
    (tmp_path / "owner" / "name").mkdir(parents=True)
    (tmp_path / "owner" / "name" / "train.jsonl").write_text('{"chosen": "p a", "rejected": "p b"}\n', encoding="utf-8")
    assert hub(tmp_path, "train") == "[('owner/name[train] row 1', {'chosen': 'p a', 'rejected': 'p b'})]"
    said = hub(tmp_path, "test")
    assert said.startswith("UserError data.pairs.source.id=owner/name: subset=None, split=test: Unknown split")
