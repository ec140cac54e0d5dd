"""quantize: the policy as `quantize.kind` says, to a checkpoint that vLLM loads, and what that cost in perplexity."""

from oneaxis.stage import Stage, run


def work(stage: Stage) -> dict[str, float]:
    """Write `checkpoint/` and the perplexity after; with kind `none` only say where the checkpoint is."""
    settings = stage.config.quantize
    if settings.kind == "none":
        stage.notes["checkpoint"] = stage.paths["policy"]
        return {}
    from oneaxis.quantize.apply import quantize

    metrics, notes = quantize(stage.policy, stage.artifact("calibrate"), settings, stage.out)
    stage.notes.update(notes)
    return metrics


if __name__ == "__main__":
    run("quantize", work)
