"""`oneaxis lint` as a user and a CI job run it: files, models, requests, what it prints and fixes, and mistakes."""

import ast
import json
import os
import resource
import stat
import subprocess
import sys
import textwrap
from contextlib import suppress
from typing import Any

import pytest

from oneaxis.cli import main
from oneaxis.lint import models
from oneaxis.lint.document import CannotMove, parse, reorder
from oneaxis.lint.folder import is_meant

SCHEMA = """{
  "type": "object",   "additionalProperties": false,
  "properties": {
    "label":     {"enum": ["a", "b", "unknown"]},
    "confidence": {"type": "number"},
    "inner": {
      "type": "object", "additionalProperties": false,
      "properties": {"verdict": {"type": ["boolean", "null"]}, "because, of": {"type": "null"},
        "reason": {"type": "string", "maxLength": 9}}
    },
    "reasoning": {"type": "string", "maxLength": 200}
  },
  "required": ["label"]
}
"""
SOUND = {"type": "object", "properties": {"x": {"enum": ["a", "unknown"]}}, "required": ["x"],
         "additionalProperties": False}  # fmt: skip
STRING = {"type": "string"}
YAML = """\
# an answer
type: object
properties:
  # what it is
  label:
    enum: [a, b, unknown]   # closed
    description: >
      a label,

      in two parts
  reasoning:      # first think
    type: string
    maxLength: 200
  tags:
    type: array
    maxItems: 3
    items: {type: string, maxLength: 9}
required:
- label
additionalProperties: false
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def lint(capsys, *words: str) -> tuple[int, str, str]:
    code = main(["lint", *words])
    said = capsys.readouterr()
    return code, said.out, said.err


def oneaxis(*words: str, env: dict[str, str] | None = None, stdout: Any = subprocess.PIPE):
    """As its own process, whose output is a real one."""
    return subprocess.run(
        [sys.executable, "-c", "import sys; from oneaxis.cli import main; sys.exit(main())", *words],
        stdout=stdout, stderr=subprocess.PIPE, text=True, check=False, env=os.environ | (env or {}),
    )  # fmt: skip


def findings(capsys, *words: str) -> list[dict]:
    code, out, _ = lint(capsys, *words, "--format", "json")
    found = json.loads(out)
    assert code == (1 if found else 0)
    return found


# --- what is printed -----------------------------------------------------------------------------------------


def test_clean_is_0_and_findings_are_1(tmp_path, capsys):
    (tmp_path / "sound.json").write_text(json.dumps(SOUND))
    assert lint(capsys, "sound.json") == (0, "nothing found in 1 file\n", "")
    (tmp_path / "bad.json").write_text(SCHEMA)
    code, out, _ = lint(capsys, "bad.json", "--select", "OV004")
    assert code == 1
    assert out.splitlines() == [
        "bad.json:4: OV004 [*] 'label' is written before 'reasoning', so it cannot rest on it: properties are "
        "written as declared",
        "    at /properties/label: declare 'reasoning' before 'label'",
        "bad.json:8: OV004 [*] 'verdict' is written before 'reason', so it cannot rest on it: properties are "
        "written as declared",
        "    at /properties/inner/properties/verdict: declare 'reason' before 'verdict'",
        "found 2 errors; 2 [*] fixable by --fix",
    ]  # fmt: skip


def test_json_holds_every_field(tmp_path, capsys):
    (tmp_path / "bad.json").write_text(SCHEMA)
    found = findings(capsys, "bad.json", "--select", "OV004,OV101", "--ignore", "OV1")
    assert found[0] == {
        "code": "OV004", "name": "answer-before-reasoning", "severity": "error", "file": "bad.json", "line": 4,
        "pointer": "/properties/label", "fix": "declare 'reasoning' before 'label'", "fixable": True,
        "message": "'label' is written before 'reasoning', so it cannot rest on it: properties are written as declared",
    }  # fmt: skip
    assert [each["line"] for each in found] == [4, 8]


def test_github_annotations_are_escaped(tmp_path, capsys):
    (tmp_path / "a,b:c%.json").write_text('{"type": "string", "pattern": "^a%b*$"}')
    code, out, _ = lint(capsys, "./a,b:c%.json", "--format", "github")
    assert code == 1
    assert out == (
        "::warning file=a%2Cb%3Ac%25.json,line=1,title=OV002 unbounded-string::/: the pattern '^a%25b*$' has no "
        "longest match; bound its repeats, as in {0,200} for *\n"
    )


def test_every_code_is_listed(capsys):
    code, out, _ = lint(capsys, "--list")
    assert code == 0
    assert out.splitlines()[0].split()[:3] == ["OV001", "no-way-out", "error"]


def test_folders_hold_what_looks_like_a_schema(tmp_path, capsys):
    for name, content in {
        "a/sound.json": json.dumps(SOUND), "a/bad.yaml": YAML, "package.json": '{"name": "x", "version": "1"}',
        "node_modules/x.json": SCHEMA, ".git/x.json": SCHEMA, "data.jsonl": "{}", "m.py": "raise",
        "tsconfig.json": "{ // comments\n}", "deploy.yaml": "kind: A\n---\nkind: !Ref B\nat: 2024-01-01\n1: x\n",
        "big.json": f"[{'1, ' * 250_000}1]",
    }.items():  # fmt: skip
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    assert {each["file"] for each in findings(capsys, ".")} == {"a/bad.yaml"}
    code, out, _ = lint(capsys, ".")
    assert code == 1
    assert out.splitlines()[-1] == "found 1 error; 1 [*] fixable by --fix; 4 files passed over, no schema"
    (tmp_path / "empty").mkdir()
    assert lint(capsys, "empty")[0] == 2


@pytest.mark.parametrize(("name", "content", "message"), [
    ("b.schema.json", b"{", "b.schema.json:1: not JSON"),
    ("merge.json", b'{\n<<<<<<< HEAD\n"type": "string"}', "merge.json:2: not JSON"),
    ("twice.json", b'{"version": 1, "version": 2}', "twice.json: the key 'version' stands twice"),
    ("latin.yaml", b"type: string\ndescription: \xfc", "latin.yaml: not UTF-8 at byte 26"),
    ("flow.yml", b"a: [1\n", "flow.yml:2: not YAML"),
    ("odd.schema.yaml", b"type: string\ndefault: 2024-01-01", "odd.schema.yaml: 2024-01-01 at /default is no JSON"),
    ("date.yaml", b"type: string\ndefault: 2024-01-01", "date.yaml: 2024-01-01 at /default is no JSON"),
])  # fmt: skip
def test_a_file_of_a_folder_that_cannot_be_read_is_told_of(tmp_path, capsys, name, content, message):
    (tmp_path / "bad.json").write_text(SCHEMA)
    (tmp_path / name).write_bytes(content)
    code, out, err = lint(capsys, ".", "--select", "OV004")
    assert code == 2
    assert "bad.json:4: OV004" in out
    assert out.splitlines()[-1].endswith("; 1 file not read in full")
    assert message in err
    assert len(err.splitlines()) == 1


def test_a_folder_that_cannot_be_read_is_told_of(tmp_path, capsys):
    """Its path is longer than the system takes: permissions do not keep root out."""
    (tmp_path / "bad.json").write_text(SCHEMA)
    (tmp_path / "loop.json").symlink_to("loop.json")
    inside = os.open(".", os.O_RDONLY)
    for _ in range(17):
        os.mkdir("d" * 250, dir_fd=inside)
        outside, inside = inside, os.open("d" * 250, os.O_RDONLY, dir_fd=inside)
        os.close(outside)
    os.close(inside)
    code, out, err = lint(capsys, ".", "--select", "OV004")
    assert code == 2
    assert "bad.json:4: OV004" in out
    loop, deep = err.splitlines()
    assert loop == "oneaxis: loop.json: Too many levels of symbolic links; allowed: a file that can be read"
    assert deep.endswith("d: File name too long; allowed: a folder that can be read, or its schemas by name")


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": STRING}}}}


@pytest.mark.parametrize("data", [
    {"$ref": "#/$defs/A", "$defs": {"A": {"type": "object"}}}, {"anyOf": [STRING, {"type": "null"}]}, STRING,
    {"enum": ["a", "b"]}, {"type": ["string", "null"], "x-own": 1}, {"$defs": {"a": STRING}}, TOOL, [TOOL, TOOL],
    {"$schema": "http://json-schema.org/draft-07/schema#"}, {"properties": {"a": STRING}, "required": ["a"]},
    {"name": "f", "input_schema": {"type": "object"}}, {"type": "json_schema", "json_schema": {"schema": STRING}},
    {"messages": [], "format": STRING}, {"response_format": {"type": "json_object"}}, {"tools": [TOOL]},
    {"type": "objct", "properties": {"a": {}, "b": STRING}}, {"body": {"input": "x", "frequency_penalty": 1}},
])  # fmt: skip
def test_what_is_taken_for_a_schema_in_a_folder(data):
    assert is_meant(data)


@pytest.mark.parametrize("data", [
    {}, [], True, None, "type", 1, {"type": "module"}, {"name": "p", "type": "string"}, {"items": [{"id": 1}]},
    {"items": {"id": 1}}, {"properties": {"server": {"port": 1}}}, {"title": "a", "description": "b"},
    {"type": "Feature", "properties": {"a": {"type": "x"}}, "geometry": {}}, {"name": "p", "parameters": {"lr": 0.1}},
    {"openapi": "3.1.0", "components": {"schemas": {"A": STRING}}}, [STRING, {"id": 1}], {"tools": {"ruff": {}}},
    {"prompt": "a", "completion": "b"}, {"messages": [{"role": "user", "content": "hi"}]}, {"default": [], "enum": 1},
])  # fmt: skip
def test_what_is_not(data):
    assert not is_meant(data)


def test_a_file_is_linted_once_however_often_it_is_named(tmp_path, capsys):
    (tmp_path / "bad.json").write_text(SCHEMA)
    (tmp_path / "link.json").symlink_to("bad.json")
    assert len(findings(capsys, "bad.json", ".", "./bad.json", "link.json", "--select", "OV004")) == 2


def test_names_are_escaped_in_every_format(tmp_path, capsys):
    """A newline in a name would forge a line; half a surrogate pair, or a byte that is no UTF-8, cannot be printed."""
    name = "a\n::error::b\udcff.json"
    (tmp_path / name).write_text(
        json.dumps({"type": "object", "additionalProperties": False, "properties": {"c\n::error::\ud800": STRING}})
    )
    (tmp_path / "d\n::error::e.json").write_text("{")
    for form in ("text", "github", "json"):
        code, out, err = lint(capsys, name, "d\n::error::e.json", "--format", form)
        assert code == 2
        assert not [line for line in (out + err).splitlines() if line.startswith("::error::")]
        assert len(err.splitlines()) == 1
    assert [each["file"] for each in json.loads(out)] == [name, "d\n::error::e.json"]


def test_what_the_output_cannot_show_is_escaped(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps({"type": "object", "properties": {"größe": STRING}}))
    done = oneaxis("lint", "a.json", "--select", "OV002", env={"PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stderr) == (1, "")
    assert "at /properties/gr\\xf6\\xdfe: " in done.stdout


def test_what_cannot_be_read_is_in_every_format(tmp_path, capsys):
    (tmp_path / "a.json").write_text('{"type": "object",\n "properties": {]}')
    code, out, err = lint(capsys, "a.json", "--format", "github")
    said = "a.json:2: not JSON: Expecting property name enclosed in double quotes, column 17"
    assert (code, err) == (2, f"oneaxis: {said}\n")
    assert out == f"::error file=a.json,line=2,title=not read::{said}\n"
    (each,) = json.loads(lint(capsys, "a.json", "--format", "json")[1])
    assert (each["code"], each["file"], each["line"], each["message"]) == (None, "a.json", 2, said)
    # And nothing was found in a file only if it was read.
    assert lint(capsys, "a.json")[1] == "1 file not read in full\n"


def test_a_full_output_is_said(tmp_path):
    (tmp_path / "a.json").write_text(SCHEMA)
    with open("/dev/full", "w") as full:
        done = oneaxis("lint", "a.json", "b.json", stdout=full)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "oneaxis: b.json: No such file or directory; allowed: a file that can be read",
        "oneaxis: the output cannot be written: No space left on device; allowed: a place with room for it",
    ]


@pytest.mark.parametrize(("text", "codes"), [
    (SCHEMA, ["OV004", "OV004"]), (YAML, ["OV004"]), ('{"prompt": "x", "format": {"type": "string"}}', ["OV002"]),
    ('{"prompt": "x"}\n{"prompt": "x", "format": {"type": "string"}}\n', ["OV002"]),
])  # fmt: skip
def test_standard_input(tmp_path, capsys, text, codes):
    (tmp_path / "in").write_text(text)
    before, given = os.dup(0), os.open("in", os.O_RDONLY)
    os.dup2(given, 0)
    try:
        found = findings(capsys, "-", "--select", "OV00", "--ignore", "OV007")
    finally:
        os.dup2(before, 0)
        os.close(before)
        os.close(given)
    assert [each["code"] for each in found] == codes
    assert {(each["file"], each["fixable"]) for each in found} == {("-", False)}


def test_one_bad_file_does_not_hide_the_findings_of_others(tmp_path, capsys):
    (tmp_path / "bad.json").write_text(SCHEMA)
    (tmp_path / "broken.json").write_text('{"type": "object",\n "properties": {]}')
    code, out, err = lint(capsys, "broken.json", "bad.json", "--select", "OV004")
    assert code == 2
    assert "bad.json:4: OV004" in out
    assert err == "oneaxis: broken.json:2: not JSON: Expecting property name enclosed in double quotes, column 17\n"


# --- fixing --------------------------------------------------------------------------------------------------


def test_fix_moves_text_and_nothing_else(tmp_path, capsys):
    file = tmp_path / "bad.json"
    file.write_text(SCHEMA)
    file.chmod(0o640)
    code, out, _ = lint(capsys, "bad.json", "--fix", "--select", "OV004,OV005")
    assert (code, out) == (0, "fixed 2 objects\nnothing found in 1 file\n")
    assert (
        file.read_text()
        == """{
  "type": "object",   "additionalProperties": false,
  "properties": {
    "reasoning": {"type": "string", "maxLength": 200},
    "label":     {"enum": ["a", "b", "unknown"]},
    "confidence": {"type": "number"},
    "inner": {
      "type": "object", "additionalProperties": false,
      "properties": {"reason": {"type": "string", "maxLength": 9}, "verdict": {"type": ["boolean", "null"]},
        "because, of": {"type": "null"}}
    }
  },
  "required": ["label"]
}
"""
    )
    assert json.loads(file.read_text()) == json.loads(SCHEMA)
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    once = file.stat()
    lint(capsys, "bad.json", "--fix")
    assert file.stat().st_mtime_ns == once.st_mtime_ns
    assert os.listdir(tmp_path) == ["bad.json"]


def test_fix_moves_the_lines_of_yaml_with_their_comments(tmp_path, capsys):
    file = tmp_path / "answer.yaml"
    file.write_text(YAML)
    code, out, _ = lint(capsys, "answer.yaml", "--fix")
    assert (code, out) == (0, "fixed 1 object\nnothing found in 1 file\n")
    head, label, rest = YAML.split("properties:\n")[0], *YAML.split("properties:\n")[1].split("  reasoning:")
    reasoning, tags = rest.split("  tags:")
    assert file.read_text() == f"{head}properties:\n  reasoning:{reasoning}{label}  tags:{tags}"
    before = file.read_text()
    lint(capsys, "answer.yaml", "--fix")
    assert file.read_text() == before


@pytest.mark.parametrize(("text", "reason"), [
    ("{type: object, properties: {label: {enum: [a, unknown]}, reasoning: {type: string, maxLength: 9}}}",
     "/properties is in flow style, {...}"),
    ("type: object\nproperties:\n  label: &x\n    type: [boolean, 'null']\n  reason: {type: string, maxLength: 9}\n"
     "  other: *x\n  other_reason: {type: string, maxLength: 9}\n  reasons: *x\n", ""),
    ("type: object\nproperties:\n  verdict:\n    enum: &x [a, unknown]\n"
     "  reason: {type: string, maxLength: 9, examples: *x}\n",
     "the lines under /properties mean something else in another order (an alias before its anchor, "),
    ("type: object\nproperties:\n  ? label\n  : enum: [a, unknown]\n  reasoning: {type: string, maxLength: 9}\n",
     "not each key under /properties begins a line of its own (`? key`, "),
    ("type: object\nproperties:\n  label: {enum: [a, unknown]}\n  reasoning:\n    type: string\n    maxLength: 9\n"
     "    description: |+\n      x\n\n\nadditionalProperties: false\n",
     "the lines under /properties mean something else in another order ("),
])  # fmt: skip
def test_what_cannot_be_moved_is_said_and_left_alone(tmp_path, capsys, text, reason):
    """The findings are what they are without --fix, but for the promise that it mends them."""
    file = tmp_path / "a.yaml"
    file.write_text(text)
    _, before, _ = lint(capsys, "a.yaml", "--select", "OV004")
    code, out, err = lint(capsys, "a.yaml", "--fix", "--select", "OV004")
    if reason:
        assert code == 1
        assert out.splitlines()[:-1] == [line.replace(" [*]", "") for line in before.splitlines()[:-1]]
        assert err.startswith(f"oneaxis: a.yaml: not fixed: {reason}")
        assert len(err.splitlines()) == 1
        assert file.read_text() == text
    else:
        assert (code, err) == (0, "")
        assert json.dumps(parse(file, text).data, sort_keys=True) == json.dumps(
            parse(file, file.read_text()).data, sort_keys=True
        )


def test_a_file_that_cannot_be_written_does_not_stop_the_others(tmp_path, capsys):
    """Read-only, which root could write; then a disk on which no file may have more than 10 bytes."""
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_text(SCHEMA)
    (tmp_path / "a.json").chmod(0o444)
    code, out, err = lint(capsys, "a.json", "b.json", "--fix", "--select", "OV004")
    assert code == 2
    assert out.startswith("a.json:4: OV004 'label'")
    assert "fixed 2 objects" in out
    assert err == "oneaxis: a.json: not fixed: read-only; allowed: a file that can be written\n"
    assert (tmp_path / "a.json").read_text() == SCHEMA != (tmp_path / "b.json").read_text()
    (tmp_path / "b.json").write_text(SCHEMA)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        code, out, err = lint(capsys, "b.json", "--fix", "--select", "OV004")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert code == 2
    assert "b.json:4: OV004" in out
    assert err == "oneaxis: b.json: not fixed: File too large; allowed: a file that can be replaced\n"
    assert sorted(os.listdir(tmp_path)) == ["a.json", "b.json"]
    assert (tmp_path / "b.json").read_text() == SCHEMA


def test_a_fix_says_that_a_hard_link_keeps_the_old_text(tmp_path, capsys):
    (tmp_path / "a.json").write_text(SCHEMA)
    os.link("a.json", "b.json")
    code, _, err = lint(capsys, "a.json", "--fix", "--select", "OV004")
    assert (code, err) == (0, "oneaxis: a.json: fixed; another hard link keeps the old text\n")
    assert (tmp_path / "b.json").read_text() == SCHEMA


def test_a_fix_keeps_marks_newlines_and_links(tmp_path, capsys):
    (tmp_path / "real.yaml").write_bytes(b"\xef\xbb\xbf" + YAML.rstrip("\n").replace("\n", "\r\n").encode())
    (tmp_path / "link.yaml").symlink_to("real.yaml")
    lint(capsys, "link.yaml", "--fix")
    assert (tmp_path / "link.yaml").is_symlink()
    written = (tmp_path / "real.yaml").read_bytes()
    assert written.startswith(b"\xef\xbb\xbf# an answer\r\ntype: object\r\nproperties:\r\n  reasoning:")
    assert written.count(b"\r\n") == written.count(b"\n") == YAML.count("\n") - 1


def test_ignored_codes_are_not_fixed(tmp_path, capsys):
    (tmp_path / "bad.json").write_text(SCHEMA)
    lint(capsys, "bad.json", "--fix", "--ignore", "OV004,OV005")
    assert (tmp_path / "bad.json").read_text() == SCHEMA


def test_reorder_refuses_what_would_change_the_data(tmp_path):
    """A multi-line string whose lines stand left of its key: moving lines would tear it; the check sees that."""
    text = 'properties:\n    label: "a\n\n  b"\n    reasoning: c\n'
    document = parse(tmp_path / "a.yaml", text)
    with suppress(CannotMove):
        assert reorder(document, {"/properties": ["reasoning", "label"]}).data == document.data


# --- models --------------------------------------------------------------------------------------------------

MODELS = '''
from enum import Enum
from typing import Literal

from pydantic import BaseModel, Field

print("imported")


class Color(Enum):
    red = "red"
    green = "green"


class Item(BaseModel):
    color: Color
    size: int | None = Field(alias="Size")


class Base(BaseModel):
    verdict: Literal["yes", "no"]


class Answer(Base):
    """What is asked for."""

    items: list[Item] = Field(max_length=3)
    reasoning: str = Field(
        max_length=200,
    )
    note: str | None
    accepted: bool = Field(json_schema_extra={"$comment": "oneaxis: ignore OV007"})
'''


def test_models_of_a_file_with_the_lines_of_their_fields(tmp_path, capsys):
    (tmp_path / "models.py").write_text(MODELS)
    lines = MODELS.splitlines()
    found = {(each["code"], lines[each["line"] - 1].strip()) for each in findings(capsys, "models.py")}
    assert found == {
        ("OV001", "class Color(Enum):"), ("OV001", 'verdict: Literal["yes", "no"]'), ("OV002", "note: str | None"),
        ("OV004", 'verdict: Literal["yes", "no"]'), ("OV004", "accepted: bool = Field("
         'json_schema_extra={"$comment": "oneaxis: ignore OV007"})'),
    } - {("OV004", "accepted: bool = Field(" 'json_schema_extra={"$comment": "oneaxis: ignore OV007"})')}  # fmt: skip
    assert {each["file"] for each in findings(capsys, "models.py:Answer")} == {"models.py"}
    assert {each["code"] for each in findings(capsys, "models:Item")} == {"OV001"}
    # Nothing of the module's own output is in ours, and nothing is offered to be fixed.
    assert not any(each["fixable"] for each in findings(capsys, "models.py", "--fix"))


@pytest.mark.parametrize(("kind", "code"), [
    ("set[int]", "OV103"), ("pathlib.Path", "OV103"), ("pydantic.SecretStr", "OV103"), ("bytes", "OV103"),
    ("pydantic.HttpUrl", "OV102"), ("datetime.datetime", ""), ("uuid.UUID", ""), ("tuple[int, bool]", ""),
])  # fmt: skip
def test_types_of_pydantic_with_which_a_server_refuses(tmp_path, capsys, kind, code):
    (tmp_path / "one.py").write_text(
        f"import datetime, pathlib, uuid, pydantic\nclass A(pydantic.BaseModel):\n    x: {kind}\n"
    )
    found = findings(capsys, "one.py", "--select", "OV10", "--ignore", "OV105")
    assert [(each["code"], each["line"]) for each in found] == ([(code, 3)] if code else [])


def test_a_module_that_never_ends_its_import(tmp_path, capsys, monkeypatch):
    (tmp_path / "hangs.py").write_text("import time; time.sleep(600)")
    monkeypatch.setattr(models, "LONGEST_IMPORT_S", 0.5)
    code, _, said = lint(capsys, "hangs.py")
    assert code == 2
    assert "hangs.py: cannot be imported: not done after 0.5 s" in said


@pytest.mark.parametrize(("name", "text", "message"), [
    ("m1.py", "import nothing_of_that_name", "m1.py: cannot be imported: ModuleNotFoundError: No module named"),
    ("m2.py", "import sys; sys.exit(3)", "m2.py: cannot be imported: SystemExit: 3"),
    ("m3.py", "def f(:", "m3.py: cannot be imported: SyntaxError"),
    ("m4.py", "x = 1", "m4.py: defines no Pydantic model"),
    ("m5.py", "from pydantic import BaseModel\nclass A(BaseModel):\n    f: 'Nowhere'", "m5.py:A: has no JSON Schema"),
    ("m8.py", "import os; os._exit(0)", "m8.py: cannot be imported: it ended its process (exit code 0)"),
    ("m9.py", "import argparse; argparse.ArgumentParser().parse_args(); raise KeyboardInterrupt",
     "m9.py: cannot be imported: KeyboardInterrupt"),
    ("nowhere.at_all", "", "nowhere.at_all: no such file or module; allowed: "),
    ("m6:A", "", "m6: no such file or module; allowed: "),
    ("m7.py:B", "from pydantic import BaseModel as B_\nclass A(B_): pass",
     "m7.py has no Pydantic model 'B'; allowed: A"),
])  # fmt: skip
def test_models_that_cannot_be_had(tmp_path, capsys, name, text, message):
    if text:
        (tmp_path / name.split(":")[0]).write_text(text)
    code, _, err = lint(capsys, name)
    assert code == 2
    assert message in err
    assert len(err.splitlines()) == 1


def test_a_module_does_not_reach_the_lint(tmp_path, capfd):
    """It writes to the output behind Python's back, changes the folder, and leaves a thread that never ends."""
    (tmp_path / "m.py").write_text(
        "import os, sys, threading, time\nfrom pydantic import BaseModel\nos.write(1, b'raw\\n')\nos.chdir('/')\n"
        "threading.Thread(target=time.sleep, args=(600,)).start()\nclass A(BaseModel):\n    x: str\n"
    )
    (tmp_path / "a.json").write_text(json.dumps(STRING))
    code, out, err = lint(capfd, "m.py", "a.json", "--select", "OV002", "--format", "json")
    assert (code, err) == (1, "raw\n")
    assert [(each["file"], each["line"]) for each in json.loads(out)] == [("m.py", 7), ("a.json", 1)]


@pytest.mark.parametrize(("word", "files"), [
    ("src/app/models.py", {"src/app/__init__.py": "", "src/app/models.py": "from app.base import B"}),
    ("src/app/models.py", {"src/app/models.py": "from app.base import B"}),
    ("app/models.py", {"app/__init__.py": "from .models import A", "app/models.py": "from .base import B"}),
    ("app/models.py", {"app/models.py": "from .base import B"}),
    # The package is not needed, so what it would import is not.
    ("app/models.py", {"app/__init__.py": "import nothing_of_that_name",
                       "app/models.py": "from pydantic import BaseModel as B"}),
    # Siblings as for a script.
    ("app/models.py", {"app/__init__.py": "", "app/models.py": "from base import B"}),
    ("app/sub/models.py", {"app/sub/models.py": "from ..base import B"}),
    ("app/models.py", {"app/models.py": "from app.base import B"}),
    ("app.models", {"app/models.py": "from .base import B"}),
    ("app.models:A", {"src/app/models.py": "from app.base import B"}),
])  # fmt: skip
def test_models_of_a_package(tmp_path, capsys, word, files):
    (models,) = [name for name in files if name.endswith("models.py")]
    base = ("src/" if "src" in models else "") + "app/base.py"
    for name, text in (files | {base: "from pydantic import BaseModel as B"}).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n" + "class A(B):\n    x: str\n" * (name == models))
    assert [(each["file"], each["line"]) for each in findings(capsys, word, "--select", "OV002")] == [(models, 3)]


def test_a_model_without_a_schema_does_not_hide_the_others(tmp_path, capsys):
    (tmp_path / "m.py").write_text(
        "from typing import Callable\nfrom pydantic import BaseModel\nclass A(BaseModel):\n    f: Callable[[], int]\n"
        "class B(BaseModel):\n    x: str\n"
    )
    code, out, err = lint(capsys, "m.py", "--select", "OV002")
    assert code == 2
    assert out.startswith("m.py:6: OV002")
    assert err.startswith("oneaxis: m.py:A: has no JSON Schema")


def test_generic_models_are_what_is_made_of_them(tmp_path, capsys):
    (tmp_path / "m.py").write_text(
        "from typing import Generic, TypeVar\nfrom pydantic import BaseModel, RootModel\nT = TypeVar('T')\n"
        "class Good(BaseModel):\n    n: bool | None\nclass Page(BaseModel, Generic[T]):\n    items: list[T]\n"
        "class Ids(RootModel[list[int]]):\n    pass\nclass Use(BaseModel):\n    page: Page[Good]\n"
        "Names = RootModel[list[bool]]\n"
    )
    found = [(each["line"], each["code"], each["pointer"]) for each in findings(capsys, "m.py")]
    assert found == [
        (7, "OV003", "/$defs/Page_Good_/properties/items"), (8, "OV003", ""), (12, "OV003", ""),
    ]  # fmt: skip


# --- requests ------------------------------------------------------------------------------------------------


def test_requests_line_by_line(tmp_path, capsys):
    schema = {"type": "object", "properties": {"x": {"enum": ["a", "b"]}}, "required": ["x"]}
    asked = {
        "messages": [{"role": "user", "content": "hi"}], "frequency_penalty": 0.3,
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}},
    }  # fmt: skip
    lines = [asked, {"messages": [], "frequency_penalty": 0.3}, {"custom_id": "1", "method": "POST", "body": asked}]
    (tmp_path / "r.jsonl").write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    found = [(each["line"], each["code"], each["pointer"]) for each in findings(capsys, "r.jsonl")]
    assert found == [
        (1, "OV001", "/response_format/json_schema/schema/properties/x"), (1, "OV201", "/frequency_penalty"),
        (3, "OV201", "/body/frequency_penalty"),
    ]  # fmt: skip
    (tmp_path / "generation_config.json").write_text('{"repetition_penalty": 1.05}')
    found = findings(capsys, "r.jsonl", "--generation-config", ".", "--select", "OV203")
    assert [each["line"] for each in found] == [1, 3]


REQUESTS = [
    {"model": "m", "messages": [], "response_format": {"type": "json_schema", "json_schema": {"schema": STRING}}},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": STRING}}}, {"tools": [TOOL]},
    {"model": "m", "prompt": "x", "format": STRING, "options": {}},
    {"text": "x", "sampling_params": {"json_schema": '{"type": "string"}'}},
    {"custom_id": "1", "body": {"input": "x", "text": {"format": {"type": "json_schema", "schema": STRING}}}},
]  # fmt: skip


@pytest.mark.parametrize("request_", REQUESTS)
def test_a_request_is_known_in_every_file(tmp_path, capsys, request_):
    request_ = request_ | ({} if "body" in request_ else {"frequency_penalty": 0.3})
    (tmp_path / "one.json").write_text(json.dumps(request_, indent=2))
    (tmp_path / "list.yaml").write_text(json.dumps([request_, request_]))
    (tmp_path / "lines.jsonl").write_text(json.dumps(request_))
    (tmp_path / "printed.jsonl").write_text("\n".join(json.dumps(request_, indent=2) for _ in range(2)))
    found = {
        name: [(each["line"], each["code"], each["pointer"]) for each in findings(capsys, name)]
        for name in ("one.json", "list.yaml", "lines.jsonl", "printed.jsonl")
    }
    one = found["one.json"]
    assert {code for _, code, _ in one} >= ({"OV002"} if "body" in request_ else {"OV002", "OV201"})
    text = (tmp_path / "one.json").read_text().splitlines()
    for line, _, pointer in one:
        assert pointer.rpartition("/")[2] in text[line - 1]
    assert sorted(each[1:] for each in found["lines.jsonl"]) == sorted(each[1:] for each in one)
    assert found["printed.jsonl"][: len(one)] == one
    assert len(found["list.yaml"]) == 2 * len(one)


def test_a_bad_line_does_not_hide_the_findings_of_others(tmp_path, capsys):
    good = {"prompt": "x", "format": "json", "frequency_penalty": 0.3}
    bad = [{}, good | {"temperature": "warm"}, good | {"tools": [{"parameters": {"type": 1}}]}]
    (tmp_path / "r.jsonl").write_text("\n".join([json.dumps(good), "{", *map(json.dumps, bad), json.dumps(good)]))
    code, out, err = lint(capsys, "r.jsonl")
    assert code == 2
    lines = [line.partition(": OV201")[0] for line in out.splitlines() if ": OV201" in line]
    assert lines == ["r.jsonl:1", "r.jsonl:5", "r.jsonl:6"]
    assert [line.split(" ")[1] for line in err.splitlines()] == [f"r.jsonl:{number}:" for number in (2, 3, 4, 5)]
    (tmp_path / "r.jsonl").write_text("\n".join([json.dumps(good), *["{}"] * 30]))
    _, _, err = lint(capsys, "r.jsonl")
    assert len(err.splitlines()) == 11
    assert err.endswith("oneaxis: r.jsonl: 20 more lines that cannot be read\n")
    tools = [{"name": "a", "parameters": {"type": "int"}}, {"name": "b", "parameters": STRING}]
    (tmp_path / "tools.json").write_text(json.dumps(tools))
    code, out, err = lint(capsys, "tools.json")
    assert (code, len(err.splitlines())) == (2, 1)
    assert "tools.json:1: OV002" in out


def test_defaults_are_judged_as_the_file_that_they_come_from(tmp_path, capsys):
    (tmp_path / "r.jsonl").write_text('{"prompt": "x"}')
    (tmp_path / "generation_config.json").write_text('{"repetition_penalty": "x"}')
    _, _, err = lint(capsys, "r.jsonl", "--generation-config", ".")
    assert err == 'oneaxis: generation_config.json: /repetition_penalty: "x" is no number; allowed: a finite one\n'


def test_it_starts_without_the_pipeline(tmp_path):
    """What docs/lint.md has a CI job install is all that it imports."""
    (tmp_path / "a.json").write_text(json.dumps({"$defs": {"a": SOUND}, "$ref": "#/$defs/a"}))
    program = (
        "import sys; from oneaxis.cli import main; code = main(['lint', 'a.json']); "
        "print(sorted({name.split('.')[0] for name in sys.modules})); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    loaded = set(ast.literal_eval(done.stdout.splitlines()[-1]))
    assert {"jsonschema", "networkx", "psutil", "pydantic", "ruamel"} <= loaded
    assert not {"torch", "vllm", "transformers", "numpy", "polars", "dvc", "mlflow", "hydra", "omegaconf"} & loaded


# --- mistakes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "content", "message"), [
    ("a.json", b"{", "a.json:1: not JSON"),
    ("a.json", b"\xff\xfe{", "a.json: not UTF-8 at byte 0"),
    ("a.json", b"", "a.json:1: not JSON"),
    ("a.json", b"[1]", "a.json:/0: 1 is no JSON Schema"),
    ("a.json", b'{"version": 1}', "a.json: no JSON Schema: it says version"),
    ("a.json", b'{"type": "string", "maxLength": NaN}', "a.json: NaN is not JSON"),
    ("a.json", b'{"type": "string", "type": "null"}', "a.json: the key 'type' stands twice in one object"),
    ("a.json", b'{"anyOf":[' * 3000, "a.json: "),
    ("a.json", b'{"type":"array","items":' * 300 + b"{}" + b"}" * 300, "a.json: nested too deep"),
    ("a.json", b'{"$ref": "#"}', "a.json: $ref goes in a circle"),
    ("a.json", b" " * 5_000_001, "a.json: 5 MB; allowed: up to 5 MB"),
    ("a.yaml", b"type: [", "a.yaml:1: not YAML"),
    ("a.yaml", b"type: object\n1: 2\n", "a.yaml: the key 1 under / is no text"),
    ("a.yaml", b"type: string\ndefault: 2024-01-01\n", "is no JSON; allowed: quote it"),
    ("a.yaml", b"type: string\ntype: string\n", "a.yaml:2: not YAML: found duplicate key"),
    ("a.yaml", b"properties: &a\n  x: *a\n", "a.yaml: /properties/x: None is not of type"),
    ("a.yaml", b"a: &a [x,x,x,x,x,x,x,x,x]\n" + b"".join(b"%c: &%c [%s]\n" % (c, c, b",".join([b"*%c" % (c - 1)] * 9))
     for c in b"bcdefgh") + b"type: string\n", "a.yaml: nested too deep or too large"),
    ("a.yaml", b"type: !!python/object:os.system x\n", "a.yaml: "),
    ("a.json", b"[]", "a.json: no schema in it"),
    ("a.json", b'{"type": "function"}', "a.json: no schema in it"),
    ("a.json", b'{"minimum": ' + b"1" * 10_000 + b"}", "a.json: a number of more than 4300 digits; allowed: fewer"),
    ("a.yaml", b"minimum: " + b"1" * 10_000, "a.yaml: not YAML that can be read: a number of more than 4300 digits"),
    ("a.yaml", b"type: string\n---\ntype: string\n", "a.yaml: 2 YAML documents; allowed: one"),
    ("a.json", b'{"enum": ["a"], "$comment": "oneaxis: ignore OV001, OVOO7"}', "/$comment: OVOO7 is no code"),
    ("a.json", b'{"messages": [], "format": "json", "temperature": "hot"}', 'a.json: /temperature: "hot" is no number'),
    ("r.jsonl", b'{"prompt": "x", "format": "json", "frequency_penalty": 1' + b"0" * 4000 + b"}",
     "r.jsonl:1: /frequency_penalty: 1000000000000"),
    ("r.jsonl", b"", "r.jsonl: no request in it"),
    ("r.jsonl", b"{}\n", "r.jsonl:1: no request"),
    ("r.jsonl", b'\n{"prompt": "x"}\n{"prompt"\n', "r.jsonl:3: not JSON"),
    ("r.jsonl", b'{"prompt": "x", "format": "json", "frequency_penalty": "high"}', "r.jsonl:1: /frequency_penalty:"),
    ("r.jsonl", b'{"prompt": "x", "guided_json": {"$ref": "#/x"}}', "r.jsonl:1: /guided_json: $ref '#/x' leads"),
])  # fmt: skip
def test_bad_input_is_one_line_and_2(tmp_path, capsys, name, content, message):
    (tmp_path / name).write_bytes(content)
    for more in ([], ["--fix"]):
        code, _, err = lint(capsys, name, *more)
        assert code == 2
        assert message in err
        assert len(err.splitlines()) == 1
        assert (tmp_path / name).read_bytes() == content


@pytest.mark.parametrize(("words", "message"), [
    ([], "lint: say what"),
    (["nowhere.json"], "nowhere.json: No such file or directory"),
    (["--select", "F401", "x.json"], "--select: 'F401' is no code"),
    (["--ignore", "OV001,", "x.json"], "--ignore: '' is no code"),
    (["--tokenizer", "org/name", "x.json"], "--tokenizer org/name: not found; allowed: a local folder"),
    (["--generation-config", "none", "x.jsonl"], "none: No such file or directory"),
])  # fmt: skip
def test_bad_words(capsys, words, message):
    code, _, err = lint(capsys, *words)
    assert code == 2
    assert message in err
    assert len(err.splitlines()) == 1


def test_pointer_lines_in_json(tmp_path):
    text = textwrap.dedent("""\
        {
          "a/b": [1,
            {"c~d": "\\u00e9 } ] ,"}],

          "e": {}
        }""")
    document = parse(tmp_path / "x.json", text)
    assert document.lines == {"": 1, "/a~1b": 2, "/a~1b/0": 2, "/a~1b/1": 3, "/a~1b/1/c~0d": 3, "/e": 5}
    assert document.line("/e/none/at/all") == 5
