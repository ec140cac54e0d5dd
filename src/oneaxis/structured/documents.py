"""Short documents of our own making, rendered from templates, with the truth of every field that will be asked.

A *record* is a receipt, a parcel, a notice or a ticket. Two of its lines are asked about: one holds a label (one of
four), the other an amount. Each record is rendered twice. `legible`: as it is. `illegible`: both values are masked
(`####`), garbled, or their lines are missing, so that nobody can know them: the truth of these fields is then that they
are not there. Both share an id, and nothing else differs between them, so that they can be compared as a pair.

A *list* is a stock list with a row for each of its goods: name, kind, count and, for about half of them, a note. Its
condition is the number of rows.

A document depends on the seed and on its number alone: more documents hold the fewer ones.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from oneaxis.data.sample import digest

Condition = str
"""`legible`, `illegible`, or `n<rows>` of a list."""
LEGIBLE, ILLEGIBLE = "legible", "illegible"
UNKNOWN = "unknown"
"""The way out of an enum."""


@dataclass(frozen=True)
class Kind:
    """A kind of record: what is asked, and which labels there are."""

    label_means: str
    labels: tuple[str, ...]
    label_line: str
    """With `{label}`."""
    amount_means: str
    amount_line: str
    """With `{amount}`."""


KINDS: Mapping[str, Kind] = {
    "receipt": Kind("how it was paid", ("cash", "card", "voucher", "transfer"), "Paid by {label}",
                    "the total", "Total {amount}"),
    "parcel": Kind("the service", ("express", "standard", "freight", "pickup"), "Service: {label}",
                   "the weight in grams", "Weight {amount} g"),
    "notice": Kind("the reason", ("painting", "flooding", "inspection", "training"), "Reason: {label}",
                   "the room number", "Room {amount}"),
    # These labels share their first token with most tokenizers, which is what the report is to find.
    "ticket": Kind("the priority", ("P1", "P2", "P3", "P4"), "Priority {label}",
                   "the account number", "Account {amount}"),
}  # fmt: skip

PLACES = ("Leeds", "Bergen", "Lyon", "Porto", "Turin", "Ghent", "Cork", "Malmo", "Graz", "Basel")
NAMES = ("Ada", "Bruno", "Clara", "David", "Elin", "Farid", "Greta", "Hugo", "Irene", "Jonas")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday")
COMPLAINTS = ("the page does not load", "a letter never came", "the lamp is broken", "the door is stuck")
GOODS: Mapping[str, tuple[str, ...]] = {
    "fruit": ("pears", "plums", "figs", "limes", "grapes", "melons", "cherries", "apples"),
    "vegetable": ("leeks", "beets", "carrots", "onions", "peas", "beans", "radishes", "turnips"),
    "grain": ("oats", "rice", "rye", "barley", "wheat", "millet", "corn", "spelt"),
    "dairy": ("milk", "butter", "cream", "yogurt", "cheese", "curd", "kefir", "whey"),
}
NOTES = ("fresh", "frozen", "dried", "local", "imported")
GARBLE = "~^%*?=+|"

Hiding = Literal["masked", "garbled", "absent"]
HIDINGS: tuple[Hiding, ...] = ("masked", "garbled", "absent")


@dataclass(frozen=True)
class Document:
    """One document under one condition."""

    document_id: str
    """The same for both renderings of a record."""
    condition: Condition
    kind: str
    """A name in KINDS, or `list`."""
    text: str
    truth: Mapping[str, Any]
    """Of a record: evidence, label and amount, each None where it is not there. Of a list: `rows`, one mapping each."""

    @property
    def rows(self) -> Sequence[Mapping[str, Any]]:
        """Of a list; empty for a record."""
        return tuple(self.truth.get("rows", ()))


def make_documents(*, records: int, lists: int, lengths: Sequence[int], seed: int) -> list[Document]:
    """Every record legible and illegible, then the lists of each length, in a fixed order."""
    made = [document for number in range(records) for document in record(seed, number)]
    return made + [stock_list(seed, number, rows) for rows in lengths for number in range(lists)]


def record(seed: int, number: int) -> tuple[Document, Document]:
    """One record, as it is and with its label and its amount hidden."""
    draw = random.Random(f"extract:record:{seed}:{number}")
    name = list(KINDS)[number % len(KINDS)]
    kind = KINDS[name]
    label, amount = draw.choice(kind.labels), draw.randint(100, 999)
    said = {"label": kind.label_line.format(label=label), "amount": kind.amount_line.format(amount=amount)}
    lines = [*_heading(name, draw), *draw.sample(sorted(said), 2)]
    text = "\n".join(said.get(line, line) for line in lines)
    hidden = {
        "label": _hidden(kind.label_line, "{label}", label, draw),
        "amount": _hidden(kind.amount_line, "{amount}", str(amount), draw),
    }
    unreadable = "\n".join(line for line in (hidden.get(line, line) for line in lines) if line)
    document_id = f"{name}-{digest('extract', str(seed), str(number), text)[:12]}"
    return (
        Document(document_id, LEGIBLE, name, text, {"evidence": said["label"], "label": label, "amount": amount}),
        Document(document_id, ILLEGIBLE, name, unreadable, {"evidence": None, "label": None, "amount": None}),
    )


def _heading(name: str, draw: random.Random) -> list[str]:
    """Lines that nobody asks about. Their numbers have two digits, amounts have three."""
    match name:
        case "receipt":
            goods = draw.sample([thing for things in GOODS.values() for thing in things], 2)
            prices = [draw.randint(10, 99) for _ in goods]
            return [f"Corner shop, {draw.choice(PLACES)}", ", ".join(map("{} {}".format, goods, prices))]
        case "parcel":
            start, end = draw.sample(PLACES, 2)
            return [f"Parcel from {start} to {end}", f"For {draw.choice(NAMES)}"]
        case "notice":
            return [f"Closed on {draw.choice(DAYS)}", f"Ask {draw.choice(NAMES)} at desk {draw.randint(10, 99)}"]
        case _:
            return [f"Ticket from {draw.choice(NAMES)}", f"Says: {draw.choice(COMPLAINTS)}"]


def _hidden(line: str, slot: str, value: str, draw: random.Random) -> str:
    """The line without its value; empty where the whole line is missing."""
    how = draw.choice(HIDINGS)
    if how == "absent":
        return ""
    shown = "#" * len(value) if how == "masked" else "".join(draw.choice(GARBLE) for _ in value)
    return line.replace(slot, shown)


def stock_list(seed: int, number: int, rows: int) -> Document:
    """A stock list of so many rows."""
    draw = random.Random(f"extract:list:{seed}:{number}:{rows}")
    kinds = {thing: kind for kind, things in GOODS.items() for thing in things}
    found: list[dict[str, Any]] = []
    for thing in draw.sample(sorted(kinds), rows):
        row: dict[str, Any] = {"name": thing, "kind": kinds[thing], "count": draw.randint(2, 99)}
        if draw.random() < 0.5:
            row["note"] = draw.choice(NOTES)
        found.append(row)
    text = "\n".join(["Stock", *(", ".join(str(value) for value in row.values()) for row in found)])
    return Document(f"list-{digest('extract', str(seed), str(number), text)[:12]}", f"n{rows}", "list", text,
                    {"rows": found})  # fmt: skip
