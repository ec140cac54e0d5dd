"""OV1xx: each statement about an engine is tried on the engines that are installed.

The oracle is `engine_facts.py`, which asks vLLM's own check of a request and the backend that it chose; whether an
answer keeps to a schema is said by jsonschema. Nothing is faked.
"""

import json
import math
import random
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from oneaxis.lint.rules import FORMATS
from oneaxis.lint.schema import lint_schema

INT, NUM, STR = {"type": "integer"}, {"type": "number"}, {"type": "string"}


def closed(properties: dict, **more: Any) -> dict:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    } | more


@dataclass(frozen=True)
class Case:
    """A schema, the one code that it gets, and answers that keep to it and that break it."""

    code: str
    schema: dict
    good: str
    bad: str
    id: str = ""


AB = {"a": INT, "b": INT}
ARRAY = {"type": "array", "items": INT}
CASES = [
    # Enforced: what the lint is silent about is what xgrammar holds.
    *(Case("", schema, good, bad) for schema, good, bad in (
        (INT | {"minimum": 3}, "5", "1"),
        (NUM | {"minimum": 0, "exclusiveMaximum": 1}, "0.3", "1"),
        (STR | {"maxLength": 3}, '"abc"', '"abcd"'),
        (STR | {"minLength": 2}, '"ab"', '"a"'),
        (STR | {"pattern": "^ab?$"}, '"a"', '"abb"'),
        (STR | {"pattern": "^a{1,3}$|^b$"}, '"aaa"', '"aaaa"'),
        (ARRAY | {"minItems": 2, "maxItems": 3}, "[1, 2]", "[1]"),
        ({"type": "array", "prefixItems": [INT, STR], "items": False}, '[1, "a"]', '["a", 1]'),
        (closed(AB), '{"a": 1, "b": 2}', '{"a": 1}'),
        (closed({"a": INT}), '{"a": 1}', '{"a": 1, "z": 2}'),
        ({"type": "object", "additionalProperties": INT, "maxProperties": 1}, '{"x": 1}', '{"x": 1, "y": 2}'),
        ({"type": "object", "properties": AB, "additionalProperties": False, "minProperties": 1}, '{"a": 1}', "{}"),
        ({"type": "object", "propertyNames": {"pattern": "^x$"}, "additionalProperties": INT}, '{"x": 1}', '{"y": 1}'),
        ({"type": "object", "patternProperties": {"^x$": INT}, "additionalProperties": False}, '{"x": 1}',
         '{"x": "q"}'),
        ({"enum": ["a", "b", None]}, "null", '"c"'),
        ({"type": ["string", "null"], "maxLength": 2}, "null", '"abc"'),
        ({"anyOf": [STR, {"type": "null"}]}, "null", "1"),
        ({"oneOf": [closed({"k": {"const": "a"}, "v": INT}), closed({"k": {"const": "b"}})]}, '{"k": "b"}',
         '{"k": "c"}'),
        ({"allOf": [{"enum": ["a"]}]}, '"a"', '"c"'),
        ({"$defs": {"q": INT}, "$ref": "#/$defs/q", "description": "x", "title": "q"}, "1", '"a"'),
        (INT | {"$comment": "oneaxis: ignore OV007"}, "1", '"a"'),
    )),
    # Dropped without a word.
    *(Case("OV101", schema, good, bad) for schema, good, bad in (
        (INT | {"not": {"const": 1}}, "2", "1"),
        ({"type": "object", "properties": AB, "dependentRequired": {"a": ["b"]}}, '{"a": 1, "b": 2}', '{"a": 1}'),
        ({"type": "object", "properties": AB, "dependentSchemas": {"a": {"required": ["b"]}}}, '{"b": 2}', '{"a": 1}'),
        ({"type": "object", "properties": AB, "if": {"required": ["a"]}, "then": {"required": ["b"]}},
         '{"a": 1, "b": 2}', '{"a": 1}'),
        (STR | {"pattern": "^(?!a)[a-z]{1,4}$"}, '"bb"', '"ab"'),
        (STR | {"format": "date", "pattern": "^2.{0,20}$"}, '"2024-01-31"', '"1024-01-31"'),
        ({"items": INT, "uniqueItems": True}, "[1, 2]", "[1, 1]"),
        ({"minimum": 3}, "5", "1"),
        ({"maxLength": 3}, '"abc"', '"abcd"'),
        ({"pattern": "^a$"}, '"a"', '"b"'),
        ({"required": ["a"]}, '{"a": 1}', "{}"),
        ({"type": "object", "properties": {"a": INT}, "required": ["a", "z"], "additionalProperties": True},
         '{"a": 1, "z": 2}', '{"a": 1}'),
        ({"type": "integer", "enum": ["a", 1]}, "1", '"a"'),
        ({"type": "string", "enum": ["a", "bbbb"], "maxLength": 2}, '"a"', '"bbbb"'),
        ({"type": "string", "enum": ["a", "b"], "pattern": "^a$"}, '"a"', '"b"'),
        ({"anyOf": [STR, {"type": "null"}], "maxLength": 2}, '"ab"', '"abcd"'),
        ({"type": "string", "anyOf": [{"const": "a"}, {"const": 1}]}, '"a"', "1"),
        ({"type": "object", "properties": {"a": INT}, "required": ["a"],
          "anyOf": [closed({"a": INT}), {"type": "null"}], "minProperties": 1}, '{"a": 1}', "null"),
        ({"oneOf": [INT | {"minimum": 0}, INT | {"maximum": 10}]}, "-1", "5"),
        ({"oneOf": [STR, {"enum": ["a"]}]}, '"b"', '"a"'),
        ({"oneOf": [INT, NUM]}, "1.5", "1"),
        ({"$defs": {"q": STR}, "$ref": "#/$defs/q", "maxLength": 2}, '"ab"', '"abcd"'),
        ({"$defs": {"q": INT | {"$anchor": "qq"}}, "$ref": "#qq"}, "1", '"a"'),
        ({"$defs": {"q": INT | {"$dynamicAnchor": "n"}}, "$dynamicRef": "#n"}, "1", '"a"'),
        ({"type": "string", "maxLength": 2, "allOf": [STR]}, '"ab"', '"abcd"'),
        ({"type": "string", "allOf": [{"maxLength": 2}]}, '"ab"', '"abcd"'),
    )),
    # For another backend, which holds them; refused where xgrammar is asked for.
    *(Case("OV102", schema, good, bad) for schema, good, bad in (
        (INT | {"multipleOf": 5}, "10", "7"),
        (NUM | {"multipleOf": 0.5}, "1.5", "1.3"),
        (STR | {"pattern": "^a{1,9}$", "maxLength": 2}, '"aa"', '"aaa"'),
        (STR | {"format": "email", "maxLength": 8}, '"a@b.co"', '"aaaaaaaaa@b.co"'),
        (STR | {"pattern": "^\\p{L}$"}, '"a"', '"1"'),
        ({"allOf": [STR, {"enum": ["a"]}]}, '"a"', '"c"'),
        ({"$defs": {"a/b": INT}, "$ref": "#/$defs/a~1b"}, "1", '"a"'),
        ({"$schema": "http://json-schema.org/draft-07/schema#", "type": "array", "items": [INT, STR],
          "additionalItems": False}, '[1, "a"]', '["a", 1]'),
        ({"type": "object", "properties": {"a": INT}, "patternProperties": {"^x$": INT}, "required": ["a"],
          "additionalProperties": False}, '{"a": 1}', '{"a": "q"}'),
    )),
    # Refused by every backend.
    *(Case("OV103", schema, good, bad) for schema, good, bad in (
        (ARRAY | {"uniqueItems": True}, "[1, 2]", "[1, 1]"),
        (ARRAY | {"contains": {"const": 1}}, "[1]", "[2]"),
        (STR | {"pattern": "^[a-z]{1,5}(?<=b)$"}, '"ab"', '"ac"'),
        (STR | {"pattern": "^a\\b.{0,9}$"}, '"a b"', '"ab"'),
        (STR | {"pattern": "^(a|b)\\1$"}, '"aa"', '"ab"'),
        ({"type": "object", "properties": {"a": INT}, "propertyNames": {"pattern": "^a$"}}, '{"a": 1}', '{"b": 1}'),
        ({"type": "object", "patternProperties": {"^x$": INT, "^y$": STR}, "additionalProperties": False}, '{"x": 1}',
         '{"x": "q"}'),
    )),
    # Read more narrowly: the good answer is refused.
    *(Case("OV104", schema, good, bad) for schema, good, bad in (
        (STR | {"pattern": "ab"}, '"xaby"', '"zz"'),
        (STR | {"pattern": "^ab"}, '"abc"', '"xab"'),
        (STR | {"pattern": "ab$"}, '"xab"', '"abx"'),
        ({"type": "object", "patternProperties": {"^x": INT}, "additionalProperties": False}, '{"xa": 1}', '{"y": 1}'),
    )),
]  # fmt: skip
DRAFT4 = {"$schema": "http://json-schema.org/draft-04/schema#"}
BOUNDS = [
    # For llguidance, which takes them.
    *(("OV102", each) for each in (
        closed({"a": INT}) | {"properties": {"a": INT, "b": False}}, {"anyOf": [INT, False]},
        INT | {"minimum": 0, "exclusiveMinimum": True} | DRAFT4,
        NUM | {"minimum": 0, "exclusiveMinimum": False} | DRAFT4,
        INT | {"maximum": 99999999999999999999}, INT | {"minimum": 1.5}, INT | {"exclusiveMaximum": 1.5},
        {"type": ["integer", "null"], "minimum": 1.5}, STR | {"minLength": 2**31}, {"type": "array", "minItems": 1},
        {"type": "object", "minProperties": 1}, ARRAY | {"prefixItems": [INT, INT], "maxItems": 1},
        {"type": "array", "prefixItems": [INT, False], "items": INT},
        STR | {"pattern": "^(?i)a$"}, STR | {"pattern": "^(?i:a)$"}, STR | {"pattern": "^+$"},
    )),
    *(("OV103", each) for each in (
        closed({"a": INT, "b": False}), {"anyOf": [False]}, {"allOf": [False]},
        {"$defs": {"n": False}, "$ref": "#/$defs/n"},
        INT | {"minimum": math.inf}, NUM | {"minimum": math.inf}, INT | {"minimum": 1e19}, INT | {"minimum": -1e19},
        NUM | {"minimum": 5, "exclusiveMaximum": 5}, INT | {"exclusiveMinimum": 5, "exclusiveMaximum": 6},
        STR | {"maxLength": 3.0}, ARRAY | {"minItems": 2.0},
        {"type": "object", "additionalProperties": INT, "maxProperties": 2.0},
        {"type": "array", "prefixItems": [INT], "items": False, "minItems": 2},
        {"type": "object", "properties": {"a": INT}, "additionalProperties": False, "minProperties": 2},
        closed(AB) | {"maxProperties": 1}, {"type": "object", "propertyNames": False},
        *(STR | {"pattern": pattern} for pattern in (
            "[", "^(a", "^a)$", "^*a$", "^(*a)$", "^a|?b$", "^[z-a]$", "^[z-\\x41]$", "^[]$", "^[\\]$", "^a{3,1}$",
            "^a{$", "^a{,3}$", "^a{1", "^(?>a)$", "^(?$", "^\\c$", "^[a\\",
        )),
    )),
    # Only the empty array and object can be written.
    ("OV104", {"type": "array", "maxItems": 3}), ("OV104", {"type": "object", "maxProperties": 3}),
]  # fmt: skip
LOST = {"type": "object", "patternProperties": {"^(a": INT}, "additionalProperties": INT}
SOUND = [
    INT | {"minimum": 1.0}, INT | {"minimum": -(2**63), "maximum": 2**63 - 1},
    INT | {"exclusiveMinimum": 5, "maximum": 6}, NUM | {"exclusiveMinimum": 0, "maximum": 1.5},
    ARRAY | {"minItems": 1}, closed(AB) | {"minProperties": 2},
    {"type": "array", "items": False}, {"type": "array"}, {"type": "object"}, {"enum": [1], "minimum": 0.5},
    *(STR | {"pattern": pattern} for pattern in (
        "^[\\w.+-]{1,64}@[\\w-]{1,63}$", "^(?:a|b|)$", "^(?<year>\\d{4})$", "^\\$\\d{1,9}(\\.\\d{2})?$", "^[a-]$",
        "^[-a]$",
        "^[\\d-z]$", "^[^\\]]{1,3}$", "^a{ 2 }$", "^a{2,4}?$", "^}]$", "^\\u{1F600}$", "^()$", "^[[]$", "^\\[\\(\\{$",
    )),
]  # fmt: skip


def made_at_random(seed: int, count: int) -> list[dict]:
    """Patterns from pieces that fit together or do not, and nested bounds, in half of which something is wrong."""
    draw = random.Random(seed)
    pieces = [*"ab()[{*+?|^,1", "\\d", "[a-z]", "{2}", "{1,3}", "(?:", "(?<x>", "[^a", "b-]", "]a", "^(", ")$"]
    made: list[dict] = []
    while len(made) < count:
        pattern = "".join(draw.choice(pieces) for _ in range(draw.randint(1, 6)))
        # Of two repeats in a row xgrammar takes some, and a ] that closes nothing makes it read with another parser.
        if not re.search(r"[*+?}]\^*[*+{]", pattern):
            made.append(STR | {"pattern": f"^{pattern}$" if draw.random() < 0.5 else pattern})

    def some(schema: dict, values: dict, share: float = 0.4) -> dict:
        return schema | {name: draw.choice(of) for name, of in values.items() if draw.random() < share}

    def bounded(depth: int) -> dict:
        kind = draw.choice(
            ["integer", "number", "string", "array", "object", "object"] if depth else ["integer", "string"]
        )
        within = lambda: bounded(depth - 1)  # noqa: E731
        few = [0, 1, 2, 3]
        if kind == "string":
            return some({"type": kind}, {"minLength": [*few, 2**31], "maxLength": few})
        if kind == "array":
            parts = {"items": [False, within(), within()], "prefixItems": [[within()], [within(), False]]}
            return some({"type": kind} | some({}, parts), {"minItems": few, "maxItems": few})
        if kind == "object":
            members = {name: draw.choice([within()] * 5 + [False]) for name in "abc"[: draw.randint(1, 3)]}
            parts = {"properties": [members], "additionalProperties": [False, within()]}
            limits = {"minProperties": few, "maxProperties": few, "propertyNames": [True, {"pattern": "^x$"}]}
            return some({"type": kind, "required": []} | some({}, parts, 0.7), limits, 0.2)
        numbers = [0, 1, 2, 1.5, -1, 2.0, 1e19, -1e19, 10**20]
        return some({"type": draw.choice([kind, [kind, "null"]])},
                    dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), numbers))  # fmt: skip

    return made + [bounded(draw.randint(0, 2)) for _ in range(count)]


RANDOM = made_at_random(7, 2000)
NULLABLE = {"type": "string", "nullable": True}
FALSE_UNIQUE = ARRAY | {"uniqueItems": False}
FOREIGN = [{"$ref": "https://example.com/x.json"}, {"$ref": "other.json#/x"}]
UNSATISFIABLE = [INT | {"minimum": 5, "maximum": 2}, STR | {"minLength": 2, "maxLength": 1}, {"enum": []}]
NEVER_ENDS = {"$defs": {"t": closed({"kid": {"$ref": "#/$defs/t"}})}, "$ref": "#/$defs/t"}
SEVERAL = {"type": "object", "patternProperties": {"^x$": INT, "^y$": STR}}
BESIDE = {"type": "object", "properties": {"a": INT}, "patternProperties": {"^x$": INT}, "required": ["a"]}
OPEN = {"type": "object", "properties": {"a": INT | {"multipleOf": 2}}, "required": ["a"]}
OPEN_ALONE = {"type": "object", "properties": {"a": INT}, "required": ["a"]}
ORDER = closed({"b": INT, "a": INT}) | {"required": ["a", "b"]}
DEEP: dict = {"type": "string"}
for _ in range(40):
    DEEP = {"type": "array", "items": DEEP}
DEEPER: dict = {"anyOf": [{"anyOf": [DEEP]}]}
for _ in range(30):
    DEEPER = {"type": "array", "items": DEEPER}
MORE = [
    *((each, []) for code, each in BOUNDS if code != "OV104"), *((each, []) for each in SOUND),
    ({"type": "array", "maxItems": 3}, ["[]", "[1]"]), ({"type": "object", "maxProperties": 3}, ["{}", '{"a": 1}']),
    (LOST, ['{"(b": 1}']),
    (NULLABLE, ["null"]), (FALSE_UNIQUE, ["[1, 1]"]), *((each, ['"anything"']) for each in FOREIGN),
    *((each, []) for each in UNSATISFIABLE), (NEVER_ENDS, ['{"kid": {"kid": {}}}']),
    (SEVERAL, ['{"x": "q"}']), (BESIDE, ['{"a": 1, "x": "q"}', '{"a": 1, "x": 1}']),
    (OPEN, ['{"a": 2, "z": "made up"}']), (OPEN_ALONE, ['{"a": 2, "z": "made up"}']),
    (ORDER, ['{"b": 1, "a": 2}', '{"a": 2, "b": 1}']), (DEEP, []), (DEEPER, []),
    *((STR | {"format": name}, []) for name in sorted(FORMATS)),
    *((STR | {"format": name}, []) for name in ("regex", "password", "iri", "idn-email", "binary", "path")),
]  # fmt: skip
SPACES = ['{"a":1,"b":2}', '{"a":1,' + "\n" * 3000 + '"b":2}', "{" + " " * 3000 + '"a":1,"b":2}']
KEYS = [{"json": INT, "disable_any_whitespace": True, "whitespace_pattern": ""}, {"json": INT}]
MESSAGES = [{"role": "user", "content": "hello"}]
REQUESTS = [
    {"messages": MESSAGES, "guided_json": INT},
    {"messages": MESSAGES, "structured_outputs": {"json": INT}},
]
# Token 0 stands in the prompt, 1 twice in the output, 2 nowhere; 3 stands 60 times in the output.
PENALTIES = [
    {"logits": [20.0, -5.0, 2.0, 20.0], "prompt": [0], "output": [1, 1, *[3] * 60], "presence": 0.0, "frequency": 0.0,
     "repetition": 1.1},
    {"logits": [20.0, -5.0, 2.0, 20.0], "prompt": [0], "output": [1, 1, *[3] * 60], "presence": 0.0, "frequency": 0.3,
     "repetition": 1.0},
    {"logits": [20.0, -5.0, 2.0, 20.0], "prompt": [0], "output": [1, 1, *[3] * 60], "presence": 0.5, "frequency": 0.0,
     "repetition": 1.0},
]  # fmt: skip


def codes(schema: dict) -> list[str]:
    return [finding.code for finding in lint_schema(schema) if finding.code.startswith("OV1")]


@pytest.fixture(scope="module")
def facts() -> dict:
    pytest.importorskip("vllm", reason="the engine is an extra")
    cases = [{"schema": case.schema, "answers": [case.good, case.bad]} for case in CASES]
    cases += [{"schema": schema, "answers": answers} for schema, answers in MORE]
    asked = {
        "cases": cases,
        "compiles": RANDOM,
        "spaces": SPACES,
        "keys": KEYS,
        "requests": REQUESTS,
        "penalties": PENALTIES,
    }
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("engine_facts.py"))],
        input=json.dumps(asked), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    said = json.loads(done.stdout.splitlines()[-1])
    said["by_schema"] = {
        json.dumps(case["schema"]): found for case, found in zip(cases, said["cases"], strict=True)
    }  # fmt: skip
    return said


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.code or 'held'}-{json.dumps(case.schema)[:70]}")
def test_the_code_of_a_constraint(case):
    """Fast: each case gets its code and no other."""
    assert set(codes(case.schema)) == ({case.code} if case.code else set())
    # The oracle knows neither draft 7's items here, nor \\p, which Python's `re` lacks.
    if "$schema" not in case.schema and "\\p" not in case.schema.get("pattern", ""):
        validator = Draft202012Validator(case.schema)
        assert validator.is_valid(json.loads(case.good))
        assert not validator.is_valid(json.loads(case.bad))


@pytest.mark.slow
def test_constraints_do_in_the_installed_engines_what_their_code_says(facts):
    for case in CASES:
        found = facts["by_schema"][json.dumps(case.schema)]
        said = (json.dumps(case.schema), found)
        if case.code == "":
            assert found["auto"] == "xgrammar", said
            assert found["accepts"] == [True, False], said
        elif case.code == "OV101":
            assert found["auto"] == "xgrammar", said
            assert found["accepts"][1] is True, said
        elif case.code == "OV102":
            assert found["auto"] in ("guidance", "outlines"), said
            assert found["xgrammar"].startswith("400"), said
            assert found["accepts"] == [True, False], said
        elif case.code == "OV103":
            assert found["auto"].startswith("400"), said
        else:
            assert found["auto"] == "xgrammar", said
            assert found["accepts"][0] is False, said


@pytest.mark.parametrize(("code", "schema"), [*BOUNDS, *(("", each) for each in SOUND)])
def test_the_code_of_what_does_not_compile(code, schema):
    assert set(codes(schema)) - {"OV105"} == ({code} if code else set())


def test_an_invalid_pattern_is_said_to_be_one():
    for pattern, reason in (("[", "the [ at character 1 is not closed"), ("^(a", "a ( is not closed")):
        (finding,) = [each for each in lint_schema(STR | {"pattern": pattern}) if each.code != "OV002"]
        assert finding.message == f"{pattern!r} is no regular expression for any backend: {reason}"
    assert codes(LOST) == ["OV101"]
    # Dropped beside a format and without a type, not compiled; nobody reads it in an unused definition either.
    assert codes(STR | {"pattern": "[", "format": "date"}) == ["OV101"]
    assert codes({"pattern": "["}) == ["OV101"]


@pytest.mark.parametrize("schema", [
    {"enum": [{"a": 1}], "properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": INT}},
    {"enum": ["a"], "pattern": "^[[a]$"}, {"enum": ["a"], "pattern": "^a{99999999999}$"},
    STR | {"pattern": "^[a&&b--c]{1,2}$"}, STR | {"pattern": "^a{99999999999}$"},
    NUM | {"enum": [1], "minimum": 0, "exclusiveMinimum": True} | DRAFT4,
])  # fmt: skip
def test_what_python_reads_otherwise_is_no_trouble(schema):
    """Each raised, or warned, which is an error here."""
    assert "OV101" not in codes(schema) or "properties" in schema


@pytest.mark.slow
def test_what_does_not_compile_in_the_installed_engines(facts):
    for code, schema in BOUNDS:
        found = facts["by_schema"][json.dumps(schema)]
        if code == "OV102":
            assert (found["auto"], found["xgrammar"][:3]) == ("guidance", "400"), schema
        elif code == "OV103":
            assert found["auto"].startswith("400"), schema
        else:
            assert (found["auto"], found["accepts"]) == ("xgrammar", [True, False]), schema
    # outlines drops what is no expression, instead of refusing it.
    found = facts["by_schema"][json.dumps(LOST)]
    assert (found["auto"], found["accepts"]) == ("outlines", [True])
    for schema in SOUND:
        assert facts["by_schema"][json.dumps(schema)]["auto"] == "xgrammar", schema


@pytest.mark.slow
def test_all_that_xgrammar_does_not_compile_is_found_and_nothing_else(facts):
    for schema, said in zip(RANDOM, facts["compiles"], strict=True):
        fault = bool({"OV102", "OV103"}.intersection(codes(schema)))
        # Handed on by vLLM for another reason, or refused for one.
        if fault and not said and "propertyNames" in json.dumps(schema):
            continue
        assert fault == bool(said), (schema, said)
    assert 0.3 < sum(map(bool, facts["compiles"])) / len(RANDOM) < 0.7


@pytest.mark.slow
def test_statements_that_take_more_than_one_answer(facts):
    def of(schema: dict) -> dict:
        return facts["by_schema"][json.dumps(schema)]

    # OpenAPI's nullable: no null. A false uniqueItems: refused all the same.
    assert codes(NULLABLE) == ["OV104"]
    assert of(NULLABLE)["accepts"] == [False]
    assert codes(FALSE_UNIQUE) == ["OV103"]
    assert of(FALSE_UNIQUE)["auto"].startswith("400")
    for schema in FOREIGN:
        assert codes(schema) == ["OV101"]
        assert of(schema) | {"guidance": ""} == {"auto": "xgrammar", "xgrammar": "xgrammar", "guidance": "",
                                                 "accepts": [True]}  # fmt: skip
        assert of(schema)["guidance"].startswith("400")
    for schema in UNSATISFIABLE:
        assert codes(schema) == ["OV103"]
        assert of(schema)["auto"].startswith("400")
    # A recursion without an end compiles, and no answer is ever accepted as whole.
    assert of(NEVER_ENDS)["auto"] == "xgrammar"
    assert of(NEVER_ENDS)["accepts"] == [False]
    # The same object is closed by xgrammar, and open once another constraint has sent it to llguidance.
    assert codes(OPEN) == ["OV102", "OV105"]
    assert of(OPEN)["auto"] == "guidance"
    assert of(OPEN)["accepts"] == [True]
    assert codes(OPEN_ALONE) == []
    assert of(OPEN_ALONE)["accepts"] == [False]
    # Properties are written as declared, whatever `required` says.
    assert of(ORDER)["accepts"] == [True, False]
    # 64 levels of objects and arrays.
    assert codes(DEEP) == []
    assert not of(DEEP)["auto"].startswith("400")
    assert codes(DEEPER) == ["OV103"]
    assert "64 levels" in of(DEEPER)["auto"]
    # What vLLM keeps from xgrammar and llguidance goes to outlines, which drops several patterns, and beside properties
    # lets no other key be written, right or wrong.
    assert codes(SEVERAL) == ["OV101"]
    assert (of(SEVERAL)["auto"], of(SEVERAL)["accepts"]) == ("outlines", [True])
    assert codes(BESIDE) == ["OV102"]
    assert (of(BESIDE)["auto"], of(BESIDE)["accepts"]) == ("outlines", [False, False])
    for schema, _ in MORE:
        if (name := schema.get("format")) is not None:
            assert (of(schema)["auto"] == "xgrammar") == (name in FORMATS), name
            assert codes(schema) == ([] if name in FORMATS else ["OV103"])


@pytest.mark.slow
def test_whitespace_is_free_unless_the_server_forbids_it(facts):
    compact, newlines, blanks = facts["spaces"]
    assert compact == {"free": [True, True], "compact": [True, True]}
    assert newlines == blanks == {"free": [True, True], "compact": [False, False]}
    # What a backend gets of a request is the schema, with or without the request's own whitespace settings.
    assert facts["keys"][0] == facts["keys"][1]


@pytest.mark.slow
def test_vllm_does_not_read_guided_fields(facts):
    assert facts["requests"] == [None, INT]


@pytest.mark.slow
def test_vllm_applies_penalties_as_the_guard_counts_them(facts):
    from oneaxis.lint.requests import additive_nats, multiplied

    repetition, frequency, presence = facts["penalties"]
    # The prompt's token and the output's are multiplied, by the sign of their logit; the other is not.
    assert repetition == pytest.approx([multiplied(20.0, 1.1), multiplied(-5.0, 1.1), 2.0, multiplied(20.0, 1.1)])
    assert frequency == pytest.approx([20.0, -5.0 - 0.6, 2.0, 20.0 - additive_nats(0.3, 60)])
    assert presence == pytest.approx([20.0, -5.5, 2.0, 19.5])
