"""vLLM in this process on several checkpoints, one after the other: what it gives each token, and its KV scales.

    python -m tests.quantize.engine_scores REQUEST.json ANSWER.json

REQUEST: {ids: [[int]], checkpoints: {name: folder}, kv_cache_dtype: {name: dtype}, dtype: {name: dtype}}.
ANSWER: {name: {logprobs: [[float]], k_scales: [float], v_scales: [float]}}.
One import serves all; a checkpoint that fails ends it, since vLLM's state is global.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any


def main(request: Path, answer: Path) -> None:
    """Run every checkpoint, in float32 where no other dtype is asked for."""
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_INT4_W4A8": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    from vllm import LLM, SamplingParams

    asked = json.loads(request.read_text(encoding="utf-8"))
    prompts = [{"prompt_token_ids": row} for row in asked["ids"]]
    sampling = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    answers = {}
    for name, folder in asked["checkpoints"].items():
        cache = asked["kv_cache_dtype"].get(name, "auto")
        dtype = asked["dtype"].get(name, "float32")
        llm = LLM(folder, dtype=dtype, kv_cache_dtype=cache, enforce_eager=True, max_model_len=256,
                  max_num_seqs=8, enable_prefix_caching=False)  # fmt: skip
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        logprobs = [[next(iter(entry.values())).logprob for entry in output.prompt_logprobs[1:]] for output in outputs]
        k_scales, v_scales = llm.apply_model(scales)[0]
        answers[name] = {"logprobs": logprobs, "k_scales": k_scales, "v_scales": v_scales}
        del llm
    answer.write_text(json.dumps(answers), encoding="utf-8")


def scales(model: Any) -> tuple[list[float], list[float]]:
    """The scales of keys and of values of each layer, as the attention uses them."""
    attentions = [layer.self_attn.attn for layer in model.model.layers]
    return [layer._k_scale_float for layer in attentions], [layer._v_scale_float for layer in attentions]


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
