"""sample_pairs: the untrained model's responses to prompts with a verifiable rule, and the pairs that follow."""

import shutil

from oneaxis.stage import STATE, Stage, run


def work(stage: Stage) -> dict[str, float]:
    """Write responses, prompts and pairs; with `sample=none` nothing: the pairs are those of prepare_data."""
    settings, seed = stage.config.sample, stage.config.seed
    if settings.kind == "none":
        stage.notes["pairs"] = stage.paths["pairs"]
        return {"sample_pairs/pairs": 0.0}

    from oneaxis.serve import num_gpus

    stage.take_device("compute", gpus=num_gpus(settings.engine))
    from oneaxis.checkpoint.load import load_tokenizer
    from oneaxis.sample.pairs import write_pairs
    from oneaxis.sample.prompts import make_prompts
    from oneaxis.sample.responses import parts_folder, sample_responses, started, tokenize

    checkpoint = stage.artifact("fetch_model", "checkpoint")
    prompts, notes = make_prompts(settings, seed=seed, root=stage.root)
    tokens, too_long = tokenize(prompts, load_tokenizer(checkpoint), settings)
    folder = parts_folder(stage.root / STATE / "sample_pairs", checkpoint, tokens, settings, seed=seed)
    log = stage.root / STATE / "logs" / "sample-engine.log"
    responses = sample_responses(
        tokens,
        settings,
        seed=seed,
        folder=folder,
        engine=lambda: started(checkpoint, settings.engine, log, stage.observed),
        observed=stage.observed,
    )
    metrics, found = write_pairs([each.prompt for each in tokens], responses, settings, seed=seed, out=stage.out)
    shutil.rmtree(folder)
    stage.notes.update(notes, too_long=too_long, **found)
    return {f"sample_pairs/{name}": value for name, value in metrics.items()}


if __name__ == "__main__":
    run("sample_pairs", work)
