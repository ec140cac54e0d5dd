"""calibrate: activation statistics of the policy, and what a quantised checkpoint of it is later held against."""

from oneaxis.stage import Stage, run


def work(stage: Stage) -> dict[str, float]:
    """Write the statistics from which `quantize` derives any scale, and the NLL, hidden states and copies "before"."""
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
