"""What is watched while a policy trains: TRL's means, escape texts, progress, and two reasons to end it.

A loss that is no number fails the run. On request (`train.displacement.stop_nats`) a fall of the held-out chosen
responses ends the training: its policy is written and measured like any other, and says where it stopped.
"""

import math
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
from tqdm import tqdm
from transformers import TrainerCallback

from oneaxis.artifacts import read_json, write_json
from oneaxis.config.schema import TrainDpo
from oneaxis.errors import RunError
from oneaxis.preference.forward import response_logps
from oneaxis.preference.pairs import Sequence
from oneaxis.preference.probes import Escapes

LOGGED = ("loss", "grad_norm", "learning_rate", "logps/chosen", "logps/rejected", "rewards/chosen", "rewards/rejected",
          "rewards/margins", "rewards/accuracies")  # fmt: skip
PROBE = "probe/"
"""Before the names of escape texts in the log."""
HELDOUT = "heldout/chosen_logp"
ESCAPES = "escapes"
"""In a row of the log: per watched prompt the log-probability of each escape text."""
OnLog = Callable[[dict[str, float], int], None]


@dataclass(frozen=True)
class Watched:
    """What is asked of the weights while they are trained."""

    escapes: Escapes
    """On a few of the benign prompts."""
    heldout: Many[Sequence]
    """The held-out chosen responses, for `train.displacement.stop_nats`."""
    heldout_before: float
    """Their mean log-probability before training, nats."""

    def write(self, path: Path) -> None:
        """As JSON, for the processes of a launch."""
        write_json(path, {"escapes": self.escapes.as_json(), "heldout_before": self.heldout_before,
                          "heldout": [[sequence.ids, sequence.start] for sequence in self.heldout]})  # fmt: skip

    @classmethod
    def read(cls, path: Path) -> "Watched":
        """What `write` wrote."""
        found = read_json(path)
        heldout = [Sequence(ids, start) for ids, start in found["heldout"]]
        return cls(Escapes.of_json(found["escapes"]), heldout, found["heldout_before"])


class _Progress(TrainerCallback):
    """A bar over the steps, and a last step that is always logged."""

    METHOD: str

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        """One a logging step, of plain values."""
        self.bar = tqdm(disable=True)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.bar = tqdm(total=state.max_steps, initial=state.global_step, desc=self.METHOD, unit="step",
                        disable=not state.is_world_process_zero)  # fmt: skip

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        self.bar.update()
        if state.global_step == state.max_steps:
            control.should_log = True
        return control

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.bar.close()


class SftWatch(_Progress):
    """Of supervised fine-tuning: as `Watch`, without what only pairs have."""

    METHOD = "SFT"
    COLUMNS = ("loss", "grad_norm", "learning_rate", "mean_token_accuracy")

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        if "loss" not in logs:
            return
        if not math.isfinite(logs["loss"]):
            raise RunError(f"the SFT loss is {logs['loss']} at step {state.global_step}; "
                           f"try a smaller train.sft.learning_rate (now {args.learning_rate:g})")  # fmt: skip
        self.rows.append({"step": state.global_step, **{name: float(logs[name]) for name in self.COLUMNS}})
        self.bar.set_postfix_str(f"loss {logs['loss']:.3f}")

    def table(self) -> pl.DataFrame:
        """One row per logging step."""
        return pl.DataFrame(self.rows, schema={"step": pl.Int64, **dict.fromkeys(self.COLUMNS, pl.Float64)})


class Watch(_Progress):
    """Collects TRL's means at each logging step and the escape texts at every k-th, shows progress, ends what must end.

    The last step is always logged and probed.
    """

    METHOD = "DPO"

    def __init__(self, watched: Watched, config: TrainDpo, on_log: OnLog | None) -> None:
        super().__init__()
        self.watched, self.config = watched, config
        self.on_log_metrics = on_log
        self.stopped: dict[str, Any] | None = None
        """Where a threshold ended the training: step, steps, heldout_chosen_change, reason."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], model: Any, **kwargs: Any) -> None:
        if "loss" not in logs:
            return
        if not math.isfinite(logs["loss"]):
            raise RunError(f"the loss is {logs['loss']} at step {state.global_step}; "
                           f"try a smaller train.learning_rate (now {args.learning_rate:g})")  # fmt: skip
        values = {name: float(logs[name]) for name in LOGGED}
        if self.config.displacement.stop_nats is not None:
            values[HELDOUT] = float(response_logps(model, self.watched.heldout).mean())
            self._stop_at(values[HELDOUT] - self.watched.heldout_before, state, control)
        probed: dict[str, Any] = {}
        last = state.global_step == state.max_steps or self.stopped is not None
        if last or (len(self.rows) + 1) % self.config.probes.every == 0:
            logps_PE = self.watched.escapes.logps(model)
            means = logps_PE.mean(axis=0).tolist()
            values |= {
                f"{PROBE}{name}_logp": mean for name, mean in zip(self.watched.escapes.names, means, strict=True)
            }
            probed = {ESCAPES: logps_PE.tolist()}
        # The loss is that of the weights before the step, what is asked of them that of the weights after it.
        if wrong := next((name for name, value in values.items() if not math.isfinite(value)), None):
            raise RunError(f"{wrong} is {values[wrong]} after step {state.global_step}; "
                           f"try a smaller train.learning_rate (now {args.learning_rate:g})")  # fmt: skip
        self.rows.append({"step": state.global_step, **values, **probed})
        self.bar.set_postfix_str(f"chosen {values['logps/chosen']:.1f}, rejected {values['logps/rejected']:.1f} nats")
        if self.on_log_metrics:
            self.on_log_metrics(values, state.global_step)

    def _stop_at(self, change: float, state: Any, control: Any) -> None:
        limit = self.config.displacement.stop_nats
        if limit is None or change >= -limit or state.global_step == state.max_steps:
            return
        control.should_training_stop = True
        self.stopped = {
            "step": state.global_step, "steps": state.max_steps, "heldout_chosen_change": change,
            "reason": f"stopped at step {state.global_step} of {state.max_steps}: the held-out chosen responses had "
            f"fallen by {-change:.2f} nats, more than train.displacement.stop_nats={limit:g}",
        }  # fmt: skip

    def table(self) -> pl.DataFrame:
        """One row per logging step; empty where a step was not probed, and `heldout/chosen_logp` where asked for."""
        names = [*LOGGED, *([HELDOUT] if self.config.displacement.stop_nats is not None else []),
                 *(f"{PROBE}{name}_logp" for name in self.watched.escapes.names)]  # fmt: skip
        rows = [{name: row.get(name) for name in ("step", *names)} for row in self.rows]
        return pl.DataFrame(rows, schema={"step": pl.Int64, **dict.fromkeys(names, pl.Float64)})

    def report(self) -> dict[str, Any]:
        """Plain values: `stopped`, and per probing `step` and `logps`, watched prompts x escape texts."""
        during = [{"step": row["step"], "logps": row[ESCAPES]} for row in self.rows if ESCAPES in row]
        return {"stopped": self.stopped, "during": during}
