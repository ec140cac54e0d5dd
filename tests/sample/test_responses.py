"""Prompts in tokens, seeds, and what names the parts of a run. (The engine itself: `tests/e2e/test_on_policy.py`.)"""

from contextlib import AbstractContextManager, nullcontext
from decimal import Decimal
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from oneaxis.config import compose
from oneaxis.config.schema import SamplePairs
from oneaxis.errors import RunError, UserError
from oneaxis.load.draws import require_draws
from oneaxis.pipeline import check_inputs
from oneaxis.preference.pairs import render_pair
from oneaxis.sample.prompts import Prompt, own_prompts
from oneaxis.sample.responses import SCHEMA, Tokenized, parts_folder, sample_responses, seed_of, tokenize
from oneaxis.sample.rules import Rule
from tests.load.fake_server import fake_server
from tests.preference.conftest import small_tokenizer


def settings(root: Path, *overrides: str) -> SamplePairs:
    sample = compose(root / "conf", ["pairs=on_policy", *overrides]).sample
    assert isinstance(sample, SamplePairs)
    return sample


def test_the_model_is_given_the_tokens_that_training_will_see(root: Path) -> None:
    tokenizer = small_tokenizer()
    prompts = own_prompts(["arithmetic"], 3, chat=True, seed=0) + own_prompts(["words"], 3, chat=False, seed=0)
    found, too_long = tokenize(prompts, tokenizer, settings(root))
    assert too_long == 0
    for each in found:
        answer = '[{"role": "assistant", "content": "a"}]' if each.prompt.conversational else "a"
        other = answer.replace("a", "b", 1) if not each.prompt.conversational else answer.replace('"a"', '"b"')
        row = {"pair_id": "p", "prompt": each.prompt.text, "chosen": answer, "rejected": other,
               "conversational": each.prompt.conversational}  # fmt: skip
        assert tokenizer.decode(list(each.ids)) == render_pair(row, tokenizer)[0]
    with pytest.raises(UserError, match=r"sample\.chat_template: the model's tokenizer has no chat template"):
        tokenize(prompts, small_tokenizer(chat=False), settings(root))


def test_prompts_that_leave_no_room_are_counted(root: Path) -> None:
    prompts = own_prompts(["arithmetic"], 2, chat=False, seed=0)
    prompts.append(Prompt("long", "mine", "x" * 500, False, Rule("words", 3)))
    found, too_long = tokenize(prompts, small_tokenizer(), settings(root))
    assert ([each.prompt for each in found], too_long) == (prompts[:2], 1)
    with pytest.raises(UserError, match=r"^sample\.max_tokens=64: none of 1 prompts is of 1 to 448 tokens"):
        tokenize(prompts[2:], small_tokenizer(), settings(root))


def test_every_response_has_a_seed_of_its_own() -> None:
    prompts = own_prompts(["arithmetic"], 50, chat=False, seed=0)
    seeds = {(run, prompt.text, sample): seed_of(run, prompt, sample)
             for run in (0, 1) for prompt in prompts for sample in range(20)}  # fmt: skip
    assert len(set(seeds.values())) == 2 * 50 * 20
    assert all(0 <= seed < 2**31 for seed in seeds.values())


def test_parts_are_named_by_what_decides_the_texts_and_not_by_the_rules(root: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text("{}", encoding="utf-8")

    def name(*overrides: str, seed: int = 0, answer: int = 4, ids: tuple[int, ...] = (1, 2)) -> str:
        prompt = Prompt("p", "mine", "2 + 2?", False, Rule("number", Decimal(answer)))
        return parts_folder(tmp_path, checkpoint, [Tokenized(prompt, ids)], settings(root, *overrides), seed=seed).name

    first = name()
    assert name(answer=5) == name("sample.pairs_per_prompt=3") == name("sample.engine.port=8123") == first
    others = [name(seed=1), name(ids=(1, 3)), name("sample.num_samples=4"), name("sample.temperature=0.8"),
              name("sample.top_p=0.9"), name("sample.max_tokens=32"), name("sample.engine.dtype=float32")]  # fmt: skip
    (checkpoint / "config.json").write_text("{ }", encoding="utf-8")
    others.append(name())
    assert len({first, *others}) == 9


def test_fault_an_engine_whose_draws_repeat_is_not_sampled_from(root: Path, tmp_path: Path) -> None:
    """Oracle: the golden server, whose tokens are drawn evenly from eight and which may know one seed alone."""
    prompts = [Tokenized(prompt, (1, 2)) for prompt in own_prompts(["arithmetic"], 4, chat=False, seed=0)]
    with fake_server() as server:
        require_draws(server, prompts[0].ids, seed=0)
    with fake_server(seeds=1) as server:
        with pytest.raises(RunError, match="guard 8, frozen draws: 6 of 6 sampled answers with different seeds"):
            sample_responses(prompts, settings(root), seed=0, folder=tmp_path / "parts" / "key",
                             engine=lambda: nullcontext(server), observed={})  # fmt: skip
    assert not list((tmp_path / "parts" / "key").glob("*.parquet"))
    assert server.calls == []


def test_an_engine_is_not_started_where_all_parts_are_there(root: Path, tmp_path: Path) -> None:
    def engine() -> AbstractContextManager[Any]:
        raise AssertionError("started")

    folder = tmp_path / "parts" / "key"
    folder.mkdir(parents=True)
    prompts = [Tokenized(prompt, (1, 2)) for prompt in own_prompts(["arithmetic"], 40, chat=False, seed=0)]
    for number in range(2):
        rows = [(each.prompt.prompt_id, sample, 0, "x", 2, 1, True)
                for each in prompts[number * 32 : (number + 1) * 32] for sample in range(8)]  # fmt: skip
        pl.DataFrame(rows, schema=SCHEMA, orient="row").write_parquet(folder / f"part-0000{number}.parquet")
    observed: dict[str, Any] = {}
    found = sample_responses(prompts, settings(root), seed=0, folder=folder, engine=engine, observed=observed)
    assert found.height == 40 * 8
    assert observed == {"parts": 2, "parts_found": 2}
    (folder / "part-00001.parquet").unlink()
    with pytest.raises(AssertionError, match="started"):
        sample_responses(prompts, settings(root), seed=0, folder=folder, engine=engine, observed=observed)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["sample=mine", "sample.path=gone.jsonl"], r"^sample\.path=gone\.jsonl: no such file or folder"),
        (["+sample.engine.engine_args.block_siz=16"], r"^sample\.engine\.engine_args\.block_siz=16: no such argument"),
        (["+sample.engine.engine_args.scheduling_policy=fcfs"],
         r"^sample\.engine\.engine_args\.scheduling_policy='fcfs': allowed: priority"),
        (["+sample.engine.engine_args.enable_chunked_prefill=true"],
         r"^sample\.engine\.engine_args\.enable_chunked_prefill=True: an engine on a CPU dies of a prompt in pieces"),
        (["+sample.engine.engine_args.max_num_batched_tokens=64"],
         r"^sample\.engine\.engine_args\.max_num_batched_tokens=64 without chunked prefill: allowed: .*=512 and up"),
    ],
)  # fmt: skip
def test_a_mistake_is_refused_before_the_run(root: Path, tmp_path: Path, overrides: list[str], said: str) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "SOURCES.md").write_text("x", encoding="utf-8")
    (tmp_path / "artifacts/fetch_model/checkpoint").mkdir(parents=True)
    with pytest.raises(UserError, match=said):
        check_inputs(tmp_path, compose(root / "conf", ["pairs=on_policy", *overrides]))
