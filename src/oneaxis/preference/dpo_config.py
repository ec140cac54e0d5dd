"""From `train.*` to TRL's `DPOConfig`, and which of its keys a user may set through `train.dpo_args`.

TRL has no `rpo_alpha` any more. It is `loss_type=["sigmoid", "sft"]` with `loss_weights=[1.0, rpo_alpha]`, where "sft"
is the NLL averaged over all chosen tokens of the micro-batch (token mean). Two other normalisations share the name:
the sum over the sequence (Razin et al., 2024) and the mean per sequence (LLaMA-Factory's pref_ftx); the same alpha then
weighs differently by about the length of a response. null or 0 is plain DPO.
"""

import dataclasses
from pathlib import Path
from typing import Any

from trl import DPOConfig, SFTConfig

from oneaxis.config.schema import TrainDpo
from oneaxis.errors import UserError

NORMALISATION = "token mean over the chosen tokens of a micro-batch (TRL's sft loss)"

LOSSES = ("sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard", "aot", "aot_unpaired",
          "apo_zero", "apo_down", "discopop", "sft", "sigmoid_norm")  # fmt: skip
"""What `train.dpo_args.loss_type` may hold: one name or a list, which `loss_weights` then weighs."""

NO_DIVERGENCE = ("nca_pair", "bco_pair", "sppo_hard", "aot", "aot_unpaired", "apo_zero", "apo_down")
"""Losses to which f-divergences do not extend."""

INSTEAD = {
    "beta": "train.beta",
    "learning_rate": "train.learning_rate",
    "max_steps": "train.steps",
    "num_train_epochs": "train.steps",
    "per_device_train_batch_size": "train.batch_size",
    "auto_find_batch_size": "train.batch_size",
    "gradient_accumulation_steps": "train.gradient_accumulation",
    "warmup_steps": "train.warmup_steps",
    "warmup_ratio": "train.warmup_steps",
    "max_length": "train.max_length",
    "logging_steps": "train.log_every",
    "logging_strategy": "train.log_every",
    "logging_first_step": "train.log_every",
    "seed": "seed",
    "data_seed": "seed",
}
"""Keys of DPOConfig that have a setting of their own."""

GUARDED = {
    "report_to": "the curves go to train_log.parquet and MLflow",
    "run_name": "the curves go to train_log.parquet and MLflow",
    "trackio_space_id": "the curves go to train_log.parquet and MLflow",
    "project": "the curves go to train_log.parquet and MLflow",
    "logging_nan_inf_filter": "a loss that is not finite must fail the stage",
    "output_dir": "the stage writes one atomic folder",
    "save_strategy": "train.checkpoint_s says when a state is saved",
    "save_steps": "train.checkpoint_s says when a state is saved",
    "resume_from_checkpoint": "train.checkpoint_s says when a state is saved",
    "load_best_model_at_end": "the policy is that of the last step",
    "push_to_hub": "nothing leaves this machine",
    "hub_model_id": "nothing leaves this machine",
    "hub_token": "nothing leaves this machine",
    "hub_strategy": "nothing leaves this machine",
    "do_eval": "held-out pairs are measured before and after training",
    "eval_strategy": "held-out pairs are measured before and after training",
    "eval_steps": "held-out pairs are measured before and after training",
    "eval_on_start": "held-out pairs are measured before and after training",
    "use_cpu": "CUDA is used where there is one",
    "bf16": "weights are trained in float32: small updates vanish in bfloat16",
    "fp16": "weights are trained in float32: small updates vanish in bfloat16",
    "bf16_full_eval": "log-probabilities are float32",
    "fp16_full_eval": "log-probabilities are float32",
    "precompute_ref_log_probs": "the reference is the fetched model, scored once",
    "sync_ref_model": "the reference is the fetched model, scored once",
    "ref_model_mixup_alpha": "the reference is the fetched model, scored once",
    "ref_model_sync_steps": "the reference is the fetched model, scored once",
    "model_init_kwargs": "the model is artifacts/fetch_model/checkpoint, in float32",
    "trust_remote_code": "the model is artifacts/fetch_model/checkpoint",
    "truncation_mode": "longer pairs are left out and counted, never cut",
    "ld_alpha": "logged log-probabilities are sums over the whole response",
    "dataset_num_proc": "a stage leaves no processes behind",
    "dataloader_num_workers": "a stage leaves no processes behind",
    "disable_tqdm": "the stage shows its own progress",
    "remove_unused_columns": "the data set has TRL's columns only",
    "pad_token": "TRL has deprecated it; the tokenizer of the model says",
}
"""Keys of DPOConfig that would break a guarantee of the stage, and the guarantee."""


def dpo_config(config: TrainDpo, *, seed: int, output_dir: Path, cpu: bool) -> DPOConfig:
    """TRL's configuration of a run.

    Raises:
        UserError: a key of `train.dpo_args` that DPOConfig does not have, that has a setting of its own, or that would
            break a guarantee; or a value that DPOConfig refuses.
    """
    anchored = bool(config.rpo_alpha)
    check_dpo_args(config.dpo_args, anchored=anchored)
    values = _shared(config, seed=seed, output_dir=output_dir, cpu=cpu) | {
        "beta": config.beta,
        "learning_rate": config.learning_rate,
        "max_steps": config.steps,
        "warmup_steps": config.warmup_steps,
        "precompute_ref_log_probs": True,
    }
    if anchored:
        values |= {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, config.rpo_alpha]}
    try:
        return DPOConfig(**(values | config.dpo_args))
    except (TypeError, ValueError) as error:
        if not config.dpo_args:
            raise
        raise UserError(f"params.yaml: train.dpo_args={config.dpo_args}: DPOConfig says: {one_line(error)}") from error


def sft_config(config: TrainDpo, *, seed: int, output_dir: Path, cpu: bool) -> SFTConfig:
    """TRL's configuration of the supervised epochs: the loss is the mean NLL over the tokens of the responses alone."""
    return SFTConfig(
        **_shared(config, seed=seed, output_dir=output_dir, cpu=cpu),
        learning_rate=config.sft.learning_rate,
        num_train_epochs=config.sft.epochs,
        completion_only_loss=True,
    )


def _shared(config: TrainDpo, *, seed: int, output_dir: Path, cpu: bool) -> dict[str, Any]:
    """What both of TRL's trainers are told."""
    return {
        "output_dir": str(output_dir),
        "seed": seed,
        "per_device_train_batch_size": config.batch_size // config.processes,
        "gradient_accumulation_steps": config.gradient_accumulation,
        "max_length": config.max_length,
        "logging_steps": config.log_every,
        "logging_nan_inf_filter": False,
        "report_to": "none",
        "save_strategy": "no",
        "eval_strategy": "no",
        "use_cpu": cpu,
        "bf16": False,
        "gradient_checkpointing": False,
        "dataloader_pin_memory": not cpu,
        "disable_tqdm": True,
    }


def check_dpo_args(dpo_args: dict[str, Any], *, anchored: bool) -> None:
    """Refuse keys that DPOConfig does not have, that have a setting of their own, or that break a guarantee.

    Raises:
        UserError: naming the first such key.
    """
    known = {field.name for field in dataclasses.fields(DPOConfig) if field.init}
    for key, value in dpo_args.items():
        where = f"params.yaml: train.dpo_args.{key}={value!r}"
        if key == "rpo_alpha":
            raise UserError(f"{where}: TRL has no such key any more; set train.rpo_alpha")
        if key in INSTEAD:
            raise UserError(f"{where}: has a setting of its own; set {INSTEAD[key]}")
        if key in GUARDED:
            raise UserError(f"{where}: may not be set: {GUARDED[key]}; allowed: other keys of trl.DPOConfig")
        if key not in known:
            raise UserError(f"{where}: trl.DPOConfig has no such key; allowed: its keys, for example label_smoothing, "
                            "lr_scheduler_type, weight_decay, max_grad_norm, optim")  # fmt: skip
        if anchored and key in ("loss_type", "loss_weights"):
            raise UserError(f"{where}: train.rpo_alpha sets the losses; allowed: with train.rpo_alpha=null")
        if anchored and key in ("use_liger_kernel", "liger_kernel_config") and value:
            raise UserError(f"{where}: Liger's fused kernel computes one loss, and the anchor is a second; "
                            "allowed: with train.rpo_alpha=null")  # fmt: skip
    check_losses(dpo_args)


def check_losses(dpo_args: dict[str, Any]) -> None:
    """Refuse a loss that TRL does not have, and what does not go with it: TRL says so after the model has been loaded.

    Raises:
        UserError: naming the key that is to be changed.
    """
    where = "params.yaml: train.dpo_args"
    given = dpo_args.get("loss_type", "sigmoid")
    losses = [given] if isinstance(given, str) else given
    smoothing = dpo_args.get("label_smoothing", 0.0)
    divergence = dpo_args.get("f_divergence_type", "reverse_kl")
    for loss in losses:
        if loss not in LOSSES:
            raise UserError(f"{where}.loss_type={given!r}: TRL has no loss {loss!r}; allowed: {', '.join(LOSSES)}")
    if not isinstance(smoothing, int | float):
        raise UserError(f"{where}.label_smoothing={smoothing!r}: allowed: a number")
    if "exo_pair" in losses and not 0 < smoothing < 1:
        raise UserError(f"{where}.label_smoothing={smoothing}: exo_pair takes its logarithm; allowed: more than 0 (its "
                        "paper: 0.001) and less than 1")  # fmt: skip
    if "exo_pair" not in losses and not 0 <= smoothing < 0.5:
        raise UserError(f"{where}.label_smoothing={smoothing}: the share of wrong labels; allowed: from 0 to less than "
                        "0.5")  # fmt: skip
    if dpo_args.get("use_weighting") and (sorting := [loss for loss in losses if loss in ("aot", "aot_unpaired")]):
        raise UserError(f"{where}.use_weighting=True: weights are per pair, and {sorting[0]} sorts the pairs apart; "
                        "allowed: false, or another loss_type")  # fmt: skip
    if divergence != "reverse_kl" and (other := [loss for loss in losses if loss in NO_DIVERGENCE]):
        raise UserError(f"{where}.f_divergence_type={divergence!r}: {other[0]} is no function of the difference of two "
                        "rewards; allowed: reverse_kl, or another loss_type")  # fmt: skip


def one_line(error: Exception) -> str:
    """The message of an exception of a library, on one line."""
    return " ".join(str(error).split())
