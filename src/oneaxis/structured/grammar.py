"""A grammar over tokens (xgrammar), and how much of the model's probability it leaves: the kept mass.

At one position the kept mass is the probability of all tokens that the grammar allows there, under the softmax over the
whole vocabulary, before anything is renormalised:

    kept = sum over legal v of exp(z_v / T) / sum over all v of exp(z_v / T)

with T the temperature of sampling. At temperature 0 no distribution is sampled from: the mass is that at T = 1, and
`moved` says whether the likeliest token of all was not allowed. After the mask the chosen token c has the probability
p_c / kept.

Dims: R rows (requests), V vocabulary, W words of a bitmask, 32 tokens each.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import xgrammar

Whitespace = Literal["free", "compact"]


class Grammars:
    """JSON schemas compiled for one tokenizer; each is compiled once (the compiler keeps them)."""

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        """Of a tokenizer of transformers (or vLLM's); `vocab_size` is that of the model's logits."""
        info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size)
        self.vocab_size = vocab_size
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1)

    def compile(self, schema: str, whitespace: Whitespace) -> xgrammar.CompiledGrammar:
        """A schema as JSON text, to a grammar as vLLM compiles it.

        Raises:
            RuntimeError: from xgrammar, for a schema that it cannot take.
        """
        compact = whitespace == "compact"
        return self._compiler.compile_json_schema(
            schema, any_whitespace=not compact, separators=(",", ":") if compact else None
        )

    def follow(self, schema: str, whitespace: Whitespace, stop_ids: Sequence[int] | None = None) -> "Follower":
        """One answer's way through the grammar; `stop_ids` end it (None: the tokenizer's own)."""
        stops = sorted(stop_ids) if stop_ids else None
        return Follower(xgrammar.GrammarMatcher(self.compile(schema, whitespace), override_stop_tokens=stops))

    def bitmask(self, rows: int) -> torch.Tensor:
        """An empty bitmask R x W, on the CPU."""
        return xgrammar.allocate_token_bitmask(rows, self.vocab_size)


@dataclass
class Follower:
    """Where one answer is in its grammar."""

    matcher: xgrammar.GrammarMatcher
    seen: int = 0
    """Tokens that were followed."""
    left: bool = False
    """The answer has left the grammar: what follows has no place in it."""

    def advance(self, ids: Sequence[int]) -> bool:
        """Follow the answer's tokens so far; False when it has ended or left the grammar."""
        for token in ids[self.seen :]:
            if self.left or self.matcher.is_terminated():
                break
            self.left = not self.matcher.accept_token(int(token))
            self.seen += 1
        return not self.left and not self.matcher.is_terminated()

    def fill(self, bitmask_RW: torch.Tensor, row: int) -> None:
        """The tokens that may come next, as bits."""
        self.matcher.fill_next_token_bitmask(bitmask_RW, row)


def legal_tokens(bitmask_RW: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """A bitmask as booleans, R x V: token v is bit v mod 32 of word v div 32."""
    bits = torch.arange(32, dtype=torch.int32, device=bitmask_RW.device)
    legal = (bitmask_RW[:, :, None] >> bits) & 1
    return legal.reshape(bitmask_RW.shape[0], -1)[:, :vocab_size].bool()


@dataclass(frozen=True)
class Mass:
    """Kept mass of R rows."""

    kept_R: torch.Tensor
    """At the temperature of sampling; of greedy rows at 1."""
    kept_at_one_R: torch.Tensor
    """At temperature 1."""
    moved_R: torch.Tensor
    """The likeliest token of all was not allowed."""


def kept_mass(logits_RV: torch.Tensor, legal_RV: torch.Tensor, temperature_R: torch.Tensor) -> Mass:
    """Kept mass per row, from logits before any mask; in float32.

    Args:
        logits_RV: raw logits. legal_RV: what the grammar allows. temperature_R: of sampling; 0 is greedy.
    """
    logits_RV = logits_RV.float()
    tempered = torch.where(temperature_R > 0, temperature_R, torch.ones_like(temperature_R))
    moved_R = ~legal_RV.gather(1, logits_RV.argmax(dim=-1, keepdim=True))[:, 0]
    at_one_R = _share(logits_RV, legal_RV)
    kept_R = at_one_R if bool((tempered == 1).all()) else _share(logits_RV / tempered[:, None].float(), legal_RV)
    return Mass(kept_R, at_one_R, moved_R)


def _share(logits_RV: torch.Tensor, legal_RV: torch.Tensor) -> torch.Tensor:
    allowed_RV = logits_RV.masked_fill(~legal_RV, float("-inf"))
    return (torch.logsumexp(allowed_RV, dim=-1) - torch.logsumexp(logits_RV, dim=-1)).exp()
