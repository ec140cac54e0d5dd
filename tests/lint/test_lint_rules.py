"""OV001 to OV010: which schemas get them, where, and which do not. Each list names what it holds; nothing is faked."""

import json

import pytest

from oneaxis.cli import main
from oneaxis.errors import UserError
from oneaxis.lint.finding import CODES, chosen
from oneaxis.lint.order import words
from oneaxis.lint.schema import lint_schema, orders, schemas, under
from oneaxis.lint.tokens import Tokenizer, alike

TEXT = {"type": "string", "maxLength": 200}
LABEL = {"enum": ["urgent", "normal", "unknown"]}


def obj(required=None, **properties) -> dict:
    return {"type": "object", "properties": properties, "additionalProperties": False,
            "required": list(properties) if required is None else required}  # fmt: skip


def found(schema, *codes: str) -> list[tuple[str, str]]:
    """Code and pointer of the findings, of these codes only if some are named."""
    return [(each.code, each.pointer) for each in lint_schema(schema) if not codes or each.code in codes]


def test_a_sound_schema_has_no_finding():
    item = obj(quote=TEXT, price={"type": ["number", "null"], "minimum": 0})
    schema = obj(
        reasoning=TEXT, evidence={"type": "array", "items": item, "maxItems": 5}, label=LABEL,
        due={"anyOf": [{"type": "string", "format": "date"}, {"type": "null"}]},
        confidence={"type": "number", "minimum": 0, "maximum": 1},
    )  # fmt: skip
    assert found(schema) == []


# --- OV001 ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [
    "unknown", "Unknown", "not_applicable", "NotApplicable", "n/a", "N/A", "other", "OTHER_LANGUAGE", "none", "", "?",
    "cannot_tell", "can't tell", "not sure", "unclear", "no_answer_found", "unspecified", "not-stated", None,
    "NOT ENOUGH INFO", "not_enough_information", "insufficient_evidence", "no_information", "don't know", "dont_know",
    "idk", "no_answer", "cannot_say", "not_provided", "not_reported", "not_visible", "no_match", "unassigned",
    "unlabeled", "I do not know", "notEnoughInfo", "prefer_not_to_say", "out_of_scope", "couldn't determine",
    "something_else", "keine Angabe", "neutral",
])  # fmt: skip
def test_a_way_out(value):
    assert found(obj(x={"enum": ["red", "green", value]}), "OV001") == []


@pytest.mark.parametrize(
    "value",
    [
        "normal",
        "notable",
        "another",
        "nonet",
        "navy",
        "knot",
        "no",
        "minor",
        "known",
        "info",
        "match",
        "answer",
        "not_spam",
        "no_action",
        "does_not_apply_brakes",
    ],
)
def test_no_way_out(value):
    assert found(obj(x={"enum": ["red", value]}), "OV001") == [("OV001", "/properties/x")]


@pytest.mark.parametrize(("schema", "pointers"), [
    # Where it need not be answered, or something else can be, there is a way out.
    (obj([], x={"enum": ["red", "green"]}), []),
    (obj(x={"anyOf": [{"enum": ["red", "green"]}, {"type": "null"}]}), []),
    (obj(x={"anyOf": [{"enum": ["red", "green"]}, TEXT]}), []),
    (obj(x={"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3}), []),
    # One value is no choice: the tag of a union.
    (obj(x={"const": "red"}), []),
    (obj(x={"enum": ["red"]}), []),
    # But not here.
    ({"enum": ["red", "green"]}, [""]),
    (obj(x={"enum": [1, 2, 3]}), ["/properties/x"]),
    (obj(x={"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 1, "maxItems": 3}),
     ["/properties/x/items"]),
    (obj(x={"oneOf": [{"const": "red", "title": "R"}, {"const": "green"}]}), ["/properties/x"]),
    (obj(x={"allOf": [{"enum": ["red", "green"]}]}), ["/properties/x/allOf/0"]),
    # Through a reference, at the enum, once for two uses.
    ({"$defs": {"c": {"enum": ["red", "green"]}}} | obj(x={"$ref": "#/$defs/c"}, y={"$ref": "#/$defs/c"}),
     ["/$defs/c"]),
    ({"$defs": {"c": {"enum": ["red", "green"]}}} | obj(x={"anyOf": [{"$ref": "#/$defs/c"}, {"type": "null"}]}), []),
    # What no value leads to is not generated.
    ({"$defs": {"c": obj(x={"enum": ["red", "green"]})}} | obj(y=LABEL), []),
    # A document that only defines: each definition.
    ({"$defs": {"c": {"enum": ["red", "green"]}, "d": LABEL}}, ["/$defs/c"]),
])  # fmt: skip
def test_where_an_enum_has_to_be_answered(schema, pointers):
    assert [pointer for _, pointer in found(schema, "OV001")] == pointers


# --- OV002, OV003, OV008 -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("schema", "expected"), [
    ({"type": "string"}, ["OV002"]),
    ({"type": ["string", "null"]}, ["OV002"]),
    ({"type": "string", "minLength": 3}, ["OV002"]),
    ({"type": "string", "pattern": "^[a-z]+$"}, ["OV002"]),
    ({"type": "string", "pattern": "^[a-z]{1,20}$"}, []),
    ({"type": "string", "format": "date"}, []),
    ({"type": "string", "maxLength": 3}, []),
    ({"type": "string", "enum": ["a"]}, []),
    ({"type": "array", "items": TEXT}, ["OV003"]),
    ({"type": "array", "items": TEXT, "maxItems": 3}, []),
    ({"type": "array", "prefixItems": [TEXT], "items": False}, []),
    ({"type": "array", "maxItems": 3}, ["OV008"]),
    ({"type": "array", "items": {"type": "string"}, "maxItems": 0}, []),
    ({"type": "array", "prefixItems": [TEXT], "items": {"type": "string"}, "maxItems": 1}, []),
    ({"type": "array", "maxItems": 0}, []),
    # A bound beyond what a model writes is none.
    ({"type": "string", "maxLength": 100_000_000}, ["OV002"]),
    ({"type": "string", "maxLength": 100_000}, []),
    ({"type": "string", "pattern": "^(a{0,5000}){0,5000}$"}, ["OV002"]),
    ({"type": "array", "items": TEXT, "maxItems": 100_000_000}, ["OV003"]),
    ({"type": "object", "additionalProperties": TEXT, "maxProperties": 100_000_000}, ["OV003"]),
    ({"type": "array", "items": {}, "maxItems": 3}, ["OV008"]),
    ({"type": "array", "items": {"description": "free"}, "maxItems": 3}, ["OV008"]),
    ({"type": "array", "maxItems": 3, "items": {"type": "array", "items": {"type": "string"}}}, ["OV002", "OV003"]),
    ({"type": "object"}, ["OV003"]),
    ({"type": "object", "additionalProperties": TEXT}, ["OV003"]),
    ({"type": "object", "additionalProperties": TEXT, "maxProperties": 5}, []),
    (obj([], x={}), ["OV008"]),
    (obj([], x=True), ["OV008"]),
    (obj([], x=False), []),
])  # fmt: skip
def test_what_need_not_end(schema, expected):
    assert [code for code, _ in found(schema, "OV002", "OV003", "OV008")] == expected


def test_a_string_in_not_is_not_written():
    assert found({"type": "integer", "not": {"type": "string"}}, "OV002") == []


# --- OV004, OV005: order -------------------------------------------------------------------------------------

CHOICE = {"enum": ["a", "b", "unknown"]}
NUMBER = {"type": ["number", "null"]}


@pytest.mark.parametrize(("before", "after"), [
    ("label reasoning", "reasoning label"),
    ("reasoning label", ""),
    ("id label evidence rationale", "id evidence rationale label"),
    ("confidence label reasoning", "reasoning label confidence"),
    ("confidence certainty label", "label confidence certainty"),
    ("label confidence reasoning", "reasoning label confidence"),
    # By its other words a reasoning belongs to one property, and then only to that.
    ("price price_reason color color_reason", "price_reason price color_reason color"),
    ("price_reason price color_reason color", ""),
    ("name name_confidence price price_confidence", ""),
    ("name_confidence name price_confidence price", "name name_confidence price price_confidence"),
    ("labelReasoning label", ""),
    ("label labelReasoning", "labelReasoning label"),
    # Names that only look alike: no finding.
    ("label season", ""),
    ("label unreasonable", ""),
    ("title abstract", ""),
    # The last word says what it is; what is about something that is not there is about nothing.
    *((f"color {name}", "") for name in (
        "close_reason", "cancellation_reason", "reason_for_visit", "reason_code", "evidence_url", "explanation_url",
        "rationale_id", "reasoning_language", "price_quote", "root_cause_analysis",
    )),
    ("default_probability confidence_interval color", ""),
    ("label evidence_ids", ""),
    ("label evidence_uri", ""),
    ("verdict_date label_id reasoning", ""),
    ("verdict_date verdict reasoning", "verdict_date reasoning verdict"),
    *((f"color {name}", f"{name} color") for name in (
        "reasoning_steps", "brief_reasoning", "chain_of_thought", "stepByStepReasoning", "answer_rationale",
        "supporting_evidence", "evidence_quotes", "thought_process", "explanation_text",
    )),
    ("reason_for_color color", ""),
    ("color reason_for_color", "reason_for_color color"),
    ("is_spam spam_reason", "spam_reason is_spam"),
    ("reason_1 answer_1 reason_2 answer_2", ""),
    ("answer_1 reason_1 answer_2 reason_2", "reason_1 answer_1 reason_2 answer_2"),
    ("confidence_score label", "label confidence_score"),
])  # fmt: skip
def test_order(before, after):
    """Labels and `color` are choices, prices numbers, `confidence` a number; all else is text."""
    kinds = {"label": CHOICE, "color": CHOICE, "price": NUMBER, "confidence": NUMBER, "certainty": NUMBER}
    kinds |= {"name_confidence": NUMBER, "price_confidence": NUMBER, "is_spam": {"type": ["boolean", "null"]}}
    kinds |= dict.fromkeys(("default_probability", "confidence_interval", "confidence_score"), NUMBER)
    kinds |= {"evidence_ids": {"type": "array", "items": {"type": "integer"}, "maxItems": 3}}
    kinds |= {"evidence_uri": {"type": "string", "format": "uri"}}
    schema = obj([], **{name: kinds.get(name, TEXT) for name in before.split()})
    if not after:
        assert orders(schema) == {}
        assert found(schema, "OV004", "OV005") == []
        return
    assert orders(schema) == {"/properties": after.split()}
    assert found(schema, "OV004", "OV005")
    mended = schema | {"properties": {name: schema["properties"][name] for name in after.split()}}
    assert found(mended, "OV004", "OV005") == []
    assert orders(mended) == {}


def test_a_reason_to_choose_from_is_an_answer():
    schema = obj([], reason={"enum": ["spam", "abuse", "other"]}, explanation=TEXT)
    assert found(schema, "OV004") == [("OV004", "/properties/reason")]


def test_confidence_without_an_answer():
    assert found(obj([], reasoning=TEXT, confidence=NUMBER), "OV005") == [("OV005", "/properties/confidence")]
    assert found(obj([], value=TEXT, confidence=NUMBER), "OV005") == []


# --- OV006 ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("values", "groups"), [
    (["p0", "p1", "p2"], [["p0", "p1", "p2"]]),
    (["urgent", "normal", "low"], []),
    (["not_urgent", "not_sure", "urgent"], [["not_urgent", "not_sure"]]),
    (["positive", "possible"], []),
    (["internal", "international"], [["internal", "international"]]),
    ([1, 2, 3], []),
    ([10, 12, 20], [[10, 12]]),
])  # fmt: skip
def test_the_stand_in_for_tokens(values, groups):
    assert [group for group, _ in alike(values, None)] == groups


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A byte-level BPE with a token for each of ` "`, `urgent`, `normal`, `no` and `10`, and none for `urged`."""
    from tokenizers import Tokenizer as Fast
    from tokenizers import decoders, models, pre_tokenizers

    vocab: dict[str, int] = {}
    for token in [*sorted(pre_tokenizers.ByteLevel.alphabet()), 'Ġ"']:
        vocab[token] = len(vocab)
    merges = [("Ġ", '"')]
    for word in ("urgent", "normal", "10"):
        for cut in range(2, len(word) + 1):
            merges.append((word[: cut - 1], word[cut - 1]))
            vocab[word[:cut]] = len(vocab)
    fast = Fast(models.BPE(vocab=vocab, merges=merges))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    folder = tmp_path_factory.mktemp("tokenizer")
    fast.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


@pytest.mark.parametrize(("values", "groups"), [
    # Whole tokens differ, though their letters begin alike.
    (["normal", "no"], []),
    # `urged` becomes `urge` + d, `urgent` is one token: apart; `zebra` and `zoo` are spelled by bytes: alike.
    (["urgent", "urged"], []),
    (["zebra", "zoo"], [["zebra", "zoo"]]),
    (["é", "è"], [["é", "è"]]),
    ([10, 12], []),
    ([20, 22], [[20, 22]]),
])  # fmt: skip
def test_a_real_tokenizer_decides(tokenizer, values, groups):
    assert [group for group, _ in alike(values, tokenizer)] == groups


def test_shared_tokens_are_a_warning_by_a_tokenizer_and_a_hint_without(tokenizer):
    schema = obj([], x={"enum": ["zebra", "zoo", "zz0", "zz1"]})
    (sure,) = [each for each in lint_schema(schema, tokenizer=tokenizer) if each.code == "OV006"]
    (hint,) = [each for each in lint_schema(schema) if each.code == "OV006"]
    assert (sure.severity, hint.severity) == ("warning", "info")
    assert "'zebra', 'zoo'" in sure.message
    assert "'zz0', 'zz1'" in hint.message


def test_a_tokenizer_that_is_not_there(tmp_path):
    with pytest.raises(UserError, match=r"not found; allowed: a local folder that holds tokenizer\.json"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"allowed: a tokenizer\.json"):
        Tokenizer(tmp_path)


def test_a_long_list_of_values_is_cut():
    schema = obj(x={"enum": [f"value{index}" for index in range(3000)]})
    said = {each.code: each.message for each in lint_schema(schema)}
    assert "'value0', 'value1', 'value2', 'value3', ... (3000 values)" in said["OV006"]
    assert "... (3000 values)" in said["OV001"]
    assert all(len(message) < 250 for message in said.values())


# --- OV007 ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("member", "flagged"), [
    ({"type": "number"}, True),
    ({"type": "boolean"}, True),
    ({"type": "string", "format": "date"}, True),
    ({"type": "string", "pattern": "^[A-Z]{2}[0-9]{4}$"}, True),
    # A text can say that it is not known, and may be written rather than found.
    (TEXT, False),
    ({"type": "string", "pattern": "^[^<>]{0,200}$"}, False),
    ({"anyOf": [{"type": "number"}, TEXT]}, False),
    ({"type": "array", "items": TEXT, "minItems": 1, "maxItems": 2}, False),
    ({"type": "array", "items": TEXT, "maxItems": 2}, False),
    ({"type": ["number", "null"]}, False),
    ({"anyOf": [{"type": "number"}, {"type": "null"}]}, False),
    ({"anyOf": [{"type": "number"}, {"$ref": "#/$defs/maybe"}]}, False),
    ({"const": 1}, False),
    (obj([], y=TEXT), False),
])  # fmt: skip
def test_required_without_null(member, flagged):
    schema = {"$defs": {"maybe": {"type": ["string", "null"], "maxLength": 3}}} | obj(x=member)
    assert [pointer for _, pointer in found(schema, "OV007")] == ["/properties/x"] * flagged
    assert found({"$defs": schema["$defs"]} | obj([], x=member), "OV007") == []
    assert found({"$defs": schema["$defs"]} | obj(score=member), "OV007") == ([("OV007", "/properties/score")]
        if member == {"type": "boolean"} else [])  # fmt: skip


def test_what_a_model_does_is_never_unknown():
    act = {"enum": ["search", "finish"]}
    assert found(obj(next_action=act, tool=act, actionable=act), "OV001") == [("OV001", "/properties/actionable")]


@pytest.mark.parametrize(("name", "schema", "code"), [
    ("hint.json", obj(days={"type": "integer"}), 0), ("warning.json", obj(title={"type": "string"}), 1),
    ("error.json", obj(x={"enum": ["red", "green"]}), 1),
])  # fmt: skip
def test_a_hint_alone_fails_nothing(tmp_path, capsys, name, schema, code):
    (tmp_path / name).write_text(json.dumps(schema))
    assert main(["lint", str(tmp_path / name)]) == code
    assert "found 1 " in capsys.readouterr().out


def test_what_is_written_or_chosen_is_no_fact():
    """OpenAI's own examples of strict mode, in which every property is required."""
    step = obj(explanation=TEXT, output=TEXT)
    assert lint_schema(obj(steps={"type": "array", "items": step, "maxItems": 9}, final_answer=TEXT)) == []
    tool = obj(location=TEXT, unit={"enum": ["celsius", "fahrenheit"]}, days={"type": "integer"})
    assert found(tool, "OV001", "OV007") == [("OV001", "/properties/unit"), ("OV007", "/properties/days")]
    assert under(lint_schema(tool), "/function/parameters") == []
    assert len(under(lint_schema(tool), "/json_schema/schema")) == 2
    assert {each.severity for each in lint_schema(tool) if each.code == "OV007"} == {"info"}


# --- recursion -----------------------------------------------------------------------------------------------

TREE = {"$ref": "#/$defs/t"}


@pytest.mark.parametrize(("tree", "code"), [
    (obj(kid=TREE), "OV009"),
    (obj(kids={"type": "array", "items": TREE, "minItems": 1, "maxItems": 3}), "OV009"),
    (obj(kid={"anyOf": [TREE, obj(kid=TREE)]}), "OV009"),
    (obj([], kid=TREE), "OV010"),
    (obj(kid={"anyOf": [TREE, {"type": "null"}]}), "OV010"),
    (obj(kids={"type": "array", "items": TREE, "maxItems": 3}), "OV010"),
    (obj(x=LABEL), ""),
])  # fmt: skip
def test_recursion(tree, code):
    schema = {"$defs": {"t": tree}, **TREE}
    assert found(schema, "OV009", "OV010") == ([(code, "/$defs/t")] if code else [])


def test_a_recursion_through_the_root_and_through_two_definitions():
    assert found(obj(kid={"$ref": "#"}), "OV009") == [("OV009", "")]
    both = {"$defs": {"a": obj(b={"$ref": "#/$defs/b"}), "b": obj(a={"$ref": "#/$defs/a"})}, "$ref": "#/$defs/a"}
    assert found(both, "OV009") == [("OV009", "/$defs/a"), ("OV009", "/$defs/b")]


# --- OV011, OV012 --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "meant"), [
    ("propertes", "properties"), ("requried", "required"), ("maxlength", "maxLength"), ("max_items", "maxItems"),
    ("additionalPropertys", "additionalProperties"), ("enums", "enum"), ("tpye", "type"), ("$def", "$defs"),
    # Others have keywords too.
    ("example", ""), ("x-type", ""), ("propertyOrdering", ""), ("enumNames", ""), ("errorMessage", ""), ("titel", ""),
    ("optional", ""), ("widget", ""), ("order", ""), ("id", ""), ("strict", ""), ("name", ""), ("parameters", ""),
    ("when", ""), ("note", ""),
])  # fmt: skip
def test_misspelt_keywords(name, meant):
    """Of a schema, not of properties, which may have any name."""
    said = [each for each in lint_schema(obj([], **{name: {name: {}, "const": None}})) if each.code == "OV011"]
    assert [(each.pointer, each.fix) for each in said] == (
        [(f"/properties/{name}/{name}", f"write `{meant}` if that is meant")] if meant else []
    )


def test_a_value_that_stands_twice_is_no_shared_token():
    said = [(each.code, each.message) for each in lint_schema(obj([], x={"enum": ["a", "a", "unknown", 1, 1.0, True]}))]
    assert said == [("OV012", "'a', 1.0 stands in it more than once")]


# --- accepting, choosing, wrappings --------------------------------------------------------------------------


def test_a_comment_accepts_a_finding_there_and_below():
    bad = obj(x={"enum": ["red", "green"]}, y={"enum": ["red", "green"]})
    bad["properties"]["x"]["$comment"] = "the form has no other; oneaxis: ignore OV001, OV006"
    assert found(bad, "OV001") == [("OV001", "/properties/y")]
    assert found(bad | {"$comment": "oneaxis: ignore OV0"}) == []
    with pytest.raises(UserError, match=r"/\$comment: OV999 is no code"):
        lint_schema(bad | {"$comment": "oneaxis: ignore OV999"})
    with pytest.raises(UserError, match="ignores no code"):
        lint_schema(bad | {"$comment": "oneaxis: ignore everything"})


def test_select_and_ignore_by_prefix():
    findings = lint_schema(
        obj(x={"enum": ["red", "green"], "maxLength": 3}, y={"type": "string"}, z={"type": "number"})
    )
    assert {each.code for each in findings} == {"OV001", "OV002", "OV007", "OV101"}
    assert {each.code for each in chosen(findings, ["OV1"])} == {"OV101"}
    assert {each.code for each in chosen(findings, [], ["OV00"])} == {"OV101"}
    assert {each.code for each in chosen(findings, ["OV00"], ["OV007"])} == {"OV001", "OV002"}
    with pytest.raises(UserError, match=r"--select: 'E501' is no code; allowed: OV"):
        chosen([], ["E501"])


def test_what_openai_wraps():
    schema = obj(x=LABEL)
    inside = {"name": "triage", "strict": True, "schema": schema}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    assert list(schemas(schema)) == [("", schema)]
    assert list(schemas(inside)) == [("/schema", schema)]
    assert list(schemas({"type": "json_schema", "json_schema": inside})) == [("/json_schema/schema", schema)]
    assert list(schemas([tool, tool])) == [(f"/{index}/function/parameters", schema) for index in (0, 1)]
    # A schema with properties that are called name and schema is itself.
    odd = {"type": "object", "properties": {"name": TEXT, "schema": TEXT}}
    assert list(schemas(odd)) == [("", odd)]


@pytest.mark.parametrize(("schema", "message"), [
    ([], "is no JSON Schema"),
    *(({"$schema": each, "type": "null"}, r"/\$schema: .*; allowed: the address of a dialect")
      for each in (5, [], {}, True, None, "http://[bad")),
    ({"name": "x", "version": 1}, "no JSON Schema: it says name, version"),
    ({"type": "strng"}, "/type: 'strng' is not valid"),
    ({"type": "object", "properties": {"a": {"minLength": "3"}}}, "/properties/a/minLength: '3' is not of type"),
    ({"$ref": "#"}, r"\$ref goes in a circle: # -> #"),
    ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}, "goes in a circle"),
    ({"$ref": "#/$defs/none"}, "leads nowhere"),
    ({"$defs": {"a": {"type": "string"}}, "$ref": "#/$defs"}, ""),
    ({"title": "x", "type": "object", "properties": {"a": {"$ref": "#/title"}}}, "leads to no schema"),
])  # fmt: skip
def test_what_is_no_schema(schema, message):
    if not message:
        lint_schema(schema)
        return
    with pytest.raises(UserError, match=message) as error:
        lint_schema(schema, "here.json")
    assert str(error.value).startswith("here.json")
    assert "allowed" in str(error.value)
    assert "\n" not in str(error.value)


def test_what_draft_3_allows_is_no_trouble():
    """There a type may be a schema, and a keyword of later drafts anything."""
    schema = {"$schema": "http://json-schema.org/draft-03/schema#", "anyOf": [{"type": "null"}]}
    lint_schema(schema | {"properties": {"a": {"enum": [{}, 1], "maxProperties": {}, "type": "integer"}},
                          "contains": {"type": 1.5, "enum": [1]}, "not": {"type": -1, "minimum": 2}})  # fmt: skip
    assert "OV003" not in {code for code, _ in found(schema | {"type": [{"$ref": "#"}, "string"]})}


def test_names_are_read_in_words():
    assert words("chainOfThought") == ["chain", "of", "thought"]
    assert words("user_id2") == ["user", "id", "2"]
    assert words("HTMLReason") == ["html", "reason"]
    assert words("N/A") == ["n", "a"]


def test_every_code_is_documented(root):
    text = (root / "docs" / "lint.md").read_text()
    for code, each in CODES.items():
        assert f"### {code} {each.name}" in text
    # And shown: the page's examples get the codes that they stand under.
    for part in text.split("\n### ")[1:]:
        code = part[:5]
        for block in part.split("```json\n")[1:]:
            example = block.split("```")[0]
            if code < "OV2":
                assert code in {each.code for each in lint_schema(json.loads(example))}, example
