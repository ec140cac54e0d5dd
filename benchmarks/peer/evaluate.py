"""NLL of a checkpoint on given tokens, by a reader that shares no code with oneaxis or llm-compressor.

    python benchmarks/peer/evaluate.py --checkpoint FOLDER --tokens heldout.npy --out nll.npy

transformers builds the plain float32 model; the integers are turned into weights here, in a few lines, from what
config.json says, and the inputs of the quantised linears are rounded as vLLM rounds them (vllm/_custom_ops.py,
`scaled_int8_quant`): absmax / 127 per token, or the stored static scale with levels clipped to -128..127. The same for
the result of any tool. `--by compressed-tensors` lets transformers and compressed-tensors, whose format it is, do all
of it instead: a second opinion, whose dynamic scale is absmax / 127.5.

Read are W8A8 INT8 (`int-quantized`), W4A16 (`pack-quantized`), W8A8 FP8 (`float-quantized`) and plain checkpoints.

Dims: S sequences, T tokens, O output channels, I input channels, G groups of input channels.
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

FP8_MAX = 448.0
HEAD_ROWS = 512


def expect(holds: bool, what: str) -> None:
    """Stop where a checkpoint is not what this reader reads, or its tensors are not what its config says."""
    if not holds:
        raise SystemExit(f"evaluate.py cannot read this: {what}")


def stored_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of the folder's shards."""
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def take_weight(tensors: dict[str, Tensor], name: str) -> Tensor:
    """Take a quantised linear's tensors out of `tensors`; its float32 weights [O, I]."""
    scale_OG = tensors.pop(f"{name}.weight_scale").float()
    zero_OG = tensors.pop(f"{name}.weight_zero_point", None)
    if f"{name}.weight_packed" in tensors:
        shape = tensors.pop(f"{name}.weight_shape").tolist()
        levels_OI = unpack_int4(tensors.pop(f"{name}.weight_packed"))[:, : shape[1]] - 8
        if zero_OG is not None:  # packed along the output channels, as offsets of 8 too
            zero_OG = unpack_int4(zero_OG.T)[:, : shape[0]].T - 8
    else:
        levels_OI = tensors.pop(f"{name}.weight").float()
    levels_OGC = levels_OI.float().view(len(levels_OI), scale_OG.shape[1], -1)
    if zero_OG is not None:
        levels_OGC = levels_OGC - zero_OG.float()[..., None]
    return (levels_OGC * scale_OG[..., None]).view(levels_OI.shape)


def unpack_int4(packed_RN: Tensor) -> Tensor:
    """int32 [R, N] -> int64 [R, 8 N] of 0..15; the first value lies in the lowest 4 bits."""
    shifts = torch.arange(0, 32, 4)
    return ((packed_RN.long()[..., None] >> shifts) & 0xF).flatten(1)


def rounder(settings: dict[str, Any] | None, scale: Tensor | None) -> Any:
    """A pre-hook that rounds a linear's input as its `input_activations` say; None: as it is."""
    if not settings:
        return None
    top, integer = (127.0, True) if settings["type"] == "int" else (FP8_MAX, False)
    expect(settings["num_bits"] == 8 and settings["symmetric"], f"input_activations {settings}")

    def hook(_module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor]:
        x = args[0]
        step = scale if scale is not None else (x.abs().amax(dim=-1, keepdim=True) / top).clamp_min(1e-12)
        if integer:
            return ((x / step).round().clamp(-128, 127) * step,)
        return ((x / step).clamp(-top, top).to(torch.float8_e4m3fn).float() * step,)

    return hook


def ignored(name: str, patterns: list[str]) -> bool:
    """Whether `ignore` leaves the linear in high precision."""
    return any(re.match(p[3:], name) if p.startswith("re:") else p == name for p in patterns)


def load(folder: Path) -> nn.Module:
    """The model in float32 with the checkpoint's weights and hooks that round activations."""
    config = AutoConfig.from_pretrained(folder)
    quantization = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("quantization_config")
    config.__dict__.pop("quantization_config", None)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tensors = stored_tensors(folder)
    if quantization:
        (group,) = quantization["config_groups"].values()
        expect(group["targets"] == ["Linear"] and not quantization.get("kv_cache_scheme"), f"scheme {quantization}")
        activations = group["input_activations"]
        linears = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
        for name, linear in linears.items():
            if ignored(name, quantization["ignore"]):
                expect(f"{name}.weight_scale" not in tensors, f"ignored {name} is quantised")
                continue
            scale = tensors.pop(f"{name}.input_scale", None)
            expect((scale is not None) == bool(activations and not activations["dynamic"]), f"{name}.input_scale")
            tensors[f"{name}.weight"] = take_weight(tensors, name)
            hook = rounder(activations, None if scale is None else scale.float())
            if hook:
                linear.register_forward_pre_hook(hook)
    missing, unexpected = model.load_state_dict({name: t.float() for name, t in tensors.items()}, strict=False)
    expect(not unexpected and set(missing) <= set(model.all_tied_weights_keys), f"tensors {missing} {unexpected}")
    model.tie_weights()
    return model.eval()


def load_by_compressed_tensors(folder: Path) -> nn.Module:
    """The same by transformers' own reader: weights decompressed, activations rounded in its wrapped forward."""
    from transformers import CompressedTensorsConfig

    whole = CompressedTensorsConfig(dequantize=True)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=whole).eval()


def disturb(model: nn.Module, size: float) -> None:
    """Multiply the embeddings by 1 + `size` times normal noise: a change that float32 itself could make.

    A quantised model rounds its activations, so a change of any size moves some of them by a whole level, and these
    move others. How far the NLL of a token then moves is how far two right readers may differ.
    """
    generator = torch.Generator().manual_seed(0)

    def hook(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        return output * (1 + size * torch.randn(output.shape, generator=generator))

    model.get_input_embeddings().register_forward_hook(hook)


@torch.inference_mode()
def token_nll(model: nn.Module, token_ids_ST: Tensor, batch: int) -> Tensor:
    """-log p of each token given those before it in its sequence, nats, float64 [S, T - 1]."""
    rows = []
    for token_ids_BT in token_ids_ST.split(batch):
        hidden = model.model(input_ids=token_ids_BT, use_cache=False).last_hidden_state[:, :-1].flatten(0, 1)
        target = token_ids_BT[:, 1:].flatten()
        nll = [nn.functional.cross_entropy(model.lm_head(h).float(), t, reduction="none").double()
               for h, t in zip(hidden.split(HEAD_ROWS), target.split(HEAD_ROWS), strict=True)]  # fmt: skip
        rows.append(torch.cat(nll).view(len(token_ids_BT), -1))
    return torch.cat(rows)


def main() -> None:
    """Write the NLL, print the perplexity."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--tokens", type=Path, required=True, help="int64 .npy [sequences, tokens]")
    parser.add_argument("--by", choices=["hand", "compressed-tensors"], default="hand")
    parser.add_argument(
        "--noise", type=float, default=0.0, help="relative, on the embeddings: what rounding makes of it"
    )
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    model = load(options.checkpoint) if options.by == "hand" else load_by_compressed_tensors(options.checkpoint)
    if options.noise:
        disturb(model, options.noise)
    nll = token_nll(model, torch.from_numpy(np.load(options.tokens)), options.batch)
    np.save(options.out, nll.numpy())
    print(f"perplexity {float(nll.mean().exp()):.4f}")


if __name__ == "__main__":
    main()
