"""One checkpoint by llm-compressor: what `benchmarks/quantize_peer.py` runs with the peer's own Python.

The recipe is that of the project's W8A8 example: SmoothQuantModifier, then INT8 weights per channel, by rounding to
nearest or by GPTQ. Activations have a scale per token at run time (its preset scheme `W8A8`), or one static scale a
tensor. The token ids are handed over ready, as a DataLoader, so that both tools see the same text.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer


def recipe(kind: str, alpha: float, observer: str, rounding: str) -> list[Any]:
    """The modifiers. observer: of static scales, `minmax` (its default, a moving average) or `static_minmax`."""
    modifier = GPTQModifier if rounding == "gptq" else QuantizationModifier
    if kind == "dynamic":
        return [SmoothQuantModifier(smoothing_strength=alpha),
                modifier(targets="Linear", scheme="W8A8", ignore=["lm_head"])]  # fmt: skip
    integers = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False}
    group = {
        "targets": ["Linear"],
        "weights": {**integers, "strategy": "channel"},
        "input_activations": {**integers, "strategy": "tensor", "observer": observer},
    }
    return [SmoothQuantModifier(smoothing_strength=alpha),
            modifier(config_groups={"group_0": group}, ignore=["lm_head"])]  # fmt: skip


def collate(rows: list[np.ndarray]) -> dict[str, torch.Tensor]:
    """A batch of whole sequences."""
    token_ids_BT = torch.from_numpy(np.stack(rows))
    return {"input_ids": token_ids_BT, "attention_mask": torch.ones_like(token_ids_BT)}


def main() -> None:
    """Load, calibrate, quantise, save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--tokens", type=Path, required=True, help="int64 .npy [sequences, tokens]")
    parser.add_argument("--kind", choices=["dynamic", "static"], required=True)
    parser.add_argument("--alpha", type=float, default=0.5)
    parser.add_argument("--observer", choices=["minmax", "static_minmax"], default="minmax")
    parser.add_argument("--rounding", choices=["rtn", "gptq"], default="rtn")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--dtype", default="auto", help="auto: the checkpoint's, as its examples load it")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()

    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=options.dtype)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    text = DataLoader(list(np.load(options.tokens)), batch_size=options.batch, collate_fn=collate)
    began = time.monotonic()
    oneshot(model=model, tokenizer=tokenizer, dataset=text, num_calibration_samples=len(text.dataset),
            recipe=recipe(options.kind, options.alpha, options.observer, options.rounding))  # fmt: skip
    print(f"oneshot took {time.monotonic() - began:.1f} s", flush=True)
    model.save_pretrained(options.out, save_compressed=True)
    tokenizer.save_pretrained(options.out)


if __name__ == "__main__":
    main()
