"""Where displaced probability is known to go: escape texts and greedy answers on benign prompts.

A prompt is benign when it deserves a real answer. Two things are read of a model on such prompts:

- the log-probability with which its answer begins with each *escape text* (canned refusals, a hedge), or ends at once
  (the empty text: the probability of every end-of-turn token of the model, summed). A prompt is computed once for all
  texts.
- its greedy answers, by transformers' `generate`, batched and padded on the left, with every setting of the
  checkpoint's generation config that would make them other than greedy (sampling, penalties) left out.

A prompt is rendered by the tokenizer's chat template where it has one; without, an answer follows on the next line.

Dims: P prompts, E escape texts.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Many
from typing import Any

import numpy as np
import polars as pl
import torch
from transformers import GenerationConfig

from oneaxis.errors import UserError
from oneaxis.preference.forward import batches, padded, response_logps
from oneaxis.preference.pairs import Sequence, tokenize_continuation
from oneaxis.score.boundary import Target
from oneaxis.score.local import check_head, log_probabilities


def spread(height: int, count: int) -> list[int]:
    """`count` row numbers (or all), evenly over a table of `height` rows: so over its categories."""
    return np.linspace(0, height - 1, min(count, height)).round().astype(int).tolist()


def end_ids(model: Any, tokenizer: Any) -> list[int]:
    """The tokens with which the model ends an answer.

    Raises:
        UserError: neither its generation config nor its tokenizer names one.
    """
    named = model.generation_config.eos_token_id if model.generation_config else None
    named = tokenizer.eos_token_id if named is None else named
    if named is None:
        raise UserError("the model names no eos_token_id, so that no answer ever ends; allowed: a model with one")
    return list(named) if isinstance(named, list) else [named]


class Escapes:
    """Escape texts as answers to benign prompts, tokenized once."""

    def __init__(self, prompts: Many[str], texts: dict[str, str], ends: Many[int], tokenizer: Any):
        """`texts` by name, `""` for an answer that ends at once; `ends` as of `end_ids`."""
        self.names = list(texts)
        self.targets: list[list[list[Target]]] = []
        """P x E: the sequences of which one or the other begins the answer."""
        for number, prompt in enumerate(prompts):
            row = []
            for text in texts.values():
                if text:
                    sequences = [tokenize_continuation(prompt, text, tokenizer)]
                else:
                    ids = prompt_ids(prompt, tokenizer, ends_at_once=True)
                    sequences = [Sequence([*ids, end], len(ids)) for end in ends]
                row.append([Target(str(number), tuple(each.ids), each.start) for each in sequences])
            self.targets.append(row)
        self._packs: bool | None = None

    def on(self, prompts: Many[int]) -> "Escapes":
        """The same texts, on some of the prompts."""
        return self.of_json({"names": self.names, "targets": [self.as_json()["targets"][row] for row in prompts]})

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        targets = [[[[target.ids, target.start] for target in each] for each in row] for row in self.targets]
        return {"names": self.names, "targets": targets}

    @classmethod
    def of_json(cls, values: Mapping[str, Any]) -> "Escapes":
        """What `as_json` gave."""
        made = cls([], dict.fromkeys(values["names"], ""), [], None)
        made.targets = [
            [[Target(str(number), tuple(ids), start) for ids, start in each] for each in row]
            for number, row in enumerate(values["targets"])
        ]
        return made

    def logps(self, model: Any) -> np.ndarray:
        """Log-probability of each escape text as (the beginning of) the answer, in nats.

        The model is put in evaluation mode and back.

        Returns:
            float64, P x E.
        """
        flat = [target for row in self.targets for targets in row for target in targets]
        training = model.training
        model.eval()
        # The layers of an adapter lie in the model that it adapts.
        inner = model.get_base_model() if hasattr(model, "get_base_model") else model
        if self._packs is None:
            self._packs = _packs(inner)
        if self._packs:
            sums = [sum(each) for each in log_probabilities(inner, flat, 2048, progress=None)[0]]
        else:
            sums = response_logps(inner, [Sequence(list(target.ids), target.start) for target in flat]).tolist()
        model.train(training)
        found = iter(sums)
        # Weights that diverged give no numbers, which is the caller's to say.
        with np.errstate(invalid="ignore"):
            return np.array(
                [[np.logaddexp.reduce([next(found) for _ in targets]) for targets in row] for row in self.targets]
            )


def _packs(model: Any) -> bool:
    """Whether a prompt can be computed once for all texts: the logits must be the unembedding's, unchanged."""
    try:
        check_head(model)
    except UserError:
        return False
    return True


def prompt_ids(prompt: str, tokenizer: Any, *, ends_at_once: bool = False) -> list[int]:
    """The tokens of `prompt` before an answer; `ends_at_once`: before an answer that has not even a first line."""
    if tokenizer.chat_template:
        message = [{"role": "user", "content": prompt}]
        text, special = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True), False
    else:
        text, special = prompt.rstrip() + ("" if ends_at_once else "\n"), True
    ids: list[int] = tokenizer(text, add_special_tokens=special)["input_ids"]
    return ids


def left_padded(prompts: Many[Many[int]]) -> dict[str, torch.Tensor]:
    """Model inputs (input_ids, attention_mask, position_ids), prompts x padded tokens, so that all end at one place."""
    return padded([Sequence(list(prompt), len(prompt)) for prompt in prompts], "left")[0]


@torch.no_grad()
def greedy(
    model: Any, prompts: Many[Many[int]], *, tokens: int, ends: Many[int], batch_tokens: int = 4096
) -> list[list[int]]:
    """The likeliest token after each prompt, and after that, and so on.

    Args:
        prompts: token ids. tokens: at most so many new ones each. ends: tokens that end an answer.
        batch_tokens: padded prompts and answers held at once.

    Returns:
        Per prompt the new tokens, the ending one included.
    """
    plain = GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=list(ends), pad_token_id=ends[0])
    theirs, model.generation_config = model.generation_config, plain
    answers: list[list[int]] = [[] for _ in prompts]
    try:
        for batch in batches([len(prompt) + tokens for prompt in prompts], batch_tokens):
            inputs = left_padded([prompts[index] for index in batch])
            del inputs["position_ids"]  # generate counts them itself, from the mask
            inputs = {name: tensor.to(model.device) for name, tensor in inputs.items()}
            made = model.generate(**inputs)[:, inputs["input_ids"].shape[1] :].tolist()
            for index, ids in zip(batch, made, strict=True):
                last = next((place for place, token in enumerate(ids) if token in ends), len(ids) - 1)
                answers[index] = ids[: last + 1]
    finally:
        model.generation_config = theirs
    return answers


def escape_table(
    escapes: Escapes, probe_ids: Many[str], rows: Many[tuple[str, int, Many[int], np.ndarray]]
) -> pl.DataFrame:
    """One row per moment, prompt and escape text.

    Args:
        rows: (moment, step, which prompts, P x E log-probabilities).

    Returns:
        moment (source, before, during or after), step, probe_id, escape, logp (nats).
    """
    return pl.DataFrame([
        {"moment": moment, "step": step, "probe_id": probe_ids[prompt], "escape": name, "logp": float(logp)}
        for moment, step, prompts, logps in rows
        for prompt, line in zip(prompts, logps, strict=True)
        for name, logp in zip(escapes.names, line, strict=True)
    ])  # fmt: skip
