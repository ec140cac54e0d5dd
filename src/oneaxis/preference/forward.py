"""Forward passes over many sequences: in float32, batched by a token budget, padded and masked by length.

Batches hold sequences of similar length (longest first, so that a run that does not fit in memory fails at once).
What is computed for a sequence does not depend on its batch or on the padding side, up to float32 rounding: padding is
masked out of the attention, positions count real tokens only, and sums run over each sequence's own positions.

Dims: B sequences of a batch, T padded tokens, D hidden width, V vocabulary.
"""

from collections.abc import Sequence as Many
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from oneaxis.preference.pairs import Sequence

Side = Literal["right", "left"]


def device() -> torch.device:
    """CUDA where there is one, else the CPU: both compute in float32, on which every number here relies."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def load(checkpoint: Path) -> tuple[Any, Any]:
    """A checkpoint folder as (model in float32, in evaluation mode, on `device()`; tokenizer)."""
    transformers_logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).to(device()).eval()
    return model, AutoTokenizer.from_pretrained(checkpoint)


def batches(lengths: Many[int], batch_tokens: int) -> list[list[int]]:
    """Indices in batches whose padded size stays within `batch_tokens` (one longer sequence is a batch alone)."""
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    result: list[list[int]] = []
    longest = 0
    for index in order:
        if result and longest * (len(result[-1]) + 1) <= batch_tokens:
            result[-1].append(index)
        else:
            result.append([index])
            longest = lengths[index]
    return result


def padded(sequences: Many[Sequence], side: Side = "right") -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Model inputs (input_ids, attention_mask, position_ids: each BT), and a mask BT of the predicting positions.

    A position predicts when the token after it belongs to the response: from the last prompt token to the
    second-to-last token of prompt + response. The padding token's id is 0; nothing depends on it.
    """
    length = max(len(sequence.ids) for sequence in sequences)
    shape = (len(sequences), length)
    ids, attention, positions = (torch.zeros(shape, dtype=torch.long) for _ in range(3))
    predicts = torch.zeros(shape, dtype=torch.bool)
    for row, sequence in enumerate(sequences):
        size = len(sequence.ids)
        first = 0 if side == "right" else length - size
        ids[row, first : first + size] = torch.tensor(sequence.ids)
        attention[row, first : first + size] = 1
        positions[row, first : first + size] = torch.arange(size)
        predicts[row, first + sequence.start - 1 : first + size - 1] = True
    return {"input_ids": ids, "attention_mask": attention, "position_ids": positions}, predicts


@torch.no_grad()
def hidden_sums(
    model: Any, sequences: Many[Sequence], *, batch_tokens: int, side: Side = "right", progress: str | None = None
) -> np.ndarray:
    """Per sequence, the sum of the hidden states after the final norm over the predicting positions.

    The unembedding is never computed. Sums accumulate in float64.

    Returns:
        float64, (number of sequences, D).
    """
    sums: np.ndarray | None = None
    with tqdm(total=len(sequences), desc=progress, unit="seq", disable=progress is None) as bar:
        for batch in batches([len(sequence.ids) for sequence in sequences], batch_tokens):
            inputs, predicts_BT = padded([sequences[index] for index in batch], side)
            inputs = {name: tensor.to(model.device) for name, tensor in inputs.items()}
            hidden_BTD = model.base_model(**inputs, use_cache=False).last_hidden_state
            weight_BT1 = predicts_BT.to(model.device)[..., None]
            sums_BD = torch.where(weight_BT1, hidden_BTD, 0.0).sum(dim=1, dtype=torch.float64).cpu().numpy()
            if sums is None:
                sums = np.empty((len(sequences), sums_BD.shape[1]))
            sums[batch] = sums_BD
            bar.update(len(batch))
    assert sums is not None, "no sequences"
    return sums


@torch.no_grad()
def response_logps(
    model: Any, sequences: Many[Sequence], *, batch_tokens: int = 1024, progress: str | None = None
) -> np.ndarray:
    """Per sequence, the summed log-probability of its response's tokens given what comes before them, in nats.

    The model is put in evaluation mode and back. Log-softmax in float32; the sum in float64.

    Returns:
        float64, (number of sequences,).
    """
    training = model.training
    model.eval()
    logps = np.empty(len(sequences))
    with tqdm(total=len(sequences), desc=progress, unit="seq", disable=progress is None) as bar:
        for batch in batches([len(sequence.ids) for sequence in sequences], batch_tokens):
            inputs, predicts_BT = padded([sequences[index] for index in batch])
            inputs = {name: tensor.to(model.device) for name, tensor in inputs.items()}
            # Logits only from the first predicting position of the batch on: most of a prompt needs none.
            keep = predicts_BT.shape[1] - int(predicts_BT.any(dim=0).nonzero()[0])
            logits_BTV = model(**inputs, use_cache=False, logits_to_keep=keep).logits[:, :-1].float()
            target_BT1 = inputs["input_ids"][:, -keep + 1 :, None]
            logp_BT = logits_BTV.gather(-1, target_BT1).squeeze(-1) - logits_BTV.logsumexp(-1)
            mask_BT = predicts_BT[:, -keep:-1].to(model.device)
            logps[batch] = torch.where(mask_BT, logp_BT, 0.0).sum(dim=1, dtype=torch.float64).cpu().numpy()
            bar.update(len(batch))
    model.train(training)
    return logps
