"""The real engine on INT8 checkpoints: it loads them unchanged and computes what `load_for_measuring` computes."""

from pathlib import Path

import pytest
import torch

from oneaxis.checkpoint.load import load_for_measuring
from oneaxis.quantize.apply import quantize
from oneaxis.serve.engine import running_engine
from tests.quantize.checkpoints import calibrated, int8
from tests.serve.tiny import serve

PROMPTS = 3
TOKENS = 48


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_engine_agrees_with_the_read_back_model(tmp_path: Path, kind: str) -> None:
    """Oracle: vLLM's `prompt_logprobs`, both sides in float32, so that only the order of sums differs.

    Seen: 4e-6 at most. An activation that falls on the other side of a rounding tie would move one INT8 level and a
    log-probability by a few thousandths; a wrong scale, clip or fold moves them by tenths, as quantising itself does.
    """
    policy, out, _ = calibrated(tmp_path)
    quantize(policy, out, int8(kind, alpha=0.6), tmp_path)
    checkpoint = tmp_path / "checkpoint"
    ids = torch.randint(2, 250, (PROMPTS, TOKENS), generator=torch.Generator().manual_seed(7))
    expected, plain = (
        load_for_measuring(folder, torch.float32)[0](ids)
        .logits[:, :-1]
        .log_softmax(-1)
        .gather(2, ids[:, 1:, None])[..., 0]
        for folder in (checkpoint, policy)
    )
    with running_engine(checkpoint, serve(dtype="float32", threads=1), log_path=tmp_path / "engine.log") as engine:
        body = {
            "model": engine.model_name,
            "prompt": ids.tolist(),
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprobs": 0,
        }
        choices = engine.post("/v1/completions", body)["choices"]
        pid = engine.process.pid
    found = torch.tensor([
        [next(iter(entry.values()))["logprob"] for entry in choice["prompt_logprobs"][1:]] for choice in choices
    ])  # fmt: skip
    difference = (found - expected).abs()
    assert difference.mean() < 0.0002
    assert difference.max() < 0.01
    assert (found - plain).abs().mean() > 0.1
    assert not Path(f"/proc/{pid}").exists()
