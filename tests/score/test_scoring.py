"""A whole scoring run on a tiny checkpoint, against the definition of each score computed from the model's logits."""

from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from oneaxis.config import compose
from oneaxis.config.schema import Config
from oneaxis.errors import RunError, UserError
from oneaxis.score.contexts import Item
from oneaxis.score.metrics import score_items
from oneaxis.score.scoring import Scored, read_items, score_checkpoint

ITEMS = [
    Item("q0", "bread", "who bakes bread?", ("a baker", "a nurse", "a pilot", "a fish"), 0),
    Item("q1", "bread", "who flies?", ("a fish", "pilot", "the baker and the nurse", "flies"), 1),
    Item("q2", "cold", "where is it cold?", ("at the pole", "in bread", "日本"), 0),
    Item("q3", "cold", "what do frogs eat?", ("flies", "", "bread"), 0),
]


@pytest.fixture(scope="module")
def config(root: Path) -> Config:
    """The committed settings, with two letter items a task and a premise of one task's own."""
    return compose(
        root / "conf",
        [
            "profile=tiny",
            "score.letter.items_per_task=2",
            "score.controls.items_per_task=0",
            "score.letter.content_free=[]",
            "+score.premises.cold=Cold:",
        ],
    )


def scored(checkpoint: Path, config: Config, items: list[Item], tmp_path: Path) -> tuple[Scored, dict[str, Any]]:
    """A run and what it observed."""
    observed: dict[str, Any] = {}
    settings = (config.score, config.serve, config.seed)
    return score_checkpoint(checkpoint, items, *settings, log=tmp_path / "log", observed=observed), observed


def test_every_logprob_is_the_models_own(
    checkpoint: Path, config: Config, tmp_path: Path, tokenizer: PreTrainedTokenizerFast, llama: LlamaForCausalLM
) -> None:
    """Oracle: encode prompt + option whole, one forward each, and sum log_softmax over the scored tokens."""
    run, observed = scored(checkpoint, config, ITEMS, tmp_path)
    items = {item.item_id: item for item in ITEMS}
    for line in run.table.filter(pl.col("context") != "letter").iter_rows(named=True):
        item = items[line["item_id"]]
        premise = "Cold:" if item.task == "cold" else "Answer:"
        prompt = f"Question: {item.question}\nAnswer:" if line["context"] == "question" else premise
        ids = tokenizer.encode(prompt + " " + item.options[line["option"]])
        scored_ids = line["token_ids"]
        assert ids[-len(scored_ids) :] == scored_ids
        with torch.inference_mode():
            logprobs = torch.log_softmax(llama(torch.tensor([ids])).logits[0].double(), dim=-1)
        own = [float(logprobs[place - 1, ids[place]]) for place in range(len(ids) - len(scored_ids), len(ids))]
        assert line["logprobs"] == pytest.approx(own, abs=5e-5)
        assert line["logprob"] == pytest.approx(sum(own), abs=5e-4)
        assert line["chars"] == len(item.options[line["option"]])
    # 3 items with 4, 4 and 3 options: cloze twice, and letters in all rotations.
    assert run.table.group_by("context").len().sort("context").rows() == [
        ("letter", 16 + 16 + 9),
        ("premise", 11),
        ("question", 11),
    ]
    assert observed["score"]["tokens_computed"] < observed["score"]["tokens_naive"]


def test_metrics_count_what_was_dropped_and_the_summary_shows_prompts_and_dtype(
    checkpoint: Path, config: Config, tmp_path: Path
) -> None:
    run, _ = scored(checkpoint, config, ITEMS, tmp_path)
    assert run.metrics["score/items_dropped"] == 1
    assert run.dropped == {"empty_option": 1, "single_option": 0, "repeated_option": 0, "overlong": 0}
    assert (run.metrics["score/bread/n"], run.metrics["score/cold/n"]) == (2, 1)
    assert "score/cold/acc_stderr" not in run.metrics
    cold = run.summary["tasks"]["cold"]
    assert cold["shown"]["premise"]["prompt"] == "Cold:"
    assert cold["shown"]["question"]["prompt"] == "Question: where is it cold?\nAnswer:"
    assert cold["shown"]["letter"]["prompt"] == (
        "Question: where is it cold?\nA. at the pole\nB. in bread\nC. 日本\nAnswer:"
    )
    assert cold["shown"]["question"]["continuations"] == [" at the pole", " in bread", " 日本"]
    assert cold["scorers"]["pmi_dc"]["scorer"] == "pmi_dc (float32)"
    assert run.items.equals(score_items(run.table))


def test_a_prompt_beyond_the_models_positions_is_cut_and_counted(
    checkpoint: Path, config: Config, tmp_path: Path
) -> None:
    """The tiny model has 256 positions; the question is longer in any tokenization of this vocabulary."""
    item = Item("long", "bread", "zx" * 400, ("a", "bb"), 0)
    settings = config.model_copy(update={"score": config.score.model_copy(update={"overlong": "cut"})})
    run, _ = scored(checkpoint, settings, [ITEMS[0], item], tmp_path)
    assert run.metrics["score/truncated"] == 1
    assert run.metrics["score/items_dropped"] == 0
    assert run.table.filter(pl.col("truncated") > 0)["item_id"].unique().to_list() == ["long"]


def test_an_item_that_is_too_long_is_left_out_and_counted(checkpoint: Path, config: Config, tmp_path: Path) -> None:
    """As the committed settings have it, in every context of the item."""
    item = Item("long", "bread", "zx" * 400, ("a", "bb"), 0)
    run, _ = scored(checkpoint, config, [ITEMS[0], item], tmp_path)
    assert run.dropped["overlong"] == run.metrics["score/items_dropped"] == 1
    assert run.metrics["score/truncated"] == 0
    assert run.table["item_id"].unique().to_list() == ["q0"]
    with pytest.raises(UserError, match=r"score\.overlong='drop': none of 1 items fits the model; allowed: cut"):
        scored(checkpoint, config, [item], tmp_path)


def test_a_model_that_gives_nan_fails_and_names_the_item(checkpoint: Path, config: Config, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in checkpoint.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    weights = load_file(broken / "model.safetensors")
    weights["model.norm.weight"] = torch.full_like(weights["model.norm.weight"], float("nan"))
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RunError, match="item q0, question context, option 'a baker': log-probability nan"):
        scored(broken, config, ITEMS, tmp_path)


def test_no_usable_item_is_refused(checkpoint: Path, config: Config, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"items\.parquet: none of 1 items can be scored"):
        scored(checkpoint, config, [ITEMS[3]], tmp_path)


def test_items_are_read_in_their_order(tmp_path: Path) -> None:
    rows = [(i.item_id, i.task, i.question, list(i.options), i.answer, None) for i in ITEMS]
    schema = {"item_id": pl.String, "task": pl.String, "question": pl.String, "options": pl.List(pl.String),
              "answer": pl.Int64, "topic": pl.String}  # fmt: skip
    pl.DataFrame(rows, schema=schema, orient="row").write_parquet(tmp_path / "items.parquet")
    assert read_items(tmp_path / "items.parquet") == ITEMS


@pytest.mark.slow
def test_the_engine_and_this_process_agree(checkpoint: Path, root: Path, tmp_path: Path) -> None:
    """vLLM and transformers, both in float32: token by token within 1e-4 nats."""
    overrides = ["profile=tiny", "score.letter.items_per_task=1", "serve.max_model_len=256"]
    here = compose(root / "conf", overrides)
    there = compose(root / "conf", [*overrides, "score.engine=vllm"])
    local, _ = scored(checkpoint, here, ITEMS, tmp_path)
    remote, observed = scored(checkpoint, there, ITEMS, tmp_path)
    assert remote.table.drop("logprobs", "logprob").equals(local.table.drop("logprobs", "logprob"))
    assert remote.table["logprobs"].explode().to_list() == pytest.approx(
        local.table["logprobs"].explode().to_list(), abs=1e-4
    )
    assert remote.summary["engine"] == "vllm"
    assert "cold_start" in observed
