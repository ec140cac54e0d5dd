"""Log-probabilities of continuations by a model in this process, each shared prefix computed once.

Sequences of one group (an item's options, the rotations of its letters) begin alike. Their common prefix runs through
the model once and leaves its keys and values; the rest of each sequence then runs as a branch on a copy of them.
Equal inputs run once: options of one token need no branch at all, since the prefix's last position scores them all.
The unembedding is applied at scored positions only, and log_softmax is taken in float32.

Letters of shapes: G groups, B branches, P prefix tokens, S suffix tokens, H hidden size, N positions, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tqdm import tqdm
from transformers import DynamicCache

from oneaxis.errors import UserError
from oneaxis.score.boundary import Target, common_prefix

ROWS_PER_HEAD = 256
"""Positions unembedded at once: a row of the vocabulary is 192 KiB in float32 at 49,152 tokens."""
PADDING_FREE = 16
"""Tokens of padding in a pass that cost less than another pass."""


@dataclass
class Branch:
    """A distinct model input, and the targets that it scores (they differ in their last token or their start)."""

    ids: tuple[int, ...]
    targets: list[int] = field(default_factory=list)


@dataclass
class Group:
    """Branches and the length of the prefix that they share."""

    branches: list[Branch]
    prefix: int


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
        model: a causal language model of transformers with a key-value cache.
        targets: what to score; `0 < start < len(ids)`.
        batch_tokens: positions held in one pass, padding and shared prefixes included.
        pad_id: any valid token id; padding is masked.

    Returns:
        Per target its log-probabilities in nats, and the tokens computed.
    """
    groups = _group(targets)
    work = Work(naive_tokens=sum(len(target.ids) - 1 for target in targets))
    results: list[list[float]] = [[0.0] * (len(target.ids) - target.start) for target in targets]
    head = model.get_output_embeddings()
    with torch.inference_mode(), tqdm(total=len(targets), desc="score", unit="option") as progress:
        _check_head(model, head, targets[0].ids)
        for batch in _batches(groups, lambda group: group.prefix, batch_tokens):
            _score_batch(model, head, batch, targets, results, batch_tokens, pad_id, work)
            progress.update(sum(len(branch.targets) for group in batch for branch in group.branches))
    return results, work


def _group(targets: Sequence[Target]) -> list[Group]:
    """Targets by group and first token (so that each group shares one token at least), longest prefix first."""
    inputs: dict[tuple[str, int], dict[tuple[int, ...], Branch]] = {}
    for index, target in enumerate(targets):
        assert 0 < target.start < len(target.ids)
        branches = inputs.setdefault((target.group, target.ids[0]), {})
        ids = target.ids[:-1]
        branches.setdefault(ids, Branch(ids)).targets.append(index)
    groups = [
        Group(list(branches.values()), common_prefix([branch.ids for branch in branches.values()]))
        for branches in inputs.values()
    ]
    return sorted(groups, key=lambda group: -group.prefix)


def _batches(items: Sequence[Any], length: Callable[[Any], int], budget: int, held: int = 0) -> Iterator[list[Any]]:
    """Runs of items, longest first, that are padded to one length: one item at least.

    A run ends before its size, count x (held + longest), exceeds the budget, or before more than a tenth of it (and
    more than PADDING_FREE tokens) would be padding. `held` is what each item holds besides its own length.
    """
    batch: list[Any] = []
    padding = 0
    for item in items:
        added = length(batch[0]) - length(item) if batch else 0
        size = (len(batch) + 1) * (held + length(batch[0] if batch else item))
        computed = (len(batch) + 1) * length(batch[0] if batch else item)
        if batch and (size > budget or padding + added > max(PADDING_FREE, computed // 10)):
            yield batch
            batch, padding, added = [], 0, 0
        batch.append(item)
        padding += added
    if batch:
        yield batch


def _score_batch(
    model: Any,
    head: Any,
    groups: Sequence[Group],
    targets: Sequence[Target],
    results: list[list[float]],
    batch_tokens: int,
    pad_id: int,
    work: Work,
) -> None:
    """Run the prefixes of some groups, then their branches, and fill `results`."""
    device = model.device
    # Prefixes are padded on the left: their last tokens stand next to the branches', as a sliding window needs it.
    longest = max(group.prefix for group in groups)
    lengths_G = torch.tensor([group.prefix for group in groups])
    ids_GP = torch.full((len(groups), longest), pad_id)
    for row, group in enumerate(groups):
        ids_GP[row, longest - group.prefix :] = torch.tensor(group.branches[0].ids[: group.prefix])
    offsets_P = torch.arange(longest) - (longest - lengths_G)[:, None]
    mask_GP = (offsets_P >= 0).long()
    cache = DynamicCache()
    hidden_GPH = model.base_model(
        input_ids=ids_GP.to(device),
        attention_mask=mask_GP.to(device),
        position_ids=offsets_P.clamp(min=0).to(device),
        past_key_values=cache,
        use_cache=True,
    ).last_hidden_state
    work.tokens += int(lengths_G.sum())
    work.padded_tokens += ids_GP.numel()
    if cache.get_seq_length() != longest:
        raise UserError(
            f"score.engine='transformers': {type(model).__name__} keeps no key-value cache of its prefix; allowed: vllm"
        )

    wanted: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for row, group in enumerate(groups):
        for branch in group.branches:
            for index in branch.targets:
                for place in range(targets[index].start, group.prefix + 1):
                    position = longest - group.prefix + place - 1
                    wanted.setdefault((row, position), []).append((index, place))
    _unembed(head, hidden_GPH, wanted, targets, results)

    branches = [
        (row, group.prefix, branch)
        for row, group in enumerate(groups)
        for branch in group.branches
        if len(branch.ids) > group.prefix
    ]
    branches.sort(key=lambda entry: entry[1] - len(entry[2].ids))
    for chunk in _batches(branches, lambda entry: len(entry[2].ids) - entry[1], batch_tokens, held=longest):
        rows_B = torch.tensor([row for row, _, _ in chunk])
        width = max(len(branch.ids) - prefix for _, prefix, branch in chunk)
        ids_BS = torch.full((len(chunk), width), pad_id)
        mask_BS = torch.zeros((len(chunk), width), dtype=torch.long)
        for place, (_, prefix, branch) in enumerate(chunk):
            suffix = branch.ids[prefix:]
            ids_BS[place, : len(suffix)] = torch.tensor(suffix)
            mask_BS[place, : len(suffix)] = 1
        hidden_BSH = model.base_model(
            input_ids=ids_BS.to(device),
            attention_mask=torch.cat([mask_GP[rows_B], mask_BS], dim=1).to(device),
            position_ids=(lengths_G[rows_B][:, None] + torch.arange(width)).to(device),
            past_key_values=_select(cache, rows_B.to(device)),
            use_cache=True,
        ).last_hidden_state
        work.tokens += int(mask_BS.sum())
        work.padded_tokens += ids_BS.numel()
        wanted = {}
        for place, (_, prefix, branch) in enumerate(chunk):
            for index in branch.targets:
                for scored in range(max(targets[index].start, prefix + 1), len(branch.ids) + 1):
                    wanted.setdefault((place, scored - 1 - prefix), []).append((index, scored))
        _unembed(head, hidden_BSH, wanted, targets, results)


def _select(cache: DynamicCache, rows_B: torch.Tensor) -> DynamicCache:
    """A cache of its own for each branch, copied from its group's row."""
    selected = DynamicCache()
    for layer, kept in enumerate(cache.layers):
        selected.update(kept.keys[rows_B], kept.values[rows_B], layer)
    return selected


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


def _check_head(model: Any, head: Any, ids: tuple[int, ...]) -> None:
    """The unembedding of the last hidden state must be the model's logits: some models scale or cap them after it."""
    sample = torch.tensor([ids[:8]], device=model.device)
    logits = model(input_ids=sample, use_cache=False).logits.float()
    ours = head(model.base_model(input_ids=sample, use_cache=False).last_hidden_state).float()
    if not torch.allclose(logits, ours, rtol=1e-3, atol=1e-3, equal_nan=True):
        raise UserError(
            f"score.engine='transformers': {type(model).__name__} changes its logits after lm_head; allowed: vllm"
        )
