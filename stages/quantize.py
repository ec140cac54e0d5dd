"""quantize: the policy as `quantize.kind` says, to a checkpoint that vLLM loads, and what that cost in perplexity."""

from oneaxis.stage import Stage, run


def work(stage: Stage) -> dict[str, float]:
    """Write `checkpoint/` and the perplexity after; with kind `none` say where the checkpoint is, and that it stays."""
    import polars as pl

    from oneaxis.dvc_plots import nll_by_sequence

    settings, before = stage.config.quantize, stage.artifact("calibrate", "heldout_nll.parquet")
    if settings.kind == "none":
        from oneaxis.quantize.nll import perplexity

        # The same table and names as with a scheme, so that a run without one can be the baseline of one with it.
        nll = pl.read_parquet(before)
        nll.write_parquet(stage.out / "heldout_nll.parquet")
        nll_by_sequence(nll, nll).write_csv(stage.out / "nll.csv")
        stage.notes["checkpoint"] = stage.paths["policy"]
        return {f"quantize/perplexity_{side}": perplexity(nll) for side in ("before", "after")}
    stage.take_device("compute")
    from oneaxis.quantize.apply import quantize

    metrics, notes = quantize(stage.policy, stage.artifact("calibrate"), settings, stage.out)
    after = pl.read_parquet(stage.out / "heldout_nll.parquet")
    nll_by_sequence(pl.read_parquet(before), after).write_csv(stage.out / "nll.csv")
    stage.notes.update(notes)
    return metrics


if __name__ == "__main__":
    run("quantize", work)
