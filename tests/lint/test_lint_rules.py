"""OV001 to OV010: which schemas get them, where, and which do not. Each list names what it holds; nothing is faked."""

import json

import pytest

from oneaxis.errors import UserError
from oneaxis.lint.finding import CODES, chosen
from oneaxis.lint.order import words
from oneaxis.lint.schema import lint_schema, orders, schemas
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
])  # fmt: skip
def test_a_way_out(value):
    assert found(obj(x={"enum": ["red", "green", value]}), "OV001") == []


@pytest.mark.parametrize("value", ["normal", "notable", "another", "nonet", "navy", "knot", "no", "minor", "known"])
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
])  # fmt: skip
def test_order(before, after):
    """Labels and `color` are choices, prices numbers, `confidence` a number; all else is text."""
    kinds = {"label": CHOICE, "color": CHOICE, "price": NUMBER, "confidence": NUMBER, "certainty": NUMBER}
    kinds |= {"name_confidence": NUMBER, "price_confidence": NUMBER}
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


# --- OV007 ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("member", "flagged"), [
    ({"type": "number"}, True),
    ({"type": "boolean"}, True),
    (TEXT, True),
    ({"type": "array", "items": TEXT, "minItems": 1, "maxItems": 2}, True),
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
    findings = lint_schema(obj(x={"enum": ["red", "green"], "maxLength": 3}, y={"type": "string"}))
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
