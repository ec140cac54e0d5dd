"""What is asked of a document: the JSON schema of the answer, and the request, which says the same in words.

Both follow from the settings: the order of the fields, whether a value may be said to be missing, whether there is an
example. The example is a document of a kind that is never asked about, with its whole answer.
"""

import json
from collections.abc import Mapping
from typing import Any

from oneaxis.config.schema import MOST_ROWS, ExtractDocuments
from oneaxis.structured.documents import GOODS, KINDS, UNKNOWN, Document, Kind

LONGEST_QUOTE = 60
"""Characters of `evidence`; no line of a document is longer."""
LONGEST_WORD = 16
"""Characters of a name or note in a list."""
LARGEST = 9999

_BADGE = Kind("the access", ("guest", "staff", "courier", "press"), "Access: {label}", "the badge number",
              "Badge {amount}")  # fmt: skip
_EXAMPLE_LIST = "Stock\nsalt, spice, 4, local\nkale, vegetable, 31"
_EXAMPLE_ROWS = [{"name": "salt", "kind": "spice", "count": 4, "note": "local"},
                 {"name": "kale", "kind": "vegetable", "count": 31}]  # fmt: skip


def schema_of(document: Document, settings: ExtractDocuments) -> dict[str, Any]:
    """The JSON schema of the answer; its properties stand in the order in which they are to be written."""
    return _list_schema() if document.kind == "list" else _record_schema(KINDS[document.kind], settings)


def _record_schema(kind: Kind, settings: ExtractDocuments) -> dict[str, Any]:
    text: dict[str, Any] = {"type": "string", "maxLength": LONGEST_QUOTE}
    number: dict[str, Any] = {"type": "integer", "minimum": 0, "maximum": LARGEST}
    if settings.way_out:
        text, number = ({"anyOf": [of, {"type": "null"}]} for of in (text, number))
    labels = [*kind.labels, UNKNOWN] if settings.way_out else list(kind.labels)
    fields = {"evidence": text, "label": {"type": "string", "enum": labels}, "amount": number}
    return _object({name: fields[name] for name in settings.order}, required=list(settings.order))


def _list_schema() -> dict[str, Any]:
    """Rows without a number of their own: how many there are is the model's to say, up to a bound."""
    word = {"type": "string", "maxLength": LONGEST_WORD}
    row = _object(
        {
            "name": word,
            "kind": {"type": "string", "enum": list(GOODS)},
            "count": {"type": "integer", "minimum": 0, "maximum": LARGEST},
            "note": word,
        },
        required=["name", "kind", "count"],
    )
    return _object({"rows": {"type": "array", "items": row, "maxItems": 2 * MOST_ROWS}}, required=["rows"])


def _object(properties: Mapping[str, Any], *, required: list[str]) -> dict[str, Any]:
    return {"type": "object", "properties": dict(properties), "required": required, "additionalProperties": False}


def messages_of(document: Document, settings: ExtractDocuments) -> list[dict[str, str]]:
    """The conversation that asks for JSON from the first token on."""
    # It ends as the examples do: a model that goes on from there begins with the object.
    return [_user(f"{_instructions(document, settings)}\n\nDocument:\n{document.text}\nAnswer:")]


def reasoning_messages(document: Document) -> list[dict[str, str]]:
    """The conversation that asks for free text first."""
    if document.kind == "list":
        asked = "Go through the document row by row: name, kind, count, and the note where there is one."
    else:
        kind = KINDS[document.kind]
        asked = (f"What does the document say of {kind.label_means} and of {kind.amount_means}? Say which line tells "
                 "it, or that it cannot be read.")  # fmt: skip
    return [_user(f"{asked}\n\nDocument:\n{document.text}")]


def formatting_messages(document: Document, settings: ExtractDocuments, reasoning: str) -> list[dict[str, str]]:
    """The second request: the same conversation, the free answer, and then the form."""
    return [*reasoning_messages(document), {"role": "assistant", "content": reasoning},
            _user(f"Now put this into the form. {_instructions(document, settings)}")]  # fmt: skip


def _user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def _instructions(document: Document, settings: ExtractDocuments) -> str:
    if document.kind == "list":
        said = ('Answer with one JSON object with the key "rows": an object for each row of the document, with "name", '
                f'"kind" (one of {_quoted(GOODS)}), "count" and, where the row has one, "note".')  # fmt: skip
    else:
        said = _record_instructions(KINDS[document.kind], settings)
    return f"{said}\n\n{_examples(document, settings)}" if settings.example else said


def _record_instructions(kind: Kind, settings: ExtractDocuments) -> str:
    otherwise = ", or null if it cannot be read" if settings.way_out else ""
    unknown = f', or "{UNKNOWN}" if it cannot be read' if settings.way_out else ""
    lines = {
        "evidence": f'"evidence": the line that says {kind.label_means}, copied{otherwise}',
        "label": f'"label": {kind.label_means}, one of {_quoted(kind.labels)}{unknown}',
        "amount": f'"amount": {kind.amount_means} as a number{otherwise}',
    }
    return "\n".join(["Answer with one JSON object with these keys, in this order:",
                      *(lines[name] for name in settings.order)])  # fmt: skip


def _quoted(words: Any) -> str:
    return ", ".join(f'"{word}"' for word in words)


def _examples(document: Document, settings: ExtractDocuments) -> str:
    if document.kind == "list":
        return _example(_EXAMPLE_LIST, {"rows": _EXAMPLE_ROWS}, settings)
    line = _BADGE.label_line.format(label="courier")
    shown = [_example(f"{_BADGE.amount_line.format(amount=715)}\n{line}",
                      {"evidence": line, "label": "courier", "amount": 715}, settings)]  # fmt: skip
    if settings.way_out:
        shown.append(_example(f"{_BADGE.amount_line.format(amount='###')}\nValid on Sunday",
                              {"evidence": None, "label": UNKNOWN, "amount": None}, settings))  # fmt: skip
    return "\n\n".join(shown)


def _example(text: str, answer: Mapping[str, Any], settings: ExtractDocuments) -> str:
    ordered = {name: answer[name] for name in settings.order} if "label" in answer else answer
    # Always with the usual spaces: what the grammar takes must be the only thing that `whitespace` changes.
    return f"Example:\n{text}\nAnswer: {json.dumps(ordered)}"
