"""A model's shape, from its config.json alone: parameters, bytes of weights, KV bytes and FLOPs, without loading it.

Families are known by name, as in `oneaxis.quantize.families`, since keys do not tell: Qwen2 has biases that its config
does not mention, Qwen3 norms its heads, Gemma ties its embeddings unless told otherwise. Anything else (other mixtures
of experts, models with recurrent layers, latent attention) is refused, not guessed.

    parameters     every tensor once, tied embeddings once
    weight bytes   as the checkpoint stores them: a quantised linear with its scales, everything else in `dtype`
    read bytes     what a decode step reads of them: all but the input embedding, which gives one row a token
    KV bytes       2 x kv_heads x head_dim x dtype_bytes a token and layer; at most `window` tokens where it slides
    FLOPs          2 a weight and token; the head once a sequence; attention 4 x heads x head_dim a pair of tokens
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oneaxis.errors import UserError
from oneaxis.plan.units import positive

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Linear:
    """A linear of a layer, by its stored name inside the model."""

    name: str
    rows: int
    columns: int
    bias: bool = False
    router: bool = False
    """Never quantised."""

    @property
    def num_weights(self) -> int:
        """Without the bias."""
        return self.rows * self.columns


@dataclass(frozen=True)
class Layer:
    """A decoder layer."""

    linears: tuple[Linear, ...]
    num_norm: int
    """Parameters of its norms."""
    window: int | None = None
    """Tokens that attention looks back; None: all."""
    experts: tuple[tuple[Linear, ...], ...] = ()
    """The linears of each expert."""
    per_token: int = 0
    """Experts that a token goes through."""

    @property
    def every(self) -> Iterator[Linear]:
        """All linears, those of the experts too."""
        yield from self.linears
        for expert in self.experts:
            yield from expert


@dataclass(frozen=True)
class Storage:
    """How the linears are stored: bits of a weight, and the bytes beside them."""

    kind: str = "none"
    group_size: int | None = None
    symmetric: bool = True
    kv_fp8: bool = False
    ignore: tuple[str, ...] = ()

    def weight_bytes(self, linear: Linear, name: str, dtype_bytes: int) -> int:
        """Of one linear, its scales and its bias.

        Args:
            name: its full name, which `ignore` may hold.
        """
        bias = linear.rows * dtype_bytes if linear.bias else 0
        if self.kind == "none" or linear.router or self.ignores(name):
            return linear.num_weights * dtype_bytes + bias
        if self.kind == "w4a16":
            assert self.group_size is not None
            groups = linear.columns // self.group_size
            packed = linear.rows * math.ceil(linear.columns / 8) * 4 + linear.rows * groups * 2 + 16
            return packed + (0 if self.symmetric else math.ceil(linear.rows / 8) * groups * 4) + bias
        static = 4 if self.kind == "w8a8_int8_static" else 0
        return linear.num_weights + 4 * linear.rows + static + bias

    def ignores(self, name: str) -> bool:
        """Whether the checkpoint says that this linear is not quantised."""
        return any(
            re.match(entry.removeprefix("re:"), name) if entry.startswith("re:") else entry == name
            for entry in self.ignore
        )


@dataclass(frozen=True)
class Model:
    """What all plans need to know of a model."""

    where: str
    family: str
    vocab_size: int
    width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[Layer, ...]
    tied: bool
    dtype: str
    max_positions: int
    num_outside: int
    """Parameters outside the layers that are neither token embedding nor head: final norm, positions, projections."""
    num_positions: int = 0
    """Of `num_outside`, those of position embeddings: a step reads one row of them."""
    embedding_width: int = 0
    """0: `width`."""
    storage: Storage = field(default_factory=Storage)
    layers_path: str = "model.layers"

    @property
    def dtype_bytes(self) -> int:
        """Of a weight that is not quantised, and of a key or value unless the cache is FP8."""
        return DTYPE_BYTES[self.dtype]

    @property
    def num_embedding(self) -> int:
        """Parameters of the token embedding, which is the head too where they are tied."""
        return self.vocab_size * (self.embedding_width or self.width)

    @property
    def num_parameters(self) -> int:
        """All, tied ones once."""
        inside = sum(_num(layer.every) + layer.num_norm for layer in self.layers)
        return inside + self.num_embedding * (1 if self.tied else 2) + self.num_outside

    def num_active(self, tokens: int = 1) -> float:
        """Parameters that a step of `tokens` tokens computes with, experts that it is expected to reach.

        Without the input embedding; with the head.
        """
        return sum(
            _num(layer.linears) + layer.num_norm + _num_experts(layer, _num, tokens) for layer in self.layers
        ) + (self.num_embedding + self.num_outside - self.num_positions)

    def weight_bytes(self) -> int:
        """All weights as the checkpoint stores them, bytes."""
        size = self.dtype_bytes
        inside = sum(self._bytes(n, layer.every) + layer.num_norm * size for n, layer in enumerate(self.layers))
        return inside + (self.num_embedding * (1 if self.tied else 2) + self.num_outside) * size

    def read_bytes(self, tokens: int = 1) -> float:
        """What a decode step of `tokens` sequences reads of the weights, bytes: of experts, those it reaches."""
        positive(tokens=tokens)
        size = self.dtype_bytes
        inside = sum(
            self._bytes(n, layer.linears)
            + layer.num_norm * size
            + _num_experts(layer, lambda linears, n=n: self._bytes(n, linears), tokens)  # type: ignore[misc]
            for n, layer in enumerate(self.layers)
        )
        return inside + (self.num_embedding + self.num_outside - self.num_positions) * size

    def _bytes(self, n: int, linears: Iterator[Linear] | Sequence[Linear]) -> int:
        return sum(
            self.storage.weight_bytes(linear, f"{self.layers_path}.{n}.{linear.name}", self.dtype_bytes)
            for linear in linears
        )

    @property
    def kv_dtype_bytes(self) -> int:
        """Bytes of a key or value, as the checkpoint asks."""
        return 1 if self.storage.kv_fp8 else self.dtype_bytes

    @property
    def uniform(self) -> bool:
        """Whether every layer keeps the whole context."""
        return all(layer.window is None for layer in self.layers)

    def kv_bytes_per_token(self, dtype_bytes: float | None = None) -> float:
        """2 x layers x kv_heads x head_dim x dtype_bytes: what one more token of context takes, within all windows."""
        size = self.kv_dtype_bytes if dtype_bytes is None else dtype_bytes
        return 2 * len(self.layers) * self.num_kv_heads * self.head_dim * size

    def kv_bytes(self, tokens: int, dtype_bytes: float | None = None) -> float:
        """Of a sequence of `tokens` tokens: layers with a window keep no more than it."""
        positive(tokens=tokens)
        kept = sum(min(tokens, layer.window or tokens) for layer in self.layers)
        return self.kv_bytes_per_token(dtype_bytes) / len(self.layers) * kept

    def prefill(self, tokens: int) -> "Flops":
        """FLOPs to the first output token of a prompt: 2 a weight and token, the head once, causal attention.

        Attention is 4 x heads x head_dim FLOPs for each pair of a token and one that it sees.
        """
        positive(tokens=tokens)
        pairs = sum(_pairs(tokens, layer.window) for layer in self.layers)
        linears = sum(_num_weights(layer.linears) + _num_experts(layer, _num_weights, 1) for layer in self.layers)
        return Flops(2 * linears * tokens, 2 * self.num_embedding, 4 * self.num_heads * self.head_dim * pairs)


@dataclass(frozen=True)
class Flops:
    """Of one prompt, by what runs in which arithmetic."""

    linears: float
    """Of the layers: in the scheme's arithmetic."""
    head: float
    attention: float

    @property
    def total(self) -> float:
        """All."""
        return self.linears + self.head + self.attention


def _num(linears: Iterator[Linear] | Sequence[Linear]) -> int:
    return sum(linear.num_weights + (linear.rows if linear.bias else 0) for linear in linears)


def _num_weights(linears: Iterator[Linear] | Sequence[Linear]) -> int:
    return sum(linear.num_weights for linear in linears)


def _num_experts(layer: Layer, size: Callable[[Sequence[Linear]], float], tokens: int) -> float:
    """Expected size of the experts that a step reaches, where routing is uniform; all experts are alike."""
    if not layer.experts:
        return 0.0
    from oneaxis.plan.serving import distinct_experts

    return size(layer.experts[0]) * distinct_experts(len(layer.experts), layer.per_token, tokens)


def _pairs(tokens: int, window: int | None) -> float:
    """Of a token and one that it sees, itself among them."""
    if window is None or window >= tokens:
        return tokens * (tokens + 1) / 2
    return window * (window + 1) / 2 + (tokens - window) * window


# --- config.json ---------------------------------------------------------------------------------------------

STRANGE = (
    "num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "kv_lora_rank", "layers_block_type",
    "hybrid_override_pattern", "mamba_d_state", "mamba_num_heads", "ssm_state_size", "linear_num_value_heads",
    "attn_layer_period", "vision_config", "audio_config",
)  # fmt: skip
"""Keys of models whose layers are not all dense attention and MLP."""


class Keys:
    """A config.json whose keys are checked as they are read."""

    def __init__(self, where: str, values: Mapping[str, Any]) -> None:
        self.where, self.values = where, values

    def count(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """A whole number.

        Raises:
            UserError: it is missing and there is no default, or it is none.
        """
        value = self.values.get(key)
        if value is None:
            if default is None:
                raise UserError(f"{self.where}: {key} is missing; allowed: a config.json with it, as "
                                f"model_type={self.values.get('model_type')!r} has")  # fmt: skip
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise UserError(f"{self.where}: {key}={value!r}: allowed: a whole number, {least} or more")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise UserError(f"{self.where}: {key}={value!r}: allowed: true, false")
        return value


def read_model(path: Path) -> Model:
    """The shape of a checkpoint folder, or of a config.json.

    Raises:
        UserError: it is missing, broken, lacks a key, or is of a family that is not known.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{file}: missing; allowed: a config.json, or a folder that holds one") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: not JSON: {error}") from error
    if not isinstance(values, dict):
        raise UserError(f"{file}: holds {type(values).__name__}; allowed: a mapping")
    return model_of(values, str(file))


def model_of(values: Mapping[str, Any], where: str) -> Model:
    """The shape that a config.json describes.

    Raises:
        UserError: as `read_model`.
    """
    family = values.get("model_type")
    if family not in FAMILIES:
        raise UserError(f"{where}: model_type={family!r}: its layers are not known here, and a guess would be wrong; "
                        f"allowed: {', '.join(FAMILIES)}")  # fmt: skip
    if family not in ("mixtral", "qwen3_moe"):
        for key in STRANGE:
            if values.get(key):
                raise UserError(f"{where}: {key}={values[key]!r}: model_type={family!r} has no such layers here; "
                                f"allowed: {', '.join(FAMILIES)} as transformers defines them")  # fmt: skip
    return FAMILIES[family](Keys(where, values))


def _dtype(keys: Keys) -> str:
    dtype = str(keys.values.get("dtype") or keys.values.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise UserError(f"{keys.where}: dtype={dtype}: allowed: {', '.join(DTYPE_BYTES)}")
    return dtype


def _storage(keys: Keys) -> Storage:
    settings = keys.values.get("quantization_config")
    if not settings:
        return Storage()
    from oneaxis.checkpoint.compressed import read_scheme

    scheme = read_scheme(settings, keys.where)
    return Storage(scheme.kind, scheme.group_size, scheme.symmetric, scheme.kv == "fp8",
                   tuple(settings.get("ignore") or ()))  # fmt: skip


def _windows(keys: Keys, num_layers: int, sliding: Callable[[int], bool]) -> list[int | None]:
    """The window of each layer: where `layer_types` says so, or else `sliding`."""
    if not keys.values.get("sliding_window"):
        return [None] * num_layers
    window, types = keys.count("sliding_window"), keys.values.get("layer_types")
    if types is None:
        return [window if sliding(layer) else None for layer in range(num_layers)]
    known = {"full_attention": None, "sliding_attention": window}
    if not isinstance(types, list) or len(types) != num_layers or not set(types) <= set(known):
        raise UserError(f"{keys.where}: layer_types={types!r}: allowed: {num_layers} of {', '.join(known)}")
    return [known[kind] for kind in types]


def _used(keys: Keys, layer: int) -> bool:
    """Qwen's: only when `use_sliding_window`, and only from `max_window_layers` on."""
    return keys.flag("use_sliding_window", False) and layer >= keys.count("max_window_layers", 28, least=0)


@dataclass(frozen=True)
class _Heads:
    queries: int
    keys: int
    size: int

    def qkv(self, width: int, *, bias: bool, out_bias: bool, prefix: str = "self_attn.") -> tuple[Linear, ...]:
        """Separate projections."""
        outs = {"q": self.queries * self.size, "k": self.keys * self.size, "v": self.keys * self.size}
        return (
            *(Linear(f"{prefix}{name}_proj", rows, width, bias) for name, rows in outs.items()),
            Linear(f"{prefix}o_proj", width, self.queries * self.size, out_bias),
        )


def _heads(keys: Keys, *, head_dim: bool = False, kv: bool = True) -> _Heads:
    """Heads; `head_dim` and `kv`: whether the family's config must say so, since its default is no quotient."""
    queries = keys.count("num_attention_heads")
    grouped = keys.count("num_key_value_heads", None if kv else queries)
    width = keys.count("hidden_size")
    if keys.values.get("head_dim") is None and not head_dim and width % queries:
        raise UserError(f"{keys.where}: hidden_size={width}: allowed: a multiple of num_attention_heads={queries}, "
                        "or head_dim beside it")  # fmt: skip
    if queries % grouped:
        raise UserError(f"{keys.where}: num_key_value_heads={grouped}: allowed: a divisor of "
                        f"num_attention_heads={queries}")  # fmt: skip
    return _Heads(queries, grouped, keys.count("head_dim", None if head_dim else max(1, width // queries)))


def _mlp(width: int, inner: int, bias: bool = False, prefix: str = "mlp.") -> tuple[Linear, ...]:
    return (
        Linear(f"{prefix}gate_proj", inner, width, bias),
        Linear(f"{prefix}up_proj", inner, width, bias),
        Linear(f"{prefix}down_proj", width, inner, bias),
    )


def _model(keys: Keys, heads: _Heads, layers: Sequence[Layer], *, tied: bool, **more: Any) -> Model:
    return Model(
        where=keys.where,
        family=str(keys.values["model_type"]),
        vocab_size=keys.count("vocab_size"),
        width=more.pop("width", None) or keys.count("hidden_size"),
        num_heads=heads.queries,
        num_kv_heads=heads.keys,
        head_dim=heads.size,
        layers=tuple(layers),
        tied=keys.flag("tie_word_embeddings", tied),
        dtype=_dtype(keys),
        max_positions=more.pop("max_positions", None) or keys.count("max_position_embeddings"),
        num_outside=more.pop("num_outside", None) or keys.count("hidden_size"),
        storage=_storage(keys),
        **more,
    )


def _llama(keys: Keys, *, qkv_bias: bool = False, head_norms: bool = False, **heads_of: bool) -> Model:
    heads, width = _heads(keys, **heads_of), keys.count("hidden_size")
    bias = keys.flag("attention_bias", False)
    linears = (
        *heads.qkv(width, bias=bias or qkv_bias, out_bias=bias),
        *_mlp(width, keys.count("intermediate_size"), keys.flag("mlp_bias", False)),
    )
    num_layers = keys.count("num_hidden_layers")
    num_norm = 2 * width + (2 * heads.size if head_norms else 0)
    qwen = str(keys.values["model_type"]).startswith("qwen")
    windows = _windows(keys, num_layers, lambda layer: _used(keys, layer) if qwen else True)
    return _model(keys, heads, [Layer(linears, num_norm, window) for window in windows], tied=False)


def _llama_family(keys: Keys) -> Model:
    return _llama(keys, kv=False)


def _mistral(keys: Keys) -> Model:
    return _llama(keys)


def _qwen2(keys: Keys) -> Model:
    """Biases of q, k and v that config.json does not mention."""
    return _llama(keys, qkv_bias=True)


def _qwen3(keys: Keys) -> Model:
    return _llama(keys, head_norms=True, head_dim=True)


def _gemma(keys: Keys, *, head_norms: bool = False, period: int = 2) -> Model:
    heads, width = _heads(keys, head_dim=True), keys.count("hidden_size")
    bias = keys.flag("attention_bias", False)
    linears = (*heads.qkv(width, bias=bias, out_bias=bias), *_mlp(width, keys.count("intermediate_size")))
    num_norm = 4 * width + (2 * heads.size if head_norms else 0)
    period = keys.count("sliding_window_pattern", period)
    windows = _windows(keys, keys.count("num_hidden_layers"), lambda layer: (layer + 1) % period != 0)
    return _model(keys, heads, [Layer(linears, num_norm, window) for window in windows], tied=True)


def _gemma3(keys: Keys) -> Model:
    return _gemma(keys, head_norms=True, period=6)


def _phi3(keys: Keys) -> Model:
    """One linear for q, k and v, one for gate and up."""
    heads, width, inner = _heads(keys, kv=False), keys.count("hidden_size"), keys.count("intermediate_size")
    linears = (
        Linear("self_attn.qkv_proj", (heads.queries + 2 * heads.keys) * heads.size, width),
        Linear("self_attn.o_proj", width, heads.queries * heads.size),
        Linear("mlp.gate_up_proj", 2 * inner, width),
        Linear("mlp.down_proj", width, inner),
    )
    windows = _windows(keys, keys.count("num_hidden_layers"), lambda _: True)
    return _model(keys, heads, [Layer(linears, 2 * width, window) for window in windows], tied=False)


def _mixtral(keys: Keys) -> Model:
    heads, width, inner = _heads(keys), keys.count("hidden_size"), keys.count("intermediate_size")
    num_experts = keys.count("num_local_experts")
    linears = (
        *heads.qkv(width, bias=False, out_bias=False),
        Linear("block_sparse_moe.gate", num_experts, width, router=True),
    )
    experts = tuple(
        (Linear(f"{name}.w1", inner, width), Linear(f"{name}.w3", inner, width), Linear(f"{name}.w2", width, inner))
        for name in (f"block_sparse_moe.experts.{expert}" for expert in range(num_experts))
    )
    windows = _windows(keys, keys.count("num_hidden_layers"), lambda _: True)
    per_token = _per_token(keys, num_experts)
    layers = [Layer(linears, 2 * width, window, experts, per_token) for window in windows]
    return _model(keys, heads, layers, tied=False)


def _qwen3_moe(keys: Keys) -> Model:
    """Every `decoder_sparse_step`-th layer has experts, but for those in `mlp_only_layers`."""
    heads, width = _heads(keys, head_dim=True), keys.count("hidden_size")
    # transformers 5 writes the number under Mixtral's name.
    written = "num_local_experts" if keys.values.get("num_experts") is None else "num_experts"
    num_experts, bias = keys.count(written), keys.flag("attention_bias", False)
    attention = heads.qkv(width, bias=bias, out_bias=bias)
    router = Linear("mlp.gate", num_experts, width, router=True)
    experts = tuple(
        _mlp(width, keys.count("moe_intermediate_size"), prefix=f"mlp.experts.{expert}.")
        for expert in range(num_experts)
    )
    num_layers, step = keys.count("num_hidden_layers"), keys.count("decoder_sparse_step", 1)
    plain = keys.values.get("mlp_only_layers") or []
    windows = _windows(keys, num_layers, lambda layer: _used(keys, layer))
    num_norm, per_token = 2 * width + 2 * heads.size, _per_token(keys, num_experts)
    layers = []
    for layer, window in enumerate(windows):
        if layer in plain or (layer + 1) % step:
            dense = (*attention, *_mlp(width, keys.count("intermediate_size")))
            layers.append(Layer(dense, num_norm, window))
        else:
            layers.append(Layer((*attention, router), num_norm, window, experts, per_token))
    return _model(keys, heads, layers, tied=False)


def _per_token(keys: Keys, num_experts: int) -> int:
    value = keys.count("num_experts_per_tok")
    if value > num_experts:
        raise UserError(f"{keys.where}: num_experts_per_tok={value}: allowed: up to {num_experts}, the experts")
    return value


def _olmo2(keys: Keys) -> Model:
    """Norms after attention and MLP, and over all queries and all keys at once."""
    heads, width = _heads(keys, kv=False), keys.count("hidden_size")
    bias = keys.flag("attention_bias", False)
    linears = (*heads.qkv(width, bias=bias, out_bias=bias), *_mlp(width, keys.count("intermediate_size")))
    num_norm = 2 * width + (heads.queries + heads.keys) * heads.size
    return _model(keys, heads, [Layer(linears, num_norm)] * keys.count("num_hidden_layers"), tied=False)


def _opt(keys: Keys) -> Model:
    queries, width, inner = keys.count("num_attention_heads"), keys.count("hidden_size"), keys.count("ffn_dim")
    bias, affine = keys.flag("enable_bias", True), keys.flag("layer_norm_elementwise_affine", True)
    heads = _Heads(queries, queries, width // queries)
    norm = 2 * width if affine else 0
    linears = (
        *(Linear(f"self_attn.{name}", width, width, bias) for name in ("q_proj", "k_proj", "v_proj", "out_proj")),
        Linear("fc1", inner, width, bias),
        Linear("fc2", width, inner, bias),
    )
    embedding = keys.count("word_embed_proj_dim", width)
    # The table of positions has two rows more than there are positions.
    positions = (keys.count("max_position_embeddings") + 2) * width
    last = norm if keys.flag("do_layer_norm_before", True) and not keys.flag("_remove_final_layer_norm", False) else 0
    projections = 2 * embedding * width if embedding != width else 0
    return _model(
        keys, heads, [Layer(linears, 2 * norm)] * keys.count("num_hidden_layers"), tied=True,
        num_outside=positions + last + projections, num_positions=positions, embedding_width=embedding,
        layers_path="model.decoder.layers",
    )  # fmt: skip


def _gpt2(keys: Keys) -> Model:
    if keys.flag("add_cross_attention", False):
        raise UserError(f"{keys.where}: add_cross_attention=true: an encoder is read too; allowed: false")
    queries, width = keys.count("n_head"), keys.count("n_embd")
    inner, heads = keys.count("n_inner", 4 * width), _Heads(queries, queries, width // queries)
    linears = (
        Linear("attn.c_attn", 3 * width, width, True),
        Linear("attn.c_proj", width, width, True),
        Linear("mlp.c_fc", inner, width, True),
        Linear("mlp.c_proj", width, inner, True),
    )
    positions = keys.count("n_positions") * width
    return _model(
        keys, heads, [Layer(linears, 4 * width)] * keys.count("n_layer"), tied=True, width=width,
        max_positions=keys.count("n_positions"), num_outside=positions + 2 * width, num_positions=positions,
        layers_path="transformer.h",
    )  # fmt: skip


FAMILIES: dict[str, Callable[[Keys], Model]] = {
    "llama": _llama_family,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma2": _gemma,
    "gemma3_text": _gemma3,
    "phi3": _phi3,
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "olmo2": _olmo2,
    "opt": _opt,
    "gpt2": _gpt2,
}
"""As `oneaxis.quantize.families`."""
