"""Where the linears of a decoder read their inputs: the four sites of every layer, and which models have them.

    hidden -> input_layernorm -> [qkv] q/k/v_proj -> attention -> [o] o_proj -> + hidden
           -> post_attention_layernorm -> [gate_up] gate/up_proj -> act(gate) * up -> [down] down_proj -> + hidden

Models with the same module names may mean other things by them (Gemma stores its norm weights as `1 + w`, and its
`post_attention_layernorm` feeds the residual), so families are allowed by name, each one proven by a test.
"""

from dataclasses import dataclass
from typing import Any

from torch import nn

from oneaxis.errors import UserError

SITES: dict[str, tuple[str, ...]] = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""Site -> the linears of a layer that read its tensor."""

NORMS = {"qkv": "input_layernorm", "gate_up": "post_attention_layernorm"}
"""Sites whose tensor an RMSNorm produces."""

LINEARS = tuple(linear for linears in SITES.values() for linear in linears)
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True)
class Heads:
    """The attention heads that lie side by side in the input of o_proj."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The decoder layers of a causal language model, checked to be of a shape that can be smoothed.

    Raises:
        UserError: the family is not supported, naming it, what its layers hold, and what is supported.
    """
    config: Any = model.config
    allowed = f"allowed: {', '.join(FAMILIES)}, with layers of {', '.join((*LINEARS, *NORMS.values()))}"
    backbone = getattr(model, "model", None)
    layers = list(getattr(backbone, "layers", None) or [])
    held = sorted(name for name, module in layers[0].named_modules() if isinstance(module, nn.Linear)) if layers else []
    if config.model_type not in FAMILIES or not layers:
        raise UserError(f"model_type={config.model_type!r}: cannot be calibrated and quantised; its layers hold "
                        f"{', '.join(held) or 'nothing at model.layers'}; {allowed}")  # fmt: skip
    for index, layer in enumerate(layers):
        found = sorted(name for name, module in layer.named_modules() if isinstance(module, nn.Linear))
        norms = [name for name in NORMS.values() if hasattr(layer, name)]
        if found != sorted(LINEARS) or len(norms) != len(NORMS):
            raise UserError(
                f"model_type={config.model_type!r}: model.layers.{index} holds {', '.join(found)}; {allowed}"
            )
    return layers


def heads(model: nn.Module) -> Heads:
    """The head counts of a supported model."""
    config: Any = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Heads(config.num_attention_heads, config.num_key_value_heads or config.num_attention_heads, head_dim)
