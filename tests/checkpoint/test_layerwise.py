"""A checkpoint run layer by layer is the whole model. Oracle: transformers' own forward in float32."""

import copy
import gc
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from pydantic import TypeAdapter
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from oneaxis.checkpoint.layerwise import Layerwise
from oneaxis.checkpoint.load import load_for_measuring
from oneaxis.config.schema import Quantize
from oneaxis.errors import UserError
from tests.checkpoint.quantised import write_quantised
from tests.quantize.checkpoints import scheme
from tests.quantize.models import MODELS, site_inputs, split, tiny, token_ids
from tests.serve.tiny import random_llama

NUM_TOKENS = 24
FLOAT32 = 1e-4
"""Two right orders of float32 sums differ by up to 5e-5 in these models, whose large weights amplify it (from float64:
2.7e-5 with torch's attention, 4.5e-5 with ours). A wrong mask, head or order changes them by a tenth."""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, PreTrainedModel]]:
    """A tiny model of a family, in a folder of several shards."""
    made: dict[str, tuple[Path, PreTrainedModel]] = {}

    def write(family: str) -> tuple[Path, PreTrainedModel]:
        if family not in made:
            # OPT and GPT-2 know no grouped queries.
            more = {"num_key_value_heads": 4} if family in ("opt", "gpt2") else {}
            model, folder = tiny(family, **more), tmp_path_factory.mktemp(family)
            model.save_pretrained(folder, max_shard_size="60KB")
            made[family] = folder, model
        return made[family]

    return write


def relative(changed: Tensor, exact: Tensor) -> float:
    return float((changed - exact).abs().max() / exact.abs().max())


@pytest.mark.parametrize("family", MODELS)
def test_logits_are_those_of_the_whole_model(
    written: Callable[[str], tuple[Path, PreTrainedModel]], family: str
) -> None:
    folder, model = written(family)
    assert len(list(folder.glob("*.safetensors"))) > 1
    ids_ST = token_ids(5, NUM_TOKENS)
    layerwise = Layerwise.open(folder)
    hidden_STD = layerwise.run(ids_ST, batch_size=2)
    exact_STV = model(ids_ST).logits
    logits_STV = layerwise.logits(hidden_STD.flatten(0, 1)).view_as(exact_STV)
    assert relative(logits_STV, exact_STV) < FLOAT32
    # The same again, and no batch's mask is another's.
    assert layerwise.run(ids_ST, batch_size=5).allclose(hidden_STD, rtol=1e-4, atol=1e-4)


def test_a_backbone_saved_alone_is_its_model(tmp_path: Path) -> None:
    """GPT-2's own checkpoint is one: its names lack `transformer.`, and its old masks are read by nobody."""
    model = tiny("gpt2", num_key_value_heads=4)
    model.transformer.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    assert "h.0.attn.c_attn.weight" in tensors
    save_file(tensors | {"h.0.attn.bias": torch.ones(1, 1, 4, 4)}, path, metadata={"format": "pt"})
    layerwise = Layerwise.open(tmp_path)
    logits_TV = layerwise.logits(layerwise.run(token_ids(1, 8), batch_size=1)[0])
    assert relative(logits_TV, model(token_ids(1, 8)).logits[0]) < FLOAT32


@pytest.mark.parametrize("family", MODELS)
def test_sites_are_what_the_linears_read(written: Callable[[str], tuple[Path, PreTrainedModel]], family: str) -> None:
    """Oracle: hooks on the whole model with its experts split. Of an expert that no token reached nothing is seen."""
    folder, model = written(family)
    ids_ST = token_ids(3, NUM_TOKENS)
    layerwise = Layerwise.open(folder)
    seen: dict[str, list[Tensor]] = {}
    layerwise.run(ids_ST, batch_size=2, see=lambda name, x_BTC: seen.setdefault(name, []).append(x_BTC.clone()))
    whole = copy.deepcopy(model)
    read = site_inputs(whole, split(whole), ids_ST)
    assert seen.keys() == {name for name, x_NC in read.items() if len(x_NC)}
    for name, batches in seen.items():
        if ".experts." in name:
            assert all(x_BTC.shape[0] == 1 for x_BTC in batches)
        else:
            assert [x_BTC.shape[:2] for x_BTC in batches] == [(2, NUM_TOKENS), (1, NUM_TOKENS)]
        x_NC = torch.cat([x_BTC.flatten(0, 1) for x_BTC in batches])
        assert relative(x_NC, read[name]) < FLOAT32


@pytest.mark.parametrize("family", MODELS)
def test_keys_and_values_are_those_of_the_cache(
    written: Callable[[str], tuple[Path, PreTrainedModel]], family: str
) -> None:
    """Oracle: what transformers keeps in its cache, which is after rotary."""
    folder, model = written(family)
    ids_ST = token_ids(3, NUM_TOKENS)
    layerwise = Layerwise.open(folder)
    seen: dict[str, list[Tensor]] = {}

    def see(name: str, x_BTC: Tensor) -> None:
        seen.setdefault(name, []).append(x_BTC.clone())

    layerwise.run(ids_ST, batch_size=2, see=see, watch_kv=True)
    cache = model(ids_ST, use_cache=True).past_key_values
    heads = layerwise.decoder.heads
    for index in range(layerwise.num_layers):
        for name, exact_SKTH in (("k", cache.layers[index].keys), ("v", cache.layers[index].values)):
            x_STC = torch.cat(seen[f"layers.{index}.{name}"])
            assert x_STC.shape == (3, NUM_TOKENS, heads.num_kv_heads * heads.head_dim)
            # A sliding layer's cache keeps its window only.
            exact_STC = exact_SKTH.transpose(1, 2).flatten(2)
            assert relative(x_STC[:, -exact_STC.shape[1] :], exact_STC) < FLOAT32


def test_rounded_values_change_what_follows(written: Callable[[str], tuple[Path, PreTrainedModel]]) -> None:
    """Values of zero leave only the residual stream of the attention; keys of zero, the mean of all values so far."""
    folder, model = written("llama")
    layerwise = Layerwise.open(folder)
    hidden, layer = layerwise.start(token_ids(1, 6), batch_size=1), layerwise.layer(0)
    read: dict[str, Tensor] = {}
    values: dict[str, Tensor] = {}

    def see(name: str, x_BTC: Tensor) -> None:
        (values if name in "kv" else read)[name] = x_BTC.clone()

    layerwise.advance(hidden.clone(), 0, layer, see, round_kv=lambda name, x: x if name == "k" else torch.zeros_like(x))
    assert read["o"].abs().max() == 0
    layerwise.advance(hidden.clone(), 0, layer, see, watch_kv=True,
                      round_kv=lambda name, x: x if name == "v" else torch.zeros_like(x))  # fmt: skip
    assert values["k"].abs().max() > 0  # seen before they are rounded
    v_TKH = values["v"].view(6, 2, 8)
    mean_TKH = v_TKH.cumsum(0) / torch.arange(1, 7)[:, None, None]
    torch.testing.assert_close(read["o"][0], mean_TKH.repeat_interleave(2, dim=1).flatten(1))
    # Nothing stays behind.
    layerwise.advance(hidden, 0, layer)
    assert (
        relative(hidden.states_STD, model.model(token_ids(1, 6), output_hidden_states=True).hidden_states[1]) < FLOAT32
    )


def test_names_and_dtypes_are_those_of_the_files(written: Callable[[str], tuple[Path, PreTrainedModel]]) -> None:
    folder, _ = written("qwen2")
    layerwise = Layerwise.open(folder, plain=True)
    stored = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}
    assert layerwise.names == sorted(stored)
    assert all(layerwise.tensor(name).equal(tensor) for name, tensor in stored.items())
    assert layerwise.stored_dtype == torch.float32


def test_one_layer_is_in_memory_and_no_file_is_mapped(tmp_path: Path) -> None:
    """Oracle: every parameter alive while layer 3 of 6 runs, with no garbage collection, and the process's mappings."""
    tiny("llama", num_hidden_layers=6, vocab_size=2000).save_pretrained(tmp_path, max_shard_size="60KB")
    kept = parameters_alive()  # of other tests; held, so that none of their ids is given anew
    before = {id(tensor) for tensor in kept}
    alive: list[int] = []
    mapped: list[set[str]] = []

    def see(name: str, _: Tensor) -> None:
        if name == "layers.3.down":
            alive.extend(tensor.numel() for tensor in parameters_alive() if id(tensor) not in before)
            mapped.append({mapping.path for mapping in psutil.Process().memory_maps()})

    Layerwise.open(tmp_path).run(token_ids(1, 8), batch_size=1, see=see)
    # q and o 32 x 32, k and v 16 x 32, three of the MLP 48 x 32, two norms; and the final norm.
    assert sum(alive) == 2 * 32 * 32 + 2 * 16 * 32 + 3 * 48 * 32 + 2 * 32 + 32
    assert mapped[0]
    assert not any(path.startswith(str(tmp_path)) for path in mapped[0])


def parameters_alive() -> list[nn.Parameter]:
    return [thing for thing in gc.get_objects() if type(thing) is nn.Parameter and not thing.is_meta]


# --- quantised ------------------------------------------------------------------------------------------------------

SCHEMES = {
    "dynamic": scheme("w8a8_int8_dynamic"),
    "static": scheme("w8a8_int8_static", ignore=("re:.*layers.0.mlp",)),
    "int4": scheme("w4a16", kv="fp8"),
    "int4_asymmetric": scheme("w4a16", symmetric=False),
    "fp8": scheme("w8a8_fp8"),
    "only_kv": TypeAdapter(Quantize).validate_python({"kind": "none", "kv": "fp8"}),
}


@pytest.mark.parametrize("kind", SCHEMES)
def test_a_quantised_checkpoint_is_computed_as_it_is_measured(tmp_path: Path, kind: str) -> None:
    """Oracle: `load_for_measuring`, which loads the whole model."""
    policy = random_llama(tmp_path / "policy")
    folder = write_quantised(policy, tmp_path / "out", SCHEMES[kind])
    model, _ = load_for_measuring(folder, torch.float32)
    ids_ST = torch.randint(0, 320, (3, 16), generator=torch.Generator().manual_seed(3))
    layerwise = Layerwise.open(folder)
    logits_NV = layerwise.logits(layerwise.run(ids_ST, batch_size=2).flatten(0, 1))
    exact_STV = model(ids_ST).logits
    plain_STV = load_for_measuring(policy, torch.float32)[0](ids_ST).logits
    # A level may round the other way where two ways to sum differ in the last bit; the scheme itself changes far more.
    change = float((logits_NV.view_as(exact_STV) - exact_STV).norm() / exact_STV.norm())
    assert change < 1e-3
    assert float((plain_STV - exact_STV).norm() / exact_STV.norm()) > 10 * change


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "phi3", "gemma3", "opt"])
def test_quantised_linears_of_other_families(
    written: Callable[[str], tuple[Path, PreTrainedModel]], tmp_path: Path, family: str
) -> None:
    """Oracle: the unquantised layer with the rounded weights put in its place, where activations are not rounded."""
    policy, _ = written(family)
    layerwise = Layerwise.open(write_quantised(policy, tmp_path / "out", scheme("w8a8_int8_dynamic")))
    plain = Layerwise.open(policy)
    for index in range(plain.num_layers):
        rounded, exact = layerwise.layer(index), plain.layer(index)
        for name in plain.decoder.linears(index):
            linear, weight_OI = rounded.get_submodule(name), exact.get_submodule(name).weight
            error_OI = (linear.weight_values() - weight_OI).abs()
            assert (error_OI <= weight_OI.abs().amax(dim=1, keepdim=True) / 127 * 0.501).all()
            bias = exact.get_submodule(name).bias
            assert (linear.bias is None) == (bias is None)
            assert bias is None or linear.bias.equal(bias)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("model.layers.1.mlp.up_proj.weight_scale", "up_proj.weight_scale is missing"),
        ("model.layers.1.mlp.up_proj.input_scale", "up_proj.input_scale is missing"),
        ("model.layers.1.mlp.up_proj.weight", "up_proj.weight is missing"),
        ("model.layers.1.self_attn.k_scale", "self_attn.k_scale is missing"),
    ],
)
def test_what_a_scheme_needs_is_named(tmp_path: Path, name: str, text: str) -> None:
    folder = write_quantised(random_llama(tmp_path / "policy"), tmp_path / "out", scheme("w8a8_int8_static", kv="fp8"))
    change(folder, name, lambda _: None)
    assert text in said(folder)


# --- bad input ------------------------------------------------------------------------------------------------------


@pytest.fixture
def sharded(written: Callable[[str], tuple[Path, PreTrainedModel]], tmp_path: Path) -> Path:
    """A copy of a tiny Llama in shards, to break."""
    return Path(shutil.copytree(written("llama_mha")[0], tmp_path / "mine"))


def change(folder: Path, name: str, function: Callable[[Tensor], Tensor | None]) -> None:
    """Change a tensor of the folder, or drop it (None)."""
    path = next(path for path in sorted(folder.glob("*.safetensors")) if name in load_file(path))
    tensors = load_file(path)
    changed = function(tensors.pop(name))
    save_file(tensors if changed is None else tensors | {name: changed}, path, metadata={"format": "pt"})


def said(folder: Path, *, plain: bool = False) -> str:
    with pytest.raises(UserError) as error:
        Layerwise.open(folder, plain=plain)
    text = str(error.value)
    assert "\n" not in text
    assert "allowed:" in text
    return text


def test_a_missing_shard_is_named(sharded: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    text = said(sharded)
    assert text.startswith(f"{shard}: missing, though model.safetensors.index.json says that")
    # Without an index too, where the names of the others tell.
    (sharded / "model.safetensors.index.json").unlink()
    assert said(sharded).startswith(f"{shard}: missing, though ")


def test_an_index_that_names_absent_tensors_is_refused(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    content = json.loads(index.read_text(encoding="utf-8"))
    content["weight_map"]["model.layers.9.mlp.up_proj.weight"] = content["weight_map"]["model.norm.weight"]
    index.write_text(json.dumps(content), encoding="utf-8")
    assert f"{index}: weight_map: model.layers.9.mlp.up_proj.weight is not in model-0" in said(sharded)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": "../b"}}'])
def test_a_broken_index_is_refused(sharded: Path, content: str) -> None:
    (sharded / "model.safetensors.index.json").write_text(content, encoding="utf-8")
    assert "model.safetensors.index.json: " in said(sharded)


@pytest.mark.parametrize("left", [0, 5, 40, -1])
def test_a_cut_file_is_refused(sharded: Path, left: int) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:left])
    assert said(sharded).startswith(f"{shard}: ")


def test_another_files_bytes_are_refused(sharded: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[0]
    shard.write_bytes(b"GGUF" * 1000)
    assert said(sharded).startswith(f"{shard}: cut or no safetensors file")


@pytest.mark.parametrize(
    ("name", "function", "text"),
    [
        ("model.norm.weight", lambda _: None, r"model.norm.weight is not in"),
        (
            "model.layers.1.mlp.up_proj.weight",
            lambda tensor: tensor[:, :-1].clone(),
            "has shape [48, 31], not [48, 32]",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    sharded: Path, name: str, function: Callable[[Tensor], Tensor], text: str
) -> None:
    change(sharded, name, function)
    assert text in said(sharded)


def test_tensors_that_are_missing_or_unknown_are_named(tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path)
    change(tmp_path, "model.norm.weight", lambda _: None)
    assert said(tmp_path).startswith(f"{tmp_path}: model.norm.weight is missing; allowed:")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors |= {"model.norm.weight": torch.ones(32), "model.vision.weight": torch.ones(3),
                "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}  # fmt: skip
    save_file(tensors, tmp_path / "model.safetensors")
    # What old checkpoints hold and nobody reads is no fault.
    assert said(tmp_path).startswith(f"{tmp_path}: model.vision.weight is unknown to this model; allowed:")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight",
                                  "lm_head.weight", "model.norm.weight"])  # fmt: skip
def test_a_value_that_is_no_number_names_its_tensor(sharded: Path, name: str, value: float) -> None:
    def spoil(tensor: Tensor) -> Tensor:
        tensor.view(-1)[7] = value
        return tensor

    change(sharded, name, spoil)
    with pytest.raises(UserError, match=f"{name} holds NaN or infinity in 1 of .*; allowed: a checkpoint of finite"):
        read_all(sharded)


def read_all(folder: Path) -> Tensor:
    layerwise = Layerwise.open(folder)
    return layerwise.logits(layerwise.run(torch.arange(8)[None], batch_size=1)[0])


def test_a_level_of_fp8_that_is_no_number_names_its_tensor(tmp_path: Path) -> None:
    def spoil(tensor: Tensor) -> Tensor:
        tensor.view(torch.uint8).view(-1)[3] = 0x7F
        return tensor

    folder = write_quantised(random_llama(tmp_path / "policy"), tmp_path / "out", scheme("w8a8_fp8"))
    change(folder, "model.layers.1.mlp.up_proj.weight", spoil)
    with pytest.raises(UserError, match=r"layers\.1\.mlp\.up_proj\.weight holds NaN or infinity in 1 of"):
        read_all(folder)


def test_a_quantised_checkpoint_is_refused_where_a_plain_one_is_needed(sharded: Path) -> None:
    config = json.loads((sharded / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (sharded / "config.json").write_text(json.dumps(config), encoding="utf-8")
    text = said(sharded, plain=True)
    assert "quantization_config is 'gptq'" in said(sharded)
    assert text.startswith(f"{sharded}: is quantised already (gptq); allowed: an unquant")


def test_an_unknown_family_is_refused(sharded: Path) -> None:
    config = json.loads((sharded / "config.json").read_text(encoding="utf-8"))
    (sharded / "config.json").write_text(json.dumps(config | {"model_type": "bloom"}), encoding="utf-8")
    assert "bloom" in said(sharded)
