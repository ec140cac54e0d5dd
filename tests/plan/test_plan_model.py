"""Shapes read from config.json: against models that transformers builds, FLOPs that torch counts, published figures."""

import json

import pytest
import torch
from safetensors.torch import load_file
from torch.utils.flop_counter import FlopCounterMode

from oneaxis.errors import UserError
from oneaxis.plan.memory import fit
from oneaxis.plan.model import FAMILIES, model_of, read_model
from oneaxis.plan.serving import cache_tokens
from oneaxis.quantize.apply import quantize
from tests.quantize.checkpoints import calibrated, scheme
from tests.quantize.models import MODELS, SIZES, tiny

SMOLLM2 = {
    "model_type": "llama", "dtype": "bfloat16", "head_dim": 64, "hidden_size": 576, "intermediate_size": 1536,
    "max_position_embeddings": 8192, "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3,
    "tie_word_embeddings": True, "vocab_size": 49152, "attention_bias": False, "mlp_bias": False,
}  # fmt: skip
LLAMA8B = {
    "model_type": "llama", "torch_dtype": "bfloat16", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 131072, "tie_word_embeddings": False,
}  # fmt: skip
LLAMA70B = LLAMA8B | {
    "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}  # fmt: skip
QWEN8B = {
    "model_type": "qwen3", "torch_dtype": "bfloat16", "hidden_size": 4096, "intermediate_size": 12288,
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 151936, "max_position_embeddings": 40960, "tie_word_embeddings": False,
}  # fmt: skip
QWEN32B = QWEN8B | {
    "hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64}  # fmt: skip
MOE30B = {
    "model_type": "qwen3_moe", "torch_dtype": "bfloat16", "hidden_size": 2048, "intermediate_size": 6144,
    "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
    "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960, "tie_word_embeddings": False,
    "num_experts": 128, "num_experts_per_tok": 8, "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "kib", "billions"),
    [
        (LLAMA8B, 128, 8.030),
        (LLAMA70B, 320, 70.554),
        (QWEN8B, 144, 8.191),
        (QWEN32B, 256, 32.762),
        (MOE30B, 96, 30.532),
    ],
)
def test_published_models(config, kib, billions):
    """KV of the methods' check numbers, and the parameters that the model cards give."""
    model = model_of(config, "config.json")
    assert model.kv_bytes_per_token() == kib * 1024
    assert model.num_parameters / 1e9 == pytest.approx(billions, abs=0.001)


def test_active_parameters_of_a_mixture():
    """The card of Qwen3-30B-A3B: 3.3 billion active. Ours is without the input embedding (0.31): a row is read."""
    model = model_of(MOE30B, "config.json")
    assert (model.num_active() + model.num_embedding) / 1e9 == pytest.approx(3.35, abs=0.01)
    assert model.read_bytes(1) == pytest.approx(2 * model.num_active(), rel=1e-12)
    # A step of many tokens reads all experts, none of the input embedding.
    assert model.read_bytes(10**5) == pytest.approx(model.weight_bytes() - 2 * model.num_embedding, rel=1e-9)


def test_smollm2_as_its_checkpoint_has_it():
    """134,515,008 elements are in the tensors of the checkpoint that `fetch_model` writes."""
    model = model_of(SMOLLM2, "config.json")
    assert model.num_parameters == 134_515_008
    assert model.weight_bytes() == 269_030_016
    # Seen in vLLM 0.32 on a CPU, 1 GiB of cache in blocks of 128: 46,592 tokens, and 93,184 in FP8.
    assert cache_tokens(2**30, model.kv_bytes_per_token(), 128) == 46_592
    assert cache_tokens(2**30, model.kv_bytes_per_token(1), 128) == 93_184


@pytest.mark.parametrize("family", MODELS)
def test_parameters_of_every_family(family, tmp_path):
    """Oracle: the parameters of the model that transformers builds from the same config.json."""
    built = tiny(family)
    built.config.save_pretrained(tmp_path)
    model = read_model(tmp_path)
    assert model.num_parameters == sum(parameter.numel() for parameter in built.parameters())
    assert len(model.layers) == built.config.num_hidden_layers


def test_every_family_that_can_be_quantised_can_be_planned():
    from oneaxis.quantize import families

    assert set(FAMILIES) == set(families.FAMILIES)


@pytest.mark.parametrize("family", ["llama_biases", "qwen3", "phi3"])
def test_flops_of_a_prompt(family, tmp_path):
    """Oracle: torch's count of a forward pass. It counts all n x n pairs of attention; causal are n (n + 1) / 2."""
    built, n = tiny(family, attn_implementation="eager"), 24
    built.config.save_pretrained(tmp_path)
    model = read_model(tmp_path)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        built(torch.randint(1, SIZES["vocab_size"], (1, n)), logits_to_keep=1)
    found = model.prefill(n)
    square = 4 * model.num_heads * model.head_dim * n * n * len(model.layers)
    assert found.linears + found.head == counter.get_total_flops() - square
    assert found.attention / square == pytest.approx((n + 1) / (2 * n))


def test_windows_bound_the_cache_and_the_pairs():
    config = {
        "model_type": "gemma3_text", "dtype": "bfloat16", "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16,
        "vocab_size": 256, "max_position_embeddings": 4096, "sliding_window": 100, "sliding_window_pattern": 6,
    }  # fmt: skip
    model = model_of(config, "config.json")
    assert [layer.window for layer in model.layers] == [100] * 5 + [None]
    # 2 x 1 head x 16 x 2 bytes = 64 bytes a token and layer.
    assert model.kv_bytes(50) == 64 * 6 * 50
    assert model.kv_bytes(1000) == 64 * (5 * 100 + 1000)
    seen = sum(min(place + 1, 100) for place in range(1000)) * 5 + 1000 * 1001 // 2
    assert model.prefill(1000).attention == 4 * 4 * 16 * seen
    assert not model.uniform


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    policy, out, _ = calibrated(tmp_path_factory.mktemp("base"))
    return policy, out


@pytest.mark.parametrize(
    "settings",
    [
        scheme("w8a8_int8_static", ignore=("re:.*layers.0.mlp",)),
        scheme("w4a16", symmetric=False, ignore=("model.layers.1.mlp.down_proj",)),
        scheme("w8a8_fp8"),
    ],
    ids=["int8_static", "w4a16", "fp8"],
)
def test_bytes_of_a_quantised_checkpoint(base, tmp_path, settings):
    """Oracle: the tensors that `oneaxis.quantize` writes."""
    quantize(*base, settings, tmp_path)
    tensors = load_file(tmp_path / "checkpoint" / "model.safetensors")
    model = read_model(tmp_path / "checkpoint")
    assert model.weight_bytes() == sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())
    assert model.storage.kind == settings.kind
    assert model.num_parameters == read_model(base[0]).num_parameters


def test_what_fits_on_a_device():
    model = model_of(LLAMA8B, "config.json")
    room = fit(model, 24e9, 2e9, context=8192, block_tokens=16, kv_dtype_bytes=2)
    # 24 - 2 - 16.06 GB of weights = 5.94 GB; 8,192 tokens of 128 KiB are 1.074 GB.
    assert room.free_bytes == pytest.approx(24e9 - 2e9 - 2 * 8_030_261_248)
    assert room.most_sequences == 5
    assert room.longest_context == 5_939_477_504 // (128 * 1024 * 16) * 16
    assert fit(model, 16e9, 2e9, context=1, block_tokens=16, kv_dtype_bytes=2).most_sequences == 0
    # Never more than the model has positions.
    assert fit(model, 800e9, 0, context=1, block_tokens=16, kv_dtype_bytes=2).longest_context == 131072
    # A sequence of one token takes a block.
    assert fit(model, 24e9, 2e9, context=1, block_tokens=16, kv_dtype_bytes=2).most_sequences == 5_939_477_504 // (
        128 * 1024 * 16
    )


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"model_type": "bamba"}, "model_type='bamba'"),
        ({"model_type": "qwen3_next"}, "model_type='qwen3_next'"),
        ({"model_type": "deepseek_v3"}, "model_type='deepseek_v3'"),
        ({"model_type": None}, "model_type=None"),
        ({"num_local_experts": 8}, "num_local_experts=8"),
        ({"kv_lora_rank": 512}, "kv_lora_rank=512"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"num_hidden_layers": -3}, "num_hidden_layers=-3"),
        ({"num_hidden_layers": "thirty"}, "num_hidden_layers='thirty'"),
        ({"num_key_value_heads": 5}, "num_key_value_heads=5"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings='yes'"),
        ({"dtype": "int4"}, "dtype=int4"),
        ({"model_type": "qwen3", "head_dim": None}, "head_dim is missing"),
        ({"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok=5"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "'gptq'"),
        ({"sliding_window": 64, "layer_types": ["linear_attention"] * 30}, "linear_attention"),
    ],
)
def test_a_config_that_is_not_known_is_refused(change, names, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({key: value for key, value in (SMOLLM2 | change).items() if value is not None}))
    with pytest.raises(UserError) as caught:
        read_model(path)
    message = str(caught.value)
    assert names in message
    assert str(path) in message
    assert "allowed" in message
    assert "\n" not in message


def test_a_config_that_is_not_there_or_broken(tmp_path):
    with pytest.raises(UserError, match="missing; allowed"):
        read_model(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="not JSON"):
        read_model(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(UserError, match="holds list; allowed: a mapping"):
        read_model(tmp_path)
