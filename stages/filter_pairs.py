"""filter_pairs: score the preference pairs by CHES on the untrained model and keep what `pairs.*` says."""

from typing import Any

from oneaxis.stage import Stage, run


def work(stage: Stage) -> dict[str, float]:
    """Write the scored pairs and the distribution of the score; the manifest says what was dropped and why."""
    stage.take_device("compute", gpus=1)
    from oneaxis.preference.filter import filter_pairs

    checkpoint = stage.artifact("fetch_model", "checkpoint")
    pairs = stage.root / stage.paths["pairs"]
    observed: dict[str, Any] = {}
    metrics, notes = filter_pairs(
        checkpoint,
        pairs,
        stage.config.pairs,
        stage.out,
        parts=stage.root / ".oneaxis" / "filter_pairs",
        observed=observed,
    )
    stage.observed["filter_pairs"] = observed
    stage.notes.update(notes)
    return {f"filter_pairs/{name}": value for name, value in metrics.items()}


if __name__ == "__main__":
    run("filter_pairs", work)
