"""SFT before DPO on a tiny random model: what it is trained on, and that DPO's reference is what comes out of it."""

import json
from pathlib import Path

import polars as pl
import pytest

from oneaxis.preference.forward import load, response_logps
from oneaxis.preference.pairs import tokenize_pair

from .test_dpo import pairs, run


@pytest.mark.slow
@pytest.mark.parametrize("conversational", [False, True], ids=["text", "messages"])
def test_sft_fits_the_chosen_responses_and_its_result_is_the_reference(
    checkpoint: Path, tmp_path: Path, conversational: bool
) -> None:
    """One batch of all kept train pairs, so TRL's first loss is the untrained model's over exactly these responses.

    Oracle: our own log-probabilities. DPO's first logged means, over the same batch, are then those of its reference.
    """
    table = pairs(heldout=4, conversational=conversational)
    kept = table.filter((pl.col("split") == "train") & pl.col("kept"))
    metrics, notes = run(
        checkpoint, tmp_path / "out", table, batch_size=kept.height, steps=2, warmup_steps=0,
        sft={"epochs": 4.0, "learning_rate": 3e-3},
    )  # fmt: skip

    model, tokenizer = load(checkpoint)
    chosen = [tokenize_pair(row, tokenizer, append_eos=True)[0] for row in kept.iter_rows(named=True)]
    logps = response_logps(model, chosen)
    log = pl.read_parquet(tmp_path / "out" / "sft_log.parquet")
    assert log["step"].to_list() == [1, 2, 3, 4]
    assert log["loss"][0] == pytest.approx(-logps.sum() / sum(part.response_tokens for part in chosen), abs=1e-3)

    first = pl.read_parquet(tmp_path / "out" / "train_log.parquet").row(0, named=True)
    assert first["logps/chosen"] > logps.mean() + 1, "SFT made the chosen responses likelier"
    assert first["rewards/chosen"] == pytest.approx(0, abs=1e-4), "DPO began at its reference"

    heldout = pl.read_parquet(tmp_path / "out" / "heldout.parquet")
    rows = {row["pair_id"]: row for row in table.iter_rows(named=True)}
    for row in heldout.iter_rows(named=True):
        pair = tokenize_pair(rows[row["pair_id"]], tokenizer, append_eos=True)
        found = response_logps(model, list(pair))
        assert (row["chosen_source"], row["rejected_source"]) == pytest.approx(tuple(found), abs=1e-3)
    assert metrics["chosen_logp_source"] == pytest.approx(heldout["chosen_source"].mean())
    assert metrics["chosen_logp_before"] != pytest.approx(metrics["chosen_logp_source"], abs=0.1)
    assert metrics["chosen_delta"] == pytest.approx(metrics["chosen_logp_after"] - metrics["chosen_logp_before"])
    judged = json.loads((tmp_path / "out" / "displacement.json").read_text())
    assert judged["sft"]["chosen"]["effect"] == pytest.approx(
        metrics["chosen_logp_before"] - metrics["chosen_logp_source"]
    )
    assert notes["reference"] == "after SFT"
