"""What the engine runs, against what was asked of it and what the checkpoint asks for.

A setting can be accepted and not kept: `async_scheduling=True` runs as False on a CPU, a `kv_cache_scheme` in the
checkpoint's config.json turns the KV cache to FP8, weights stored for W4A8 run as W4A16. Each is a *difference*:
`{key, asked, resolved, reason}`. Everything here is a pure function of three documents: the `serve` section, the
engine's `/server_info` (with the labels of `vllm:cache_config_info`), and config.json.
"""

import filecmp
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import polars as pl

from oneaxis.config.schema import Serve, ServeAttach
from oneaxis.errors import RunError
from oneaxis.serve.command import BATCH_INVARIANT, Device, kv_cache_bytes, num_threads
from oneaxis.serve.endpoint import SERVER_INFO, Endpoint, shown
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


def realised_config(engine: Endpoint, checkpoint: Path) -> dict[str, Any]:
    """Ask a running engine what it runs.

    Returns:
        `{asked, resolved, checkpoint, differences: [{key, asked, resolved, reason}], unverified, cautions}`: the same
        for the same settings, checkpoint and machine. `unverified` names what was asked, or what a run relies on, and
        the engine does not tell; `cautions` what this machine computes otherwise than the checkpoint says.

    Raises:
        RunError: when the engine does not answer, or with what cannot be read.
    """
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    generation, recipe = checkpoint / "generation_config.json", checkpoint / "recipe.json"
    documents = {
        "config": config,
        "generation": json.loads(generation.read_text(encoding="utf-8")) if generation.is_file() else {},
        "recipe": json.loads(recipe.read_text(encoding="utf-8")) if recipe.is_file() else {},
    }
    if isinstance(engine.settings, ServeAttach):
        text, metrics = engine.offers(SERVER_INFO), engine.offers("/metrics")
        info = engine.read_object(SERVER_INFO, text) if text is not None else None
        return compare_attached(
            engine.settings,
            card=engine.card,
            # Another server's page of this name, such as SGLang's, tells nothing of what is looked for.
            server_info=None if info and "vllm_config" not in info else info,
            cache_labels=info_labels(metrics or "", "vllm:cache_config_info", f"{engine.base_url}/metrics"),
            same_checkpoint=_same_checkpoint(engine.card.get("root"), checkpoint),
            **documents,
        )
    assert isinstance(engine, Engine)
    realised = compare(
        engine.settings,
        server_info=engine.server_info(),
        cache_labels=info_labels(engine.get("/metrics"), "vllm:cache_config_info"),
        kernels=kernels(engine.log_lines()),
        device=engine.device,
        **documents,
    )
    for side in (realised["asked"], realised["resolved"]):
        guess = side.get("engine_args.speculative_config")
        if isinstance(guess, Mapping) and "model" in guess:
            # Where the project lies is no setting: what is recorded is the same in every work tree.
            side["engine_args.speculative_config"] = {**guess, "model": os.path.relpath(guess["model"])}
    realised["cautions"] = cautions(config, cpu_flags=cpu_flags()) if engine.device == "cpu" else []
    return realised


def _same_checkpoint(root: Any, checkpoint: Path) -> bool | None:
    """Whether a server was loaded from this checkpoint, or a copy; None when its files are not here to be compared."""
    if not isinstance(root, str) or not Path(root).is_absolute() or not Path(root).is_dir():
        return None
    if Path(root).samefile(checkpoint):
        return True
    names = ["config.json", *sorted(path.name for path in checkpoint.glob("*.safetensors"))]
    there = ["config.json", *sorted(path.name for path in Path(root).glob("*.safetensors"))]
    return names == there and not filecmp.cmpfiles(checkpoint, root, names, shallow=False)[1]


RELIED_ON = ("dtype", "quantization", "kv_cache_dtype", "kv_cache_tokens", "prefix_caching", "enforce_eager",
             "async_scheduling", "max_num_seqs", "max_num_batched_tokens", "vllm_version")  # fmt: skip
"""What makes two runs comparable, and an attached server need not tell."""


def compare_attached(
    settings: ServeAttach,
    *,
    card: Mapping[str, Any],
    server_info: Mapping[str, Any] | None,
    cache_labels: Mapping[str, str],
    config: Mapping[str, Any],
    generation: Mapping[str, Any],
    recipe: Mapping[str, Any],
    same_checkpoint: bool | None,
) -> dict[str, Any]:
    """The comparison for a server of another's; see `realised_config`.

    Nothing was asked of it but its model: what it resolved is recorded, so that two runs can be compared, and held to
    what the checkpoint wishes.

    Args:
        card: of `/v1/models`. server_info: None where there is no such page. cache_labels: empty without `/metrics`.
        same_checkpoint: whether it was loaded from this run's checkpoint; None when that cannot be seen.

    Raises:
        RunError: when `server_info` lacks what vLLM's has.
    """
    wishes = checkpoint_wishes(config, generation)
    differences: list[dict[str, Any]] = []
    unverified: list[str] = []
    if server_info is not None:
        try:
            device: Device = "cpu" if "cpu" in str(server_info["vllm_config"].get("device_config")) else "gpu"
            resolved = resolved_settings(server_info, cache_labels, device)
        except (LookupError, TypeError, AttributeError, ValueError) as error:
            raise RunError(f"serve.base_url={settings.base_url}: its /server_info is not as vLLM's "
                           f"({type(error).__name__}: {error}): {shown(str(server_info))}") from error  # fmt: skip
        differences += _quantization(None, wishes, resolved)
        if wishes["dtype"] and not _same(wishes["dtype"], resolved["dtype"]):
            differences.append({"key": "serve.dtype", "asked": f"checkpoint: {wishes['dtype']}",
                                "resolved": resolved["dtype"],
                                "reason": "the engine does not compute in the checkpoint's dtype"})  # fmt: skip
        differences += _garbage(resolved, device)
        if wishes["kv_cache_scheme"] and recipe.get("kv") != "fp8":
            differences.append(_scheme(wishes))
    else:
        labels = {"kv_cache_dtype": "cache_dtype", "prefix_caching": "enable_prefix_caching",
                  "kv_cache_tokens": "kv_cache_size_tokens", "block_size": "block_size"}  # fmt: skip
        resolved = {"max_model_len": card.get("max_model_len")}
        resolved |= {name: _label(cache_labels, label, None) for name, label in labels.items() if label in cache_labels}
    if same_checkpoint is None:
        unverified.append("checkpoint")
    elif not same_checkpoint:
        differences.append({"key": "checkpoint", "asked": "this run's", "resolved": card.get("root"),
                            "reason": "the endpoint was loaded from another checkpoint"})  # fmt: skip
    unverified += [name for name in RELIED_ON if resolved.get(name) is None and name != "quantization"]
    if server_info is None:
        unverified.append("quantization")
    return {
        "asked": {"model": card["id"], "max_model_len": settings.max_model_len},
        "resolved": {"model": card["id"], **resolved},
        "checkpoint": wishes,
        "differences": differences,
        "unverified": unverified,
        "cautions": [],
    }


def realised_table(document: Mapping[str, Any]) -> pl.DataFrame:
    """Every setting in one place: what was asked, what runs, what the checkpoint wishes, and what that means.

    Returns:
        Columns `setting`, `asked`, `resolved`, `checkpoint` (JSON; null where nothing was said) and `verdict`: `as
        asked`, `not asked`, `unverified`, or `differs: ` and why. Those that differ come first.
    """
    asked, resolved, wishes = document["asked"], document["resolved"], document.get("checkpoint") or {}
    wished = {
        "dtype": wishes.get("dtype"),
        "quantization": wishes.get("quantization_config"),
        "kv_cache_dtype": wishes.get("kv_cache_scheme"),
        **{f"sampling.{name}": value for name, value in (wishes.get("sampling_defaults") or {}).items()},
    }
    found: dict[str, list[Mapping[str, Any]]] = {}
    for difference in document["differences"]:
        key = difference["key"].removeprefix("serve.")
        found.setdefault("quantization" if key == "checkpoint.quantization_config" else key, []).append(difference)
    unverified = {name.removeprefix("serve.") for name in document.get("unverified", [])}
    rows = []
    for name in dict.fromkeys([*found, *asked, *resolved, *wished, *sorted(unverified)]):
        verdict = "as asked" if name in asked else "not asked"
        if name in unverified:
            verdict = "unverified"
        if name in found:
            verdict = "differs: " + "; ".join(str(difference["reason"]) for difference in found[name])
        # A difference may be in what follows from what was asked, or wished: it has its own two sides.
        sides = found[name][0] if name in found else {}
        values = [asked.get(name, sides.get("asked")), resolved.get(name, sides.get("resolved")), wished.get(name)]
        rows.append([name, *(None if value is None else json.dumps(value) for value in values), verdict])
    return pl.DataFrame(rows, schema=TABLE_SCHEMA, orient="row")


TABLE_SCHEMA = pl.Schema({name: pl.String() for name in ("setting", "asked", "resolved", "checkpoint", "verdict")})


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

    differences += _quantization(settings.engine_args.get("quantization"), wishes, resolved)
    differences += _garbage(resolved, device)
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
        "batch_invariant": settings.batch_invariant,
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
        "batch_invariant": _variable(server_info, BATCH_INVARIANT) == "1",
        "vllm_version": (server_info.get("system_env") or {}).get("vllm_version"),
    }
    if device == "cpu":
        size = cache["kv_cache_memory_bytes"]
        resolved["kv_cache_gib"] = size / 2**30 if size else None
        threads = _variable(server_info, "OMP_NUM_THREADS")
        resolved["threads"] = int(threads) if threads else None
    return resolved


def _variable(server_info: Mapping[str, Any], name: str) -> str | None:
    """An environment variable of the server, as it tells them; None where it is not set."""
    lines = str((server_info.get("system_env") or {}).get("env_vars") or "").splitlines()
    return next((line.partition("=")[2] for line in lines if line.startswith(f"{name}=")), None)


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


def _garbage(resolved: Mapping[str, Any], device: Device) -> list[dict[str, Any]]:
    """A KV cache that vLLM 0.32 takes on a CPU and computes garbage with (13.8 nats a token where 2.7 are due)."""
    dtype = str(resolved["kv_cache_dtype"])
    if device != "cpu" or not dtype.startswith("int8"):
        return []
    return [{"key": "serve.kv_cache_dtype", "asked": dtype, "resolved": "garbage",
             "reason": "vLLM takes this KV cache on a CPU, and its answers are garbage"}]  # fmt: skip


def _quantization(asked: Any, wishes: Mapping[str, Any], resolved: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Differences between the checkpoint's quantisation and the engine's; `asked`: `engine_args.quantization`."""
    quantization, runs = wishes["quantization_config"] or {}, resolved["quantization"]
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
        differences.append(_scheme(wishes))
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


def _scheme(wishes: Mapping[str, Any]) -> dict[str, Any]:
    scheme = wishes["kv_cache_scheme"]
    bits = f"{scheme.get('type', '?')}{scheme.get('num_bits', '')}"
    return {"key": "serve.kv_cache_dtype", "asked": "auto", "resolved": f"kv_cache_scheme {bits}",
            "reason": "the checkpoint's config.json sets the KV cache"}  # fmt: skip


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
