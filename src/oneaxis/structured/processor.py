"""The kept mass of a grammar inside vLLM: a logits processor that is the grammar, and so sees both sides of its mask.

vLLM 0.32 applies the mask of its own structured outputs to the logits before the sampler
(`GPUModelRunner.sample_tokens` calls `apply_grammar_bitmask`, then `_sample`), and everything that could look at them
comes later: `raw_logprobs`, `raw_logits` and every logits processor. What that mask removed is gone. So this processor
carries the grammar itself: the same xgrammar, compiled in the same way, applied at the place where processors are
applied, that is before penalties, temperature and top-p, as vLLM's own mask is. The answers are the same; a test
compares them.

A request takes part by its `vllm_xargs`, whose names are below. For every position one line is written to
`mass-<process>.jsonl` in the folder that the engine's `additional_config` names, before its token is sampled:

    [request, position, kept mass at the sampling temperature, at temperature 1, 1 where the likeliest was not allowed]

Loaded into the engine by `--logits-processors oneaxis.structured.processor:KeptMass`.
"""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.sampling_params import SamplingParams
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, process_dict_updates

from oneaxis.structured.grammar import Follower, Grammars, kept_mass, legal_tokens
from oneaxis.structured.masses import FOLDER, MASK, REQUEST, SCHEMA, WHITESPACE

if TYPE_CHECKING:
    from vllm.config import VllmConfig


@dataclass
class _Request:
    """A request that takes part, in its place of the batch."""

    name: str
    mask: bool
    temperature: float
    follower: Follower
    output_ids: list[int] = field(repr=False)
    """The engine's own list, which grows."""


class KeptMass(LogitsProcessor):  # type: ignore[misc]
    """See the module."""

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Refuse a request with some of the names and not all, or values that cannot be.

        Raises:
            ValueError: which the client is answered with.
        """
        given = sampling_params.extra_args or {}
        names = [name for name in (REQUEST, SCHEMA, WHITESPACE, MASK) if name in given]
        if not names:
            return
        if len(names) < 4:
            raise ValueError(f"vllm_xargs has {', '.join(names)}; allowed: these with {REQUEST}, {SCHEMA}, "
                             f"{WHITESPACE} and {MASK}, or none of them")  # fmt: skip
        if given[WHITESPACE] not in ("free", "compact") or given[MASK] not in (0, 1):
            raise ValueError(f"vllm_xargs: {WHITESPACE}={given[WHITESPACE]!r}, {MASK}={given[MASK]!r}; allowed: free "
                             "or compact, and 0 or 1")  # fmt: skip
        if sampling_params.structured_outputs is not None:
            raise ValueError(f"vllm_xargs.{SCHEMA} beside structured_outputs; allowed: one grammar")

    def __init__(self, vllm_config: "VllmConfig", device: torch.device, is_pin_memory: bool) -> None:
        """As vLLM calls it. The tokenizer is read only when a request takes part."""
        folder = dict(vllm_config.additional_config or {}).get(FOLDER)
        if not folder:
            raise ValueError(f"additional_config.{FOLDER} is missing; allowed: an existing folder")
        self._model_config = vllm_config.model_config
        self._path = Path(folder) / f"mass-{os.getpid()}.jsonl"
        self._grammars: Grammars | None = None
        self._requests: dict[int, _Request] = {}

    def is_argmax_invariant(self) -> bool:
        """False: the mask changes which token is the likeliest."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the batch: who came, who left, who moved."""
        process_dict_updates(self._requests, batch_update, self._new)

    def _new(self, params: SamplingParams, prompt_ids: list[int] | None, output_ids: list[int]) -> _Request | None:
        given: dict[str, Any] = params.extra_args or {}
        if REQUEST not in given:
            return None
        if self._grammars is None:
            tokenizer = cached_tokenizer_from_config(model_config=self._model_config)
            self._grammars = Grammars(tokenizer, self._model_config.get_vocab_size())
        follower = self._grammars.follow(given[SCHEMA], given[WHITESPACE], sorted(params.all_stop_token_ids))
        return _Request(str(given[REQUEST]), bool(given[MASK]), params.temperature, follower, output_ids)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Record the kept mass of every request that takes part, and mask those that asked for it. In place.

        Args:
            logits: float32, R x V, raw.
        """
        alive = [(row, request) for row, request in self._requests.items()
                 if request.follower.advance(request.output_ids)]  # fmt: skip
        if not alive:
            return logits
        assert self._grammars is not None
        bitmask_RW = self._grammars.bitmask(len(alive))
        for place, (_, request) in enumerate(alive):
            request.follower.fill(bitmask_RW, place)
        rows = torch.tensor([row for row, _ in alive], device=logits.device)
        legal_RV = legal_tokens(bitmask_RW, logits.shape[-1]).to(logits.device)
        temperature_R = torch.tensor([request.temperature for _, request in alive], device=logits.device)
        mass = kept_mass(logits[rows], legal_RV, temperature_R)
        self._write([request for _, request in alive], mass.kept_R, mass.kept_at_one_R, mass.moved_R)
        masks = torch.tensor([request.mask for _, request in alive], device=logits.device)
        logits[rows] = logits[rows].masked_fill(~legal_RV & masks[:, None], float("-inf"))
        return logits

    def _write(self, requests: list[_Request], *columns: torch.Tensor) -> None:
        """One line each, whole at once: the answer that it belongs to is read right after."""
        kept, at_one, moved = (column.tolist() for column in columns)
        lines = [
            json.dumps([request.name, len(request.output_ids), kept[place], at_one[place], int(moved[place])])
            for place, request in enumerate(requests)
        ]
        with self._path.open("a", encoding="utf-8") as file:
            file.write("\n".join(lines) + "\n")
