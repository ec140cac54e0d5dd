"""quantize: the policy as `quantize` says, to a checkpoint that vLLM loads, and what that cost in quality."""

from oneaxis.stage import Stage, run


def work(stage: Stage) -> dict[str, float]:
    """Write `checkpoint/` and its quality; with kind and kv `none` say where the checkpoint is, and that it stays."""
    import polars as pl

    from oneaxis.dvc_plots import nll_by_sequence

    settings, before = stage.config.quantize, pl.read_parquet(stage.artifact("calibrate", "heldout_nll.parquet"))
    if settings.kind == "none" and settings.kv == "none":
        from oneaxis.quantize.quality import unchanged_quality

        found = unchanged_quality(stage.artifact("calibrate"), stage.out)
        nll_by_sequence(before, before).write_csv(stage.out / "nll.csv")
        stage.notes["checkpoint"] = stage.paths["policy"]
        return {f"quantize/{name}": value for name, value in found.items()}
    stage.take_device("compute")
    from oneaxis.quantize.apply import quantize

    metrics, notes = quantize(stage.policy, stage.artifact("calibrate"), settings, stage.out)
    after = pl.read_parquet(stage.out / "heldout_nll.parquet")
    nll_by_sequence(before, after).write_csv(stage.out / "nll.csv")
    stage.notes.update(notes)
    return metrics


if __name__ == "__main__":
    run("quantize", work)
