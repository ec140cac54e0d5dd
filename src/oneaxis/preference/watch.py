"""What is watched while a policy trains: TRL's means, the escape probe, progress, and a loss that is no number."""

import math
from collections.abc import Callable
from typing import Any

import polars as pl
from tqdm import tqdm
from transformers import TrainerCallback

from oneaxis.errors import RunError
from oneaxis.preference.forward import response_logps
from oneaxis.preference.pairs import Sequence

LOGGED = ("loss", "grad_norm", "learning_rate", "logps/chosen", "logps/rejected", "rewards/chosen", "rewards/rejected",
          "rewards/margins", "rewards/accuracies")  # fmt: skip
PROBE = "probe/escape_logp"
OnLog = Callable[[dict[str, float], int], None]


class SftWatch(TrainerCallback):
    """Of supervised fine-tuning: as `Watch`, without what only pairs have."""

    COLUMNS = ("loss", "grad_norm", "learning_rate", "mean_token_accuracy")

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self.bar = tqdm(disable=True)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.bar = tqdm(total=state.max_steps, initial=state.global_step, desc="SFT", unit="step",
                        disable=not state.is_world_process_zero)  # fmt: skip

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        self.bar.update()
        if state.global_step == state.max_steps:
            control.should_log = True
        return control

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        if "loss" not in logs:
            return
        if not math.isfinite(logs["loss"]):
            raise RunError(f"the SFT loss is {logs['loss']} at step {state.global_step}; "
                           f"try a smaller train.sft.learning_rate (now {args.learning_rate:g})")  # fmt: skip
        self.rows.append({"step": state.global_step, **{name: float(logs[name]) for name in self.COLUMNS}})
        self.bar.set_postfix_str(f"loss {logs['loss']:.3f}")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.bar.close()

    def table(self) -> pl.DataFrame:
        """One row per logging step."""
        return pl.DataFrame(self.rows, schema={"step": pl.Int64, **dict.fromkeys(self.COLUMNS, pl.Float64)})


class Watch(TrainerCallback):
    """Collects TRL's means and the escape probe at each logging step, shows progress, refuses a loss that is no number.

    The last step is always logged.
    """

    def __init__(self, escapes: list[Sequence], on_log: OnLog | None) -> None:
        self.escapes = escapes
        self.on_log_metrics = on_log
        self.rows: list[dict[str, float]] = []
        self.bar = tqdm(disable=True)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.bar = tqdm(total=state.max_steps, initial=state.global_step, desc="DPO", unit="step",
                        disable=not state.is_world_process_zero)  # fmt: skip

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        self.bar.update()
        if state.global_step == state.max_steps:
            control.should_log = True
        return control

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], model: Any, **kwargs: Any) -> None:
        if "loss" not in logs:
            return
        if not math.isfinite(logs["loss"]):
            raise RunError(f"the loss is {logs['loss']} at step {state.global_step}; "
                           f"try a smaller train.learning_rate (now {args.learning_rate:g})")  # fmt: skip
        values = {name: float(logs[name]) for name in LOGGED}
        values[PROBE] = float(response_logps(model, self.escapes).mean())
        # The loss is that of the weights before the step, the probe that of the weights after it.
        if wrong := next((name for name, value in values.items() if not math.isfinite(value)), None):
            raise RunError(f"{wrong} is {values[wrong]} after step {state.global_step}; "
                           f"try a smaller train.learning_rate (now {args.learning_rate:g})")  # fmt: skip
        self.rows.append({"step": state.global_step, **values})
        self.bar.set_postfix_str(f"chosen {values['logps/chosen']:.1f}, rejected {values['logps/rejected']:.1f} nats")
        if self.on_log_metrics:
            self.on_log_metrics(values, state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.bar.close()

    def table(self) -> pl.DataFrame:
        """One row per logging step."""
        return pl.DataFrame(self.rows, schema={"step": pl.Int64, **dict.fromkeys((*LOGGED, PROBE), pl.Float64)})
