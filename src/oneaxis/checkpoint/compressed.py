"""The compressed-tensors description of an INT8 checkpoint: `quantization_config` in config.json, written and read.

vLLM and transformers read this description. Format `int-quantized`: `<module>.weight` int8 [out, in],
`<module>.weight_scale` float32 [out, 1], and `<module>.input_scale` float32 [1] where activations have a static scale.
An entry of `ignore` is a module's exact name or `re:` and a regular expression matched at the start of the name. vLLM
fuses q/k/v and gate/up into one layer each, so these are quantised together or not at all.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from oneaxis.errors import UserError

Scheme = Literal["w8a8_int8_dynamic", "w8a8_int8_static"]

FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Linears that engines run as one layer, which therefore share one scheme (and one static input scale)."""


def quantization_config(scheme: Scheme, ignore: Sequence[str]) -> dict[str, Any]:
    """The `quantization_config` of a checkpoint in which every Linear but `ignore` follows `scheme`."""
    static = scheme == "w8a8_int8_static"
    integers = {"num_bits": 8, "type": "int", "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": list(ignore),
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**integers, "strategy": "channel", "dynamic": False},
                "input_activations": {**integers, "strategy": "tensor" if static else "token", "dynamic": not static},
            }
        },
    }


def read_scheme(settings: dict[str, Any], name: str) -> Scheme:
    """The scheme that a `quantization_config` asks for.

    Args:
        settings: its content. name: the file, for the message.

    Raises:
        UserError: it is none that `quantization_config` writes.
    """
    allowed = (
        "allowed: compressed-tensors, int-quantized, INT8 weights per channel, activations per token or per tensor"
    )
    method, form = settings.get("quant_method"), settings.get("format")
    if method != "compressed-tensors" or form != "int-quantized":
        raise UserError(f"{name}: quantization_config is {method!r}, format {form!r}; {allowed}")
    if settings.get("kv_cache_scheme") or settings.get("sparsity_config") or settings.get("transform_config"):
        raise UserError(f"{name}: quantization_config has a KV cache, sparsity or transform scheme; {allowed}")
    groups = settings.get("config_groups") or {}
    for scheme in ("w8a8_int8_dynamic", "w8a8_int8_static"):
        wanted = quantization_config(scheme, [])["config_groups"]["group_0"]  # type: ignore[arg-type]
        if len(groups) == 1 and _asks_for(next(iter(groups.values())), wanted):
            return scheme  # type: ignore[return-value]
    raise UserError(f"{name}: quantization_config.config_groups is {groups}; {allowed}")


def _asks_for(group: Any, wanted: dict[str, Any]) -> bool:
    """Whether a config group says what `wanted` says; keys that only compressed-tensors' defaults fill may be more."""
    if not isinstance(group, dict) or group.get("targets") != wanted["targets"]:
        return False
    if group.get("output_activations") or group.get("format") not in (None, "int-quantized"):
        return False
    return all(
        isinstance(group.get(part), dict) and all(group[part].get(key) == value for key, value in wanted[part].items())
        for part in ("weights", "input_activations")
    )


def ignored_modules(names: Iterable[str], ignore: Sequence[str]) -> set[str]:
    """Which of the linear modules `names` the patterns leave in high precision.

    Raises:
        UserError: a pattern is no regular expression, matches nothing, or splits linears that engines fuse.
    """
    names = list(names)
    found: set[str] = set()
    for pattern in ignore:
        matched = {name for name in names if _matches(name, pattern)}
        if not matched:
            raise UserError(f"quantize.ignore: {pattern!r} matches no linear module; allowed: a module's full name, "
                            f"such as {names[0]!r}, or `re:` and an expression that matches its start")  # fmt: skip
        found |= matched
    for name in names:
        parent, _, leaf = name.rpartition(".")
        for group in FUSED:
            present = [f"{parent}.{part}" for part in group if f"{parent}.{part}" in names]
            kept = [other for other in present if other in found]
            if leaf in group and kept and len(kept) < len(present):
                raise UserError(f"quantize.ignore: leaves {', '.join(kept)} alone but not the rest of "
                                f"{', '.join(present)}; allowed: all or none, the engine fuses them")  # fmt: skip
    return found


def _matches(name: str, pattern: str) -> bool:
    if not pattern.startswith("re:"):
        return name == pattern
    try:
        return re.match(pattern.removeprefix("re:"), name) is not None
    except re.error as error:
        raise UserError(f"quantize.ignore: {pattern!r} is no regular expression: {error}") from error
