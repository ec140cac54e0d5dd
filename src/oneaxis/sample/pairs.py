"""From responses to preference pairs: a response that passes its prompt's rule against one that fails it.

Within a prompt the first passing response is paired with the first failing one, the second with the second, up to
`pairs_per_prompt`; each text is used once. Responses stand in the order in which they were drawn, so that nothing but
the rule ranks them (choosing the shortest would teach brevity), except that a failing response which was cut off at the
token limit comes after those that ended: its end is no choice of the model's. A prompt whose responses all pass, or all
fail, gives no pair and is counted.

Shares are over responses. Responses to one prompt are alike, so their interval is Wilson's at the effective number of
independent responses (Korn and Graubard, Survey Methodology 24, 1998): the variance between prompts decides it.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl
from scipy.special import stdtrit

from oneaxis.artifacts import write_json
from oneaxis.config.schema import SamplePairs
from oneaxis.data.pairs import split_pairs
from oneaxis.data.sample import Row, digest
from oneaxis.errors import UserError
from oneaxis.judge.shares import share_interval
from oneaxis.sample.prompts import Prompt
from oneaxis.sample.rules import check
from oneaxis.sources.records import Drop, usable

CONFIDENCE = 0.95
FATES = ("paired", "all pass", "all fail", "no usable text")
"""Of a prompt. `no usable text`: some pass and some fail, but what fails (or passes) is empty or cannot be written."""

PAIR_SCHEMA = {
    "pair_id": pl.String, "source": pl.String, "prompt": pl.String, "chosen": pl.String, "rejected": pl.String,
    "conversational": pl.Boolean, "split": pl.String,
}  # fmt: skip
"""As `prepare_data` writes pairs: what follows reads either."""


def write_pairs(
    prompts: Sequence[Prompt], responses: pl.DataFrame, settings: SamplePairs, *, seed: int, out: Path
) -> tuple[dict[str, float], dict[str, Any]]:
    """Write responses.parquet, prompts.parquet, pairs.parquet, pairs.jsonl (as TRL has them) and summary.json to `out`.

    Args:
        responses: columns of `sample.responses.SCHEMA`, every sample of every prompt.

    Returns:
        Metrics without the stage's prefix, and notes.

    Raises:
        UserError: no prompt gives a pair, or too few do to train on some and hold out others.
    """
    read = read_responses(prompts, responses)
    pairs, used = make_pairs(prompts, read, settings.pairs_per_prompt)
    asked = fates(prompts, read, pairs)
    if not pairs:
        raise UserError(f"sample: none of {asked.height} prompts gives a pair ({shortage(asked, read, settings)}")
    try:
        split, lost = split_pairs(pairs, max_pairs=None, heldout_pairs=settings.heldout_pairs, seed=seed, key="sample")
    except UserError as error:
        said = str(error).partition("; dropped")[0]
        raise UserError(f"{said} (of {asked.height} prompts {shortage(asked, read, settings)}") from error
    assert not lost, f"pairs of one prompt share a text: {lost}"
    stands = [used.get(place, (None, None)) for place in range(read.height)]
    read = read.with_columns(
        pl.Series("pair_id", [pair_id for pair_id, _ in stands], dtype=pl.String),
        pl.Series("side", [side for _, side in stands], dtype=pl.String),
    )
    read.write_parquet(out / "responses.parquet")
    asked.write_parquet(out / "prompts.parquet")
    table = pl.DataFrame([[row[column] for column in PAIR_SCHEMA] for row in split], schema=PAIR_SCHEMA, orient="row")
    table.write_parquet(out / "pairs.parquet")
    (out / "pairs.jsonl").write_text("".join(as_trl(row) for row in split), encoding="utf-8")
    summary = summarise(asked, read, split)
    write_json(out / "summary.json", summary)
    return flat_metrics(summary), {"rule": "passing against failing responses, in the order drawn", **summary["pairs"]}


def read_responses(prompts: Sequence[Prompt], responses: pl.DataFrame) -> pl.DataFrame:
    """`responses` with what the rule said: columns source, rule, passed, said, and duplicate (an earlier sample of the
    prompt has the same text)."""
    by_id = {prompt.prompt_id: prompt for prompt in prompts}
    seen: set[tuple[str, str]] = set()
    columns: dict[str, list[Any]] = {name: [] for name in ("source", "rule", "passed", "said", "duplicate")}
    for row in responses.iter_rows(named=True):
        prompt = by_id[row["prompt_id"]]
        reading = check(prompt.rule, row["text"], finished=row["finished"])
        own = (row["prompt_id"], row["text"])
        for name, value in zip(columns, (prompt.source, prompt.rule.kind, reading.passed, reading.said, own in seen),
                               strict=True):  # fmt: skip
            columns[name].append(value)
        seen.add(own)
    return responses.with_columns(
        pl.Series("source", columns["source"], dtype=pl.String),
        pl.Series("rule", columns["rule"], dtype=pl.String),
        pl.Series("passed", columns["passed"], dtype=pl.Boolean),
        pl.Series("said", columns["said"], dtype=pl.String),
        pl.Series("duplicate", columns["duplicate"], dtype=pl.Boolean),
    )


def make_pairs(
    prompts: Sequence[Prompt], read: pl.DataFrame, most: int
) -> tuple[list[Row], dict[int, tuple[str, str]]]:
    """The pairs of every prompt, and which response (its row in `read`) stands where: (pair_id, chosen or rejected)."""
    rows: dict[str, list[tuple[int, Row]]] = {}
    for place, row in enumerate(read.iter_rows(named=True)):
        rows.setdefault(row["prompt_id"], []).append((place, row))
    pairs: list[Row] = []
    used: dict[int, tuple[str, str]] = {}
    for prompt in prompts:
        own = [(place, row) for place, row in rows[prompt.prompt_id] if not row["duplicate"] and _writable(row["text"])]
        passing = [each for each in own if each[1]["passed"]]
        failing = sorted((each for each in own if not each[1]["passed"]), key=lambda each: not each[1]["finished"])
        for (good, chosen), (bad, rejected) in list(zip(passing, failing, strict=False))[:most]:
            texts = [_response(prompt, row["text"]) for row in (chosen, rejected)]
            pair_id = f"{prompt.source}-{digest(prompt.text, *texts)[:12]}"
            pairs.append({"pair_id": pair_id, "source": prompt.source, "prompt": prompt.text, "chosen": texts[0],
                          "rejected": texts[1], "conversational": prompt.conversational})  # fmt: skip
            used[good], used[bad] = (pair_id, "chosen"), (pair_id, "rejected")
    return pairs, used


def _writable(text: str) -> bool:
    try:
        usable(text)
    except Drop:
        return False
    return True


def _response(prompt: Prompt, text: str) -> str:
    """As `pairs.parquet` has it: the text itself, or the assistant's message as JSON text."""
    if not prompt.conversational:
        return text
    return json.dumps([{"role": "assistant", "content": text}], ensure_ascii=False)


def as_trl(row: Row) -> str:
    """A line of `pairs.jsonl`, for `data.pairs.source` or TRL itself."""
    parts = {
        key: json.loads(row[key]) if row["conversational"] else row[key] for key in ("prompt", "chosen", "rejected")
    }
    return json.dumps(parts, ensure_ascii=False) + "\n"


def fates(prompts: Sequence[Prompt], read: pl.DataFrame, pairs: Sequence[Row]) -> pl.DataFrame:
    """One row per prompt: its rule, how many of its responses passed, how many pairs it gives, and its fate."""
    counts = {
        prompt_id: (samples, passed)
        for prompt_id, samples, passed in read.group_by("prompt_id").agg(pl.len(), pl.col("passed").sum()).iter_rows()
    }
    given: dict[str, int] = {}
    for pair in pairs:
        given[pair["prompt"]] = given.get(pair["prompt"], 0) + 1
    rows = []
    for prompt in prompts:
        samples, passed = counts[prompt.prompt_id]
        own = given.get(prompt.text, 0)
        fate = FATES[0 if own else 1 if passed == samples else 2 if not passed else 3]
        rows.append((prompt.prompt_id, prompt.source, prompt.rule.kind, prompt.rule.as_json(), prompt.text,
                     prompt.conversational, samples, passed, own, fate))  # fmt: skip
    schema = {"prompt_id": pl.String, "source": pl.String, "rule": pl.String, "value": pl.String, "prompt": pl.String,
              "conversational": pl.Boolean, "samples": pl.Int64, "passed": pl.Int64, "pairs": pl.Int64,
              "fate": pl.String}  # fmt: skip
    return pl.DataFrame(rows, schema=schema, orient="row")


def shortage(asked: pl.DataFrame, read: pl.DataFrame, settings: SamplePairs) -> str:
    """What came of the prompts, closing a bracket, and what would give more pairs."""
    fate = dict(asked.group_by("fate").len().iter_rows())
    counts = ", ".join(f"{fate[name]} {name}" for name in FATES if name in fate)
    cut = read.filter(~pl.col("finished")).height
    most = read.filter(~pl.col("passed")).group_by("said").len().sort("len", "said", descending=[True, False]).head(1)
    why = f", most often: {most['said'][0]}" if most.height else ""
    longer = f", sample.max_tokens over {settings.max_tokens}" if cut else ""
    easier = "easier" if fate.get("all fail", 0) >= fate.get("all pass", 0) else "harder"
    return (
        f"{counts}); {read['passed'].sum()} of {read.height} responses pass{why}; {cut} were cut off; more pairs come "
        f"from more or {easier} prompts{longer}, sample.num_samples over {settings.num_samples}"
    )


# --- what is reported ----------------------------------------------------------------------------------------


def clustered_share(hits: Sequence[int], sizes: Sequence[int], confidence: float = CONFIDENCE) -> dict[str, float]:
    """A share over units that lie in clusters, with its interval.

    Args:
        hits, sizes: of each cluster, sizes > 0.

    Returns:
        share, low, high, and `effective`: the number of independent units with the same standard error. Where no unit,
        or every one, is a hit, that is the number of clusters, since nothing shows how units of one differ.
    """
    n, m = sum(sizes), len(sizes)
    share = sum(hits) / n
    effective = float(m)
    if 0 < share < 1 and m > 1:
        between = sum((hit - share * size) ** 2 for hit, size in zip(hits, sizes, strict=True))
        variance = between * m / (m - 1) / n**2
        effective = min(share * (1 - share) / variance, n) if variance else float(n)
        # Few clusters estimate their variance badly: t in place of z.
        level = (1 + confidence) / 2
        effective *= float((stdtrit(n - 1, level) / stdtrit(m - 1, level)) ** 2)
    low, high = share_interval(share * effective, effective, confidence)
    return {"share": share, "low": low, "high": high, "effective": effective}


def summarise(asked: pl.DataFrame, read: pl.DataFrame, pairs: Sequence[Row]) -> dict[str, Any]:
    """By rule and in all: prompts and their fates, responses, pass rate with interval, duplicates, cut ones, pairs."""
    rules = {kind: _facts(asked.filter(pl.col("rule") == kind), read.filter(pl.col("rule") == kind))
             for kind in sorted(asked["rule"].unique())}  # fmt: skip
    heldout = sum(pair["split"] == "heldout" for pair in pairs)
    return {
        "confidence": CONFIDENCE,
        "all": _facts(asked, read),
        "rules": rules,
        "pairs": {"train_pairs": len(pairs) - heldout, "heldout_pairs": heldout},
    }


def _facts(asked: pl.DataFrame, read: pl.DataFrame) -> dict[str, Any]:
    fate = dict(asked.group_by("fate").len().iter_rows())
    return {
        "prompts": asked.height,
        "fates": {name: fate.get(name, 0) for name in FATES},
        "responses": read.height,
        "pass_rate": clustered_share(asked["passed"].to_list(), asked["samples"].to_list()),
        "duplicates": int(read["duplicate"].sum()),
        "cut": int((~read["finished"]).sum()),
        "tokens": int(read["tokens"].sum()),
        "pairs": int(asked["pairs"].sum()),
    }


def flat_metrics(summary: Mapping[str, Any]) -> dict[str, float]:
    """The summary under stable names, those of a rule behind its name."""
    metrics = {name: float(value) for name, value in summary["pairs"].items()}
    for prefix, facts in [("", summary["all"]), *((f"{kind}/", facts) for kind, facts in summary["rules"].items())]:
        rate, fate = facts["pass_rate"], facts["fates"]
        named = {
            "prompts": facts["prompts"],
            "prompts_all_pass": fate["all pass"],
            "prompts_all_fail": fate["all fail"],
            "prompts_without_pair": facts["prompts"] - fate["paired"],
            "responses": facts["responses"],
            "pass_rate": rate["share"],
            "pass_rate_ci_low": rate["low"],
            "pass_rate_ci_high": rate["high"],
            "duplicate_share": facts["duplicates"] / facts["responses"],
            "cut_share": facts["cut"] / facts["responses"],
            "tokens": facts["tokens"],
            "pairs": facts["pairs"],
            "pairs_per_prompt": facts["pairs"] / facts["prompts"],
        }
        metrics.update({prefix + name: float(value) for name, value in named.items()})
    return metrics
