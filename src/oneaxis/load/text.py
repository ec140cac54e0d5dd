"""The text that prompts are cut from: the held-out documents in the tokens of the served checkpoint."""

from pathlib import Path

import numpy as np
import polars as pl
from transformers import AutoTokenizer

from oneaxis.load.plan import text_tokens


def served_text(checkpoint: Path, heldout: Path) -> np.ndarray:
    """Token ids, as `text_tokens` gives them.

    Args:
        checkpoint: its folder, for the tokenizer. heldout: parquet with a column text.

    Raises:
        UserError: when there is too little text.
    """
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    texts = pl.read_parquet(heldout)["text"]
    return text_tokens(texts, lambda t: tokenizer.encode(t, add_special_tokens=False), set(tokenizer.all_special_ids))
