"""A tiny random checkpoint with text, calibrated: what the stages `calibrate` and `quantize` start from."""

from pathlib import Path
from typing import Any

import polars as pl
import torch

from oneaxis.config.schema import Calibrate, QuantizeInt8, Smooth
from oneaxis.quantize.calibrate import calibrate
from tests.serve.tiny import random_llama

SITES = ["qkv", "o", "gate_up", "down"]


def write_text(path: Path, num_documents: int, seed: int) -> Path:
    """Random words of letters from two sources."""
    draws = torch.randint(97, 123, (num_documents, 400), generator=torch.Generator().manual_seed(seed))
    texts = ["".join(chr(code) if code % 6 else " " for code in row) for row in draws.tolist()]
    sources = [("novel", "encyclopaedia")[index % 2] for index in range(num_documents)]
    pl.DataFrame({"doc_id": sources, "source": sources, "text": texts}).write_parquet(path)
    return path


def calibrated(folder: Path, **sizes: Any) -> tuple[Path, Path, dict[str, float]]:
    """A checkpoint, what `calibrate` wrote for it, and its metrics."""
    checkpoint = random_llama(folder / "policy")
    (checkpoint / "generation_config.json").write_text('{"eos_token_id": 1}', encoding="utf-8")
    (checkpoint / "chat_template.jinja").write_text("{{ messages }}", encoding="utf-8")
    out = folder / "calibrate"
    out.mkdir()
    texts = write_text(folder / "calibration.parquet", 20, 1), write_text(folder / "heldout.parquet", 10, 2)
    values = {"num_sequences": 8, "heldout_sequences": 4, "sequence_tokens": 64, "batch_size": 3} | sizes
    return checkpoint, out, calibrate(checkpoint, *texts, Calibrate(**values), out)


def int8(
    kind: str = "dynamic", alpha: float = 0.5, sites: list[Any] | None = None, ignore: tuple[str, ...] = ()
) -> Any:
    """A `quantize` section."""
    smooth = Smooth(alpha=alpha, sites=SITES if sites is None else sites)
    return QuantizeInt8(kind=f"w8a8_int8_{kind}", smooth=smooth, ignore=["lm_head", *ignore])
