"""The exact-copy suite: strings that nothing but the context tells, to be repeated to the last character.

Perplexity averages over text that is mostly easy; a long identifier or a row of digits is copied whole or is wrong, so
it shows damage by quantisation that an average hides. Five kinds: identifiers, JSON keys, base64, digits (a list of
records, then the records again in another order), and retrieval (facts in the middle of a long text of our own, asked
for at its end). Everything is drawn from a seed; no text of others is in it.

One forward pass scores a sequence. Greedy decoding writes a string exactly if, and only if, each of its tokens is the
argmax after the true ones before it, so the copies are teacher-forced: each task starts from a correct context, as if
the earlier copies had been right. The end of the string (a line break, a quote) is a target too.

Dims: S sequences, T tokens, D size of the hidden state, N predicted positions, V vocabulary.
"""

import base64
import string
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import polars as pl
import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from oneaxis.config.schema import Copying
from oneaxis.judge.statistics import no_narrower_share
from oneaxis.quantize.nll import CONFIDENCE, clustered_mean
from oneaxis.quantize.text import leading_tokens

KINDS = ("identifiers", "json_keys", "base64", "digits", "retrieval")
LIST_TOKENS = 512
"""Length of a sequence of every kind but retrieval."""
NUM_FACTS = 8
"""At most so many facts are hidden in, and asked of, one long text."""
DIGITS, CODE_DIGITS, BASE64_BYTES, NUM_WORDS = 24, 6, 15, 4
"""How long the strings are: what leaves a small model room to be right and to be wrong."""
BATCH_TOKENS = 2048
HEAD_ROWS = 512

ONE_WORD_NAMES = (
    "amber birch cedar coral crane delta ember falcon garnet harbor heron indigo ivory jasper juniper kestrel lagoon "
    "lantern larch lotus maple marble meadow nectar olive onyx opal orchid osprey pebble pewter plover quartz raven "
    "rowan saffron sage sierra silver sorrel sparrow spruce tansy teal thistle timber topaz umber velvet violet walnut "
    "willow yarrow zephyr"
)
PARTS_OF_NAMES = (
    "account address archive audit backup balance batch billing buffer cache catalog channel cluster config count "
    "credit cursor customer device digest driver export filter format gateway handle header import index input invoice "
    "journal kernel layout ledger limit locale margin memory module monitor number object offset order output owner "
    "packet parser payload policy profile query quota record region report request retry route sample schema script "
    "secret sensor session shadow signal socket source status stream string switch symbol target thread ticket timeout "
    "token total tracker user vector vendor version volume window worker"
)
NAMES, WORDS = ONE_WORD_NAMES.split(), PARTS_OF_NAMES.split()
SUBJECTS = ("the clerk", "a visitor", "the old ferry", "our neighbour", "the night guard", "a small dog", "the baker",
            "the morning train", "a tired nurse", "the last tenant", "the choir", "a young painter")  # fmt: skip
VERBS = ("waited beside", "walked around", "looked across", "came back to", "turned away from", "remembered",
         "passed by", "stood in front of", "spoke about", "was seen near")  # fmt: skip
PLACES = ("the long bridge", "the empty market", "a garden of herbs", "the railway station", "the stone well",
          "a shop with blue doors", "the quiet library", "the upper mill", "a field of barley",
          "the harbour wall")  # fmt: skip
TIMES = ("before the rain began", "after the bells had rung", "while the lamps were lit", "on the first day",
         "when the wind had gone down", "as on every other evening", "without saying a word",
         "for the better part of an hour")  # fmt: skip


class Model(Protocol):
    """What scoring needs of a model: `Layerwise` has it."""

    def run(self, token_ids_ST: Tensor, batch_size: int) -> Tensor:
        """Hidden states after the final norm [S, T, D]."""

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """[N, V]."""


@dataclass(frozen=True)
class CopyTasks:
    """The suite for one tokenizer."""

    tokens: pl.DataFrame
    """kind str, sequence i64, position i64, token_id i64, task i64 (null: not a target). Sequences of one kind are of
    one length; tokens after the last task are filling."""

    @property
    def tables(self) -> dict[str, pl.DataFrame]:
        """The rows of each kind that has any, in the order of KINDS."""
        parts = {kind: self.tokens.filter(pl.col("kind") == kind) for kind in KINDS}
        return {kind: part.sort("sequence", "position") for kind, part in parts.items() if part.height}

    def half(self) -> "CopyTasks":
        """The first half of the sequences of each kind, one at least."""
        rank = pl.col("sequence").rank("dense").over("kind")
        return CopyTasks(self.tokens.filter(rank <= (rank.max().over("kind") + 1) // 2))

    @property
    def groups(self) -> list[Tensor]:
        """Token ids [S, T], one tensor for each length, kinds in the order of KINDS: what a model is run on."""
        return [torch.cat([_ids(part) for part in parts]) for parts in self._by_length()]

    def _by_length(self) -> list[list[pl.DataFrame]]:
        lengths: dict[int, list[pl.DataFrame]] = {}
        for part in self.tables.values():
            lengths.setdefault(int(part["position"].max()) + 1, []).append(part)  # type: ignore[arg-type]
        return list(lengths.values())


def _ids(part: pl.DataFrame) -> Tensor:
    return torch.tensor(part["token_id"].to_numpy()).view(part["sequence"].n_unique(), -1)


# --- the tasks -----------------------------------------------------------------------------------------------


def make_copy_tasks(
    tokenizer: PreTrainedTokenizerBase, settings: Copying, max_positions: int | None, seed: int
) -> CopyTasks:
    """Draw the suite: `settings.sequences` of each kind.

    Args:
        max_positions: longest sequence that the model can read (None: any); a longer context is cut to it, and said.
    """
    if max_positions and settings.sequences and settings.context_tokens > max_positions:
        tqdm.write(f"oneaxis: calibrate.copying.context_tokens={settings.context_tokens}: cut to {max_positions}, the "
                   "model's positions", file=sys.stderr)  # fmt: skip
    rows: list[pl.DataFrame] = []
    prefix = leading_tokens(tokenizer)
    for index, kind in enumerate(KINDS):
        asked = settings.context_tokens if kind == "retrieval" else min(LIST_TOKENS, settings.context_tokens)
        length = min(asked, max_positions or asked)
        for sequence in range(settings.sequences):
            rng = np.random.default_rng([seed, index, sequence])
            pieces = _retrieval(rng, tokenizer, length - len(prefix)) if kind == "retrieval" else _copies(
                kind, rng, tokenizer, length - len(prefix))  # fmt: skip
            ids, tasks = list(prefix), [-1] * len(prefix)
            for token_ids, task in pieces:
                ids += token_ids
                tasks += [task] * len(token_ids)
            assert len(ids) <= length, (kind, sequence, len(ids), length)
            filling = length - len(ids)
            rows.append(
                pl.DataFrame(
                    {
                        "kind": kind,
                        "sequence": sequence,
                        "position": range(length),
                        "token_id": ids + [ids[-1]] * filling,
                        "task": [task if task >= 0 else None for task in tasks] + [None] * filling,
                    },
                    schema=TOKEN_SCHEMA,
                )
            )
    return CopyTasks(pl.concat(rows) if rows else pl.DataFrame(schema=TOKEN_SCHEMA))


TOKEN_SCHEMA = {
    "kind": pl.String,
    "sequence": pl.Int64,
    "position": pl.Int64,
    "token_id": pl.Int64,
    "task": pl.Int64,
}
Piece = tuple[list[int], int]
"""Token ids, and the task whose target they are (-1: context)."""


def _record(kind: str, name: str, rng: np.random.Generator) -> tuple[str, str, str]:
    """One record as what stands before the string, the string, and what ends it."""
    match kind:
        case "identifiers":
            words = "_".join(rng.choice(WORDS, NUM_WORDS, replace=False))
            return f"{name}:", f" {words}_{_draw(rng, string.digits, 3)}", "\n"
        case "json_keys":
            first, *others = rng.choice(WORDS, NUM_WORDS, replace=False)
            key = first + "".join(word.capitalize() for word in others)
            return f'{{"{name}": {{"', key, f'": {rng.integers(100)}}}}}\n'
        case "base64":
            return f"{name}:", " " + base64.b64encode(rng.bytes(BASE64_BYTES)).decode(), "\n"
        case _:
            return f"{name}:", " " + _draw(rng, string.digits, DIGITS), "\n"


def _draw(rng: np.random.Generator, alphabet: str, length: int) -> str:
    return "".join(rng.choice(list(alphabet), length))


def _copies(kind: str, rng: np.random.Generator, tokenizer: PreTrainedTokenizerBase, room: int) -> list[Piece]:
    """As many records as fit in `room` tokens twice, and their copies in another order."""
    head, again = _encode(tokenizer, "Records:\n"), _encode(tokenizer, "\nThe same records in another order:\n")
    records: list[tuple[list[int], list[int], list[int]]] = []
    left = room - len(head) - len(again)
    for name in rng.permutation(NAMES):
        before, target, end = (_encode(tokenizer, part) for part in _record(kind, str(name), rng))
        left -= 2 * (len(before) + len(target) + len(end))
        if left < 0:
            break
        records.append((before, target, end))
    pieces = [(head, -1)] + [(part, -1) for record in records for part in record] + [(again, -1)]
    for task, index in enumerate(rng.permutation(len(records))):
        before, target, end = records[index]
        pieces += [(before, -1), (target + end[:1], task), (end[1:], -1)]
    return pieces


def _retrieval(rng: np.random.Generator, tokenizer: PreTrainedTokenizerBase, room: int) -> list[Piece]:
    """Facts in the middle half of a long text, and the same facts begun again, in another order, at its end."""
    again, line = _encode(tokenizer, "\n\nThe codes that the text names:\n"), _encode(tokenizer, "\n")
    facts: list[tuple[list[int], list[int], list[int]]] = []
    left = room - len(again)
    for name in rng.permutation(NAMES)[:NUM_FACTS]:
        code = "-".join((*rng.choice(WORDS, 2, replace=False), _draw(rng, string.digits, CODE_DIGITS)))
        parts = (f" The code of {name} is", f" {code}", ".")
        before, target, end = (_encode(tokenizer, part) for part in parts)
        cost = 2 * (len(before) + len(target) + len(end)) + len(line)
        if left - cost < room // 2:  # Half of the text at least is other sentences.
            break
        left -= cost
        facts.append((before, target, end))
    sentences: list[list[int]] = []
    while len(sentence := _encode(tokenizer, _sentence(rng))) <= left:
        left -= len(sentence)
        sentences.append(sentence)
    middle = range(len(sentences) // 4, len(sentences) - len(sentences) // 4)
    after = sorted(rng.choice(middle, len(facts), replace=len(middle) < len(facts)).tolist()) if facts else []
    pieces: list[Piece] = []
    for number, sentence in enumerate(sentences):
        pieces.append((sentence, -1))
        pieces += [(part, -1) for fact, place in zip(facts, after, strict=True) if place == number for part in fact]
    pieces.append((again, -1))
    for task, index in enumerate(rng.permutation(len(facts))):
        before, target, end = facts[index]
        pieces += [(before, -1), (target + end, task), (line, -1)]
    return pieces


def _sentence(rng: np.random.Generator) -> str:
    subject, verb, place, time = (str(rng.choice(part)) for part in (SUBJECTS, VERBS, PLACES, TIMES))
    return f" {subject.capitalize()} {verb} {place} {time}."


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)


# --- the scores ----------------------------------------------------------------------------------------------

SCORE_SCHEMA = {
    "kind": pl.String,
    "sequence": pl.Int64,
    "task": pl.Int64,
    "num_tokens": pl.Int64,
    "exact": pl.Boolean,
    "nll": pl.Float64,
}


def score_copies(model: Model, tasks: CopyTasks) -> pl.DataFrame:
    """One row per task: kind, sequence, task, num_tokens, exact (each target is the argmax), nll (nats a token)."""
    hidden = [model.run(ids_ST, max(1, BATCH_TOKENS // ids_ST.shape[1])) for ids_ST in tasks.groups]
    return score_hidden(hidden, model.logits, tasks)


@torch.inference_mode()
def score_hidden(hidden: Sequence[Tensor], logits: Callable[[Tensor], Tensor], tasks: CopyTasks) -> pl.DataFrame:
    """`score_copies` from hidden states that are there already.

    Args:
        hidden: after the final norm, [S, T, D] for each of `tasks.groups`. logits: [N, D] -> [N, V].
    """
    rows = []
    for parts, hidden_STD in zip(tasks._by_length(), hidden, strict=True):
        table = pl.concat(parts).with_row_index("row")
        targets = table.filter(pl.col("task").is_not_null())
        # What stands at a position is predicted from the hidden state before it.
        before_N = torch.tensor(targets["row"].to_numpy().astype(np.int64) - 1)
        target_N = torch.tensor(targets["token_id"].to_numpy())
        hidden_ND = hidden_STD.flatten(0, 1)[before_N]
        nll, hit = [], []
        for piece_ND, ids_N in zip(hidden_ND.split(HEAD_ROWS), target_N.split(HEAD_ROWS), strict=True):
            logits_NV = logits(piece_ND).float()
            nll.append(torch.nn.functional.cross_entropy(logits_NV, ids_N, reduction="none").double())
            hit.append(logits_NV.argmax(dim=-1) == ids_N)
        scored = targets.select("kind", "sequence", "task").with_columns(
            nll=pl.Series(torch.cat(nll).numpy()), hit=pl.Series(torch.cat(hit).numpy())
        )
        rows.append(
            scored.group_by("kind", "sequence", "task", maintain_order=True).agg(
                num_tokens=pl.len().cast(pl.Int64), exact=pl.col("hit").all(), nll=pl.col("nll").mean()
            )
        )
    return pl.concat(rows) if rows else pl.DataFrame(schema=SCORE_SCHEMA)


# --- what changed --------------------------------------------------------------------------------------------


def compare_copies(base: pl.DataFrame, other: pl.DataFrame) -> dict[str, Any]:
    """Two tables of the same tasks to what changed from `base` to `other`, over all of them and by kind.

    Returns:
        all, and kinds by name, each with num_tasks, num_sequences, exact_base, exact_other (shares of the tasks),
        gained, lost (tasks right only in `other`, only in `base`), exact and nll: effect, ci_low, ci_high of the
        differences (share of tasks; nats per target token, each task counting the same). Tasks of one sequence are not
        independent: the intervals are over sequences, and null for one sequence. No interval of a share is narrower
        than Tango's of as many tasks without a difference: the same answers twice do not prove the next one.
        Without tasks {}.
    """
    keys = ["kind", "sequence", "task"]
    joined = base.join(other, on=keys, how="inner", suffix="_other", maintain_order="left")
    assert joined.height == base.height == other.height, "the copies compared are not of the same tasks"
    if joined.is_empty():
        return {}
    kinds = joined.partition_by("kind", maintain_order=True)
    return {"all": _changes(joined), "kinds": {part["kind"][0]: _changes(part) for part in kinds},
            "confidence": CONFIDENCE}  # fmt: skip


def _changes(joined: pl.DataFrame) -> dict[str, Any]:
    clusters = joined.select(pl.struct("kind", "sequence").rank("dense"))["kind"].to_numpy()
    right, right_other = (joined[name].to_numpy().astype(float) for name in ("exact", "exact_other"))
    exact = clustered_mean(right_other - right, clusters)
    low, high = exact["ci_low"], exact["ci_high"]
    if low is not None and high is not None:
        exact["ci_low"], exact["ci_high"] = no_narrower_share(exact["effect"], low, high, joined.height, CONFIDENCE)
    return {
        "num_tasks": joined.height,
        "num_sequences": len(np.unique(clusters)),
        "exact_base": float(right.mean()),
        "exact_other": float(right_other.mean()),
        "gained": int(((right_other == 1) & (right == 0)).sum()),
        "lost": int(((right_other == 0) & (right == 1)).sum()),
        "exact": exact,
        "nll": clustered_mean((joined["nll_other"] - joined["nll"]).to_numpy(), clusters),
    }


def discriminates(base: pl.DataFrame, weak: pl.DataFrame) -> dict[str, Any]:
    """Can the suite tell a model from its known-weak quantisation? If not, an equal score says nothing of a better one.

    One test, fixed before: over all tasks, the interval of the change in the share of exact copies is below zero.

    Returns:
        discriminates bool; effect, ci_low, ci_high of that change; exact_base, exact_weak, num_tasks, num_sequences;
        why str: what to think of the suite, in a sentence. Without tasks only the first and the last.
    """
    compared = compare_copies(base, weak)
    if not compared:
        return {"discriminates": False, "why": "There are no exact-copy tasks, so nothing is said of copying."}
    found = compared["all"]
    exact = found["exact"]
    tells = bool(exact["ci_high"] is not None and exact["ci_high"] < 0)
    shares = f"{found['exact_base']:.1%} of {found['num_tasks']} strings, plain static INT8 {found['exact_other']:.1%}"
    if tells:
        why = f"The suite tells a weak quantisation apart: the model copies {shares}."
    else:
        why = f"The suite cannot tell a weak quantisation apart; an equal score is no proof: the model copies {shares}."
    return {
        "discriminates": tells,
        **exact,
        "exact_base": found["exact_base"],
        "exact_weak": found["exact_other"],
        "num_tasks": found["num_tasks"],
        "num_sequences": found["num_sequences"],
        "why": why,
    }
