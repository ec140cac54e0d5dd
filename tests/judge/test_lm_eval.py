"""Samples as lm-eval 0.4.13 writes them, by hand. (That these are what it writes: tests/score/test_parity.py.)"""

import json
from pathlib import Path
from typing import Any

import pytest

from oneaxis.cli import main
from oneaxis.errors import UserError
from oneaxis.judge.lm_eval import find_output, is_output, read_items

DATE = "2026-01-02T03-04-05.678901"


def sample(
    place: int,
    logprobs: list[float],
    *,
    target: str = "0",
    texts: tuple[str, ...] = (" a", " bbbb"),
    unconditional: list[float] | None = None,
    **logged: Any,
) -> dict[str, Any]:
    """A line of samples. `logged` are lm-eval's own metrics, and other keys to change."""
    requests = [(f"Question {place}:", text) for text in texts]
    requests += [("", text) for text in texts] if unconditional else []
    answered = [[str(value), "False"] for value in [*logprobs, *(unconditional or [])]]
    return {
        "doc_id": place, "doc": {"question": f"q{place}", "subject": "law"}, "target": target,
        "arguments": {f"gen_args_{k}": {"arg_0": a, "arg_1": b} for k, (a, b) in enumerate(requests)},
        "resps": [[answer] for answer in answered], "filtered_resps": answered, "filter": "none",
        "metrics": ["acc"], "doc_hash": f"{place:064x}"[::-1], "prompt_hash": f"p{place}", "target_hash": "t", **logged,
    }  # fmt: skip


def write(folder: Path, samples: list[dict[str, Any]], task: str = "quiz", date: str = DATE) -> Path:
    """A file of samples."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"samples_{task}_{date}.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in samples), encoding="utf-8")
    return path


def write_run(
    folder: Path, right: list[bool], *, date: str = DATE, args: Any = "pretrained=a,dtype=float32,device=cpu",
    shots: int = 0, prompt: str = "p", **more: Any,
) -> Path:  # fmt: skip
    """A whole output: option 0 is right, and chosen where `right` says so."""
    samples = [
        sample(k, [-1.0, -2.0] if good else [-2.0, -1.0], acc=float(good), acc_norm=float(good), prompt_hash=prompt)
        for k, good in enumerate(right)
    ]
    write(folder, samples, date=date)
    results = {"config": {"model": "hf", "model_args": args, "model_dtype": "torch.float32", "batch_size": 8},
               "n-shot": {"quiz": shots}, "versions": {"quiz": 1}, "lm_eval_version": "0.4.13", **more}  # fmt: skip
    (folder / f"results_{date}.json").write_text(json.dumps(results))
    return folder


RIGHT = [True] * 10 + [False] * 10


def test_an_item_is_right_as_lm_eval_says_and_what_it_did_not_log_is_computed(tmp_path: Path) -> None:
    """Options "a" and "bbbb" at -2 and -3: acc chooses "a"; per character -2 against -.75, "bbbb". Without a prompt -1
    and -5: pmi -1 against +2, "bbbb"."""
    path = write(tmp_path, [
        sample(0, [-2.0, -3.0], target="1", unconditional=[-1.0, -5.0], acc=0.0),
        sample(1, [-2.0, -3.0], target="[0, 1]", unconditional=[-1.0, -5.0], acc=1.0, acc_mutual_info=0.0),
    ])  # fmt: skip
    first, second = read_items(path, "quiz").to_dicts()
    assert (first["item_id"], first["topic"], first["answers"]) == ("0" * 16, "law", [1])
    assert [first[f"{name}_correct"] for name in ("acc", "acc_norm", "acc_bytes", "pmi")] == [False, True, True, True]
    assert [first[f"{name}_predicted"] for name in ("acc", "acc_norm", "acc_bytes", "pmi")] == [0, 1, 1, 1]
    # Of several right answers any counts, whatever the log says of acc_mutual_info.
    assert second["answers"] == [0, 1]
    assert second["pmi_correct"] is True


def test_a_multi_byte_option_is_shorter_in_characters_than_in_bytes(tmp_path: Path) -> None:
    """日本 has 2 characters and 6 bytes: -3 / 2 = -1.5 and -3 / 6 = -.5; "abc" at -3.3: -1.1 both."""
    path = write(tmp_path, [sample(0, [-3.0, -3.3], texts=(" 日本", " abc"), acc=1.0)])
    (row,) = read_items(path, "quiz").to_dicts()
    assert (row["acc_norm_predicted"], row["acc_bytes_predicted"]) == (1, 0)


def test_the_right_option_by_its_text_and_options_in_the_prompts(tmp_path: Path) -> None:
    """winogrande's way: one continuation after several contexts. lm-eval's own word is all there is then."""
    named = write(tmp_path / "a", [sample(0, [-1.0, -2.0], target="bbbb", acc=0.0)])
    assert read_items(named, "quiz")["answers"].to_list() == [[1]]
    apart = write(tmp_path / "b", [sample(0, [-1.0, -2.0], target="same", texts=(" same", " same"), acc=1.0)])
    (row,) = read_items(apart, "quiz").to_dicts()
    assert (row["answers"], row["acc_correct"], row["acc_norm_correct"]) == (None, True, None)


def test_a_task_with_a_rule_of_its_own_has_only_what_it_logged(tmp_path: Path) -> None:
    """acc says 1 where the likeliest option is wrong: nothing is computed beside it."""
    path = write(tmp_path, [sample(0, [-1.0, -2.0], target="1", acc=1.0, acc_norm=0.37)])
    (row,) = read_items(path, "quiz").to_dicts()
    assert (row["acc_correct"], row["acc_norm_correct"], row["acc_bytes_correct"]) == (True, None, None)
    soft = write(tmp_path, [sample(0, [-1.0, -2.0], acc=0.4)])
    with pytest.raises(UserError, match="no sample says right or wrong; allowed: a task with acc"):
        read_items(soft, "quiz")


def test_equal_documents_are_told_apart(tmp_path: Path) -> None:
    path = write(tmp_path, [sample(0, [-1.0, -2.0], doc_hash="x"), sample(1, [-1.0, -2.0], doc_hash="x")])
    assert read_items(path, "quiz")["item_id"].to_list() == ["x", "x#2"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", r"samples_quiz_.*\.jsonl:1: not JSON"),
        (json.dumps({"doc_id": 0, "resps": []}), r"jsonl:1: has no arguments with as many filtered_resps"),
        (json.dumps(sample(0, [-1.0, -2.0], filtered_resps=["one", "two"])), "its answers are no log-probabilities"),
        (json.dumps(sample(0, [-1.0, -2.0], filtered_resps=[[10**399], [-1]])), "its answers are no log-probabilities"),
        (json.dumps(sample(0, [-1.0], texts=(" a",))), "has 1 options; allowed: two options or more"),
        (json.dumps(sample(0, [-1.0, float("nan")])), "has a log-probability of NaN"),
        ("", "holds no samples"),
    ],
)
def test_what_is_none_of_lm_evals_is_refused_by_file_and_line(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / f"samples_quiz_{DATE}.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(UserError, match=said):
        read_items(path, "quiz")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"n-shot": None}, "n-shot is None; allowed: examples by task"),
        ({"config": {"model": float("nan")}}, "holds NaN or Infinity; allowed: finite numbers in config"),
        ({"config": None}, "has no config; allowed: what lm-eval writes"),
    ],
)
def test_results_of_another_shape_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: dict[str, Any], said: str
) -> None:
    one, other = write_run(tmp_path / "b", RIGHT), write_run(tmp_path / "c", RIGHT, **more)
    assert main(["judge", str(one), str(other)]) == 2
    error = capsys.readouterr().err
    assert f"results_{DATE}.json: " in error
    assert said in error
    assert error.count("\n") == 1


def test_the_newest_file_of_a_task_in_the_folder_of_one_model(tmp_path: Path) -> None:
    write(tmp_path / "m", [sample(0, [-1.0, -2.0])], date="2026-01-01T00-00-00.5")
    newest = write(tmp_path / "m", [sample(0, [-1.0, -2.0])])
    other = write(tmp_path / "m", [sample(0, [-1.0, -2.0])], task="a_2026-01-01T00-00-00_b")
    found = find_output(tmp_path)
    assert (found.files, found.older) == ({"a_2026-01-01T00-00-00_b": other, "quiz": newest}, 1)
    assert is_output(newest)
    assert not is_output(tmp_path / "m" / "missing")
    write(tmp_path / "n", [sample(0, [-1.0, -2.0])])
    with pytest.raises(UserError, match=r"holds samples of 2 models; allowed: one of .*/m, .*/n"):
        find_output(tmp_path)


def judged(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> list[dict[str, Any]]:
    """The verdicts of `oneaxis judge --json`."""
    assert main(["judge", *words, "--json"]) == code
    verdicts: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return verdicts


def test_two_checkpoints_are_paired_by_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """12 gained of 20, none lost: McNemar's exact p is 2 / 2^10 for 10. The order of the file does not matter."""
    one = write_run(tmp_path / "b", RIGHT)
    other = write_run(tmp_path / "c", [True] * 20, args={"pretrained": "b", "dtype": "float32", "device": "cuda"})
    path = other / f"samples_quiz_{DATE}.jsonl"
    path.write_text("".join(reversed(path.read_text().splitlines(keepends=True))))
    (verdict,) = judged(capsys, str(one), str(other), "--metric", "score/quiz/acc")
    assert verdict["decision"] == "accept"
    assert (verdict["baseline_value"], verdict["candidate_value"], verdict["n"]) == (0.5, 1.0, 20)
    assert verdict["p_value"] == pytest.approx(2 / 2**10)
    assert verdict["changed_axis"] == "model.pretrained"
    (described,) = judged(capsys, str(one), str(other))
    assert (described["metric"], described["claim"]) == ("score/quiz/acc_bytes", False)


def test_two_changes_are_two_axes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = write_run(tmp_path / "b", RIGHT)
    other = write_run(tmp_path / "c", RIGHT, args="pretrained=b,dtype=bfloat16")
    (verdict,) = judged(capsys, str(one), str(other), code=1)
    assert verdict["decision"] == "invalid"
    assert "2 axes differ: model.dtype (float32 -> bfloat16), model.pretrained (a -> b)" in verdict["reasons"][0]


def test_few_shot_examples_change_the_prompts_and_are_one_axis(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = write_run(tmp_path / "b", RIGHT)
    (verdict,) = judged(capsys, str(one), str(write_run(tmp_path / "c", RIGHT, shots=5, prompt="q")))
    assert (verdict["changed_axis"], verdict["valid"]) == ("score.num_fewshot", True)
    # Other prompts that nothing recorded explains are an axis of their own.
    (verdict,) = judged(capsys, str(one), str(write_run(tmp_path / "d", RIGHT, prompt="q")))
    assert verdict["changed_axis"] == "score.prompts"


def test_samples_alone_are_compared_with_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = write_run(tmp_path / "b", RIGHT)
    write_run(one, [False] * 20, date="2025-01-01T00-00-00")
    alone = write(tmp_path / "c", [sample(k, [-1.0, -2.0], acc=1.0) for k in range(20)])
    (verdict,) = judged(capsys, str(one), str(alone))
    assert verdict["changed_axis"] == "model.output"
    assert (
        f"{alone}: no results_*.json beside its samples: what differs between the runs is unknown"
        in verdict["warnings"]
    )
    assert f"{one}: 1 older files of samples are left aside" in verdict["warnings"]


def test_what_cannot_be_paired_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = write_run(tmp_path / "b", RIGHT)
    (verdict,) = judged(capsys, str(one), str(write_run(tmp_path / "c", RIGHT[:-1], args="pretrained=b,dtype=float32")))
    assert verdict["decision"] == "unresolved"
    assert "the arms were not measured on the same items of quiz" in verdict["reasons"][0]
    for other, said in (
        (write(tmp_path / "d", [sample(0, [-1.0, -2.0])], task="exam"), "no task is in both (quiz and exam)"),
        (tmp_path / "none", "holds no samples_*.jsonl of lm-eval, as the other does; allowed: two of lm-eval; or"),
        (one, "the same run twice"),
    ):
        assert main(["judge", str(one), str(other)]) == 2
        assert said in capsys.readouterr().err
