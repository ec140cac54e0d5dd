"""Where the probability went: what a model says after the held-out prompts, before training against after it.

DPO takes probability from the rejected response, and often from the chosen one too; what it gives it to stands in no
pair. Three looks, on at most `PROMPTS` held-out pairs spread evenly over the table:

first     the next token after the prompt
fork      the next token after the prompt and what both responses share: where they part, and where the training bears
          on them. The same as `first` where they share nothing. A pair whose one response begins the other has none
greedy    the greedy continuation of the prompt, `CONTINUED` tokens or to the end of the answer, before and after: each
          with its probability under both models

For `first` and `fork` all tokens of the vocabulary are compared: a token's gain is the sum over prompts of
p_after - p_before; what moved in all is the sum over prompts and tokens of what rose (P times the mean total-variation
distance), and a share is of that. For `greedy` the texts compared are those continuations, and a share is of what rose
among them. With the gains stands how much of the fork's probability the chosen and the rejected token hold.

Dims: P prompts, V vocabulary.
"""

from collections import defaultdict
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from oneaxis.judge.paired import paired_difference
from oneaxis.preference.displacement import interval
from oneaxis.preference.forward import batches, response_logps
from oneaxis.preference.pairs import Sequence, common_prefix
from oneaxis.preference.probes import greedy, left_padded, spread

PROMPTS = 32
CONTINUED = 8
TOP = 10
"""Continuations that are listed, those that gained most."""

Pair = tuple[Sequence, Sequence]


@dataclass(frozen=True)
class Look:
    """What a model says after the prompts."""

    first_PV: np.ndarray
    """Probabilities, float32."""
    fork_PV: np.ndarray
    """As `first_PV`, of the pairs that fork."""
    continuations: list[list[int]]
    """Greedy, per prompt."""


def looked_at(pairs: Many[Pair]) -> list[Pair]:
    """The pairs that are looked at."""
    return [pairs[row] for row in spread(len(pairs), PROMPTS)]


def fork_of(pair: Pair) -> int | None:
    """The index of the first token in which two responses differ; None where one begins the other."""
    chosen, rejected = pair[0].ids, pair[1].ids
    at = common_prefix(chosen, rejected)
    return at if at < min(len(chosen), len(rejected)) else None


def look(model: Any, pairs: Many[Pair], ends: Many[int]) -> Look:
    """Both distributions and the greedy continuations of `pairs` (as `looked_at` gives them)."""
    prompts = [pair[0].ids[: pair[0].start] for pair in pairs]
    forks = [pair[0].ids[:at] for pair in pairs if (at := fork_of(pair)) is not None]
    return Look(
        first_PV=next_token(model, prompts),
        fork_PV=next_token(model, forks),
        continuations=greedy(model, prompts, tokens=CONTINUED, ends=ends),
    )


@torch.no_grad()
def next_token(model: Any, prefixes: Many[list[int]], batch_tokens: int = 2048) -> np.ndarray:
    """The probabilities of the next token, float32, P x V; the sums of softmax in float32."""
    found: list[tuple[int, np.ndarray]] = []
    for batch in batches([len(prefix) for prefix in prefixes], batch_tokens):
        inputs = left_padded([prefixes[index] for index in batch])
        inputs = {name: tensor.to(model.device) for name, tensor in inputs.items()}
        logits_BV = model(**inputs, use_cache=False, logits_to_keep=1).logits[:, -1].float()
        found += zip(batch, torch.softmax(logits_BV, dim=-1).cpu().numpy(), strict=True)
    return np.stack([line for _, line in sorted(found, key=lambda each: each[0])]) if found else np.zeros((0, 0))


def continuation_logps(model: Any, pairs: Many[Pair], *kinds: Many[list[int]]) -> list[np.ndarray]:
    """Per kind, the log-probability in nats of each continuation after the prompt of its pair; equal ones run once."""
    prompts = [tuple(pair[0].ids[: pair[0].start]) for pair in pairs]
    asked = [list(zip(prompts, map(tuple, kind), strict=True)) for kind in kinds]
    distinct = list(dict.fromkeys(key for kind in asked for key in kind))
    logps = response_logps(model, [Sequence([*prompt, *more], len(prompt)) for prompt, more in distinct])
    found = dict(zip(distinct, logps, strict=True))
    return [np.array([found[key] for key in kind]) for kind in asked]


def moved(
    pairs: Many[Pair],
    before: Look,
    after: Look,
    logps: Many[Many[np.ndarray]],
    tokenizer: Any,
    confidence: float,
) -> dict[str, Any]:
    """`mass.json`: what gained, by how much and which share, in the three looks.

    Args:
        logps: of the continuations of `before` and of `after`, each under both models, nats per prompt: `logps[0][1]`
            is what the model after training gives the continuations from before it.

    Returns:
        first, fork and greedy, each with num_prompts, moved (summed over prompts) and gained: text, gain (summed over
        prompts), share, before and after (means over prompts), num_prompts (in which it rose, or stood). first and
        fork also have held_by: the mean probability of the chosen response's token, of the rejected one's and of all
        others, with intervals.
    """
    told: dict[str, Any] = {
        "num_prompts": len(pairs),
        "first": _tokens(before.first_PV, after.first_PV, tokenizer),
        "fork": _tokens(before.fork_PV, after.fork_PV, tokenizer),
        "greedy": _texts(before, after, logps, tokenizer),
    }
    starts = [(pair, pair[0].start) for pair in pairs]
    forks = [(pair, at) for pair in pairs if (at := fork_of(pair)) is not None]
    told["first"]["held_by"] = _held_by(starts, before.first_PV, after.first_PV, confidence)
    if forks:
        told["fork"]["held_by"] = _held_by(forks, before.fork_PV, after.fork_PV, confidence)
    return told


def _held_by(
    places: Many[tuple[Pair, int]], before_PV: np.ndarray, after_PV: np.ndarray, confidence: float
) -> dict[str, Any]:
    """The mean probability of the chosen response's token at its place, of the rejected one's, and of all others."""
    rows = np.arange(len(places))
    chosen, rejected = (np.array([pair[side].ids[place] for pair, place in places]) for side in (0, 1))

    def held(found_PV: np.ndarray) -> dict[str, np.ndarray]:
        first, second = (found_PV[rows, ids].astype(np.float64) for ids in (chosen, rejected))
        # Where both go on with the same token it counts once.
        return {"chosen": first, "rejected": second, "neither": 1 - first - np.where(chosen == rejected, 0, second)}

    early, late = held(before_PV), held(after_PV)
    return {
        name: {"before": float(early[name].mean()), "after": float(late[name].mean()),
               **(interval(paired_difference(early[name], late[name], confidence)) if len(rows) > 1 else {})}
        for name in early
    }  # fmt: skip


def _tokens(before_PV: np.ndarray, after_PV: np.ndarray, tokenizer: Any) -> dict[str, Any]:
    """The tokens that gained most over all prompts."""
    change_PV = after_PV.astype(np.float64) - before_PV
    total = float(np.maximum(change_PV, 0).sum())
    gain_V = change_PV.sum(axis=0)
    listed = [
        {"text": shown(tokenizer, [int(token)]), "gain": float(gain_V[token]),
         "share": float(gain_V[token]) / total, "before": float(before_PV[:, token].mean()),
         "after": float(after_PV[:, token].mean()), "num_prompts": int((change_PV[:, token] > 0).sum())}
        for token in np.argsort(-gain_V, kind="stable")[:TOP]
        if gain_V[token] > 0
    ]  # fmt: skip
    return {"num_prompts": len(change_PV), "moved": total, "gained": listed}


def _texts(
    before: Look,
    after: Look,
    logps: Many[Many[np.ndarray]],
    tokenizer: Any,
) -> dict[str, Any]:
    """The greedy continuations that gained most; equal texts of several prompts are one."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0])
    pairs = list(zip(before.continuations, after.continuations, strict=True))
    for prompt, (old, new) in enumerate(pairs):
        for number, ids in enumerate([old] if old == new else [old, new]):
            line = sums[shown(tokenizer, ids)]
            for side in (0, 1):
                line[side] += float(np.exp(logps[number][side][prompt]))
            line[2] += 1
    total = sum(max(late - early, 0.0) for early, late, _ in sums.values())
    ranked = sorted(sums.items(), key=lambda item: (item[1][0] - item[1][1], item[0]))
    changed = sum(old != new for old, new in pairs)
    return {
        "num_prompts": len(pairs),
        "num_changed": changed,
        "moved": total,
        "gained": [
            {"text": text, "gain": late - early, "share": (late - early) / total, "before": early / len(pairs),
             "after": late / len(pairs), "num_prompts": int(count)}
            for text, (early, late, count) in ranked[:TOP]
            if late > early
        ],
    }  # fmt: skip


def shown(tokenizer: Any, ids: Many[int]) -> str:
    """Tokens as one line of text in which a space at the beginning and a line's end can be seen."""
    text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    text = text.replace("\n", "⏎").replace("\t", "⇥")
    kept = text.lstrip(" ")
    return "␣" * (len(text) - len(kept)) + kept
