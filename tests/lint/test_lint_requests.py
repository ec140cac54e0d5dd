"""The request guard: which requests it takes for structured or code, and the numbers that it explains.

The numbers are those of the methods, worked by hand; that vLLM applies penalties so is tested in test_lint_engines.py.
"""

import math

import pytest

from oneaxis.errors import UserError
from oneaxis.lint.requests import additive_nats, guard, handicap, kind, multiplied, schemas_of, texts_of


def ask(asked: str = "Sum up this letter.", **more) -> dict:
    return {
        "model": "m",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": asked}],
    } | more


JSON = {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}}


# --- the numbers ---------------------------------------------------------------------------------------------


def test_frequency_penalty_is_unbounded():
    # 0.3 x 60 = 18 nats: e^-18 = 1.5e-8.
    assert additive_nats(0.3, 60) == pytest.approx(18)
    assert 1 / handicap(18, 1.0) == pytest.approx(1.52e-8, rel=0.01)


def test_low_temperature_amplifies():
    # e^(0.5/0.2) = e^2.5 = 12.2; at temperature 1 only e^0.5 = 1.65.
    assert handicap(0.5, 0.2) == pytest.approx(12.18, abs=0.01)
    assert handicap(0.5, 1.0) == pytest.approx(1.65, abs=0.01)
    assert handicap(0.5, 0.0) == math.inf
    assert handicap(1000, 0.5) == math.inf
    assert handicap(0.0, 0.0) == 1.0


def test_repetition_penalty_is_asymmetric():
    # 20 / 1.1 = 18.18, 2 / 1.1 = 1.82, -5 x 1.1 = -5.5: the surest token loses most.
    assert multiplied(20, 1.1) == pytest.approx(18.18, abs=0.01)
    assert multiplied(2, 1.1) == pytest.approx(1.82, abs=0.01)
    assert multiplied(-5, 1.1) == pytest.approx(-5.5)


def test_the_message_says_what_the_penalty_does():
    (finding,) = guard(ask(frequency_penalty=0.3, **JSON))
    assert (finding.code, finding.pointer, finding.severity) == ("OV201", "/frequency_penalty", "error")
    assert finding.message == (
        "frequency_penalty 0.3 on a structured request (response_format json_schema): after 60 quotes takes 18 nats "
        "from the quote, 6.6e+07 times less likely at temperature 1, and it grows without bound"
    )
    (finding,) = guard(ask(presence_penalty=0.5, temperature=0.2, **JSON))
    assert finding.code == "OV202"
    assert "takes 0.5 nats from every token once written, 12 times less likely at temperature 0.2" in finding.message
    (finding,) = guard(ask(repetition_penalty=1.1, **JSON))
    # 20 - 18.18 = 1.818; e^1.818 = 6.2.
    assert "of a token at logit 20 takes 1.818 nats from it, 6.2 times less likely" in finding.message
    (finding,) = guard(ask(frequency_penalty=-0.3, **JSON))
    assert "adds 18 nats to the quote, 6.6e+07 times more likely" in finding.message
    (finding,) = guard(ask(presence_penalty=0.5, temperature=0, **JSON))
    assert "at temperature 0 loses to whatever is less than 0.5 behind" in finding.message


# --- which requests ------------------------------------------------------------------------------------------

PENALTY = {"frequency_penalty": 0.3}


@pytest.mark.parametrize("structured", [
    JSON, {"response_format": {"type": "json_object"}}, {"response_format": {"type": "structural_tag"}},
    {"structured_outputs": {"json": {"type": "object"}}}, {"structured_outputs": {"choice": ["a", "b"]}},
    {"extra_body": {"structured_outputs": {"regex": "a"}}}, {"text": {"format": {"type": "json_schema"}}},
    {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]},
    {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required"},
    {"functions": [{"name": "f"}]}, {"grammar": "root ::= [a]"}, {"format": "json"},
])  # fmt: skip
def test_structured_requests_are_refused(structured):
    (finding,) = guard(ask(**structured, **PENALTY))
    assert finding.code == "OV201"
    assert "structured request" in finding.message
    assert guard(ask(**structured)) == []
    assert guard(ask(**structured, frequency_penalty=0, presence_penalty=0.0, repetition_penalty=1)) == []
    assert guard(ask(**structured, frequency_penalty=None, repetition_penalty=None)) == []


@pytest.mark.parametrize("free", [
    {}, {"response_format": {"type": "text"}}, {"tools": [], "tool_choice": "none"},
    {"text": {"format": {"type": "text"}}},
    {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"}, {"structured_outputs": None},
])  # fmt: skip
def test_free_text_may_be_penalised(free):
    assert guard(ask(**free, frequency_penalty=0.3, presence_penalty=1, repetition_penalty=1.2)) == []


@pytest.mark.parametrize("text", [
    "Write a Python function that reverses a list.", "Please fix this code.", "Implement quicksort in Rust",
    "refactor the following snippet", "Generate SQL for the monthly revenue", "Add unit tests.",
    "Translate this to TypeScript", "Why does this fail?\n```python\nprint(1)\n```", "write me a regular expression",
    "Create a Dockerfile for it", "Port it to C++ please", "complete the function below", "Convert it into Go",
])  # fmt: skip
def test_code_requests(text):
    assert kind(ask(text)).startswith("a code request")
    assert [each.code for each in guard(ask(text, **PENALTY))] == ["OV201"]


@pytest.mark.parametrize("text", [
    "Write a poem about rust and autumn leaves.", "Write a letter to my aunt.", "Write a code of conduct for our club.",
    "What is the dress code?", "Explain how photosynthesis functions.", "Create a shopping list.",
    "Translate this into French.", "Add more detail to the second paragraph.", "Who wrote the java sea charts?",
    "Complete the sentence.", "Write a film script about a heist.", "Generate ideas for a class trip.",
])  # fmt: skip
def test_requests_that_are_no_code(text):
    assert kind(ask(text)) is None


def test_what_the_rule_gets_wrong():
    assert kind(ask("Write a travel guide to Java.")) == "a code request ('Write a travel guide to Java')"
    assert kind(ask("I need something that sorts my photos by date.")) is None


def test_other_signs_of_code():
    assert kind({"prompt": "def f(x):", "suffix": "return y"}) == "a code request (fill in the middle)"
    assert kind({"prompt": "<|fim_prefix|>def f"}) == "a code request (fill in the middle)"
    assert kind({"prompt": "x", "model": "Qwen/Qwen2.5-Coder-7B"}) == "a code request (model Qwen/Qwen2.5-Coder-7B)"
    assert kind({"prompt": "x", "model": "encoder-7b"}) is None
    assert kind(ask(metadata={"route": "codegen"})) == "a code request (metadata route=codegen)"
    assert kind({"input": "Write a Python class"}).startswith("a code request")
    parts = [{"type": "text", "text": "Fix this code"}, {"type": "image_url", "image_url": {"url": "x"}}]
    assert kind({"messages": [{"role": "user", "content": parts}]}).startswith("a code request")
    # Only the last user message counts: what was asked before is done.
    turns = [{"role": "user", "content": "Write code"}, {"role": "assistant", "content": "..."},
             {"role": "user", "content": "Thanks!"}]  # fmt: skip
    assert kind({"messages": turns}) is None


def test_penalties_where_clients_put_them():
    found = guard(ask(extra_body={"repetition_penalty": 1.05}, options={"repeat_penalty": 1.1}, **JSON))
    assert [(each.code, each.pointer) for each in found] == [
        ("OV203", "/extra_body/repetition_penalty"), ("OV203", "/options/repeat_penalty"),
    ]  # fmt: skip


def test_penalties_that_the_server_fills_in():
    defaults = {"repetition_penalty": 1.05, "temperature": 0.7}
    (finding,) = guard(ask(**JSON), defaults)
    assert (finding.code, finding.pointer) == ("OV203", "")
    assert "by the server's defaults" in finding.message
    assert "at temperature 0.7" in finding.message
    assert "in the request" in finding.fix
    assert guard(ask(repetition_penalty=1.0, **JSON), defaults) == []
    assert guard(ask(), defaults) == []


def test_fields_that_vllm_does_not_read():
    found = guard(ask(guided_json={"type": "object"}, structured_outputs={"json": {}, "disable_any_whitespace": True}))
    assert [(each.code, each.pointer) for each in found] == [
        ("OV204", "/guided_json"), ("OV205", "/structured_outputs/disable_any_whitespace"),
    ]  # fmt: skip


@pytest.mark.parametrize("penalty", [1e30, 2.01, -3])
def test_a_penalty_that_vllm_refuses(penalty):
    """Its SamplingParams take -2 to 2: no effect is told of what is never applied."""
    for name in ("frequency_penalty", "presence_penalty"):
        (finding,) = guard(ask(**{name: penalty}, **JSON))
        assert finding.message.endswith(": vLLM refuses the request; allowed: -2 to 2")
        assert "refuses" not in guard(ask(**{name: 2}, **JSON))[0].message


@pytest.mark.parametrize(("more", "message"), [
    ({"frequency_penalty": "0.3"}, '/frequency_penalty: "0.3" is no number'),
    ({"presence_penalty": True}, "/presence_penalty: true is no number"),
    ({"repetition_penalty": 0}, "/repetition_penalty: 0; allowed: more than 0"),
    ({"temperature": -1}, "/temperature: -1; allowed: 0 or more"),
])  # fmt: skip
def test_bad_numbers(more, message):
    with pytest.raises(UserError, match=message):
        guard(ask(**JSON, **more))


def test_schemas_in_a_request():
    schema = {"type": "object"}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    found = list(schemas_of(ask(**JSON, tools=[tool], structured_outputs={"json": '{"type": "object"}'})))
    assert found == [
        ("/response_format/json_schema/schema", schema), ("/structured_outputs/json", schema),
        ("/tools/0/function/parameters", schema),
    ]  # fmt: skip
    # Tools that may not be called constrain nothing.
    assert list(schemas_of(ask(tools=[tool], tool_choice="none"))) == []
    with pytest.raises(UserError, match="/structured_outputs/json: not JSON"):
        list(schemas_of(ask(structured_outputs={"json": "{"})))


STRING = {"type": "string"}


@pytest.mark.parametrize(("request_", "pointers"), [
    ({"format": STRING}, ["/format"]), ({"format": "json"}, []),
    ({"response_format": {"type": "json_object", "schema": STRING}}, ["/response_format/schema"]),
    # A structural tag as vLLM 0.32 still takes it, and as it is for xgrammar 0.2.8, also as a text.
    ({"response_format": {"type": "structural_tag", "triggers": ["<f="],
                          "structures": [{"begin": "<f=a>", "schema": STRING, "end": "</f>"}]}},
     ["/response_format/structures/0/schema"]),
    ({"response_format": {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<f="], "tags": [
        {"begin": "<f=a>", "content": {"type": "json_schema", "json_schema": STRING}, "end": "</f>"}]}}},
     ["/response_format/format/tags/0/content/json_schema"]),
    ({"structured_outputs": {"structural_tag": '{"type": "structural_tag", "format": {"type": "sequence", "elements": '
                             '[{"type": "json_schema", "json_schema": {"type": "string"}}]}}'}},
     ["/structured_outputs/structural_tag/format/elements/0/json_schema"]),
    ({"sampling_params": {"json_schema": '{"type": "string"}'}}, ["/sampling_params/json_schema"]),
    ({"tools": [{"name": "f", "input_schema": STRING}]}, ["/tools/0/input_schema"]),
])  # fmt: skip
def test_every_place_of_a_schema_is_opened(request_, pointers):
    assert list(schemas_of(ask(**request_))) == [(pointer, STRING) for pointer in pointers]


def test_choices_and_regular_expressions_are_read_as_schemas():
    assert list(texts_of(ask(structured_outputs={"choice": ["a", "b"]}))) == [
        ("/structured_outputs/choice", {"enum": ["a", "b"]})
    ]
    assert list(texts_of(ask(sampling_params={"regex": "a+"}))) == [
        ("/sampling_params/regex", {"type": "string", "pattern": "^(?:a+)$"})
    ]
