"""A tiny random checkpoint with text, calibrated: what the stages `calibrate` and `quantize` start from."""

from pathlib import Path
from typing import Any

import polars as pl
import torch
from pydantic import TypeAdapter

from oneaxis.config.schema import Calibrate, Quantize
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


def sizes_of(**sizes: Any) -> Calibrate:
    """A small `calibrate` section."""
    copying = {"sequences": 1, "context_tokens": 128}
    values = {"num_sequences": 8, "heldout_sequences": 4, "sequence_tokens": 64, "batch_size": 3,
              "sample_tokens": 32, "dtype": "float32", "copying": copying}  # fmt: skip
    return Calibrate(**(values | sizes))


def calibrated(folder: Path, **sizes: Any) -> tuple[Path, Path, dict[str, float]]:
    """A checkpoint, what `calibrate` wrote for it, and its metrics."""
    checkpoint = random_llama(folder / "policy")
    (checkpoint / "generation_config.json").write_text('{"eos_token_id": 1}', encoding="utf-8")
    (checkpoint / "chat_template.jinja").write_text("{{ messages }}", encoding="utf-8")
    out = folder / "calibrate"
    out.mkdir()
    texts = write_text(folder / "calibration.parquet", 20, 1), write_text(folder / "heldout.parquet", 10, 2)
    return checkpoint, out, calibrate(checkpoint, *texts, sizes_of(**sizes), out)


def scheme(kind: str = "w8a8_int8_dynamic", sites: list[Any] | None = None, ignore: tuple[str, ...] = (),
           *, alpha: Any = 0.5, **other: Any) -> Any:  # fmt: skip
    """A `quantize` section, checked; `other` may set any of its keys, those of `smooth` and of `gptq` too."""
    values: dict[str, Any] = {
        "kind": kind,
        "smooth": {"alpha": alpha, "site_alpha": dict.fromkeys(SITES), "grid": [0.5, 0.6, 0.7, 0.8, 0.85],
                   "formula": "absmax", "sites": SITES if sites is None else sites, "refine_steps": 0},
        "rounding": "rtn", "weight_range": "absmax", "kv": "none", "ignore": ["lm_head", *ignore],
        "gptq": {"num_sequences": 4, "damping": 0.01, "act_order": True},
    }  # fmt: skip
    if kind == "w4a16":
        values |= {"group_size": 32, "symmetric": True}
    for part in ("smooth", "gptq"):
        values[part] |= {key: other.pop(key) for key in list(other) if key in values[part]}
    return TypeAdapter(Quantize).validate_python(values | other)


def int8(
    kind: str = "dynamic", alpha: float = 0.5, sites: list[Any] | None = None, ignore: tuple[str, ...] = ()
) -> Any:
    """A `quantize` section of INT8."""
    return scheme(f"w8a8_int8_{kind}", sites, ignore, alpha=alpha)
