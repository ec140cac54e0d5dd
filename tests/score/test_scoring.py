"""A whole scoring run on a tiny checkpoint, against the definition of each score computed from the model's logits."""

import json
import shutil
from collections.abc import Sequence
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
from oneaxis.multirun.metric_names import metric_names
from oneaxis.score.boundary import Target
from oneaxis.score.contexts import Item
from oneaxis.score.metrics import score_items
from oneaxis.score.scoring import (
    Engine,
    Scored,
    batch_difference,
    encode_items,
    read_items,
    score_checkpoint,
    targets_of,
)
from oneaxis.score.table import build_table

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


def scored(
    checkpoint: Path, config: Config, items: list[Item], tmp_path: Path, **parts: Any
) -> tuple[Scored, dict[str, Any]]:
    """A run and what it observed."""
    observed: dict[str, Any] = {}
    settings = (config.score, config.serve, config.seed)
    return score_checkpoint(checkpoint, items, *settings, log=tmp_path / "log", observed=observed, **parts), observed


def with_score(config: Config, **changes: Any) -> Config:
    """The settings with other values in section score."""
    return config.model_copy(update={"score": config.score.model_copy(update=changes)})


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
    assert run.dropped == {"empty_option": 1, "single_option": 0, "repeated_option": 0, "same_tokens": 0,
                           "overlong": 0}  # fmt: skip
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
    run, _ = scored(checkpoint, with_score(config, overlong="cut"), [ITEMS[0], item], tmp_path)
    assert run.metrics["score/truncated"] == 1
    assert run.metrics["score/items_dropped"] == 0
    assert run.table.filter(pl.col("truncated") > 0)["item_id"].unique().to_list() == ["long"]


def full(root: Path, *overrides: str) -> Config:
    """The committed settings, which have every context, with all items of a task in all of them."""
    return compose(root / "conf", ["profile=tiny", "score.letter.prior_share=0.5", *overrides])


def test_every_context_is_scored_as_its_prompt_and_continuation_say(
    checkpoint: Path, root: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerFast, llama: LlamaForCausalLM
) -> None:
    """Oracle: the model's own log_softmax over prompt + continuation, encoded whole; EOS stands for no prompt."""
    run, _ = scored(checkpoint, full(root), ITEMS[:2], tmp_path)
    assert tokenizer.pad_token is None
    kinds = run.table.group_by("context", "variant").len().sort("context", "variant").rows()
    assert kinds == [("bos", 0, 8), ("content_free", 0, 8), ("letter", 0, 32), ("premise", 0, 8), ("premise", 1, 8),
                     ("question", 0, 8)]  # fmt: skip
    for line in run.table.iter_rows(named=True):
        ids = tokenizer.encode(line["prompt"] + line["continuation"])
        if line["context"] == "bos":
            ids = [tokenizer.eos_token_id, *ids]
        first = len(ids) - len(line["token_ids"])
        assert (ids[first:], first) == (line["token_ids"], line["prompt_tokens"])
        with torch.inference_mode():
            logprobs = torch.log_softmax(llama(torch.tensor([ids])).logits[0].double(), dim=-1)
        own = sum(float(logprobs[place - 1, ids[place]]) for place in range(first, len(ids)))
        assert line["logprob"] == pytest.approx(own, abs=5e-4)
    free = run.table.filter(pl.col("context") == "content_free")["prompt"][0]
    assert free == "Question: N/A\nA. a baker\nB. a nurse\nC. a pilot\nD. a fish\nAnswer:"
    bread = run.summary["tasks"]["bread"]
    assert set(bread["scorers"]) == {"acc", "acc_norm", "acc_bytes", "acc_per_token", "pmi", "pmi_dc", "letter",
                                     "letter_calibrated", "letter_permuted", "letter_averaged", "pride"}  # fmt: skip
    assert bread["scorers"]["pride"]["n"] == 1
    assert [one["premise"] for one in bread["premises"]["premises"]] == ["Answer:", "The answer is:"]
    # Every metric is one that a claim may name.
    known = metric_names(full(root, "data.items.tasks=[bread]"), "score")
    assert set(run.metrics) <= known, set(run.metrics) - known


def test_a_chat_template_a_think_span_and_a_season_are_in_the_prompt_and_on_record(
    checkpoint: Path, root: Path, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    chatty = tmp_path / "chatty"
    shutil.copytree(checkpoint, chatty)
    (chatty / "chat_template.jinja").write_text(
        "{% for turn in messages %}<{{ turn.role }}>{{ turn.content }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    config = with_score(full(root), chat_template=True, answer_prefix="<think>\n</think>\n", season=3)
    run, _ = scored(chatty, config, ITEMS[:2], tmp_path)
    wordings = {f"<user>{template.format(question=ITEMS[0].question)}<assistant><think>\n</think>\n"
                for template in (config.score.question_template, *config.score.season_templates)}  # fmt: skip
    asked = run.table.filter((pl.col("context") == "question") & (pl.col("item_id") == "q0"))
    assert asked["prompt"][0] in wordings
    assert asked["continuation"].to_list() == list(ITEMS[0].options)
    premise = run.table.filter(pl.col("context") == "premise")["prompt"][0]
    assert premise == "<user>Answer:<assistant><think>\n</think>\n"
    assert (run.summary["season"], run.summary["chat_template"]) == (3, True)
    with pytest.raises(UserError, match=r"score\.chat_template=true: the tokenizer has no chat template"):
        scored(checkpoint, config, ITEMS[:2], tmp_path)


def test_a_killed_run_goes_on_from_its_parts_to_the_same_bytes(checkpoint: Path, root: Path, tmp_path: Path) -> None:
    """Some parts are there, one is half written. Parts of other settings or another checkpoint are not taken."""
    config, parts = full(root, "score.batch_check=0"), tmp_path / "parts"
    run, observed = scored(checkpoint, config, ITEMS, tmp_path, parts=parts, items_per_part=1)
    assert (observed["score"]["parts"], observed["score"]["parts_found"]) == (3, 0)
    assert run.parts is not None
    files = sorted(run.parts.iterdir())
    assert [file.name for file in files] == [f"part-{k:05d}.parquet" for k in range(3)]
    files[1].rename(files[1].with_suffix(".half"))
    again, observed = scored(checkpoint, config, ITEMS, tmp_path, parts=parts, items_per_part=1)
    assert (observed["score"]["parts"], observed["score"]["parts_found"]) == (3, 2)
    for name, one in (("first", run), ("again", again)):
        one.table.write_parquet(tmp_path / f"{name}.parquet")
        one.items.write_parquet(tmp_path / f"{name}_items.parquet")
    for end in (".parquet", "_items.parquet"):
        assert (tmp_path / f"again{end}").read_bytes() == (tmp_path / f"first{end}").read_bytes()
    assert again.summary == run.summary
    assert again.metrics == run.metrics
    # The size of a part changes which sequences share a batch, and so no more than the last bits.
    at_once, _ = scored(checkpoint, config, ITEMS, tmp_path)
    assert at_once.table["logprob"].to_list() == pytest.approx(run.table["logprob"].to_list(), abs=5e-4)

    other = tmp_path / "other"
    shutil.copytree(checkpoint, other)
    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"] *= 1.5
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    changed = [(other, config, ITEMS), (checkpoint, with_score(config, answer_prefix=" So"), ITEMS),
               (checkpoint, config, ITEMS[:2])]  # fmt: skip
    for folder, settings, items in changed:
        _, observed = scored(folder, settings, items, tmp_path, parts=parts, items_per_part=1)
        assert observed["score"]["parts_found"] == 0


def test_what_a_batch_does_to_scores_is_measured(checkpoint: Path, root: Path, tmp_path: Path) -> None:
    """In float32 it is rounding; bfloat16 differs by what its eight bits leave."""
    exact, _ = scored(checkpoint, full(root), ITEMS, tmp_path)
    assert exact.summary["batch_difference"]["sequences"] == 16
    assert exact.metrics["score/batch_difference_nats"] < 5e-5
    coarse, _ = scored(checkpoint, full(root, "score.dtype=bfloat16"), ITEMS, tmp_path)
    assert coarse.metrics["score/batch_difference_nats"] > 1e-3
    assert coarse.summary["tasks"]["cold"]["scorers"]["acc"]["scorer"] == "acc (bfloat16)"
    none, _ = scored(checkpoint, full(root, "score.batch_check=0"), ITEMS, tmp_path)
    assert none.summary["batch_difference"] is None
    assert "score/batch_difference_nats" not in none.metrics


def test_the_difference_is_the_largest_of_the_sample_by_hand(checkpoint: Path, root: Path) -> None:
    """An engine that gives 1 nat less per token when asked alone: a sequence of t tokens differs by t."""
    config = full(root)
    by_item, encoded = encode_items(checkpoint, ITEMS[:2], config.score, config.serve, config.seed)
    contexts = [context for own in by_item for context in own]
    tokens = [one for own in encoded for one in own]
    logprobs = [[[-1.0] * (len(ids) - one.start) for ids in one.ids] for one in tokens]
    table = build_table(contexts, tokens, logprobs)

    def alone(targets: Sequence[Target]) -> list[list[float]]:
        return [[-2.0] * (len(target.ids) - target.start) for target in targets]

    found = batch_difference(Engine(alone, alone), table, by_item, encoded, table.height, 0)
    assert found == {"sequences": table.height, "max_nats": table["tokens"].max(), "max_token_nats": 1.0}
    assert len(targets_of(contexts, tokens)) == table.height
    few = batch_difference(Engine(alone, alone), table, by_item, encoded, 3, 0)
    assert few is not None
    assert few["sequences"] == 3


def test_an_item_with_several_right_answers_and_one_without_that_column(tmp_path: Path) -> None:
    frame = pl.DataFrame({"item_id": ["a"], "task": ["t"], "question": ["?"], "options": [["x", "y", "z"]],
                          "answer": [1], "answers": [[1, 2]], "topic": ["letters"]})  # fmt: skip
    frame.write_parquet(tmp_path / "new.parquet")
    frame.drop("answers").write_parquet(tmp_path / "old.parquet")
    assert read_items(tmp_path / "new.parquet") == [Item("a", "t", "?", ("x", "y", "z"), 1, (1, 2), "letters")]
    assert read_items(tmp_path / "old.parquet") == [Item("a", "t", "?", ("x", "y", "z"), 1, (1,), "letters")]


def test_an_item_that_is_too_long_is_left_out_and_counted(checkpoint: Path, config: Config, tmp_path: Path) -> None:
    """As the committed settings have it, in every context of the item."""
    item = Item("long", "bread", "zx" * 400, ("a", "bb"), 0)
    run, _ = scored(checkpoint, config, [ITEMS[0], item], tmp_path)
    assert run.dropped["overlong"] == run.metrics["score/items_dropped"] == 1
    assert run.metrics["score/truncated"] == 0
    assert run.table["item_id"].unique().to_list() == ["q0"]
    with pytest.raises(
        UserError, match=r"none of 1 items can be scored: .*'overlong': 1}; allowed: .*score\.overlong='cut'"
    ):
        scored(checkpoint, config, [item], tmp_path)


def test_options_that_the_tokenizer_reads_as_one_are_left_out_and_counted(
    checkpoint: Path, config: Config, tmp_path: Path
) -> None:
    """A tokenizer that lower-cases cannot tell "Polish" from "polish": the first would win, whatever the model."""
    lower = tmp_path / "lower"
    shutil.copytree(checkpoint, lower)
    file = lower / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "normalizer": {"type": "Lowercase"}}))
    item = Item("case", "bread", "what comes from Poland?", ("polish", "Polish"), 1)
    run, _ = scored(lower, config, [ITEMS[0], item], tmp_path)
    assert run.dropped["same_tokens"] == run.metrics["score/items_dropped"] == 1
    assert run.table["item_id"].unique().to_list() == ["q0"]


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
