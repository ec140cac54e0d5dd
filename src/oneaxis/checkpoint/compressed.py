"""The compressed-tensors description of a checkpoint: `quantization_config` in config.json, written and read.

vLLM and transformers read this description. Beside a quantised module's name stand

    w8a8_int8  int-quantized    weight int8 [out, in], weight_scale float32 [out, 1], input_scale float32 [1] if static
    w4a16      pack-quantized   weight_packed int32 [out, in / 8], weight_scale bfloat16 [out, in / group],
                                weight_shape int64 [2], if asymmetric weight_zero_point int32 [out / 8, in / group]
    w8a8_fp8   float-quantized  weight float8_e4m3fn [out, in], weight_scale float32 [out, 1]
    kv fp8     any of these     <attention module>.k_scale and .v_scale, float32 [1]

An entry of `ignore` is a module's exact name or `re:` and a regular expression matched at the start of the name. vLLM
fuses q/k/v and gate/up into one layer each, so these are quantised together or not at all.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from oneaxis.config.schema import Kv, Quantize, QuantizeInt4, QuantizeNone
from oneaxis.errors import UserError
from oneaxis.quantize.families import Decoder

Kind = Literal["none", "w8a8_int8_dynamic", "w8a8_int8_static", "w4a16", "w8a8_fp8"]

FORMATS = {"none": "dense", "w8a8_int8_dynamic": "int-quantized", "w8a8_int8_static": "int-quantized",
           "w4a16": "pack-quantized", "w8a8_fp8": "float-quantized"}  # fmt: skip
KV_SCHEME = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}

ALLOWED = (
    "allowed: compressed-tensors with INT8 weights per channel and activations per token or per tensor, INT4 weights "
    "per group, FP8 weights per channel and activations per token, an FP8 KV cache with a scale per tensor"
)


@dataclass(frozen=True)
class Scheme:
    """What a checkpoint holds."""

    kind: Kind
    kv: Kv = "none"
    group_size: int | None = None
    """Of w4a16."""
    symmetric: bool = True


def scheme_of(settings: Quantize) -> Scheme:
    """What a `quantize` section makes."""
    if isinstance(settings, QuantizeInt4):
        return Scheme(settings.kind, settings.kv, settings.group_size, settings.symmetric)
    return Scheme(settings.kind, settings.kv)


def quantization_config(settings: Quantize, kept: Iterable[str] = ()) -> dict[str, Any]:
    """The `quantization_config` of a checkpoint in which every Linear but `ignore` follows the scheme.

    Args:
        kept: stored names of linears that are never quantised (routers), which must stand in `ignore` too.
    """
    ignore = [] if isinstance(settings, QuantizeNone) else settings.ignore
    return describe(scheme_of(settings), list(dict.fromkeys([*ignore, *kept])))


def describe(scheme: Scheme, ignore: Sequence[str]) -> dict[str, Any]:
    """The `quantization_config` of a scheme."""
    description: dict[str, Any] = {
        "quant_method": "compressed-tensors",
        "format": FORMATS[scheme.kind],
        "quantization_status": "compressed",
        "ignore": list(ignore),
        "config_groups": {},
    }
    if scheme.kind != "none":
        description["config_groups"] = {"group_0": {"targets": ["Linear"], **_group(scheme)}}
    if scheme.kv == "fp8":
        description["kv_cache_scheme"] = dict(KV_SCHEME)
    return description


def _group(scheme: Scheme) -> dict[str, Any]:
    if scheme.kind == "w4a16":
        weights = {"num_bits": 4, "type": "int", "symmetric": scheme.symmetric, "strategy": "group",
                   "group_size": scheme.group_size, "dynamic": False}  # fmt: skip
        return {"weights": weights, "input_activations": None}
    numbers = {"num_bits": 8, "type": "float" if scheme.kind == "w8a8_fp8" else "int", "symmetric": True}
    static = scheme.kind == "w8a8_int8_static"
    return {
        "weights": {**numbers, "strategy": "channel", "dynamic": False},
        "input_activations": {**numbers, "strategy": "tensor" if static else "token", "dynamic": not static},
    }


def read_scheme(settings: dict[str, Any], name: str) -> Scheme:
    """The scheme that a `quantization_config` asks for.

    Args:
        settings: its content. name: the file, for the message.

    Raises:
        UserError: it is none that `describe` writes.
    """
    method, form = settings.get("quant_method"), settings.get("format")
    groups = settings.get("config_groups") or {}
    if method != "compressed-tensors" or (groups and form not in FORMATS.values()):
        raise UserError(f"{name}: quantization_config is {method!r}, format {form!r}; {ALLOWED}")
    if settings.get("sparsity_config") or settings.get("transform_config"):
        raise UserError(f"{name}: quantization_config has a sparsity or transform scheme; {ALLOWED}")
    cache = settings.get("kv_cache_scheme")
    if cache and not _says(cache, KV_SCHEME):
        raise UserError(f"{name}: quantization_config.kv_cache_scheme is {cache}; {ALLOWED}")
    kv: Kv = "fp8" if cache else "none"
    if not groups and kv == "fp8":
        return Scheme("none", kv)
    (group,) = groups.values() if len(groups) == 1 else (None,)
    for scheme in _candidates(group, kv):
        if form == FORMATS[scheme.kind] and _asks_for(group, scheme):
            return scheme
    raise UserError(f"{name}: quantization_config.config_groups is {groups}, format {form!r}; {ALLOWED}")


def _candidates(group: Any, kv: Kv) -> list[Scheme]:
    weights = (group.get("weights") if isinstance(group, dict) else None) or {}
    size, symmetric = weights.get("group_size"), bool(weights.get("symmetric"))
    kinds = [kind for kind in get_args(Kind) if kind not in ("none", "w4a16")]
    packed = [Scheme("w4a16", kv, size, symmetric)] if isinstance(size, int) and size > 0 else []
    return packed + [Scheme(kind, kv) for kind in kinds]


def _asks_for(group: Any, scheme: Scheme) -> bool:
    """Whether a config group says what `scheme` says; keys that only compressed-tensors' defaults fill may be more."""
    wanted = _group(scheme)
    if not isinstance(group, dict) or group.get("targets") != ["Linear"]:
        return False
    if group.get("output_activations") or group.get("format") not in (None, FORMATS[scheme.kind]):
        return False
    inputs = group.get("input_activations")
    activations = _says(inputs, wanted["input_activations"]) if wanted["input_activations"] else not inputs
    return activations and _says(group.get("weights"), wanted["weights"])


def _says(found: Any, wanted: dict[str, Any]) -> bool:
    return isinstance(found, dict) and all(found.get(key) == value for key, value in wanted.items())


def ignored_modules(names: Iterable[str], ignore: Sequence[str], fused: Iterable[Sequence[str]]) -> set[str]:
    """Which of the linear modules `names` the patterns leave in high precision.

    Args:
        fused: groups of names that engines run as one layer, so that they are quantised together or not at all.

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
    for group in fused:
        kept = [name for name in group if name in found]
        if kept and len(kept) < len(group):
            raise UserError(f"quantize.ignore: leaves {_some(kept)} alone but not the rest of "
                            f"{_some(group)}; allowed: all or none, the engine fuses them")  # fmt: skip
    return found


def ignored_linears(family: Decoder, ignore: Sequence[str]) -> set[str]:
    """Which of a model's linears the patterns leave in high precision, by their stored names; routers always are.

    Raises:
        UserError: as `ignored_modules`.
    """
    layers = range(family.num_layers)
    linears = [family.stored_name(layer, name) for layer in layers for name in family.linears(layer)]
    fused = [[family.stored_name(layer, name) for name in group] for layer in layers for group in family.fused(layer)]
    routers = routers_of(family)
    return ignored_modules([*linears, *routers, "lm_head"], ignore, fused) | set(routers)


def routers_of(family: Decoder) -> list[str]:
    """The stored names of a model's linears that are never quantised."""
    return [family.stored_name(layer, name) for layer in range(family.num_layers) for site in family.sites(layer)
            for name in site.high]  # fmt: skip


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def _matches(name: str, pattern: str) -> bool:
    if not pattern.startswith("re:"):
        return name == pattern
    try:
        return re.match(pattern.removeprefix("re:"), name) is not None
    except re.error as error:
        raise UserError(f"quantize.ignore: {pattern!r} is no regular expression: {error}") from error
