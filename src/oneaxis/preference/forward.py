"""Forward passes over many sequences: in float32, batched by a token budget, padded and masked by length.

Batches hold sequences of similar length (longest first, so that a run that does not fit in memory fails at once).
What is computed for a sequence does not depend on its batch or on the padding side, up to float32 rounding: padding is
masked out of the attention, positions count real tokens only, and sums run over each sequence's own positions. The two
responses of a pair share a row, their prompt computed once (`oneaxis.packing`).

Dims: B sequences of a batch, R rows, T padded tokens, D hidden width, V vocabulary.
"""

from collections.abc import Sequence as Many
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from oneaxis import packing
from oneaxis.preference.pairs import Sequence


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


def padded(sequences: Many[Sequence], side: packing.Side = "right") -> tuple[dict[str, torch.Tensor], torch.Tensor]:
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
    model: Any, pairs: Many[tuple[Sequence, Sequence]], *, batch_tokens: int, side: packing.Side = "right"
) -> tuple[np.ndarray, int]:
    """Per response, the sum of the hidden states after the final norm over the positions that predict its tokens.

    These are the last prompt token to the second-to-last token of prompt + response. What both sequences of a pair
    begin with, the prompt at least, is computed once. The unembedding is never computed. Sums accumulate in float64.

    Args:
        pairs: (chosen, rejected) token sequences, none of them degenerate.
        batch_tokens: positions held in one pass, padding included; one longer sequence is a pass alone.
        side: of the padding.

    Returns:
        float64 (N, 2, D): chosen and rejected; and the number of positions computed, padding included.
    """
    sequences = [sequence for pair in pairs for sequence in pair]
    # The last token of a sequence predicts nothing that is asked for.
    inputs = ((str(index // 2), tuple(sequence.ids[:-1])) for index, sequence in enumerate(sequences))
    rows = packing.rows_of(inputs, batch_tokens, packing.longest_shared(model))
    sums: dict[int, np.ndarray] = {}
    computed = 0
    for batch in packing.batches(rows, batch_tokens):
        packed, begins = packing.pack(batch, model, side=side)
        hidden_RTD = model.base_model(**packed, use_cache=False).last_hidden_state
        computed += hidden_RTD.shape[0] * hidden_RTD.shape[1]
        for r, (row, begin) in enumerate(zip(batch, begins, strict=True)):
            for number, branch in enumerate(row.branches):
                places = [begin + row.place(number, token) for token in range(len(branch.ids))]
                for index in branch.members:
                    states_ND = hidden_RTD[r, places[sequences[index].start - 1 :]]
                    sums[index] = states_ND.sum(dim=0, dtype=torch.float64).cpu().numpy()
    return np.stack([sums[index] for index in range(len(sequences))]).reshape(len(pairs), 2, -1), computed


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
