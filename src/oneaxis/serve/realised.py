"""What the engine runs, against what was asked of it and what the checkpoint asks for.

A setting can be accepted and not kept: `async_scheduling=True` runs as False on a CPU, a `kv_cache_scheme` in the
checkpoint's config.json turns the KV cache to FP8, weights stored for W4A8 run as W4A16. Each is a *difference*:
`{key, asked, resolved, reason}`. Everything here is a pure function of three documents: the `serve` section, the
engine's `/server_info` (with the labels of `vllm:cache_config_info`), and config.json.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from oneaxis.config.schema import Serve
from oneaxis.serve.command import Device, kv_cache_bytes, num_threads
from oneaxis.serve.engine import Engine
from oneaxis.serve.log import kernels
from oneaxis.serve.metrics import info_labels
from oneaxis.serve.preflight import cautions, cpu_flags, kv_bytes_per_token

DTYPE_BYTES = {"bfloat16": 2.0, "float16": 2.0, "float32": 4.0, "fp8": 1.0, "fp8_e4m3": 1.0, "fp8_e5m2": 1.0}

RENAMED = {
    "scheduling_policy": ("scheduler_config", "policy"),
    "prefix_caching_hash_algo": ("cache_config", "prefix_caching_hash_algo"),
    "cpu_offload_gb": ("offload_config", "uva", "cpu_offload_gb"),
    "quantization": ("model_config", "quantization"),
    "seed": ("model_config", "seed"),
    "trust_remote_code": ("model_config", "trust_remote_code"),
    "load_format": ("load_config", "load_format"),
}
"""Arguments whose name is another, or not the only one, in the engine's configuration."""


def realised_config(engine: Engine, checkpoint: Path) -> dict[str, Any]:
    """Ask a running engine what it runs.

    Returns:
        `{asked, resolved, checkpoint, differences: [{key, asked, resolved, reason}], unverified, cautions}`: the same
        for the same settings, checkpoint and machine. `unverified` names what was asked and the engine does not tell,
        `cautions` what this machine computes otherwise than the checkpoint says.

    Raises:
        RunError: when the engine does not answer.
    """
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    generation, recipe = checkpoint / "generation_config.json", checkpoint / "recipe.json"
    realised = compare(
        engine.settings,
        server_info=engine.server_info(),
        cache_labels=info_labels(engine.get("/metrics"), "vllm:cache_config_info"),
        config=config,
        generation=json.loads(generation.read_text(encoding="utf-8")) if generation.is_file() else {},
        recipe=json.loads(recipe.read_text(encoding="utf-8")) if recipe.is_file() else {},
        kernels=kernels(engine.log_lines()),
        device=engine.device,
    )
    for side in (realised["asked"], realised["resolved"]):
        guess = side.get("engine_args.speculative_config")
        if isinstance(guess, Mapping) and "model" in guess:
            # Where the project lies is no setting: what is recorded is the same in every work tree.
            side["engine_args.speculative_config"] = {**guess, "model": os.path.relpath(guess["model"])}
    realised["cautions"] = cautions(config, cpu_flags=cpu_flags()) if engine.device == "cpu" else []
    return realised


def compare(
    settings: Serve,
    *,
    server_info: Mapping[str, Any],
    cache_labels: Mapping[str, str],
    config: Mapping[str, Any],
    generation: Mapping[str, Any],
    kernels: list[str],
    device: Device,
    recipe: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The comparison itself; see `realised_config`. `recipe` is the `quantize` section that made the checkpoint."""
    engine_config = server_info["vllm_config"]
    asked = asked_settings(settings, device)
    wishes = checkpoint_wishes(config, generation)
    resolved = resolved_settings(server_info, cache_labels, device) | {"kernels": kernels}
    differences: list[dict[str, Any]] = []

    def differ(key: str, want: Any, found: Any, reason: str) -> None:
        differences.append({"key": key, "asked": want, "resolved": found, "reason": reason})

    for key, want in asked.items():
        found = resolved[key]
        if want == "auto" or (key == "kv_cache_gib" and math.isclose(want, found or 0, rel_tol=0.01)):
            continue
        if not _same(want, found):
            differ(f"serve.{key}", want, found, "the engine resolved it otherwise")

    unverified = []
    for name, want in sorted(settings.engine_args.items()):
        shown, found = _find(engine_config, name)
        if not shown:
            unverified.append(f"serve.engine_args.{name}")
            continue
        # Of a mapping what was asked of it: `speculative_config` comes back with two whole model configurations.
        both = isinstance(want, Mapping) and isinstance(found, Mapping)
        resolved[f"engine_args.{name}"] = {key: found[key] for key in want if key in found} if both else found
        if not _same(want, found):
            differ(f"serve.engine_args.{name}", want, found, "the engine resolved it otherwise")

    if settings.dtype == "auto" and wishes["dtype"] and not _same(wishes["dtype"], resolved["dtype"]):
        differ("serve.dtype", f"auto (checkpoint: {wishes['dtype']})", resolved["dtype"],
               "the engine does not compute in the checkpoint's dtype")  # fmt: skip

    differences += _quantization(settings, wishes, resolved)
    asked_kv = (recipe or {}).get("kv") == "fp8" and wishes["kv_cache_scheme"] is not None
    differences += _kv_cache(settings, wishes, resolved, config, asked_for=asked_kv)
    return {
        "asked": asked | {f"engine_args.{name}": value for name, value in sorted(settings.engine_args.items())},
        "resolved": resolved,
        "checkpoint": wishes,
        "differences": differences,
        "unverified": unverified,
    }


def asked_settings(settings: Serve, device: Device) -> dict[str, Any]:
    """The settings that decide how the engine runs (its port and its patience do not)."""
    asked: dict[str, Any] = {
        "dtype": settings.dtype,
        "max_model_len": settings.max_model_len,
        "max_num_seqs": settings.max_num_seqs,
        "kv_cache_dtype": settings.kv_cache_dtype,
        "prefix_caching": settings.prefix_caching,
        "enforce_eager": settings.enforce_eager,
    }
    if device == "cpu":
        asked |= {"kv_cache_gib": kv_cache_bytes(settings) / 2**30, "threads": num_threads(settings)}
    return asked


def resolved_settings(
    server_info: Mapping[str, Any], cache_labels: Mapping[str, str], device: Device
) -> dict[str, Any]:
    """The same, and what else decides the speed, as the engine tells it."""
    config = server_info["vllm_config"]
    model, cache, scheduler, parallel = (
        config[f"{part}_config"] for part in ("model", "cache", "scheduler", "parallel")
    )
    resolved: dict[str, Any] = {
        "dtype": str(model["dtype"]).removeprefix("torch."),
        "max_model_len": model["max_model_len"],
        "max_num_seqs": scheduler["max_num_seqs"],
        "kv_cache_dtype": cache_labels.get("cache_dtype", cache["cache_dtype"]),
        "prefix_caching": _label(cache_labels, "enable_prefix_caching", cache["enable_prefix_caching"]),
        "enforce_eager": model["enforce_eager"],
        "kv_cache_tokens": _label(cache_labels, "kv_cache_size_tokens", cache["kv_cache_size_tokens"]),
        "block_size": cache["block_size"],
        "quantization": model["quantization"],
        "max_num_batched_tokens": scheduler["max_num_batched_tokens"],
        "chunked_prefill": scheduler["enable_chunked_prefill"],
        "async_scheduling": scheduler["async_scheduling"],
        "attention_backend": (config.get("attention_config") or {}).get("backend"),
        "compilation_mode": (config.get("compilation_config") or {}).get("mode"),
        "speculative": bool(config.get("speculative_config")),
        "tensor_parallel_size": parallel["tensor_parallel_size"],
        "pipeline_parallel_size": parallel["pipeline_parallel_size"],
        "data_parallel_size": parallel["data_parallel_size"],
        "device": (config.get("device_config") or {}).get("device"),
        "vllm_version": (server_info.get("system_env") or {}).get("vllm_version"),
    }
    if device == "cpu":
        size = cache["kv_cache_memory_bytes"]
        resolved["kv_cache_gib"] = size / 2**30 if size else None
        variables = str((server_info.get("system_env") or {}).get("env_vars") or "")
        threads = [line.partition("=")[2] for line in variables.splitlines() if line.startswith("OMP_NUM_THREADS=")]
        resolved["threads"] = int(threads[0]) if threads else None
    return resolved


def checkpoint_wishes(config: Mapping[str, Any], generation: Mapping[str, Any]) -> dict[str, Any]:
    """What the checkpoint asks for by itself: its dtype, its quantisation, a KV cache scheme, sampling defaults."""
    quantization = config.get("quantization_config") or None
    sampling = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")
    return {
        "dtype": config.get("dtype") or config.get("torch_dtype"),
        "quantization_config": quantization,
        "kv_cache_scheme": (quantization or {}).get("kv_cache_scheme"),
        # vLLM takes these for every request that does not say otherwise.
        "sampling_defaults": {name: generation[name] for name in sampling if generation.get(name) is not None},
    }


def _quantization(settings: Serve, wishes: Mapping[str, Any], resolved: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Differences between the checkpoint's quantisation and the engine's."""
    quantization, runs = wishes["quantization_config"] or {}, resolved["quantization"]
    asked = settings.engine_args.get("quantization")
    method = quantization.get("quant_method")
    differences = []
    if asked is None and not _same(method, runs):
        differences.append({"key": "checkpoint.quantization_config", "asked": method, "resolved": runs,
                            "reason": "the engine does not run the checkpoint's quantisation"})  # fmt: skip
    for group in (quantization.get("config_groups") or {}).values():
        weights, inputs = group.get("weights") or {}, group.get("input_activations")
        if weights.get("num_bits") == 4 and inputs and (group.get("format") or quantization.get("format")) in (
            "pack-quantized", "int-quantized",
        ):  # fmt: skip
            asked_for = f"W4A{inputs.get('num_bits')}"
            differences.append({"key": "checkpoint.quantization_config", "asked": asked_for, "resolved": "W4A16",
                                "reason": "vLLM runs packed 4-bit weights with unquantised activations"})  # fmt: skip
    return differences


def _kv_cache(
    settings: Serve,
    wishes: Mapping[str, Any],
    resolved: Mapping[str, Any],
    config: Mapping[str, Any],
    *,
    asked_for: bool,
) -> list[dict[str, Any]]:
    """Differences in the KV cache: a scheme of the checkpoint, and a capacity that the asked dtype does not give.

    vLLM reports `cache_dtype="auto"` for a cache that a checkpoint has turned to FP8; its capacity in tokens tells.
    `asked_for`: `quantize.kv=fp8` made the scheme, so the cache is expected to be FP8.
    """
    differences = []
    if wishes["kv_cache_scheme"] and settings.kv_cache_dtype == "auto" and not asked_for:
        scheme = wishes["kv_cache_scheme"]
        bits = f"{scheme.get('type', '?')}{scheme.get('num_bits', '')}"
        differences.append({"key": "serve.kv_cache_dtype", "asked": "auto", "resolved": f"kv_cache_scheme {bits}",
                            "reason": "the checkpoint's config.json sets the KV cache"})  # fmt: skip
    automatic = "fp8" if asked_for else resolved["dtype"]
    dtype = automatic if settings.kv_cache_dtype == "auto" else settings.kv_cache_dtype
    per_token = kv_bytes_per_token(dict(config), DTYPE_BYTES.get(dtype, math.nan))
    gib, tokens = resolved.get("kv_cache_gib"), resolved["kv_cache_tokens"]
    speculates = resolved["speculative"]
    if per_token and gib and tokens and not speculates:
        block = resolved["block_size"]
        expected = int(gib * 2**30 // (per_token * block)) * block
        # Less than one block in a hundred is rounding; a wrong dtype is a factor of two.
        if abs(tokens - expected) > max(block, expected / 100):
            differences.append({"key": "kv_cache_tokens", "asked": expected, "resolved": tokens,
                                "reason": f"{gib:g} GiB of {dtype} keys and values hold another number"})  # fmt: skip
    return differences


def _label(labels: Mapping[str, str], name: str, otherwise: Any) -> Any:
    """A label's value, typed: the engine core's own word, where the API server's copy may be stale."""
    text = labels.get(name)
    if text is None or text == "None":
        return otherwise
    if text in ("True", "False"):
        return text == "True"
    return int(text) if text.lstrip("-").isdigit() else text


def _find(config: Mapping[str, Any], name: str) -> tuple[bool, Any]:
    """Whether the engine's configuration shows `name`, and its value. Ambiguous names are not shown."""
    if path := RENAMED.get(name):
        value: Any = config
        for part in path:
            if not isinstance(value, Mapping) or part not in value:
                return False, None
            value = value[part]
        return True, value
    if name in config:
        return True, config[name]
    found = list(_occurrences(config, name))
    return (True, found[0]) if found and all(value == found[0] for value in found) else (False, None)


def _occurrences(config: Mapping[str, Any], name: str) -> Iterator[Any]:
    for section in config.values():
        if isinstance(section, Mapping) and name in section:
            yield section[name]


def _same(want: Any, found: Any) -> bool:
    """Equal up to spelling: `torch.bfloat16`, `fp8` for `fp8_e4m3`, and a mapping may hold more than was asked."""
    if isinstance(want, Mapping) and isinstance(found, Mapping):
        return all(key in found and _same(value, found[key]) for key, value in want.items())
    if isinstance(want, bool) or isinstance(found, bool):
        return want is found
    if isinstance(want, int | float) and isinstance(found, int | float):
        return math.isclose(want, found, rel_tol=1e-9)
    return _spelling(want) == _spelling(found)


def _spelling(value: Any) -> str | None:
    if value is None:
        return None
    text = str(value).removeprefix("torch.").lower()
    return "fp8" if text == "fp8_e4m3" else text
