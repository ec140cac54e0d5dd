"""Log-probabilities of continuations by a model in this process, each shared prefix computed once.

Sequences of one group (an item's options, the rotations of its letters) begin alike and share rows (`oneaxis.packing`):
options of one token need no branch at all, since the prefix's last position scores them all. The unembedding is applied
at scored positions only, and log_softmax is taken in float32.

Letters of shapes: R rows, T tokens of a row, H hidden size, N positions, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tqdm import tqdm

from oneaxis.errors import UserError
from oneaxis.packing import Row, batches, longest_shared, pack, rows_of
from oneaxis.score.boundary import Target

ROWS_PER_HEAD = 256
"""Positions unembedded at once: a row of the vocabulary is 192 KiB in float32 at 49,152 tokens."""


@dataclass
class Work:
    """How many tokens went through the model: real ones, with padding, and what one option at a time would take."""

    tokens: int = 0
    padded_tokens: int = 0
    naive_tokens: int = 0


def log_probabilities(
    model: Any, targets: Sequence[Target], batch_tokens: int, *, pad_id: int = 0, progress: str | None = "score"
) -> tuple[list[list[float]], Work]:
    """Log-probability of every token of every target from its start on, given all tokens before it.

    Args:
        model: a causal language model of transformers that `check_head` accepts.
        targets: what to score; `0 < start < len(ids)`.
        batch_tokens: positions held in one pass, padding and shared prefixes included.
        pad_id: any valid token id; what stands there is never seen.
        progress: before the bar; None: no bar.

    Returns:
        Per target its log-probabilities in nats, and the tokens computed.
    """
    work = Work(naive_tokens=sum(len(target.ids) - 1 for target in targets))
    results: list[list[float]] = [[0.0] * (len(target.ids) - target.start) for target in targets]
    assert all(0 < target.start < len(target.ids) for target in targets)
    rows = rows_of(((target.group, target.ids[:-1]) for target in targets), batch_tokens, longest_shared(model))
    with (
        torch.inference_mode(),
        tqdm(total=len(targets), desc=progress, unit="option", disable=progress is None) as bar,
    ):
        for batch in batches(rows, batch_tokens):
            _score_batch(model, batch, targets, results, pad_id)
            work.tokens += sum(row.length for row in batch)
            work.padded_tokens += len(batch) * batch[0].length
            bar.update(sum(len(branch.members) for row in batch for branch in row.branches))
    return results, work


def check_head(model: Any) -> None:
    """The unembedding of the last hidden state must be the model's logits: some models scale or cap them after it.

    Raises:
        UserError: it is not.
    """
    sample = torch.arange(8, device=model.device)[None]
    with torch.inference_mode():
        logits = model(input_ids=sample, use_cache=False).logits.float()
        hidden = model.base_model(input_ids=sample, use_cache=False).last_hidden_state
        ours = model.get_output_embeddings()(hidden).float()
    if not torch.allclose(logits, ours, rtol=1e-3, atol=1e-3, equal_nan=True):
        raise UserError(
            f"score.engine='transformers': {type(model).__name__} changes its logits after lm_head; allowed: vllm"
        )


def _score_batch(
    model: Any, rows: Sequence[Row], targets: Sequence[Target], results: list[list[float]], pad_id: int
) -> None:
    """Run some rows, the longest first, and fill `results`."""
    inputs, begins = pack(rows, model, pad_id=pad_id)
    wanted: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for r, (row, begin) in enumerate(zip(rows, begins, strict=True)):
        for number, branch in enumerate(row.branches):
            for index in branch.members:
                for place in range(targets[index].start, len(branch.ids) + 1):
                    wanted.setdefault((r, begin + row.place(number, place - 1)), []).append((index, place))
    hidden_RTH = model.base_model(**inputs, use_cache=False).last_hidden_state
    _unembed(model.get_output_embeddings(), hidden_RTH, wanted, targets, results)


def _unembed(
    head: Any,
    hidden: torch.Tensor,
    wanted: dict[tuple[int, int], list[tuple[int, int]]],
    targets: Sequence[Target],
    results: list[list[float]],
) -> None:
    """Log-probabilities at the wanted (row, position) of hidden (B x S x H), each for its (target, place) pairs."""
    keys = list(wanted)
    for begin in range(0, len(keys), ROWS_PER_HEAD):
        part = keys[begin : begin + ROWS_PER_HEAD]
        rows, positions = (torch.tensor(column, device=hidden.device) for column in zip(*part, strict=True))
        logprobs_NV = torch.log_softmax(head(hidden[rows, positions]).float(), dim=-1)
        places = [(row, index, place) for row, key in enumerate(part) for index, place in wanted[key]]
        tokens = torch.tensor([targets[index].ids[place] for _, index, place in places], device=hidden.device)
        picked = logprobs_NV[torch.tensor([row for row, _, _ in places], device=hidden.device), tokens].tolist()
        for (_, index, place), value in zip(places, picked, strict=True):
            results[index][place - targets[index].start] = value
