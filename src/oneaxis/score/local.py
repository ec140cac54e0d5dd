"""Log-probabilities of continuations by a model in this process, each shared prefix computed once.

Sequences of one group (an item's options, the rotations of its letters) begin alike. Their common prefix and, behind
it, the rest of each sequence lie in one row of a batch: a branch sees the prefix and itself, not the other branches,
and its positions go on from the prefix. Equal inputs run once: options of one token need no branch at all, since the
prefix's last position scores them all. The unembedding is applied at scored positions only, and log_softmax is taken
in float32.

Models whose families `oneaxis.quantize.families` does not know may read masks in ways of their own (ALiBi), and a
window of attention counts places in a row: for those, and for rows longer than the window, each sequence has its own
row, as it would have alone.

Letters of shapes: R rows, T tokens of a row, H hidden size, N positions, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tqdm import tqdm

from oneaxis.errors import UserError
from oneaxis.quantize.families import FAMILIES
from oneaxis.score.boundary import Target, common_prefix

ROWS_PER_HEAD = 256
"""Positions unembedded at once: a row of the vocabulary is 192 KiB in float32 at 49,152 tokens."""
PADDING_FREE = 16
"""Tokens of padding in a pass that cost less than another pass."""
ROW_TOKENS = 512
"""A group goes on in another row beyond this length, or beyond `ROW_PREFIXES` times its prefix, whatever is more:
attention grows with the square of the length, and each further row computes the prefix again."""
ROW_PREFIXES = 4


@dataclass
class Branch:
    """A distinct model input, and the targets that it scores (they differ in their last token or their start)."""

    ids: tuple[int, ...]
    targets: list[int] = field(default_factory=list)


@dataclass
class Row:
    """Branches that share a prefix, in one row: the prefix, then the rest of each."""

    prefix: int
    branches: list[Branch] = field(default_factory=list)
    length: int = field(init=False)

    def __post_init__(self) -> None:
        self.length = self.prefix

    def add(self, branch: Branch) -> None:
        """Put another branch behind those that are there."""
        self.length += len(branch.ids) - self.prefix
        self.branches.append(branch)


@dataclass
class Work:
    """How many tokens went through the model: real ones, with padding, and what one option at a time would take."""

    tokens: int = 0
    padded_tokens: int = 0
    naive_tokens: int = 0


def log_probabilities(
    model: Any, targets: Sequence[Target], batch_tokens: int, *, pad_id: int = 0
) -> tuple[list[list[float]], Work]:
    """Log-probability of every token of every target from its start on, given all tokens before it.

    Args:
        model: a causal language model of transformers that `check_head` accepts.
        targets: what to score; `0 < start < len(ids)`.
        batch_tokens: positions held in one pass, padding and shared prefixes included.
        pad_id: any valid token id; what stands there is never seen.

    Returns:
        Per target its log-probabilities in nats, and the tokens computed.
    """
    work = Work(naive_tokens=sum(len(target.ids) - 1 for target in targets))
    results: list[list[float]] = [[0.0] * (len(target.ids) - target.start) for target in targets]
    rows = sorted(_rows(targets, batch_tokens, _longest_shared(model)), key=lambda row: -row.length)
    with torch.inference_mode(), tqdm(total=len(targets), desc="score", unit="option") as progress:
        for batch in _batches(rows, batch_tokens):
            _score_batch(model, batch, targets, results, pad_id)
            work.tokens += sum(row.length for row in batch)
            work.padded_tokens += len(batch) * batch[0].length
            progress.update(sum(len(branch.targets) for row in batch for branch in row.branches))
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


def _longest_shared(model: Any) -> int:
    """The longest row in which branches may share a prefix; 0: none may."""
    config = model.config.get_text_config()
    if config.model_type not in FAMILIES:
        return 0
    return getattr(config, "sliding_window", None) or 2**31


def _rows(targets: Sequence[Target], batch_tokens: int, longest_shared: int) -> Iterator[Row]:
    """Targets by group and first token, so that what shares a row has one token at least in common."""
    inputs: dict[tuple[str, int], dict[tuple[int, ...], Branch]] = {}
    for index, target in enumerate(targets):
        assert 0 < target.start < len(target.ids)
        branches = inputs.setdefault((target.group, target.ids[0]), {})
        ids = target.ids[:-1]
        branches.setdefault(ids, Branch(ids)).targets.append(index)
    for branches in inputs.values():
        prefix = common_prefix([branch.ids for branch in branches.values()])
        most = min(batch_tokens, max(ROW_TOKENS, ROW_PREFIXES * prefix), longest_shared)
        row = Row(prefix)
        # The shortest first: one that is all prefix begins a row, and costs nothing there.
        for branch in sorted(branches.values(), key=lambda branch: len(branch.ids)):
            if row.branches and row.length + len(branch.ids) - prefix > most:
                yield row
                row = Row(prefix)
            row.add(branch)
        yield row


def _batches(rows: Sequence[Row], budget: int) -> Iterator[list[Row]]:
    """Runs of rows, longest first, that are padded to one length: one row at least.

    A run ends before its size, count x longest, exceeds the budget, or before more than a tenth of it (and more than
    PADDING_FREE tokens) would be padding.
    """
    batch: list[Row] = []
    padding = 0
    for row in rows:
        added = batch[0].length - row.length if batch else 0
        size = (len(batch) + 1) * (batch[0] if batch else row).length
        if batch and (size > budget or padding + added > max(PADDING_FREE, size // 10)):
            yield batch
            batch, padding, added = [], 0, 0
        batch.append(row)
        padding += added
    if batch:
        yield batch


def _score_batch(
    model: Any, rows: Sequence[Row], targets: Sequence[Target], results: list[list[float]], pad_id: int
) -> None:
    """Run some rows, the longest first, and fill `results`."""
    shape = (len(rows), rows[0].length)
    ids_RT = torch.full(shape, pad_id)
    positions_RT = torch.arange(shape[1]).repeat(len(rows), 1)
    owner_RT = torch.full(shape, -1)
    wanted: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for r, row in enumerate(rows):
        prefix, end = row.prefix, row.prefix
        ids_RT[r, :prefix] = torch.tensor(row.branches[0].ids[:prefix])
        owner_RT[r, :prefix] = 0
        for number, branch in enumerate(row.branches, start=1):
            start, end = end, end + len(branch.ids) - prefix
            ids_RT[r, start:end] = torch.tensor(branch.ids[prefix:])
            positions_RT[r, start:end] = torch.arange(prefix, len(branch.ids))
            owner_RT[r, start:end] = number
            for index in branch.targets:
                for place in range(targets[index].start, len(branch.ids) + 1):
                    read = place - 1 if place <= prefix else start + place - 1 - prefix
                    wanted.setdefault((r, read), []).append((index, place))
    inputs = {"input_ids": ids_RT}
    # Where no row has branches beside each other, causal attention is all: padding stands behind what is read.
    if any(sum(len(branch.ids) > row.prefix for branch in row.branches) > 1 for row in rows):
        inputs |= {"position_ids": positions_RT, "attention_mask": _mask(owner_RT, model)}
    hidden_RTH = model.base_model(
        **{name: tensor.to(model.device) for name, tensor in inputs.items()}, use_cache=False
    ).last_hidden_state
    _unembed(model.get_output_embeddings(), hidden_RTH, wanted, targets, results)


def _mask(owner_RT: torch.Tensor, model: Any) -> torch.Tensor:
    """[R, 1, T, T], True where a token sees another: before it, and of the prefix (owner 0) or of the same owner."""
    causal_TT = torch.ones(owner_RT.shape[1], owner_RT.shape[1], dtype=torch.bool).tril()
    seen_RTT = causal_TT & ((owner_RT[:, None] == 0) | (owner_RT[:, None] == owner_RT[:, :, None]))
    if model.config._attn_implementation == "eager":  # adds the mask
        seen_RTT = torch.zeros(seen_RTT.shape, dtype=model.dtype).masked_fill_(~seen_RTT, torch.finfo(model.dtype).min)
    return seen_RTT[:, None]


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
