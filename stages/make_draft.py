"""make_draft: a draft model for speculative decoding from the policy's first layers, or nothing with other drafts."""

from oneaxis.stage import STATE, Stage, run


def work(stage: Stage) -> dict[str, float]:
    """Write the draft and how often it chooses as the policy does; without one the manifest says who guesses."""
    settings = stage.config.draft
    if settings.kind != "layers":
        stage.notes["draft"] = settings.kind
        return {"make_draft/num_parameters": 0.0}
    stage.take_device("compute")
    from oneaxis.draft.distill import make_draft

    metrics, notes = make_draft(
        stage.policy,
        stage.artifact("prepare_data", "calibration.parquet"),
        stage.artifact("prepare_data", "heldout.parquet"),
        settings,
        seed=stage.config.seed,
        out=stage.out,
        scratch=stage.root / STATE / "scratch" / "make_draft",
        observed=stage.observed,
    )
    stage.notes.update(notes)
    return {f"make_draft/{name}": value for name, value in metrics.items()}


if __name__ == "__main__":
    run("make_draft", work)
