"""How `train.*` becomes TRL's configuration, and which pass-through keys are refused."""

from pathlib import Path
from typing import Any

import pytest

from oneaxis.config.schema import TrainDpo
from oneaxis.errors import UserError
from oneaxis.preference.dpo_config import GUARDED, INSTEAD, LOSSES, NO_DIVERGENCE, dpo_config


def train(**changes: Any) -> TrainDpo:
    values: dict[str, Any] = {
        "kind": "dpo", "beta": 0.1, "rpo_alpha": None, "learning_rate": 1e-3, "steps": 4, "batch_size": 2,
        "gradient_accumulation": 1, "warmup_steps": 1, "max_length": 128, "log_every": 1,
        "probes": {"texts": {"refusal": "I will not help with that.", "empty": ""}, "prompts": 3, "watched": 3,
                   "every": 1, "answers": 3, "answer_tokens": 8},
        "displacement": {"slight_nats": 0.5, "steep_nats": 5.0, "refusal_share": 0.05, "stop_nats": None,
                         "confidence": 0.95}, "dpo_args": {},
        "sft": {"epochs": 0.0, "learning_rate": 1e-3}, "lora": {"r": 0, "alpha": 16, "targets": "all-linear"},
        "processes": 1, "checkpoint_s": None, "reference": "start",
    }  # fmt: skip
    return TrainDpo.model_validate(values | changes)


def config(tmp_path: Path, **changes: Any) -> Any:
    return dpo_config(train(**changes), seed=7, output_dir=tmp_path, cpu=True)


@pytest.mark.parametrize("alpha", [None, 0.0])
def test_no_rpo_alpha_is_plain_dpo(tmp_path: Path, alpha: float | None) -> None:
    made = config(tmp_path, rpo_alpha=alpha)
    assert made.loss_type == ["sigmoid"]
    assert made.loss_weights is None


def test_rpo_alpha_is_the_weight_of_the_sft_loss(tmp_path: Path) -> None:
    made = config(tmp_path, rpo_alpha=0.25)
    assert made.loss_type == ["sigmoid", "sft"]
    assert made.loss_weights == [1.0, 0.25]


def test_settings_reach_trl(tmp_path: Path) -> None:
    made = config(tmp_path, beta=0.3, gradient_accumulation=3, warmup_steps=2, log_every=4, max_length=99)
    found = (made.beta, made.gradient_accumulation_steps, made.warmup_steps, made.logging_steps, made.max_length,
             made.max_steps, made.per_device_train_batch_size, made.learning_rate, made.seed)  # fmt: skip
    assert found == (0.3, 3, 2, 4, 99, 4, 2, 1e-3, 7)
    assert made.precompute_ref_log_probs
    assert not made.bf16
    assert made.report_to == []


def test_free_keys_pass_through(tmp_path: Path) -> None:
    made = config(tmp_path, dpo_args={"weight_decay": 0.1, "loss_type": ["hinge"], "gradient_checkpointing": True})
    assert (made.weight_decay, made.loss_type, made.gradient_checkpointing) == (0.1, ["hinge"], True)


@pytest.mark.parametrize("key", [*INSTEAD, *GUARDED])
def test_keys_that_the_section_sets_or_guards_are_refused_by_name(tmp_path: Path, key: str) -> None:
    with pytest.raises(UserError, match=rf"train\.dpo_args\.{key}=1") as caught:
        config(tmp_path, dpo_args={key: 1})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"dpo_args": {"rpo_alpha": 1.0}}, "set train.rpo_alpha"),
        ({"dpo_args": {"bta": 1.0}}, "dpo_args.bta=1.0: trl.DPOConfig has no such key"),
        ({"rpo_alpha": 1.0, "dpo_args": {"loss_type": ["ipo"]}}, "with train.rpo_alpha=null"),
        ({"rpo_alpha": 1.0, "dpo_args": {"use_liger_kernel": True}}, "computes one loss, and the anchor"),
        ({"dpo_args": {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0]}}, "DPOConfig says"),
        ({"dpo_args": {"lr_scheduler_type": "zigzag"}}, "DPOConfig says"),
        ({"dpo_args": {"loss_type": "sigmoyd"}}, "TRL has no loss 'sigmoyd'; allowed: sigmoid, hinge, ipo"),
        ({"dpo_args": {"loss_type": ["exo_pair"]}}, "label_smoothing=0.0: exo_pair"),
        ({"dpo_args": {"loss_type": ["robust"], "label_smoothing": 0.5}}, "label_smoothing=0.5: .* less than 0.5"),
        ({"dpo_args": {"label_smoothing": 7}}, "label_smoothing=7: .* less than 0.5"),
        ({"dpo_args": {"loss_type": ["sft", "aot"], "use_weighting": True}}, "use_weighting=True: .*aot sorts"),
        ({"dpo_args": {"loss_type": ["apo_down"], "f_divergence_type": "forward_kl"}}, "'forward_kl': apo_down"),
    ],
)
def test_wrong_dpo_args_are_one_clear_line(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says) as caught:
        config(tmp_path, **changes)
    assert "\n" not in str(caught.value)


def test_every_refused_key_of_ours_is_a_key_of_trl_or_a_former_one() -> None:
    import dataclasses

    from trl import DPOConfig

    known = {field.name for field in dataclasses.fields(DPOConfig)}
    assert {*INSTEAD, *GUARDED} - known == {"warmup_ratio"}


def test_the_losses_are_those_of_trl() -> None:
    """Oracle: the names that TRL's own code compares with, and those it lets an f-divergence have."""
    import inspect
    import re

    from trl import DPOTrainer

    assert set(re.findall(r'loss_type == "(\w+)"', inspect.getsource(DPOTrainer._compute_loss))) == set(LOSSES)
    extends = re.search(r"f_divergence_loss_types = \{([^}]*)\}", inspect.getsource(DPOTrainer.__init__))
    assert extends
    assert set(re.findall(r'"(\w+)"', extends[1])) == set(LOSSES) - set(NO_DIVERGENCE)
