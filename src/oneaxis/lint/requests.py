"""The request guard: no repetition penalty where the answer has to repeat itself (OV201 to OV205).

JSON and code repeat their quotes, braces, keys and indentation by rule, so a penalty on repetition falls on them and on
little else. How much it takes, in nats, before the temperature divides it:

    frequency_penalty f     f x count, without bound: 0.3 after 60 quotes is 18 nats
    presence_penalty p      p, once a token was written
    repetition_penalty r    a positive logit is divided by r, a negative one multiplied; tokens of the prompt count too
    at temperature T        d nats make a token exp(d / T) times less likely than one without: 0.5 at 0.2 is 12 times

With a grammar on, the JSON still parses, and the penalty decides which of the legal values is written.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from oneaxis.errors import UserError
from oneaxis.lint.document import load_json
from oneaxis.lint.finding import Finding
from oneaxis.lint.tree import TYPES

PENALTIES = {
    "frequency_penalty": ("OV201", 0.0),
    "presence_penalty": ("OV202", 0.0),
    "repetition_penalty": ("OV203", 1.0),
    "repeat_penalty": ("OV203", 1.0),
}
"""Each name with its code and the value at which it does nothing. `repeat_penalty` is llama.cpp's and Ollama's."""
INSIDE = ("extra_body", "sampling_params", "options")
"""Where clients put what the server reads at the top."""
SAYS = ("messages", "prompt", "input", "input_ids")
"""What a request asks with; SGLang's own `text` beside `sampling_params` too."""
NO_REQUEST = frozenset(("$schema", "$ref", "$defs", "properties", "anyOf", "oneOf", "allOf"))
"""Keywords of a schema, none of which a request has; nor has it a type of JSON, or a wrapping's, as `type`."""
GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
GUIDED_IGNORED = (*GUIDED, "guided_decoding_backend", "guided_whitespace_pattern")
"""Fields that vLLM removed: it answers 200, unconstrained."""
CONSTRAINTS = ("structured_outputs", *GUIDED, "grammar", "json_schema", "regex", "ebnf", "structural_tag")
QUOTES = 60
"""Repeats for which the effect of a frequency penalty is told: the quotes of fifteen small fields."""
HUGE = 1e300
"""From here on a number is not taken for a setting; Python's integers may be larger than any float."""
CERTAIN = 20.0
"""A logit of a token that a model is sure of, for which a repetition penalty's effect is told."""

FIM = re.compile(r"<\|?fim_|<PRE>|<fim-prefix>|\[SUFFIX\]")
CODE_MODEL = re.compile(r"(?:^|[^a-z])(?:code|coder|codestral|starcoder\d*|codellama|codegemma|codegen)(?:[^a-z]|$)")
LANGUAGE = (
    r"python|javascript|typescript|golang|kotlin|php|haskell|bash|powershell|sql|html|css|c\+\+|c#|regex|"
    r"dockerfile|terraform"
)
NOUN = (
    rf"(?:{LANGUAGE})(?!\w)|(?:in|into|to)\s+(?:rust|java|ruby|swift|scala|go|c)\b|code\b(?! of\b)|function\b|"
    r"unit tests?\b|(?:api|cli)\b|regular expression\b|snippet\b|algorithm\b|codebase\b|pull request\b"
)
"""Languages that are words as well only behind in, into or to."""
VERB = r"write|implement|fix|refactor|complete|generate|debug|rewrite|port|translate|convert|optimi[sz]e|create|add"
ASKS = re.compile(rf"\b(?:{VERB})\b[^.!?\n]{{0,60}}?(?<![\w-])(?:{NOUN})", re.IGNORECASE)
TAGS = ("code", "codegen", "coding", "code_generation")


def additive_nats(penalty: float, count: int) -> float:
    """What a frequency penalty has taken from a token's logit after so many repeats, in nats."""
    return penalty * count


def multiplied(logit: float, penalty: float) -> float:
    """A logit after a repetition penalty (Keskar et al. 2019, as transformers and vLLM have it)."""
    return logit / penalty if logit > 0 else logit * penalty


def handicap(nats: float, temperature: float) -> float:
    """How many times less likely a token is for losing so many nats; infinite at temperature 0, and beyond floats."""
    if nats == 0:
        return 1.0
    try:
        return math.exp(nats / temperature)
    except (ZeroDivisionError, OverflowError):
        return math.inf if nats > 0 else 0.0


def guard(request: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> list[Finding]:
    """What is wrong with a request's sampling, for what it asks; empty for free text and for penalties at rest.

    Args:
        request: an OpenAI-style body (chat, completion or response), as JSON has it.
        defaults: what the server fills in, a model's `generation_config.json`.

    Raises:
        UserError: a penalty or temperature that is no number.
    """
    found = list(_ignored(request))
    what = kind(request)
    if what is None:
        return found
    temperature = _number(request, "temperature", defaults)
    for pointer, scope in _scopes(request):
        for name, (code, rest) in PENALTIES.items():
            if name in scope and scope[name] is not None:
                penalty = _checked(scope[name], f"{pointer}/{name}")
                if penalty != rest:
                    found.append(_explain(code, f"{pointer}/{name}", name, penalty, temperature, what))
    given = {name for _, scope in _scopes(request) for name in scope if scope[name] is not None}
    for name, (code, rest) in PENALTIES.items():
        default = (defaults or {}).get(name)
        if name not in given and default is not None and (penalty := _checked(default, name)) != rest:
            found.append(_explain(code, "", name, penalty, temperature, what, " by the server's defaults"))
    return found


def kind(request: Mapping[str, Any]) -> str | None:
    """What makes a request structured or code, in words; None for free text.

    Structured: a `response_format` (or Responses' `text.format`) other than text, `structured_outputs`, `guided_*`,
    a grammar of llama.cpp or SGLang, Ollama's `format`, or tools that may be called.
    Code: a suffix or a fill-in-the-middle token; a model named for code; a `metadata` value that says so; a fenced
    block in the last user message; or a sentence there in which a verb of making (write, fix, refactor, ...) is
    followed within 60 characters by code, a function, a language and the like.
    """
    for _, scope in _scopes(request):
        answer = scope.get("response_format")
        if isinstance(answer, dict) and answer.get("type") not in (None, "text"):
            return f"a structured request (response_format {answer.get('type')})"
        text = scope.get("text")
        form = text.get("format") if isinstance(text, dict) else None
        if isinstance(form, dict) and form.get("type") not in (None, "text"):
            return f"a structured request (text.format {form.get('type')})"
        for name in CONSTRAINTS:
            if scope.get(name):
                return f"a structured request ({name})"
        if scope.get("format") == "json" or isinstance(scope.get("format"), dict):
            return "a structured request (format)"
        for tools, choice in (("tools", "tool_choice"), ("functions", "function_call")):
            if scope.get(tools) and scope.get(choice) != "none":
                return f"a structured request ({tools})"
    return _code(request)


def _code(request: Mapping[str, Any]) -> str | None:
    asked = _asked(request)
    if request.get("suffix") or FIM.search(asked):
        return "a code request (fill in the middle)"
    model = request.get("model")
    if isinstance(model, str) and CODE_MODEL.search(model.lower()):
        return f"a code request (model {model})"
    tags = request.get("metadata")
    for name, tag in tags.items() if isinstance(tags, dict) else ():
        if str(tag).lower() in TAGS:
            return f"a code request (metadata {name}={tag})"
    if "```" in asked:
        return "a code request (a fenced block)"
    match = ASKS.search(asked)
    return f"a code request ({' '.join(match[0].split())!r})" if match else None


def _asked(request: Mapping[str, Any]) -> str:
    """The prompt, or the last user message."""
    prompt = request.get("prompt", request.get("input", request.get("text")))
    messages = request.get("messages", prompt if isinstance(prompt, list) else None)
    if isinstance(messages, list):
        users = [each for each in messages if isinstance(each, dict) and each.get("role") == "user"]
        if users:
            content = users[-1].get("content")
            parts = content if isinstance(content, list) else [content]
            return "\n".join(
                part if isinstance(part, str) else str(part.get("text", ""))
                for part in parts
                if isinstance(part, str | dict)
            )
        return "\n".join(each for each in messages if isinstance(each, str))
    return prompt if isinstance(prompt, str) else ""


def _scopes(request: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    yield "", request
    for name in INSIDE:
        if isinstance(request.get(name), dict):
            yield f"/{name}", request[name]


def _ignored(request: Mapping[str, Any]) -> Iterator[Finding]:
    for pointer, scope in _scopes(request):
        for name in GUIDED_IGNORED:
            if scope.get(name) is not None:
                yield Finding(
                    "OV204",
                    f"{pointer}/{name}",
                    f"vLLM removed {name}: it answers 200, and the output is not constrained",
                    "use `structured_outputs` or `response_format`",
                )
        inside = scope.get("structured_outputs")
        for name in ("disable_any_whitespace", "whitespace_pattern"):
            if isinstance(inside, dict) and inside.get(name):
                yield Finding(
                    "OV205",
                    f"{pointer}/structured_outputs/{name}",
                    f"vLLM does not read {name} in a request: whitespace stays free, and may go on until max_tokens",
                    "start the server with --structured-outputs-config "
                    '\'{"backend": "xgrammar", "disable_any_whitespace": true}\'',
                )


def _explain(
    code: str, pointer: str, name: str, penalty: float, temperature: float, what: str, source: str = ""
) -> Finding:
    if code in ("OV201", "OV202") and abs(penalty) > 2:
        message = f"{name} {penalty:g}{source} on {what}: vLLM refuses the request; allowed: -2 to 2"
        return Finding(code, pointer, message, f"set {name} to 0")
    if code == "OV201":
        nats = additive_nats(penalty, QUOTES)
        effect = (
            f"after {QUOTES} quotes {_taken(nats)} the quote, {_times(nats, temperature)}, and it grows without bound"
        )
        rest = "0"
    elif code == "OV202":
        effect = f"{_taken(penalty)} every token once written, {_times(penalty, temperature)}"
        rest = "0"
    else:
        nats = CERTAIN - multiplied(CERTAIN, penalty)
        effect = (
            f"of a token at logit {CERTAIN:g} {_taken(nats)} it, {_times(nats, temperature)}, and tokens of the "
            "prompt, its schema too, count from the start"
        )
        rest = "1"
    fix = f"set {name} to {rest}"
    if source:
        fix += f" in the request: leaving it out takes {penalty:g} from the server"
    return Finding(code, pointer, f"{name} {penalty:g}{source} on {what}: {effect}", fix)


def _taken(nats: float) -> str:
    return f"takes {nats:.4g} nats from" if nats > 0 else f"adds {-nats:.4g} nats to"


def _times(nats: float, temperature: float) -> str:
    if temperature == 0:
        return f"which at temperature 0 loses to whatever is less than {abs(nats):.4g} behind" if nats > 0 else (
            f"which at temperature 0 wins over whatever is less than {abs(nats):.4g} ahead"
        )  # fmt: skip
    factor = handicap(abs(nats), temperature)
    return f"{factor:.2g} times {'less' if nats > 0 else 'more'} likely at temperature {temperature:g}"


def _number(request: Mapping[str, Any], name: str, defaults: Mapping[str, Any] | None) -> float:
    for pointer, scope in _scopes(request):
        if scope.get(name) is not None:
            return _checked(scope[name], f"{pointer}/{name}")
    default = (defaults or {}).get(name)
    return 1.0 if default is None else _checked(default, name)


def _checked(value: Any, pointer: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < HUGE:
        raise UserError(f"{pointer}: {_short(value)} is no number; allowed: a finite one")
    if pointer.endswith("temperature") and value < 0:
        raise UserError(f"{pointer}: {_short(value)}; allowed: 0 or more")
    if pointer.endswith(("repetition_penalty", "repeat_penalty")) and value <= 0:
        raise UserError(f"{pointer}: {_short(value)}; allowed: more than 0")
    return float(value)


def _short(value: Any) -> str:
    shown = json.dumps(value)
    return shown if len(shown) <= 40 else shown[:37] + "..."


def check_defaults(defaults: Mapping[str, Any], where: str) -> None:
    """Whether a server's sampling settings are numbers, so that no request is blamed for them.

    Raises:
        UserError: one is not.
    """
    for name in (*PENALTIES, "temperature"):
        if defaults.get(name) is not None:
            _checked(defaults[name], f"{where}: /{name}")


def body_of(document: Any) -> tuple[str, dict[str, Any]] | None:
    """The request body that a JSON document is, or wraps as a batch file does (`body`), with its pointer; else None.

    A body has `messages`, `prompt` or `input`, `text` beside `sampling_params`, or a field that constrains or tunes
    an answer; and it is no JSON Schema, which has none of them as a keyword.
    """
    pointer, body = ("/body", document["body"]) if isinstance(document, dict) and "body" in document else ("", document)
    if not isinstance(body, dict) or NO_REQUEST & set(body):
        return None
    said = body.get("type")
    if isinstance(said, list) or said in (*TYPES, "json_schema", "function"):
        return None
    asks = any(isinstance(body.get(name), str | list) for name in SAYS)
    native = isinstance(body.get("text"), str | list) and isinstance(body.get("sampling_params"), dict)
    responds = isinstance(_inside(body, "text").get("format"), dict)
    return (pointer, body) if asks or native or responds or any(_carries(scope) for _, scope in _scopes(body)) else None


def _carries(scope: Mapping[str, Any]) -> bool:
    """Whether a field is there that only a request has, with a value of its kind."""
    return (
        any(isinstance(scope.get(name), dict) for name in ("response_format", "structured_outputs"))
        or any(scope.get(name) is not None for name in GUIDED)
        or any(
            isinstance(scope.get(name), list) and scope[name] and all(isinstance(each, dict) for each in scope[name])
            for name in ("tools", "functions")
        )
    )


def is_constrained(document: Any) -> bool:
    """Whether a document is a request with a constraint, tools or a penalty: what of a folder is looked at."""
    found = body_of(document)
    if found is None:
        return False
    names = (*PENALTIES, *CONSTRAINTS)
    return any(
        _carries(scope) or isinstance(scope.get("format"), dict) or any(scope.get(name) is not None for name in names)
        for _, scope in (*_scopes(found[1]), ("", _inside(found[1], "text")))
    )


def schemas_of(request: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The JSON Schemas that a request carries, with their pointers; of tools only if one may be called.

    Raises:
        UserError: a schema that is a text, but not JSON.
    """
    for pointer, scope in _scopes(request):
        for path in (
            ("response_format", "json_schema", "schema"), ("response_format", "schema"), ("text", "format", "schema"),
            ("structured_outputs", "json"), ("guided_json",), ("json_schema",),
        ):  # fmt: skip
            found: Any = scope
            for key in path:
                found = found.get(key) if isinstance(found, dict) else None
            at = pointer + "".join(f"/{key}" for key in path)
            found = _parsed(found, at)
            if found is not None:
                yield at, found
        # Ollama's, where it is not "json".
        if isinstance(scope.get("format"), dict):
            yield f"{pointer}/format", scope["format"]
        for at, tag in (
            ("/response_format", scope.get("response_format")),
            ("/structured_outputs/structural_tag", _inside(scope, "structured_outputs").get("structural_tag")),
            ("/structural_tag", scope.get("structural_tag")),
        ):
            if not at.startswith("/response") or (isinstance(tag, dict) and tag.get("type") == "structural_tag"):
                yield from _tagged(_parsed(tag, pointer + at), pointer + at)
        for tools, choice in (("tools", "tool_choice"), ("functions", "function_call")):
            listed = scope.get(tools) if scope.get(choice) != "none" else None
            for index, tool in enumerate(listed if isinstance(listed, list) else []):
                own = tool.get("function", tool) if isinstance(tool, dict) else {}
                inside = "/function" if isinstance(tool, dict) and "function" in tool else ""
                for key in ("parameters", "input_schema"):
                    if isinstance(own, dict) and isinstance(own.get(key), dict):
                        yield f"{pointer}/{tools}/{index}{inside}/{key}", own[key]


TEXT_FIXES = {
    "OV001": 'add a choice such as "unknown", and tell the model when to use it',
    "OV006": "choose values that differ from the first token on",
}
"""What to do about choices, which have neither null nor a quote before them."""


def texts_of(request: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Choices and regular expressions, which constrain a text and no JSON, as the schemas that say the same.

    Of a regular expression the whole text has to match, so the schema's has anchors.
    """
    for pointer, scope in _scopes(request):
        outputs = _inside(scope, "structured_outputs")
        if isinstance(outputs.get("choice"), list):
            yield f"{pointer}/structured_outputs/choice", {"enum": outputs["choice"]}
        for at, found in (("/structured_outputs/regex", outputs.get("regex")), ("/regex", scope.get("regex"))):
            if isinstance(found, str):
                yield pointer + at, {"type": "string", "pattern": f"^(?:{found})$"}


def _inside(scope: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = scope.get(key)
    return found if isinstance(found, dict) else {}


def _parsed(found: Any, at: str) -> Any:
    return load_json(found, at, 1) if isinstance(found, str) else found


def _tagged(tag: Any, pointer: str) -> Iterator[tuple[str, Any]]:
    """The schemas in a structural tag (vLLM 0.32, xgrammar 0.2.8): `structures` with a `schema` each, or a `format`
    with `json_schema` formats anywhere in it."""
    if isinstance(tag, list):
        for index, each in enumerate(tag):
            yield from _tagged(each, f"{pointer}/{index}")
    elif isinstance(tag, dict):
        for key in ("schema", "json_schema"):
            if isinstance(tag.get(key), dict) and (key == "schema") == ("begin" in tag and "type" not in tag):
                yield f"{pointer}/{key}", tag[key]
        for key in ("structures", "format", "elements", "content", "tags", "rules"):
            if isinstance(tag.get(key), dict | list):
                yield from _tagged(tag[key], f"{pointer}/{key}")
