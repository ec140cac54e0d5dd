"""What a decoder layer of each known family holds: which linears read a tensor, and what produces that tensor.

    hidden -> norm -> [qkv] q, k, v -> attention -> [o] out -> + hidden
           -> norm -> [gate_up] gate, up -> act(gate) * up -> [down] down -> + hidden

A scale can be folded away where a norm, or rows of a linear that nothing nonlinear follows, produces the tensor. Names
alone do not tell: Gemma stores its norm weights as `1 + w`, and its `post_attention_layernorm` feeds the residual
stream. So families are allowed by name, and a test proves every fold of each on random weights.

Module names are those inside a layer whose experts are split and whose linears are all `nn.Linear` (see experts.py);
`Decoder.stored_name` gives the name in the checkpoint.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import nn
from transformers import PretrainedConfig

from oneaxis.errors import UserError

Kind = Literal["qkv", "o", "gate_up", "down"]
"""What a tensor is to `smooth.sites`; `gate_up` is the input of the MLP and `down` its inner one, in every family."""
KINDS: tuple[Kind, ...] = ("qkv", "o", "gate_up", "down")


@dataclass(frozen=True)
class Norm:
    """An RMSNorm or LayerNorm: its weight is stored as `w` and used as `offset + w`; a bias is scaled with it."""

    name: str
    offset: float = 0.0


@dataclass(frozen=True)
class Rows:
    """Output rows of a linear, and of its bias: all of v_proj, the last third of a fused qkv."""

    name: str
    first: int
    count: int


@dataclass(frozen=True)
class Heads:
    """The attention heads that lie side by side in the input of the attention's output projection."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class Site:
    """A tensor inside a layer that linears read: what statistics are taken of and what one smoothing scale is for."""

    name: str
    """`qkv`, `o`, `gate_up`, `down`, or `experts.3.down`: its statistics are `layers.<n>.<name>.*`."""
    kind: Kind
    readers: tuple[str, ...]
    """The linears that read it and may be quantised."""
    high: tuple[str, ...] = ()
    """Readers that are never quantised (a router): scaled like the others, in high precision."""
    producer: Norm | Rows | None = None
    why_not: str = ""
    """Without a producer: why no fold exists."""
    heads: Heads | None = None
    """Of kind `o`: scales must be equal within a group of query heads."""

    @property
    def tap(self) -> str:
        """The module whose input is the whole tensor (experts see only their tokens); leading dims may be flat."""
        return (*self.high, *self.readers)[0]


@dataclass(frozen=True)
class Decoder:
    """The layers of one checkpoint's model."""

    model_type: str
    layers_path: str
    """Of the ModuleList, in the causal language model."""
    heads: Heads
    layers: tuple[tuple[Site, ...], ...]
    kept: tuple[str, ...] = ()
    """Modules of a layer with parameters of their own that no fold touches."""
    renamed: tuple[tuple[str, str], ...] = ()
    """Parts of module names that are called otherwise in the checkpoint, applied in order."""
    conv1d: bool = False
    """Weights of linears are stored as [in, out], as GPT-2's are; layers in memory hold [out, in]."""

    @property
    def num_layers(self) -> int:
        """How many."""
        return len(self.layers)

    def sites(self, layer: int) -> tuple[Site, ...]:
        """The tensors of a layer, in the order in which they are computed."""
        return self.layers[layer]

    def linears(self, layer: int) -> tuple[str, ...]:
        """Every linear of a layer that may be quantised, inside the layer."""
        return tuple(name for site in self.layers[layer] for name in site.readers)

    def stored_name(self, layer: int, name: str) -> str:
        """The name in the checkpoint, and in vLLM, of a module or tensor of a layer.

        `mlp.experts.3.gate_proj.weight` of Mixtral's layer 0 is `model.layers.0.block_sparse_moe.experts.3.w1.weight`.
        """
        for ours, theirs in self.renamed:
            name = name.replace(ours, theirs)
        return f"{self.layers_path}.{layer}.{name}"

    def transposed(self, layer: int, name: str) -> bool:
        """Whether a tensor of a layer (`attn.c_attn.weight`) is stored as [in, out]: transpose to read and to write."""
        return self.conv1d and name.removesuffix(".weight") in self.linears(layer) and name.endswith(".weight")

    def fused(self, layer: int) -> tuple[tuple[str, ...], ...]:
        """Linears that engines run as one layer: they share a scheme, and a static input scale if they share a tensor.

        q, k and v; gate and up; and all linears of all experts.
        """
        groups = [site.readers for site in self.layers[layer] if len(site.readers) > 1 and not _is_expert(site)]
        experts = tuple(name for site in self.layers[layer] if _is_expert(site) for name in site.readers)
        return (*groups, experts) if experts else tuple(groups)

    def foldable(self) -> tuple[Kind, ...]:
        """The kinds of tensors whose scales can be folded away in every layer."""
        return tuple(
            kind for kind in KINDS if all(site.producer for sites in self.layers for site in sites if site.kind == kind)
        )


def decoder(config: PretrainedConfig, model: nn.Module | None = None) -> Decoder:
    """The description of a model.

    Args:
        model: only for the message, what its layers hold.

    Raises:
        UserError: the family is unknown, or this member of it has layers of another shape.
    """
    if config.model_type not in FAMILIES:
        held = "" if model is None else f"; its layers hold {_held(model)}"
        raise UserError(f"model_type={config.model_type!r}: not a family whose layers are known, so it cannot be "
                        f"calibrated and quantised{held}; allowed: {', '.join(FAMILIES)}")  # fmt: skip
    return FAMILIES[config.model_type](config)


def check_layer(description: Decoder, index: int, layer: nn.Module) -> None:
    """Refuse a layer that holds anything else than its description says.

    Raises:
        UserError: naming the layer, the modules that are missing or unknown, or the width that does not fit.
    """
    where = f"model_type={description.model_type!r}: {description.layers_path}.{index}"
    sites = description.sites(index)
    norms = {site.producer.name for site in sites if isinstance(site.producer, Norm)}
    known = {*description.linears(index), *(name for site in sites for name in site.high), *norms, *description.kept}
    found = {name for name, module in layer.named_modules() if _holds(module)}
    if found != known:
        problems = [f"{word} {', '.join(sorted(names)[:8])}{', ...' if len(names) > 8 else ''}"
                    for word, names in (("holds", found - known), ("lacks", known - found)) if names]  # fmt: skip
        raise UserError(f"{where} {' and '.join(problems)}; allowed: the layers of that family in transformers")
    for site in sites:
        widths = {name: _in_features(layer.get_submodule(name)) for name in (*site.readers, *site.high)}
        if isinstance(site.producer, Norm):
            widths[site.producer.name] = len(layer.get_submodule(site.producer.name).weight)
        if site.heads:
            widths["the query heads"] = site.heads.num_heads * site.heads.head_dim
        elif isinstance(site.producer, Rows):
            widths[f"rows of {site.producer.name}"] = site.producer.count
        if len(set(widths.values())) > 1:
            listed = ", ".join(f"{name} {width}" for name, width in widths.items())
            raise UserError(f"{where} has widths that do not fit each other: {listed}; allowed: equal ones")
        if isinstance(site.producer, Rows):
            rows, last = layer.get_submodule(site.producer.name), site.producer.first + site.producer.count
            if rows.out_features < last:
                raise UserError(f"{where}.{site.producer.name} has {rows.out_features} outputs, of which {last} are "
                                f"needed; allowed: those that the config's head counts ask for")  # fmt: skip


def _is_expert(site: Site) -> bool:
    return any(".experts." in name for name in site.readers)


def _holds(module: nn.Module) -> bool:
    return hasattr(module, "in_features") or any(True for _ in module.parameters(recurse=False))


def _in_features(module: nn.Module) -> int:
    """Of a linear, or of a router that only has a weight."""
    width = getattr(module, "in_features", None)
    return int(module.weight.shape[-1] if width is None else width)  # type: ignore[union-attr,index]


def _held(model: nn.Module) -> str:
    """The modules with parameters in the first of a model's decoder layers, for a message."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module)]
    if not lists:
        return "nothing that is known (no list of layers)"
    names = sorted(name for name, module in max(lists, key=len)[0].named_modules() if _holds(module))
    return ", ".join(names)


# The families. Each function reads a config and describes its layers.


def _heads(config: Any) -> Heads:
    num_heads = config.num_attention_heads
    if config.model_type in ("opt", "gpt2"):  # A stray num_key_value_heads means nothing to them.
        return Heads(num_heads, num_heads, config.hidden_size // num_heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    return Heads(num_heads, getattr(config, "num_key_value_heads", None) or num_heads, head_dim)


def _attention(heads: Heads, norm: Norm | None, why_not: str = "") -> tuple[Site, Site]:
    """Separate q, k and v that read `norm`."""
    qkv = tuple(f"self_attn.{name}_proj" for name in "qkv")
    rows = Rows("self_attn.v_proj", 0, heads.num_kv_heads * heads.head_dim)
    return (
        Site("qkv", "qkv", qkv, producer=norm, why_not=why_not),
        Site("o", "o", ("self_attn.o_proj",), producer=rows, heads=heads),
    )


def _mlp(norm: Norm | None, width: int, why_not: str = "") -> tuple[Site, Site]:
    """Gated, with separate gate and up that read `norm`; up feeds only the product, so it can take a scale."""
    return (
        Site("gate_up", "gate_up", ("mlp.gate_proj", "mlp.up_proj"), producer=norm, why_not=why_not),
        Site("down", "down", ("mlp.down_proj",), producer=Rows("mlp.up_proj", 0, width)),
    )


def _same_layers(config: Any, *sites: tuple[Site, Site], **more: Any) -> Decoder:
    """A model whose layers are all alike."""
    layer = tuple(site for pair in sites for site in pair)
    path = more.pop("layers_path", "model.layers")
    return Decoder(config.model_type, path, _heads(config), (layer,) * config.num_hidden_layers, **more)


def _llama(config: Any, kept: tuple[str, ...] = ()) -> Decoder:
    attention = _attention(_heads(config), Norm("input_layernorm"))
    return _same_layers(config, attention, _mlp(Norm("post_attention_layernorm"), config.intermediate_size), kept=kept)


QK_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
"""Norms of queries and keys after their projection: they do not touch what the projections read."""


def _qwen3(config: Any) -> Decoder:
    return _llama(config, QK_NORMS)


def _gemma(config: Any, kept: tuple[str, ...] = ()) -> Decoder:
    """Norms of `1 + w` around both halves of a layer: those after them feed the residual stream."""
    attention = _attention(_heads(config), Norm("input_layernorm", 1.0))
    mlp = _mlp(Norm("pre_feedforward_layernorm", 1.0), config.intermediate_size)
    after = ("post_attention_layernorm", "post_feedforward_layernorm")
    return _same_layers(config, attention, mlp, kept=(*after, *kept))


def _gemma3(config: Any) -> Decoder:
    return _gemma(config, QK_NORMS)


def _phi3(config: Any) -> Decoder:
    """One linear for q, k and v, one for gate and up; v and up are their last rows."""
    heads, width = _heads(config), config.intermediate_size
    kv_width = heads.num_kv_heads * heads.head_dim
    v = Rows("self_attn.qkv_proj", heads.num_heads * heads.head_dim + kv_width, kv_width)
    up = Rows("mlp.gate_up_proj", width, width)
    return _same_layers(
        config,
        (
            Site("qkv", "qkv", ("self_attn.qkv_proj",), producer=Norm("input_layernorm")),
            Site("o", "o", ("self_attn.o_proj",), producer=v, heads=heads),
        ),
        (
            Site("gate_up", "gate_up", ("mlp.gate_up_proj",), producer=Norm("post_attention_layernorm")),
            Site("down", "down", ("mlp.down_proj",), producer=up),
        ),
    )


def _experts(num_experts: int, width: int) -> tuple[Site, ...]:
    """Router and experts read one tensor, so they share one scale; inside, each expert has its own."""
    names = [f"mlp.experts.{expert}" for expert in range(num_experts)]
    readers = tuple(f"{name}.{linear}" for name in names for linear in ("gate_proj", "up_proj"))
    return (
        Site("gate_up", "gate_up", readers, high=("mlp.gate",), producer=Norm("post_attention_layernorm")),
        *(
            Site(f"experts.{expert}.down", "down", (f"{name}.down_proj",), producer=Rows(f"{name}.up_proj", 0, width))
            for expert, name in enumerate(names)
        ),
    )


def _mixtral(config: Any) -> Decoder:
    heads = _heads(config)
    layer = (*_attention(heads, Norm("input_layernorm")), *_experts(config.num_local_experts, config.intermediate_size))
    renamed = (("mlp.", "block_sparse_moe."), ("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2"))
    return Decoder("mixtral", "model.layers", heads, (layer,) * config.num_hidden_layers, renamed=renamed)


def _qwen3_moe(config: Any) -> Decoder:
    """Every `decoder_sparse_step`-th layer has experts, but for those in `mlp_only_layers`."""
    heads = _heads(config)
    attention = _attention(heads, Norm("input_layernorm"))
    dense = (*attention, *_mlp(Norm("post_attention_layernorm"), config.intermediate_size))
    sparse = (*attention, *_experts(config.num_experts, config.moe_intermediate_size))
    layers = tuple(
        sparse
        if config.num_experts and layer not in config.mlp_only_layers and not (layer + 1) % config.decoder_sparse_step
        else dense
        for layer in range(config.num_hidden_layers)
    )
    return Decoder("qwen3_moe", "model.layers", heads, layers, kept=QK_NORMS)


def _olmo2(config: Any) -> Decoder:
    """Norms come after attention and MLP, so nothing stands between the residual stream and what reads it."""
    why_not = "reads the residual stream itself, with no norm between them to take the scale"
    return _same_layers(
        config,
        _attention(_heads(config), None, why_not),
        _mlp(None, config.intermediate_size, why_not),
        kept=("post_attention_layernorm", "post_feedforward_layernorm", *QK_NORMS),
    )


NONLINEAR = "reads what a nonlinearity gives, with no linear between them to take the scale"


def _opt(config: Any) -> Decoder:
    names = ("self_attn_layer_norm", "final_layer_norm")
    qkv_norm, mlp_norm = (Norm(name) for name in names) if config.do_layer_norm_before else (None, None)
    why_not = "reads the residual stream: the norm before it feeds that too (do_layer_norm_before=False)"
    if not config.layer_norm_elementwise_affine:
        qkv_norm, mlp_norm = None, None
        why_not = "reads a norm that has no weight to take the scale (layer_norm_elementwise_affine=False)"
    qkv, out = _attention(_heads(config), qkv_norm, why_not)
    kept = names if config.layer_norm_elementwise_affine and not config.do_layer_norm_before else ()
    return _same_layers(
        config,
        (qkv, replace(out, readers=("self_attn.out_proj",))),
        (
            Site("gate_up", "gate_up", ("fc1",), producer=mlp_norm, why_not=why_not),
            Site("down", "down", ("fc2",), why_not=NONLINEAR),
        ),
        layers_path="model.decoder.layers",
        kept=kept,
    )


def _gpt2(config: Any) -> Decoder:
    if config.add_cross_attention:
        raise UserError("model_type='gpt2': add_cross_attention=True: an encoder's output is read too; allowed: False")
    heads, width = _heads(config), config.hidden_size
    return _same_layers(
        config,
        (
            Site("qkv", "qkv", ("attn.c_attn",), producer=Norm("ln_1")),
            Site("o", "o", ("attn.c_proj",), producer=Rows("attn.c_attn", 2 * width, width), heads=heads),
        ),
        (
            Site("gate_up", "gate_up", ("mlp.c_fc",), producer=Norm("ln_2")),
            Site("down", "down", ("mlp.c_proj",), why_not=NONLINEAR),
        ),
        layers_path="transformer.h",
        conv1d=True,
    )


FAMILIES: dict[str, Callable[[Any], Decoder]] = {
    "llama": _llama,
    "mistral": _llama,
    "qwen2": _llama,
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
