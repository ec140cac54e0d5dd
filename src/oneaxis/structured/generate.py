"""The kept mass of a grammar in transformers: a logits processor for `model.generate()`.

    processor = KeptMassProcessor(grammars, schema, "free", prompt_tokens=ids.shape[1])
    model.generate(ids, logits_processor=[processor], do_sample=False)
    processor.kept[0]          # of the first row, one number per generated token

It applies the grammar and records what that removed; with `mask=False` it only watches, until the answer leaves the
grammar. It belongs before any other processor, since it takes the scores that it is given for the model's. Of one
`generate()` call only.
"""

from typing import Any

import torch
from transformers import LogitsProcessor

from oneaxis.structured.grammar import Follower, Grammars, Whitespace, kept_mass, legal_tokens


class KeptMassProcessor(LogitsProcessor):  # type: ignore[misc]
    """See the module."""

    def __init__(
        self,
        grammars: Grammars,
        schema: str,
        whitespace: Whitespace,
        *,
        prompt_tokens: int,
        temperature: float = 0.0,
        mask: bool = True,
    ) -> None:
        """As `Grammars.follow`; `prompt_tokens` is the length of every row's prompt, padding included.

        Args:
            temperature: of sampling, at which the mass is taken; 0: greedy.
            mask: False: nothing is removed.
        """
        self.kept: list[list[float]] = []
        """Per row, the kept mass at each generated token; shorter where an answer ended or left the grammar."""
        self._grammars, self._schema, self._whitespace = grammars, schema, whitespace
        self._prompt_tokens, self._temperature, self._mask = prompt_tokens, temperature, mask
        self._followers: list[Follower] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> Any:
        """Scores R x V with what the grammar forbids at -inf."""
        if not self._followers:
            self._followers = [self._grammars.follow(self._schema, self._whitespace) for _ in input_ids]
            self.kept = [[] for _ in input_ids]
        answers = input_ids[:, self._prompt_tokens :].tolist()
        alive = [row for row, (follower, ids) in enumerate(zip(self._followers, answers, strict=True))
                 if follower.advance(ids)]  # fmt: skip
        if not alive:
            return scores
        bitmask_RW = self._grammars.bitmask(len(alive))
        for place, row in enumerate(alive):
            self._followers[row].fill(bitmask_RW, place)
        legal_RV = legal_tokens(bitmask_RW, scores.shape[-1]).to(scores.device)
        temperature_R = torch.full((len(alive),), self._temperature, device=scores.device)
        mass = kept_mass(scores[alive], legal_RV, temperature_R)
        for row, kept in zip(alive, mass.kept_R.tolist(), strict=True):
            self.kept[row].append(kept)
        if not self._mask:
            return scores
        masked = scores.clone()
        masked[alive] = scores[alive].masked_fill(~legal_RV, float("-inf"))
        return masked
