"""calibrate: activation statistics of the policy, their coverage of held-out text, and its perplexity in float32."""

from oneaxis.stage import Stage, run


def work(stage: Stage) -> dict[str, float]:
    """Write the statistics from which `quantize` derives the scales of any alpha, and the held-out NLL "before"."""
    stage.take_device("compute")
    from oneaxis.quantize.calibrate import calibrate

    return calibrate(
        stage.policy,
        stage.artifact("prepare_data", "calibration.parquet"),
        stage.artifact("prepare_data", "heldout.parquet"),
        stage.config.calibrate,
        stage.out,
    )


if __name__ == "__main__":
    run("calibrate", work)
