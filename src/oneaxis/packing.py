"""Token sequences that begin alike, in one row of a batch: what they share is computed once.

The common prefix of some sequences and, behind it, the rest of each (its branch) lie in one row. A branch sees the
prefix and itself, not the other branches, and its positions go on from the prefix, so a causal model computes for each
token what it would compute for the sequence alone. Equal sequences are one branch.

Models whose families `oneaxis.quantize.families` does not know may read masks in ways of their own (ALiBi), and a
window of attention counts places in a row: for those, and for rows longer than the window, each sequence has its own
row, as it would have alone.

Letters of shapes: R rows, T tokens of a row.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from oneaxis.quantize.families import FAMILIES

PADDING_FREE = 16
"""Tokens of padding in a pass that cost less than another pass."""
ROW_TOKENS = 512
"""A group goes on in another row beyond this length, or beyond `ROW_PREFIXES` times its prefix, whatever is more:
attention grows with the square of the length, and each further row computes the prefix again."""
ROW_PREFIXES = 4

Side = Literal["right", "left"]


@dataclass
class Branch:
    """A distinct model input, and the numbers of the sequences that read from it."""

    ids: tuple[int, ...]
    members: list[int] = field(default_factory=list)


@dataclass
class Row:
    """Branches that share a prefix, in one row: the prefix, then the rest of each."""

    prefix: int
    branches: list[Branch] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    """Per branch, where its own tokens begin in the row."""
    length: int = field(init=False)

    def __post_init__(self) -> None:
        self.length = self.prefix

    def add(self, branch: Branch) -> None:
        """Put another branch behind those that are there."""
        self.branches.append(branch)
        self.starts.append(self.length)
        self.length += len(branch.ids) - self.prefix

    def place(self, number: int, token: int) -> int:
        """Where token `token` of branch `number` lies in the row."""
        return token if token < self.prefix else self.starts[number] + token - self.prefix


def longest_shared(model: Any) -> int:
    """The longest row in which branches may share a prefix; 0: none may."""
    config = model.config.get_text_config()
    if config.model_type not in FAMILIES:
        return 0
    return getattr(config, "sliding_window", None) or 2**31


def rows_of(inputs: Iterable[tuple[str, tuple[int, ...]]], batch_tokens: int, longest: int) -> list[Row]:
    """Model inputs as rows, the longest first, so that a run that does not fit in memory fails at once.

    Args:
        inputs: per sequence the group that is expected to begin alike, and its ids, at least one.
        batch_tokens: positions held in one pass: no row with more than one branch is longer.
        longest: `longest_shared`.
    """
    groups: dict[tuple[str, int], dict[tuple[int, ...], Branch]] = {}
    # By group and first token, so that what shares a row has one token at least in common.
    for index, (group, ids) in enumerate(inputs):
        groups.setdefault((group, ids[0]), {}).setdefault(ids, Branch(ids)).members.append(index)
    rows = [row for branches in groups.values() for row in _rows(list(branches.values()), batch_tokens, longest)]
    return sorted(rows, key=lambda row: -row.length)


def _rows(branches: list[Branch], batch_tokens: int, longest: int) -> Iterator[Row]:
    """The branches of one group in as few rows as the bounds allow."""
    prefix = _common_prefix([branch.ids for branch in branches])
    most = min(batch_tokens, max(ROW_TOKENS, ROW_PREFIXES * prefix), longest)
    row = Row(prefix)
    # The shortest first: one that is all prefix begins a row, and costs nothing there.
    for branch in sorted(branches, key=lambda branch: len(branch.ids)):
        if row.branches and row.length + len(branch.ids) - prefix > most:
            yield row
            row = Row(prefix)
        row.add(branch)
    yield row


def _common_prefix(sequences: Sequence[tuple[int, ...]]) -> int:
    for index, tokens in enumerate(zip(*sequences, strict=False)):
        if len(set(tokens)) > 1:
            return index
    return min(map(len, sequences))


def batches(rows: Sequence[Row], budget: int) -> Iterator[list[Row]]:
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


def pack(
    rows: Sequence[Row], model: Any, *, pad_id: int = 0, side: Side = "right"
) -> tuple[dict[str, torch.Tensor], list[int]]:
    """A run of rows as inputs of the model, on its device, and where each row begins.

    Args:
        rows: the longest first.
        model: a causal language model of transformers.
        pad_id: any valid token id; what stands there is never seen.
        side: of the padding. Nothing depends on it; tests hold that.
    """
    shape = (len(rows), rows[0].length)
    ids_RT, positions_RT, owner_RT = (torch.full(shape, value) for value in (pad_id, 0, -1))
    begins = [0 if side == "right" else shape[1] - row.length for row in rows]
    for r, (row, begin) in enumerate(zip(rows, begins, strict=True)):
        end = begin + row.prefix
        ids_RT[r, begin:end] = torch.tensor(row.branches[0].ids[: row.prefix])
        positions_RT[r, begin:end] = torch.arange(row.prefix)
        owner_RT[r, begin:end] = 0
        for number, branch in enumerate(row.branches, start=1):
            start, end = end, end + len(branch.ids) - row.prefix
            ids_RT[r, start:end] = torch.tensor(branch.ids[row.prefix :])
            positions_RT[r, start:end] = torch.arange(row.prefix, len(branch.ids))
            owner_RT[r, start:end] = number
    inputs = {"input_ids": ids_RT}
    # Where no row has branches beside each other, causal attention is all: right padding stands behind what is read.
    if any(sum(len(branch.ids) > row.prefix for branch in row.branches) > 1 for row in rows):
        inputs |= {"position_ids": positions_RT, "attention_mask": _mask(owner_RT, model)}
    elif side == "left":
        inputs |= {"position_ids": positions_RT, "attention_mask": (owner_RT >= 0).long()}
    return {name: tensor.to(model.device) for name, tensor in inputs.items()}, begins


def _mask(owner_RT: torch.Tensor, model: Any) -> torch.Tensor:
    """[R, 1, T, T], True where a token sees another: before it, and of the prefix (owner 0) or of the same owner."""
    causal_TT = torch.ones(owner_RT.shape[1], owner_RT.shape[1], dtype=torch.bool).tril()
    seen_RTT = causal_TT & ((owner_RT[:, None] == 0) | (owner_RT[:, None] == owner_RT[:, :, None]))
    if model.config._attn_implementation == "eager":  # adds the mask
        seen_RTT = torch.zeros(seen_RTT.shape, dtype=model.dtype).masked_fill_(~seen_RTT, torch.finfo(model.dtype).min)
    return seen_RTT[:, None]
