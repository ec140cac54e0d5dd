"""The same items through lm-eval 0.4.13's transformers backend, in float32: the oracle shares no code with ours.

Three tiny checkpoints: a tokenizer of bytes, the same with BOS before every text, and one that merges across the end of
the prompt. Nothing is faked: `lm_eval.simple_evaluate` runs on local task files, and what it writes is what we read.
"""

import json
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import yaml
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from oneaxis.cli import main
from oneaxis.config import compose
from oneaxis.score.boundary import Target
from oneaxis.score.contexts import Item
from oneaxis.score.export import documents, write_samples, write_tasks
from oneaxis.score.local import log_probabilities
from oneaxis.score.metrics import score_items
from oneaxis.score.scoring import score_checkpoint
from tests.serve.tiny import random_llama

TOLERANCE = 1e-4
"""Nats, of an option's summed log-probability in float32."""

SINGLE = [
    Item("s0", "single", "who bakes bread?", ("a baker", "a nurse", "a pilot", "a fish"), 0),
    Item("s1", "single", "日本 の首都は?", ("東京", "京都", "é", "e\u0301"), 1),
    Item("s2", "single", "what is {{x}} of {y}?", ("{{x}}", "{y}", "'x'"), 2),
    Item("s3", "single", 'two\nlines, "quoted" and \\ back', ("one\ntwo", "one", "one two", "one two three"), 0),
    Item("s4", "single", "7 times 6?", ("42", "7", "-1"), 0),
    Item("s5", "single", "an emoji?", ("👩‍👩‍👧", "🙂", "no, none at all, of a much longer sort"), 1),
    Item("s6", "single", "white space?", (" before", "after ", "in  side", "\ttab"), 3),
    Item("s7", "single", "ــ العربية?", ("نعم", "لا"), 0),
]
SEVERAL = [
    Item("m0", "several", "who flies?", ("flies", "a pilot", "a fish"), 0, (0, 1), "air"),
    Item("m1", "several", "which is cold?", ("the pole", "ice", "fire", "the sun"), 0, (0, 1)),
    Item("m2", "several", "which is bread?", ("a nurse", "a bread roll", "a fish"), 1, (1,)),
]
KINDS = ("bytes", "bos", "merging")
CLOZE = ("acc", "acc_norm", "acc_bytes")


@dataclass(frozen=True)
class Both:
    """A checkpoint's table from us, and lm-eval's folder."""

    table: pl.DataFrame
    items: pl.DataFrame
    theirs: Path
    exported: Path

    def samples(self, task: str) -> list[dict[str, Any]]:
        """What lm-eval logged of a task, in the order of its items."""
        (path,) = self.theirs.rglob(f"samples_{task}_*.jsonl")
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]

    def rows(self, task: str, context: str) -> list[pl.DataFrame]:
        """Our rows, one frame per item."""
        own = self.table.filter((pl.col("task") == task) & (pl.col("context") == context) & (pl.col("variant") == 0))
        return own.partition_by("item_id", maintain_order=True)


def write_plain(folder: Path) -> None:
    """A task as its author writes it for lm-eval: a template of its own, the data as it came."""
    docs = [{"question": i.question, "options": list(i.options), "answer": i.answer} for i in SINGLE]
    data = folder / "plain.jsonl"
    data.write_text("".join(json.dumps(doc) + "\n" for doc in docs), encoding="utf-8")
    task = {
        "task": "plain",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "Question: {{question}}\nAnswer:",
        "doc_to_choice": "options",
        "doc_to_target": "answer",
        "metric_list": [{"metric": name} for name in (*CLOZE, "acc_mutual_info")],
    }
    (folder / "plain.yaml").write_text(yaml.safe_dump(task), encoding="utf-8")


def run_lm_eval(checkpoint: Path, names: list[str], tasks: Path, out: Path) -> None:
    """lm-eval in float32, with its results and samples written as its command does."""
    from lm_eval import simple_evaluate
    from lm_eval.loggers import EvaluationTracker
    from lm_eval.tasks import TaskManager

    tracker = EvaluationTracker(output_path=str(out))
    found: Any = simple_evaluate(
        model="hf",
        model_args={"pretrained": str(checkpoint), "dtype": "float32"},
        tasks=list(names),
        batch_size=4,
        device="cpu",
        bootstrap_iters=0,
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        evaluation_tracker=tracker,
        log_samples=True,
    )
    samples = found.pop("samples")
    tracker.save_results_aggregated(results=found, samples=samples)
    for name in names:
        tracker.save_results_samples(task_name=name, samples=samples[name])


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path, root: Path) -> Mapping[str, Both]:
    """Every checkpoint scored by us and by lm-eval."""
    folder = tmp_path_factory.mktemp("parity")
    random_llama(folder / "bytes")
    shutil.copytree(folder / "bytes", folder / "bos")
    tokenizer = json.loads((folder / "bos" / "tokenizer.json").read_text(encoding="utf-8"))
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}},
    }
    (folder / "bos" / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    shutil.copytree(checkpoint, folder / "merging")
    config = compose(root / "conf", ["profile=tiny", "score.letter.items_per_task=0", "score.batch_check=0",
                                     "score.controls.items_per_task=100"])  # fmt: skip
    settings = (config.score, config.serve, config.seed)
    assert config.score.dtype == "float32"
    scored = {
        kind: score_checkpoint(folder / kind, SINGLE + SEVERAL, *settings, log=folder / "log", observed={})
        for kind in KINDS
    }
    tasks = folder / "tasks"
    tasks.mkdir()
    names = write_tasks(scored["bytes"].table, tasks)
    assert names == ["oneaxis_single", "oneaxis_several"]
    write_plain(tasks)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        # Its libraries warn; and a data set read from a file needs no hub, and no cache of the user's.
        warnings.simplefilter("ignore")
        import datasets

        patch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")
        for kind in KINDS:
            run_lm_eval(folder / kind, [*names, "plain"], tasks, folder / "theirs" / kind)
    found = {}
    for kind, run in scored.items():
        exported = folder / "ours" / kind
        exported.mkdir(parents=True)
        write_samples(run.table, exported, "2026-01-02T03-04-05.000000")
        found[kind] = Both(run.table, run.items, folder / "theirs" / kind, exported)
    return found


def logprobs(sample: dict[str, Any]) -> list[float]:
    """lm-eval's sums, one per request."""
    return [float(logprob) for logprob, _ in sample["filtered_resps"]]


@pytest.mark.parametrize("kind", ["bytes", "bos"])
@pytest.mark.parametrize("task", ["single", "several"])
def test_log_probabilities_are_lm_evals(both: Mapping[str, Both], kind: str, task: str) -> None:
    rows = both[kind].rows(task, "question")
    samples = both[kind].samples(f"oneaxis_{task}")
    assert len(rows) == len(samples) == len(SINGLE if task == "single" else SEVERAL)
    for ours, sample in zip(rows, samples, strict=True):
        assert ours["boundary"].unique().to_list() == ["clean"]
        assert ours["logprob"].to_list() == pytest.approx(logprobs(sample), abs=TOLERANCE)
        requests = [(each["arg_0"], each["arg_1"]) for each in sample["arguments"].values()]
        assert list(ours["prompt", "continuation"].iter_rows()) == requests


@pytest.mark.parametrize("kind", ["bytes", "bos"])
@pytest.mark.parametrize("task", ["single", "several"])
def test_accuracies_are_lm_evals_item_by_item(both: Mapping[str, Both], kind: str, task: str) -> None:
    items = both[kind].items.filter(pl.col("task") == task)
    by_id = {row["item_id"]: row for row in items.iter_rows(named=True)}
    for sample in both[kind].samples(f"oneaxis_{task}"):
        row = by_id[sample["doc"]["item_id"]]
        for name in CLOZE:
            assert row[f"{name}_correct"] == (sample[name] == 1.0), (sample["doc"], name)


def test_where_the_tokenizer_merges_across_the_boundary_lm_eval_scores_another_text(
    both: Mapping[str, Both], llama: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Here ":" and the space after it are one token. lm-eval cuts the encoded whole at the length of the encoded
    prompt, and puts the rest behind the prompt encoded alone: a text without that space. That moves choices (acc_norm
    of item s3). We score the whole, from where the two encodings part."""
    for task in ("single", "several"):
        for ours, sample in zip(
            both["merging"].rows(task, "question"), both["merging"].samples(f"oneaxis_{task}"), strict=True
        ):
            assert ours["boundary"].unique().to_list() == ["backed_off:1"]
            theirs = []
            for prompt, text in ours["prompt", "continuation"].iter_rows():
                context, whole = tokenizer.encode(prompt), tokenizer.encode(prompt + text)
                cut = context + whole[len(context) :]
                assert tokenizer.decode(whole) == prompt + text
                assert tokenizer.decode(cut) == prompt + text.removeprefix(" ")
                theirs.append(Target("", tuple(cut), len(context)))
            scored = [sum(values) for values in log_probabilities(llama, theirs, 512)[0]]
            assert logprobs(sample) == pytest.approx(scored, abs=TOLERANCE)
            assert logprobs(sample) != pytest.approx(ours["logprob"].to_list(), abs=1)


@pytest.mark.parametrize("kind", ["bytes", "bos"])
def test_an_lm_eval_task_of_its_own_template_gives_the_same(both: Mapping[str, Both], kind: str) -> None:
    """The template of conf/score is what a task's author would write; and its unconditional scores are our `pmi`."""
    items = both[kind].items.filter(pl.col("task") == "single").sort("item_id")
    asked, unasked = (both[kind].rows("single", context) for context in ("question", "bos"))
    for place, sample in enumerate(both[kind].samples("plain")):
        num = len(sample["doc"]["options"])
        theirs = logprobs(sample)
        assert asked[place]["logprob"].to_list() == pytest.approx(theirs[:num], abs=TOLERANCE)
        assert unasked[place]["logprob"].to_list() == pytest.approx(theirs[num:], abs=TOLERANCE)
        row = items.row(place, named=True)
        for ours, name in (*zip(CLOZE, CLOZE, strict=True), ("pmi", "acc_mutual_info")):
            assert row[f"{ours}_correct"] == (sample[name] == 1.0), (sample["doc"], name)


def test_what_we_export_is_what_lm_eval_logs(both: Mapping[str, Both]) -> None:
    """Key by key, hashes included; but for the numbers' last digits, and what only lm-eval knows or only we log."""
    for task in ("single", "several"):
        (path,) = both["bytes"].exported.glob(f"samples_oneaxis_{task}_*.jsonl")
        ours = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        for mine, sample in zip(ours, both["bytes"].samples(f"oneaxis_{task}"), strict=True):
            assert mine.keys() - {"acc_mutual_info"} == sample.keys()
            num = len(mine["doc"]["choices"])
            for key in ("doc_id", "doc", "target", "filter", "doc_hash", "prompt_hash", "target_hash", *CLOZE):
                assert mine[key] == sample[key], key
            assert list(mine["arguments"].items())[:num] == list(sample["arguments"].items())
            assert logprobs(mine)[:num] == pytest.approx(logprobs(sample), abs=TOLERANCE)
            assert [len(each) for each in mine["resps"]] == [1] * 2 * num
            assert mine["metrics"] == [*sample["metrics"], "acc_mutual_info"]


def test_the_table_survives_the_export(both: Mapping[str, Both]) -> None:
    asked = documents(both["bytes"].table)
    assert [document["choices"] for document in asked["single"]] == [list(item.options) for item in SINGLE]
    assert [document["answers"] for document in asked["several"]] == [[0, 1], [0, 1], [1]]
    assert score_items(both["bytes"].table)["acc_correct"].to_list() == both["bytes"].items["acc_correct"].to_list()


def test_two_outputs_of_lm_eval_are_judged(both: Mapping[str, Both], capsys: pytest.CaptureFixture[str]) -> None:
    """Another checkpoint is one axis; 8 items decide nothing."""
    arms = [str(both["bytes"].theirs), str(both["bos"].theirs)]
    assert main(["judge", *arms, "--json"]) == 0
    verdicts = {verdict["metric"]: verdict for verdict in json.loads(capsys.readouterr().out)}
    assert set(verdicts) == {f"score/{task}/acc_bytes" for task in ("oneaxis_single", "oneaxis_several", "plain")}
    single = verdicts["score/oneaxis_single/acc_bytes"]
    assert (single["changed_axis"], single["valid"], single["n"]) == ("model.pretrained", True, len(SINGLE))
    assert single["unit_of_pairing"] == "item"
    assert single["test"].startswith("McNemar")
    for arm, side in (("bytes", "baseline"), ("bos", "candidate")):
        own = [sample["acc_bytes"] for sample in both[arm].samples("oneaxis_single")]
        assert single[f"{side}_value"] == pytest.approx(sum(own) / len(own))


def test_our_export_and_lm_evals_output_are_a_tie(both: Mapping[str, Both], capsys: pytest.CaptureFixture[str]) -> None:
    arms = [str(both["bytes"].exported), str(both["bytes"].theirs)]
    assert main(["judge", *arms, "--json", "--metric", "score/oneaxis_single/acc_norm"]) == 1
    (verdict,) = json.loads(capsys.readouterr().out)
    assert (verdict["effect"], verdict["n"], verdict["valid"]) == (0.0, len(SINGLE), True)
    assert any("no results_*.json" in warning for warning in verdict["warnings"])
