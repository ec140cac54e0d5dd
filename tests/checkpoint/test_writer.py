"""A checkpoint written tensor by tensor. Oracles: the safetensors library's own bytes, and transformers' loading."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from oneaxis.checkpoint.tensors import DTYPES, find_tensors, read_rows, read_tensor
from oneaxis.checkpoint.writer import CheckpointWriter
from tests.quantize.models import tiny, token_ids

RECIPE = {"kind": "w8a8_int8_dynamic", "ignore": ["lm_head"]}


def every_dtype() -> dict[str, Tensor]:
    """Tensors of every dtype, in an order that is not safetensors', some of odd sizes, empty or without dims."""
    draws = torch.randint(0, 2, (6, 3, 5), generator=torch.Generator().manual_seed(0))
    tensors = {f"{name}.weight": (draws[0] * 3).to(dtype) for name, dtype in DTYPES.items()}
    return tensors | {"b.odd": draws[1, 0, :3].to(torch.int8), "a.odd": draws[2, 0, :1].to(torch.int8),
                      "scalar": torch.tensor(2.5), "empty": torch.zeros(0, 4)}  # fmt: skip


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    """The files beside the weights of the checkpoint that is quantised."""
    folder = tmp_path / "policy"
    tiny("llama").save_pretrained(folder)
    for name in ("tokenizer.json", "chat_template.jinja", "LICENSE", "notes.md", "recipe.json"):
        (folder / name).write_text(f"{name} of the policy", encoding="utf-8")
    return folder


def test_one_shard_is_byte_for_byte_what_safetensors_writes(policy: Path, tmp_path: Path) -> None:
    writer = CheckpointWriter(policy, tmp_path / "out")
    for name, tensor in every_dtype().items():
        writer.add(name, tensor)
    writer.finish(None, RECIPE)
    save_file(every_dtype(), tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    assert (tmp_path / "out/model.safetensors").read_bytes() == (tmp_path / "theirs.safetensors").read_bytes()


def test_what_stands_beside_the_weights(policy: Path, tmp_path: Path) -> None:
    writer = CheckpointWriter(policy, tmp_path / "out")
    writer.add("weight", torch.ones(2))
    writer.finish({"quant_method": "compressed-tensors"}, RECIPE)
    out = tmp_path / "out"
    assert {path.name for path in out.iterdir()} == {"config.json", "generation_config.json", "model.safetensors",
                                                     "tokenizer.json", "chat_template.jinja", "LICENSE",
                                                     "recipe.json"}  # fmt: skip
    assert all(path.stat().st_mode & 0o777 == 0o644 for path in out.iterdir())
    assert (out / "tokenizer.json").read_text(encoding="utf-8") == "tokenizer.json of the policy"
    config = json.loads((policy / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {"quant_method": "compressed-tensors"}
    assert json.loads((out / "config.json").read_text(encoding="utf-8")) == config
    assert json.loads((out / "recipe.json").read_text(encoding="utf-8")) == RECIPE


def test_shards_hold_every_tensor_once_and_load(policy: Path, tmp_path: Path) -> None:
    """A limit of 20,000 bytes, and tensors of up to 12,288 (float32 96 x 32): no shard is larger."""
    model, out = tiny("llama"), tmp_path / "out"
    tied = model.all_tied_weights_keys
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    writer = CheckpointWriter(policy, out, shard_bytes=20_000)
    for name, tensor in tensors.items():
        writer.add(name, tensor)
    writer.finish(None, RECIPE)
    shards = sorted(out.glob("*.safetensors"))
    assert [path.name for path in shards] == [
        f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)
    ]
    sizes = [sum(tensor.nbytes for tensor in load_file(path).values()) for path in shards]
    assert max(sizes) <= 20_000
    total = sum(tensor.nbytes for tensor in tensors.values())
    assert sum(sizes) == total
    index = json.loads((out / "model.safetensors.index.json").read_text(encoding="utf-8"))
    assert index["metadata"] == {"total_size": total}
    assert index["weight_map"] == {name: path.name for path in shards for name in load_file(path)}
    loaded = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert loaded(token_ids(1, 9)).logits.equal(model(token_ids(1, 9)).logits)
    # What is read back piece by piece is what was added.
    places = find_tensors(out)
    assert all(read_tensor(places[name]).equal(tensor) for name, tensor in tensors.items())
    embedding = tensors["model.embed_tokens.weight"]
    for rows in ([], [5], [0, 1, 2, 95], [7, 3, 4, 3]):
        assert read_rows(places["model.embed_tokens.weight"], rows).equal(embedding[rows])


def test_a_tensor_larger_than_a_shard_has_its_own(policy: Path, tmp_path: Path) -> None:
    writer = CheckpointWriter(policy, tmp_path / "out", shard_bytes=10)
    for name in "abc":
        writer.add(name, torch.ones(100 if name == "b" else 1))
    writer.finish(None, RECIPE)
    assert [list(load_file(path)) for path in sorted((tmp_path / "out").glob("*.safetensors"))] == [["a"], ["b"], ["c"]]


def test_views_and_transposes_are_written_as_their_values(policy: Path, tmp_path: Path) -> None:
    whole = torch.arange(12.0).view(3, 4)
    views: dict[str, Any] = {"row": whole[1], "column": whole[:, 2], "transpose": whole.T, "gradient": whole * 1}
    views["gradient"].requires_grad_()
    writer = CheckpointWriter(policy, tmp_path / "out")
    for name, tensor in views.items():
        writer.add(name, tensor)
    writer.finish(None, RECIPE)
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written["row"].tolist() == [4, 5, 6, 7]
    assert written["column"].tolist() == [2, 6, 10]
    assert written["transpose"].equal(whole.T)
    assert written["gradient"].equal(whole)
