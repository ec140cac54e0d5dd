"""Short names of a run's model, quantisation and training, from its settings: for MLflow's tables and the report."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def model_name(model: Mapping[str, Any]) -> str:
    """A short name of the model that the `model` section chooses."""
    match model.get("kind"):
        case "wheel":
            return re.sub(r"(\.[QF]\d\w*)?\.gguf$", "", Path(str(model["member"])).name)
        case "hub":
            return str(model["id"])
        case "path":
            return Path(str(model["path"])).name or str(model["path"])
        case "random":
            return f"random {model['num_layers']}-layer model"
    return "unknown model"


def scheme_name(quantize: Mapping[str, Any]) -> str:
    """The quantisation in a few words: `int8_dynamic α=0.5`, `w4a16 g32 gptq unsmoothed`."""
    kv = f" kv={quantize['kv']}" if quantize.get("kv", "none") != "none" else ""
    if quantize["kind"] == "none":
        return f"weights as they are{kv}" if kv else "not quantised"
    smooth = quantize["smooth"]
    words = [str(quantize["kind"]).removeprefix("w8a8_")]
    if "group_size" in quantize:
        words.append(f"{'' if quantize['symmetric'] else 'asym '}g{quantize['group_size']}")
    if quantize.get("rounding", "rtn") != "rtn":
        words.append(str(quantize["rounding"]))
    alpha = smooth["alpha"]
    words.append((f"α={alpha}" if isinstance(alpha, str) else f"α={alpha:g}") if smooth["sites"] else "unsmoothed")
    return " ".join(words) + kv


def run_name(params: Mapping[str, Any]) -> str:
    """`int8_dynamic α=0.5 · dpo · SmolLM2-135M-Instruct`: first what differs most often, since tables cut names."""
    trained = "not trained" if params["train"]["kind"] == "none" else str(params["train"]["kind"])
    return " · ".join([scheme_name(params["quantize"]), trained, model_name(params["model"])])
