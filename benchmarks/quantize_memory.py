"""Peak memory of calibrate and quantize on a synthetic Llama of 1.1 billion parameters.

    python benchmarks/quantize_memory.py --out memory.md

The checkpoint has TinyLlama's shape (hidden 2048, 22 layers, 32 heads over 4 KV heads, MLP 5632, vocabulary 32,000) and
random BF16 weights in shards of a gigabyte. Each stage runs in a process of its own, whose resident memory is sampled;
its peak is the kernel's own (VmHWM). To hold: peak <= 1.3 x the largest shard + one layer's activations, the hidden
states [sequences, tokens, 2048] of all the text in float32. What Python, torch and transformers take before the first
tensor is read is part of the peak and does not grow with the model, so it is measured and shown by itself.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

SHAPE = {"hidden_size": 2048, "num_hidden_layers": 22, "num_attention_heads": 32, "num_key_value_heads": 4,
         "head_dim": 64, "intermediate_size": 5632, "vocab_size": 32000}  # fmt: skip
SIZES = ["calibrate.num_sequences=4", "calibrate.heldout_sequences=2", "calibrate.sequence_tokens=256",
         "calibrate.batch_size=2", "calibrate.copying.sequences=1", "calibrate.copying.context_tokens=256"]  # fmt: skip
FACTOR = 1.3
MB = 1e6


# --- the checkpoint -------------------------------------------------------------------------------------------------


def write_checkpoint(folder: Path, shard_bytes: int) -> None:
    """Random weights of the shape above, none of them kept, and a tokenizer of bytes."""
    from oneaxis.checkpoint.writer import CheckpointWriter
    from tests.serve.tiny import byte_tokenizer

    source = folder.parent / "source"
    source.mkdir()
    byte_tokenizer(source)
    config = SHAPE | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16",
                      "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "hidden_act": "silu",
                      "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1}  # fmt: skip
    (source / "config.json").write_text(json.dumps(config), encoding="utf-8")
    writer = CheckpointWriter(source, folder, shard_bytes)
    for name, tensor in _tensors():
        writer.add(name, tensor)
    writer.finish(None, {"weights": "random"})


def _tensors() -> Iterator[tuple[str, Any]]:
    import torch

    generator = torch.Generator().manual_seed(0)
    hidden, inner, heads = SHAPE["hidden_size"], SHAPE["intermediate_size"], SHAPE["num_attention_heads"]
    kv = SHAPE["num_key_value_heads"] * SHAPE["head_dim"]

    def normal(*dims: int) -> Any:
        return (torch.randn(dims, generator=generator) * 0.02).to(torch.bfloat16)

    yield "model.embed_tokens.weight", normal(SHAPE["vocab_size"], hidden)
    for layer in range(SHAPE["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}.{norm}.weight", torch.ones(hidden, dtype=torch.bfloat16)
        for part, outputs in (("q", heads * SHAPE["head_dim"]), ("k", kv), ("v", kv)):
            yield f"{prefix}.self_attn.{part}_proj.weight", normal(outputs, hidden)
        yield f"{prefix}.self_attn.o_proj.weight", normal(hidden, hidden)
        yield f"{prefix}.mlp.gate_proj.weight", normal(inner, hidden)
        yield f"{prefix}.mlp.up_proj.weight", normal(inner, hidden)
        yield f"{prefix}.mlp.down_proj.weight", normal(hidden, inner)
    yield "model.norm.weight", torch.ones(hidden, dtype=torch.bfloat16)
    yield "lm_head.weight", normal(SHAPE["vocab_size"], hidden)


# --- the stages, each in a process of its own -----------------------------------------------------------------------


def run_stage(stage: str, work: Path, overrides: list[str]) -> None:
    """What the child process does."""
    from oneaxis.config import compose
    from oneaxis.quantize.apply import quantize
    from oneaxis.quantize.calibrate import calibrate
    from tests.quantize.checkpoints import write_text

    config = compose(ROOT / "conf", overrides)
    out = work / stage
    if stage == "imports":
        return
    out.mkdir()
    if stage == "calibrate":
        texts = write_text(work / "calibration.parquet", 200, 1), write_text(work / "heldout.parquet", 100, 2)
        metrics = calibrate(work / "policy", *texts, config.calibrate, out)
    else:
        metrics, _ = quantize(work / "policy", work / "calibrate", config.quantize, out)
    (work / f"{stage}.json").write_text(json.dumps(metrics), encoding="utf-8")


def measure(stage: str, work: Path, overrides: list[str]) -> dict[str, float]:
    """Run a stage; its peak of resident memory in bytes, what of it was file pages (libraries), and seconds."""
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, __file__, "--work", str(work), "--stage", stage, *overrides],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    peak: dict[str, float] = {"VmHWM": 0, "RssAnon": 0, "RssFile": 0}

    def sample() -> None:
        while process.poll() is None:
            try:
                lines = Path(f"/proc/{process.pid}/status").read_text(encoding="ascii").splitlines()
            except OSError:
                return
            for line in lines:
                name, _, value = line.partition(":")
                if name in peak:
                    peak[name] = max(peak[name], int(value.split()[0]) * 1024)
            time.sleep(0.02)

    sampler = threading.Thread(target=sample)
    sampler.start()
    code = process.wait()
    sampler.join()
    if code:
        raise SystemExit(f"{stage} ended with {code}")
    return peak | {"seconds": time.monotonic() - began}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="also write the table here")
    parser.add_argument("--shard-mb", type=int, default=1000)
    parser.add_argument("--schemes", default="w8a8_int8_static", help="comma-separated values of `quantize`")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--stage", help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", help="further settings, such as calibrate.num_sequences=8")
    arguments = parser.parse_args()
    if arguments.stage:
        run_stage(arguments.stage, arguments.work, arguments.overrides)
        return
    with tempfile.TemporaryDirectory(dir=arguments.work) as folder:
        report = compare(Path(folder), arguments)
    print(report)
    if arguments.out:
        arguments.out.write_text(report + "\n", encoding="utf-8")


def compare(work: Path, arguments: argparse.Namespace) -> str:
    """Make the checkpoint, run the stages, and the table in Markdown."""
    from oneaxis.config import compose

    write_checkpoint(work / "policy", int(arguments.shard_mb * MB))
    shards = [path.stat().st_size for path in sorted((work / "policy").glob("*.safetensors"))]
    overrides = [*SIZES, *arguments.overrides]
    sizes = compose(ROOT / "conf", overrides).calibrate
    activations = sizes.num_sequences * sizes.sequence_tokens * SHAPE["hidden_size"] * 4
    limit = FACTOR * max(shards) + activations
    rows = [("imports", measure("imports", work, overrides))]
    rows.append(("calibrate", measure("calibrate", work, overrides)))
    for scheme in arguments.schemes.split(","):
        rows.append((scheme, measure(scheme, work, [*overrides, f"quantize={scheme}"])))
    fixed = rows[0][1]["VmHWM"]
    lines = [
        f"Checkpoint: {sum(shards) / MB:,.0f} MB in {len(shards)} shards, the largest {max(shards) / MB:,.0f} MB. "
        f"Text: {sizes.num_sequences} x {sizes.sequence_tokens} tokens, hidden states {activations / MB:,.1f} MB.",
        f"Limit: {FACTOR} x {max(shards) / MB:,.0f} + {activations / MB:,.1f} = {limit / MB:,.0f} MB.",
        "",
        "| stage | peak RSS, MB | beyond the imports | its own memory | files (libraries) | share of the limit | s |",
        "|---|---|---|---|---|---|---|",
    ]
    for stage, peak in rows:
        cells = [peak["VmHWM"], peak["VmHWM"] - fixed, peak["RssAnon"], peak["RssFile"]]
        lines.append(f"| {stage} | {' | '.join(f'{cell / MB:,.0f}' for cell in cells)} | {peak['VmHWM'] / limit:.0%} "
                     f"| {peak['seconds']:.0f} |")  # fmt: skip
    worst = max(peak["VmHWM"] for _, peak in rows)
    verdict = "holds" if worst <= limit else "FAILS"
    lines += ["", f"Peak {worst / MB:,.0f} MB of {limit / MB:,.0f} MB allowed: {verdict}."]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
