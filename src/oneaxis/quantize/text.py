"""From documents to token sequences of one length: what statistics are taken from and perplexity is measured on.

Sources take turns, document by document, in the order of the table. Documents are joined by a blank line and cut into
sequences without overlap. Each sequence starts with whatever the tokenizer puts before a text (a BOS token for some).
"""

from dataclasses import dataclass

import numpy as np
import polars as pl
import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from oneaxis.errors import UserError

JOIN = "\n\n"


@dataclass(frozen=True)
class Sequences:
    """Packed text. Dims: S sequences, T tokens of each."""

    token_ids_ST: Tensor
    source_ids_ST: Tensor
    """Index into `sources` of the document that each token comes from."""
    sources: list[str]
    num_prefix: int
    """Leading tokens that the tokenizer adds: they are context, never predicted."""

    def frame(self) -> pl.DataFrame:
        """One row per token: sequence i64, position i64, source str, token_id i64."""
        S, T = self.token_ids_ST.shape
        names = np.asarray(self.sources)
        return pl.DataFrame(
            {
                "sequence": np.repeat(np.arange(S), T),
                "position": np.tile(np.arange(T), S),
                "source": names[self.source_ids_ST.flatten().numpy()],
                "token_id": self.token_ids_ST.flatten().numpy(),
                "predicted": np.tile(np.arange(T) >= max(self.num_prefix, 1), S),
            },
            schema_overrides={"source": pl.String},
        )


def sequences_from_frame(table: pl.DataFrame) -> Sequences:
    """The inverse of `Sequences.frame`."""
    S = int(table["sequence"].n_unique())
    table = table.sort("sequence", "position")
    sources = sorted(table["source"].unique())
    source_ids = table["source"].replace_strict({name: index for index, name in enumerate(sources)})
    first = table.filter(pl.col("sequence") == 0)
    return Sequences(
        token_ids_ST=torch.tensor(table["token_id"].to_numpy()).view(S, -1),
        source_ids_ST=torch.tensor(source_ids.to_numpy()).view(S, -1),
        sources=sources,
        num_prefix=int((~first["predicted"]).sum()),
    )


def pack(
    documents: pl.DataFrame,
    tokenizer: PreTrainedTokenizerBase,
    num_sequences: int,
    sequence_tokens: int,
    *,
    origin: str,
) -> Sequences:
    """Tokenise and pack as many documents as `num_sequences` of `sequence_tokens` need.

    Args:
        documents: columns source, text. origin: the file and the key of `num_sequences`, for the message.

    Raises:
        UserError: there is too little text: how many tokens there are, and how many are needed.
    """
    prefix = leading_tokens(tokenizer)
    body = sequence_tokens - len(prefix)
    needed = num_sequences * body
    sources = sorted(documents["source"].unique())
    tokens: list[int] = []
    token_sources: list[int] = []
    with tqdm(total=needed, unit="tok", desc="tokenise", delay=3) as bar:
        for source, text in _taking_turns(documents):
            ids = tokenizer(text + JOIN, add_special_tokens=False, verbose=False).input_ids
            tokens += ids
            token_sources += [sources.index(source)] * len(ids)
            bar.update(len(ids))
            if len(tokens) >= needed:
                break
    if len(tokens) < needed:
        there, longest = len(tokens) // body, len(tokens) + len(prefix)
        shorter = f"calibrate.sequence_tokens up to {longest}, or more text" if longest >= 16 else "more text"
        raise UserError(f"{origin}={num_sequences} of {sequence_tokens} tokens each need {needed} tokens of text, "
                        f"there are {len(tokens)}; allowed: "
                        + (f"up to {there}, or more text" if there else shorter))  # fmt: skip
    token_ids = torch.tensor(tokens[:needed]).view(num_sequences, body)
    source_ids = torch.tensor(token_sources[:needed]).view(num_sequences, body)
    start = torch.tensor(prefix, dtype=torch.long).expand(num_sequences, -1)
    return Sequences(
        token_ids_ST=torch.cat([start, token_ids], dim=1),
        source_ids_ST=torch.cat([source_ids[:, :1].expand(-1, len(prefix)), source_ids], dim=1),
        sources=sources,
        num_prefix=len(prefix),
    )


def leading_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens that the tokenizer puts before a text."""
    plain, full = (list(tokenizer("a", add_special_tokens=special).input_ids) for special in (False, True))
    return full[: full.index(plain[0])]


def _taking_turns(documents: pl.DataFrame) -> list[tuple[str, str]]:
    """(source, text): the first document of each source, then the second of each, ..."""
    return (
        documents.select("source", "text")
        .with_columns(turn=pl.int_range(pl.len()).over("source"))
        .sort("turn", "source", maintain_order=True)
        .select("source", "text")
        .rows()
    )
