"""The exporter on a table of literal numbers. (That lm-eval reads and writes the same: test_parity.)"""

import json
from pathlib import Path

import polars as pl
import pytest
import yaml

from oneaxis.score.boundary import Encoded
from oneaxis.score.contexts import Item, Wording, bos_context, question_context
from oneaxis.score.export import main, write_samples, write_tasks
from oneaxis.score.table import build_table

ITEMS = [Item("a", "quiz", "one?", ("x", "日本"), 1, (0, 1), "air"), Item("b", "quiz", "two?", ("y", "zz"), 0)]
ASKED = {"a": (-2.0, -3.0), "b": (-2.0, -3.0)}
UNASKED = {"a": (-1.0, -5.0), "b": (-1.0, -5.0)}


def table(*, unasked: tuple[str, ...] = ("a", "b"), wording: Wording | None = None) -> pl.DataFrame:
    """One token an option; `unasked` are the items that are scored without a prompt too."""
    how = wording or Wording(("Q: {question}\nA:",))
    contexts = [question_context(item, how) for item in ITEMS]
    contexts += [bos_context(item, how) for item in ITEMS if item.item_id in unasked]
    values = [(ASKED if context.kind == "question" else UNASKED)[context.item.item_id] for context in contexts]
    encoded = Encoded(ids=((1, 2), (1, 3)), start=1, backed_off=0, truncated=0)
    return build_table(contexts, [encoded] * len(contexts), [[[one] for one in pair] for pair in values])


def test_samples_say_right_and_wrong_and_the_requests(tmp_path: Path) -> None:
    """Item b: acc chooses y (-2), right; per character -2 against -1.5, zz, wrong; pmi -1 against +2, zz, wrong.
    Of item a both are right."""
    (path,) = write_samples(table(), tmp_path, "2026-01-02T03-04-05.0")
    assert path.name == "samples_oneaxis_quiz_2026-01-02T03-04-05.0.jsonl"
    first, second = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    assert second["arguments"] == {
        "gen_args_0": {"arg_0": "Q: two?\nA:", "arg_1": " y"}, "gen_args_1": {"arg_0": "Q: two?\nA:", "arg_1": " zz"},
        "gen_args_2": {"arg_0": "", "arg_1": " y"}, "gen_args_3": {"arg_0": "", "arg_1": " zz"},
    }  # fmt: skip
    assert second["filtered_resps"] == [["-2.0", "None"], ["-3.0", "None"], ["-1.0", "None"], ["-5.0", "None"]]
    names = ("acc", "acc_norm", "acc_bytes", "acc_mutual_info")
    assert [second[name] for name in names] == [1.0, 0.0, 0.0, 0.0]
    assert [first[name] for name in names] == [1.0, 1.0, 1.0, 1.0]
    assert (first["target"], second["target"]) == ("[0, 1]", "[0]")


def test_without_a_prompt_only_where_all_of_a_task_were_scored_so(tmp_path: Path) -> None:
    (path,) = write_samples(table(unasked=("a",)), tmp_path)
    for line in path.read_text(encoding="utf-8").splitlines():
        assert len(json.loads(line)["arguments"]) == 2
        assert "acc_mutual_info" not in json.loads(line)


def test_the_task_asks_what_the_model_read(tmp_path: Path) -> None:
    """After a chat template nothing stands between prompt and option."""
    assert write_tasks(table(wording=Wording(("{question}",), chat="<u>{}<a>".format)), tmp_path) == ["oneaxis_quiz"]
    settings = yaml.safe_load((tmp_path / "oneaxis_quiz.yaml").read_text(encoding="utf-8"))
    assert settings["target_delimiter"] == ""
    assert settings["doc_to_target"] == "answers"
    (data,) = settings["dataset_kwargs"]["data_files"].values()
    assert json.loads(Path(data).read_text(encoding="utf-8").splitlines()[0]) == {
        "item_id": "a", "prompt": "<u>one?<a>", "choices": ["x", "日本"], "answers": [0, 1], "topic": "air",
    }  # fmt: skip


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "artifacts" / "score"
    run.mkdir(parents=True)
    assert main([str(run), str(tmp_path / "out")]) == 2
    assert "table.parquet: missing; allowed: the folder that the stage score wrote" in capsys.readouterr().err
    table().write_parquet(run / "table.parquet")
    started = {"started_at": "2026-01-02T03:04:05.678+00:00"}
    (run.parent / "score.provenance.json").write_text(json.dumps(started))
    assert main([str(run), str(tmp_path / "out")]) == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "oneaxis_quiz.jsonl", "oneaxis_quiz.yaml", "samples_oneaxis_quiz_2026-01-02T03-04-05.678.jsonl",
    ]  # fmt: skip
    assert "tasks oneaxis_quiz, and 1 files of samples" in capsys.readouterr().out
