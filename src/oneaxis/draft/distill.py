"""A draft model: the policy's first layers under its own embedding, norm and head, distilled to guess as it does.

The loss is KL(policy || draft) over every next token of packed prose, with products in BF16 and weights in float32;
only the layers and the final norm are trained, so that embedding and head stay the policy's. Under greedy decoding a
guess stands when both choose the same token, so what counts is the share of positions at which they do: measured on
held-out prose, before and after.

What a step trains on follows from the seed and the step alone, and so does its learning rate. A state (weights and the
optimiser's two means) is kept now and then in a folder that is named by every input: a training that was killed goes on
from it and ends with the same weights.

Files:
    checkpoint/           config.json, model.safetensors (BF16), and the policy's tokenizer
    log.parquet           a row per step: step i64, kl_nats f64 (mean over its tokens), learning_rate f64
    heldout.parquet       a row per predicted token of the held-out text: sequence i64, position i64, policy i64 (its
                          choice), before i64, after i64 (the draft's), kl_before f64, kl_after f64
"""

import hashlib
import json
import math
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import polars as pl
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm

from oneaxis.artifacts import write_json
from oneaxis.checkpoint.load import load_for_measuring, read_config
from oneaxis.config.schema import DraftLayers
from oneaxis.draft.engine import check_num_layers
from oneaxis.errors import RunError
from oneaxis.parts import folder_digest, open_parts
from oneaxis.quantize.families import decoder
from oneaxis.quantize.text import pack

GRAD_NORM = 1.0


def make_draft(
    policy: Path,
    calibration: Path,
    heldout: Path,
    settings: DraftLayers,
    *,
    seed: int,
    out: Path,
    scratch: Path,
    observed: dict[str, Any],
) -> tuple[dict[str, float], dict[str, Any]]:
    """Write the files above to `out`; return metrics and notes.

    Args:
        policy: a plain checkpoint folder. calibration, heldout: parquet with columns source, text.
        scratch: states to go on from lie in a folder below it. observed: gets what was gone on from.

    Raises:
        UserError: the policy has no more layers than are asked for, its family is unknown, or there is too little text.
        RunError: the loss is not finite.
    """
    config = read_config(policy)[0]
    layers = decoder(config).layers_path
    check_num_layers(settings, config.num_hidden_layers)
    teacher, tokenizer = load_for_measuring(policy, torch.float32)
    student = first_layers(policy, settings.num_layers)
    trained = trainable(student, layers)

    unseen_ST = pack(pl.read_parquet(heldout), tokenizer, settings.heldout_sequences, settings.sequence_tokens,
                     origin=f"{heldout}: draft.heldout_sequences").token_ids_ST  # fmt: skip
    before = compare(teacher, student, unseen_ST, settings.batch_size)
    folder = scratch / _identity(policy, calibration, settings, seed)
    open_parts(folder)
    if settings.steps:
        text_ST = pack(pl.read_parquet(calibration), tokenizer, settings.steps * settings.batch_size,
                       settings.sequence_tokens, origin=f"{calibration}: draft.steps * draft.batch_size")  # fmt: skip
        log = distill(teacher, student, trained, text_ST.token_ids_ST, settings, seed=seed, folder=folder,
                      observed=observed)  # fmt: skip
    else:
        log = pl.DataFrame(schema=LOG)
    write_checkpoint(policy, student, settings.num_layers, out / "checkpoint")
    # What is measured is what an engine loads: the written weights, rounded to BF16.
    after = compare(teacher, load_for_measuring(out / "checkpoint", torch.float32)[0], unseen_ST, settings.batch_size)
    log.write_parquet(out / "log.parquet")
    table = before.rename({"draft": "before", "kl": "kl_before"}).with_columns(
        after["draft"].alias("after"), after["kl"].alias("kl_after")
    )
    table.write_parquet(out / "heldout.parquet")
    shutil.rmtree(folder)
    parameters = sum(weights.numel() for weights in student.parameters())
    metrics = {
        "num_parameters": float(parameters),
        "parameter_share": parameters / sum(weights.numel() for weights in teacher.parameters()),
        **{f"kl_{when}": float(table[f"kl_{when}"].mean()) for when in ("before", "after")},  # type: ignore[arg-type]
        **{f"agreement_{when}": float((table[when] == table["policy"]).mean()) for when in ("before", "after")},  # type: ignore[arg-type]
    }
    return metrics, {"layers": settings.num_layers, "of": config.num_hidden_layers, "steps": settings.steps}


def first_layers(policy: Path, num_layers: int) -> Any:
    """The policy with its first layers alone, in float32."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    config = read_config(policy)[0]
    for name, value in shrunk({}, config, num_layers).items():
        setattr(config, name, value)
    return AutoModelForCausalLM.from_pretrained(
        policy, config=config, dtype=torch.float32, local_files_only=True, trust_remote_code=False, use_safetensors=True
    )


def shrunk(document: dict[str, Any], config: Any, num_layers: int) -> dict[str, Any]:
    """The keys of a configuration that say how many layers there are, and of which kind each is."""
    changed = {**document, "num_hidden_layers": num_layers}
    if kinds := getattr(config, "layer_types", None):
        changed["layer_types"] = list(kinds)[:num_layers]
    return changed


def trainable(student: Any, layers_path: str) -> dict[str, Tensor]:
    """The parameters of the layers and of the final norm, by name; all others are frozen."""
    stem = layers_path.rpartition(".")[0]
    frozen = {id(module.weight) for module in (student.get_input_embeddings(), student.get_output_embeddings())}
    chosen = {}
    for name, weights in student.named_parameters():
        weights.requires_grad_(name.startswith(f"{stem}.") and id(weights) not in frozen)
        if weights.requires_grad:
            chosen[name] = weights
    return chosen


LOG = {"step": pl.Int64, "kl_nats": pl.Float64, "learning_rate": pl.Float64}


def learning_rate(step: int, settings: DraftLayers) -> float:
    """Linear warm-up, then half a cosine to a tenth, over steps from 0."""
    if step < settings.warmup_steps:
        return settings.learning_rate * (step + 1) / settings.warmup_steps
    along = (step - settings.warmup_steps) / max(1, settings.steps - settings.warmup_steps)
    return settings.learning_rate * (0.1 + 0.45 * (1 + math.cos(math.pi * along)))


def distill(
    teacher: Any,
    student: Any,
    trained: dict[str, Tensor],
    text_ST: Tensor,
    settings: DraftLayers,
    *,
    seed: int,
    folder: Path,
    observed: dict[str, Any],
) -> pl.DataFrame:
    """Train `trained` in place, going on from the newest state in `folder`; the log, a row per step.

    Raises:
        RunError: the loss is not finite.
    """
    order = torch.randperm(len(text_ST), generator=torch.Generator().manual_seed(seed)).view(settings.steps, -1)
    optimiser = torch.optim.AdamW(trained.values(), lr=settings.learning_rate, weight_decay=0.0)
    rows, first = _go_on(folder, trained, optimiser)
    observed["went_on_from_step"] = first
    saved_at = time.monotonic()
    with tqdm(total=settings.steps, initial=first, desc="distil", unit="step", file=sys.stderr) as bar:
        for step in range(first, settings.steps):
            rate = learning_rate(step, settings)
            for group in optimiser.param_groups:
                group["lr"] = rate
            batch_BT = text_ST[order[step]]
            with torch.autocast("cpu", torch.bfloat16):
                with torch.no_grad():
                    wanted_BTV = teacher(batch_BT).logits
                given_BTV = student(batch_BT).logits
            loss = kl(wanted_BTV.float().log_softmax(-1), given_BTV.float().log_softmax(-1)).mean()
            if not loss.isfinite():
                raise RunError(f"the loss of the draft is {loss.item()} at step {step + 1}; lower draft.learning_rate")
            optimiser.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained.values(), GRAD_NORM)
            optimiser.step()
            rows.append({"step": step + 1, "kl_nats": loss.item(), "learning_rate": rate})
            bar.update()
            bar.set_postfix(kl=f"{loss.item():.3f}")
            due = settings.checkpoint_s is not None and time.monotonic() - saved_at >= settings.checkpoint_s
            if due and step + 1 < settings.steps:
                _save(folder, trained, optimiser, rows)
                saved_at = time.monotonic()
    return pl.DataFrame(rows, schema=LOG)


def kl(wanted_BTV: Tensor, given_BTV: Tensor) -> Tensor:
    """KL(wanted || given) of log-probabilities, in nats, per token [B, T]."""
    return (wanted_BTV.exp() * (wanted_BTV - given_BTV)).sum(-1)


@torch.no_grad()
def compare(teacher: Any, student: Any, text_ST: Tensor, batch_size: int) -> pl.DataFrame:
    """What both choose for every next token: sequence, position (of the token), policy, draft, kl."""
    tables = []
    for start in range(0, len(text_ST), batch_size):
        batch_BT = text_ST[start : start + batch_size]
        logps = [model(batch_BT).logits[:, :-1].log_softmax(-1) for model in (teacher, student)]
        B, T = logps[0].shape[:2]
        tables.append(
            pl.DataFrame(
                {
                    "sequence": torch.arange(start, start + B).repeat_interleave(T).numpy(),
                    "position": torch.arange(1, T + 1).repeat(B).numpy(),
                    "policy": logps[0].argmax(-1).flatten().numpy(),
                    "draft": logps[1].argmax(-1).flatten().numpy(),
                    "kl": kl(*logps).double().flatten().numpy(),
                }
            )
        )
    return pl.concat(tables)


def write_checkpoint(policy: Path, student: Any, num_layers: int, folder: Path) -> None:
    """BF16 safetensors, the policy's config with fewer layers, and its tokenizer."""
    folder.mkdir(parents=True)
    student.to(torch.bfloat16).save_pretrained(folder)
    for path in folder.iterdir():
        if path.suffix != ".safetensors":
            path.unlink()
    document = json.loads((policy / "config.json").read_text(encoding="utf-8"))
    config = read_config(policy)[0]
    changed = shrunk(document, config, num_layers)
    if "layer_types" not in document:
        changed.pop("layer_types", None)
    write_json(folder / "config.json", changed)
    for path in sorted(policy.iterdir()):
        if path.is_file() and path.name != "config.json" and ".safetensors" not in path.name:
            shutil.copyfile(path, folder / path.name)


# --- states ----------------------------------------------------------------------------------------------------------


def _identity(policy: Path, calibration: Path, settings: DraftLayers, seed: int) -> str:
    """A name for everything that decides the weights; how often a state is kept does not."""
    # Guesses per step and what is held out are read after, or beside, the training.
    decides = settings.model_dump(exclude={"checkpoint_s", "num_tokens", "heldout_sequences"})
    digest = hashlib.sha256(json.dumps([decides, seed, torch.get_num_threads()], sort_keys=True).encode())
    digest.update(folder_digest(policy).encode())
    digest.update(calibration.read_bytes())
    return digest.hexdigest()[:16]


def _save(folder: Path, trained: dict[str, Tensor], optimiser: Any, rows: list[dict[str, Any]]) -> None:
    """A whole state or none: the file is renamed when it is complete, and holds its own log."""
    tensors = {f"weight/{name}": weights.detach() for name, weights in trained.items()}
    for name, weights in trained.items():
        for key in ("exp_avg", "exp_avg_sq", "step"):
            tensors[f"{key}/{name}"] = optimiser.state[weights][key]
    half = folder / "state.half"
    save_file(tensors, half, metadata={"log": json.dumps(rows)})
    os.replace(half, folder / "state.safetensors")


def _go_on(folder: Path, trained: dict[str, Tensor], optimiser: Any) -> tuple[list[dict[str, Any]], int]:
    """Put the newest state into the weights and the optimiser; its log, and the step to go on with."""
    path = folder / "state.safetensors"
    if not path.is_file():
        return [], 0
    with safe_open(path, framework="pt") as file:
        rows = json.loads(file.metadata()["log"])
    tensors = load_file(path)
    with torch.no_grad():
        for name, weights in trained.items():
            weights.copy_(tensors[f"weight/{name}"])
            optimiser.state[weights] = {key: tensors[f"{key}/{name}"] for key in ("step", "exp_avg", "exp_avg_sq")}
    return rows, len(rows)
