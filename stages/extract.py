"""extract: fields of short documents with known truth, asked of the served model as JSON; `extract=none`: nothing."""

import shutil

from oneaxis.artifacts import write_json
from oneaxis.stage import STATE, Stage, run


def work(stage: Stage) -> dict[str, float]:
    """Write answers.parquet, fields.parquet and summary.json."""
    settings, serve, seed = stage.config.extract, stage.config.serve, stage.config.seed
    if settings.kind == "none":
        stage.notes["extract"] = "none"
        return {"extract/answers": 0.0}
    assert serve.kind == "vllm"  # the schema allows no engine of another's
    stage.take_engines_device("compute")
    from oneaxis.checkpoint.load import load_tokenizer
    from oneaxis.structured.documents import make_documents
    from oneaxis.structured.extraction import Prompter, ask_documents, fitting, parts_folder, started
    from oneaxis.structured.results import flat_metrics, summarise, tables

    tokenizer = load_tokenizer(stage.served)
    made = make_documents(records=settings.records, lists=settings.lists, lengths=settings.lengths, seed=seed)
    prompter = Prompter(tokenizer, settings)
    documents, too_long = fitting(made, prompter, settings, serve)
    state = stage.root / STATE
    folder = parts_folder(state / "extract", stage.served, documents, prompter, settings, serve, seed=seed)
    masses = state / "extract-mass"
    log = state / "logs" / "extract-engine.log"
    raw = ask_documents(
        documents,
        prompter,
        settings,
        seed=seed,
        folder=folder,
        masses=masses,
        engine=lambda: started(stage.served, serve, settings, masses=masses, log=log, observed=stage.observed),
        observed=stage.observed,
    )
    answers, fields = tables(documents, raw, tokenizer, settings)
    answers.write_parquet(stage.out / "answers.parquet")
    fields.write_parquet(stage.out / "fields.parquet")
    write_json(stage.out / "summary.json", summarise(answers, fields, settings, tokenizer))
    shutil.rmtree(folder)
    shutil.rmtree(masses, ignore_errors=True)
    stage.notes.update(documents=len(documents), too_long=too_long)
    return {f"extract/{name}": value for name, value in flat_metrics(answers, settings).items()}


if __name__ == "__main__":
    run("extract", work)
