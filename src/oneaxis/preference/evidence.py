"""What is measured of a policy before and after training, and the tables and numbers that come of it.

On a fixed held-out set: the log-probability of every chosen and rejected response, and where the probability of their
continuations went (`mass`). On benign prompts: the log-probability of each escape text, and the greedy answers with
what the refusal detector says of them (`probes`, `refusal`). The verdict reads the paired differences (`displacement`).
"""

import gc
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from oneaxis.config.schema import TrainDpo
from oneaxis.errors import UserError
from oneaxis.judge.paired import Effect, paired_difference
from oneaxis.preference import mass, refusal
from oneaxis.preference.displacement import interval, share_change, verdict
from oneaxis.preference.forward import response_logps
from oneaxis.preference.mass import Look, Pair
from oneaxis.preference.probes import Escapes, end_ids, escape_table, greedy, prompt_ids, spread
from oneaxis.preference.watch import Watched

ESCAPE = "escape_"
"""Before the names of escape texts in measurements and metrics."""
SHARES = {"refusal": refusal.is_refusal, "empty": refusal.is_empty}
"""What greedy answers are counted by."""
PLURAL = {"refusal": "refusals", "empty": "empty answers"}
DURING = "during"


@dataclass(frozen=True)
class Seen:
    """What a model was seen to do."""

    logps: dict[str, np.ndarray]
    """As of `Subjects.measure`."""
    answers: list[str]
    """Greedy, to the benign prompts."""
    look: Look


class Subjects:
    """What every measurement is made on: held-out pairs, and benign prompts spread evenly over their table."""

    def __init__(self, model: Any, tokenizer: Any, pairs: Many[Pair], probes: pl.DataFrame, config: TrainDpo):
        """
        Raises:
            UserError: fewer than two probes, or a model without an end of an answer.
        """
        if probes.height < 2:
            raise UserError(f"prepare_data/probes.parquet: {probes.height} probes; allowed: at least 2")
        settings = config.probes
        self.tokenizer, self.pairs, self.looked, self.settings = tokenizer, list(pairs), mass.looked_at(pairs), settings
        self.ends = end_ids(model, tokenizer)
        self.probes = probes[spread(probes.height, settings.prompts)]
        self.escapes = Escapes(self.probes["prompt"].to_list(), settings.texts, self.ends, tokenizer)
        self.watched_rows = spread(self.probes.height, settings.watched)
        """Which of the prompts are also asked while the model trains."""
        self.asked = probes[spread(probes.height, settings.answers)] if settings.answers else probes.head(0)

    def measure(self, model: Any, progress: str) -> dict[str, np.ndarray]:
        """Summed log-probabilities in nats: chosen, rejected and margin per held-out pair, and per benign prompt
        `escape_NAME` for each escape text."""
        sequences = [sequence for pair in self.pairs for sequence in pair]
        logps = response_logps(model, sequences, progress=f"held-out, {progress}")
        chosen, rejected = logps[::2], logps[1::2]
        escapes_PE = self.escapes.logps(model)
        by_text = {f"{ESCAPE}{name}": escapes_PE[:, number] for number, name in enumerate(self.escapes.names)}
        return {"chosen": chosen, "rejected": rejected, "margin": chosen - rejected, **by_text}

    def see(self, model: Any, progress: str) -> Seen:
        """All of it: `measure`, the greedy answers, and the look at the held-out prompts."""
        asked = [prompt_ids(prompt, self.tokenizer) for prompt in self.asked["prompt"]]
        answers = greedy(model, asked, tokens=self.settings.answer_tokens, ends=self.ends)
        return Seen(
            logps=self.measure(model, progress),
            answers=[self.tokenizer.decode(answer, skip_special_tokens=True) for answer in answers],
            look=mass.look(model, self.looked, self.ends),
        )

    def watched(self, before: Mapping[str, np.ndarray]) -> Watched:
        """What is asked of the weights during training; `before` as `measure` gave it of the model that begins."""
        chosen = [pair[0] for pair in self.pairs]
        return Watched(self.escapes.on(self.watched_rows), chosen, float(before["chosen"].mean()))


# --- tables ----------------------------------------------------------------------------------------------------------


def heldout_table(heldout: pl.DataFrame, levels: Mapping[str, Mapping[str, np.ndarray]]) -> pl.DataFrame:
    """Per held-out pair, the summed log-probabilities in nats of both responses: before and after DPO, and before SFT.

    Args:
        levels: `measure` of `before`, `after` and, where SFT came first, `source` (the fetched model).
    """
    columns = {f"{side}_{when}": values[side] for side in ("chosen", "rejected") for when, values in levels.items()}
    return heldout.select("pair_id").with_columns(**{name: pl.Series(values) for name, values in columns.items()})


def answer_table(subjects: Subjects, fetched: Seen, after: Seen) -> pl.DataFrame:
    """Per benign prompt: probe_id, prompt, answer_before, answer_after, and what each is (`refusal_*`, `empty_*`)."""
    columns: dict[str, Any] = {}
    for when, seen in (("before", fetched), ("after", after)):
        columns[f"answer_{when}"] = pl.Series(seen.answers, dtype=pl.String)
        for name, test in SHARES.items():
            columns[f"{name}_{when}"] = pl.Series([test(answer) for answer in seen.answers], dtype=pl.Boolean)
    return subjects.asked.select("probe_id", "prompt").with_columns(**columns)


def escapes_table(
    subjects: Subjects,
    levels: Mapping[str, Mapping[str, np.ndarray]],
    during: Many[Mapping[str, Any]],
    steps: int,
) -> pl.DataFrame:
    """`escapes.parquet`: as of `probes.escape_table`; during training on the watched prompts only.

    Args:
        levels: as of `heldout_table`. during: as of `Watch.report`. steps: of the training.
    """
    everywhere = range(subjects.probes.height)
    rows: list[tuple[str, int, Many[int], np.ndarray]] = []
    for moment in ("source", "before", DURING, "after"):
        if moment == DURING:
            rows += [(DURING, each["step"], subjects.watched_rows, np.array(each["logps"])) for each in during]
        elif moment in levels:
            logps_PE = np.stack([levels[moment][f"{ESCAPE}{name}"] for name in subjects.escapes.names], axis=1)
            rows.append((moment, steps if moment == "after" else 0, everywhere, logps_PE))
    return escape_table(subjects.escapes, subjects.probes["probe_id"].to_list(), rows)


def mass_report(subjects: Subjects, before: Seen, after: Seen, written: Any, reference: Callable[[], Any],
                confidence: float) -> dict[str, Any]:  # fmt: skip
    """`mass.json`, as of `mass.moved`.

    Args:
        before, after: of the reference and of the policy. written: the policy. reference: loads the reference.
    """
    old, new = before.look.continuations, after.look.continuations
    late = mass.continuation_logps(written, subjects.looked, old, new)
    model = reference()
    early = mass.continuation_logps(model, subjects.looked, old, new)
    del model
    gc.collect()
    logps = list(zip(early, late, strict=True))
    return mass.moved(subjects.looked, before.look, after.look, logps, subjects.tokenizer, confidence)


# --- the verdict and its numbers -------------------------------------------------------------------------------------


def differences(
    before: Mapping[str, np.ndarray], after: Mapping[str, np.ndarray], confidence: float
) -> dict[str, Effect]:
    """Changes of log-probability by what `measure` names, paired by held-out pair or benign prompt."""
    return {name: paired_difference(first, after[name], confidence) for name, first in before.items()}


def answer_changes(fetched: Seen, after: Seen, confidence: float) -> dict[str, Effect]:
    """Changes of the shares of greedy answers that refuse, or say nothing, since the model was fetched (SFT included).

    Empty where no prompt was answered.
    """
    return {
        name: share_change([test(each) for each in fetched.answers], [test(each) for each in after.answers], confidence)
        for name, test in SHARES.items()
        if fetched.answers
    }


def judge(
    changes: Mapping[str, Effect], shares: Mapping[str, Effect], config: TrainDpo, stopped: Mapping[str, Any] | None
) -> dict[str, Any]:
    """`displacement.json`: the verdict with its numbers, thresholds and reasons.

    Args:
        changes, shares: as of `differences` and `answer_changes`.
        stopped: as of `Watch.stopped`.
    """
    settings = config.displacement
    limits = {"slight_nats": settings.slight_nats, "steep_nats": settings.steep_nats,
              "refusal_share": settings.refusal_share}  # fmt: skip
    escapes = {name.removeprefix(ESCAPE): effect for name, effect in changes.items() if name.startswith(ESCAPE)}
    name, reasons = verdict(changes["chosen"], changes["rejected"], changes["margin"], escapes,
                            {PLURAL[share]: effect for share, effect in shares.items()}, **limits)  # fmt: skip
    if stopped:
        reasons.insert(0, stopped["reason"])
    return {
        "verdict": name,
        **{side: interval(changes[side]) for side in ("chosen", "rejected", "margin")},
        "escapes": {name: {"text": config.probes.texts[name], **interval(change)} for name, change in escapes.items()},
        "answers": {share: interval(effect) for share, effect in shares.items()},
        "detector": {
            part: refusal.accuracy(row for row in refusal.labelled() if row["part"] == part)
            for part in refusal.EXPECTED
        },
        "stopped": stopped,
        "n": changes["chosen"].n,
        "confidence": settings.confidence,
        "thresholds": {**limits, "stop_nats": settings.stop_nats},
        "reasons": reasons,
    }


def metrics(
    levels: Mapping[str, Mapping[str, np.ndarray]],
    answers: Mapping[str, Many[str]],
    changes: Mapping[str, Effect],
    shares: Mapping[str, Effect],
) -> dict[str, float]:
    """Flat numbers: means in nats per response, shares of answers, and the paired differences with their intervals.

    Args:
        levels: `measure` by moment. answers: to the benign prompts, `before` and `after`.
    """
    flat = {}
    for side in changes:
        if side != "margin":
            for when, values in levels.items():
                flat[f"{side}_logp_{when}"] = float(values[side].mean())
    for share in shares:
        for when, said in answers.items():
            flat[f"{share}_rate_{when}"] = sum(SHARES[share](answer) for answer in said) / len(said)
    for name, effect in [*changes.items(), *((f"{share}_rate", effect) for share, effect in shares.items())]:
        flat[f"{name}_delta"] = effect.effect
        flat[f"{name}_delta_ci_low"] = effect.ci_low
        flat[f"{name}_delta_ci_high"] = effect.ci_high
    return flat
