"""The draft model of a random Llama of two layers. Oracles: sums in float64, and a run that nothing interrupted."""

from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from safetensors.torch import load_file

from oneaxis.config.schema import DraftLayers
from oneaxis.draft import distill
from oneaxis.draft.distill import first_layers, kl, learning_rate, make_draft
from oneaxis.errors import UserError
from tests.serve.tiny import random_llama

SETTINGS = DraftLayers(
    kind="layers",
    num_tokens=3,
    num_layers=1,
    steps=6,
    batch_size=2,
    sequence_tokens=16,
    learning_rate=3e-3,
    warmup_steps=2,
    heldout_sequences=3,
    checkpoint_s=0.0,
)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_llama(tmp_path_factory.mktemp("draft") / "policy", num_hidden_layers=2)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("texts")
    for name, word in (("calibration", "a cat sat on a mat and "), ("heldout", "the cat is on the mat, ")):
        pl.DataFrame({"source": ["s"], "text": [word * 20]}).write_parquet(folder / f"{name}.parquet")
    return folder / "calibration.parquet", folder / "heldout.parquet"


def made(policy: Path, texts: tuple[Path, Path], folder: Path, settings: DraftLayers = SETTINGS, **more: Any) -> Any:
    (folder / "out").mkdir(parents=True, exist_ok=True)
    observed: dict[str, Any] = {}
    found = make_draft(policy, *texts, settings, seed=3, out=folder / "out", scratch=folder / "scratch",
                       observed=observed, **more)  # fmt: skip
    return *found, observed


def test_without_steps_it_is_the_first_layers_as_they_are(
    policy: Path, texts: tuple[Path, Path], tmp_path: Path
) -> None:
    metrics, notes, _ = made(policy, texts, tmp_path, SETTINGS.model_copy(update={"steps": 0}))
    whole, draft = load_file(policy / "model.safetensors"), load_file(tmp_path / "out/checkpoint/model.safetensors")
    assert {name for name in whole if ".layers.1." not in name} == set(draft)
    assert all(torch.equal(draft[name], whole[name]) for name in draft)
    assert metrics["kl_before"] == metrics["kl_after"]
    assert notes == {"layers": 1, "of": 2, "steps": 0}


def test_a_draft_learns_and_a_killed_one_ends_with_the_same_bytes(
    policy: Path, texts: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics, _, observed = made(policy, texts, tmp_path / "whole")
    assert observed["went_on_from_step"] == 0
    assert metrics["kl_after"] < metrics["kl_before"]

    class Killed(Exception):
        pass

    def killed_after_four(folder: Path, trained: Any, optimiser: Any, rows: list[Any]) -> None:
        save(folder, trained, optimiser, rows)
        if len(rows) == 4:
            raise Killed

    save = distill._save
    with monkeypatch.context() as patch:
        patch.setattr(distill, "_save", killed_after_four)
        with pytest.raises(Killed):
            made(policy, texts, tmp_path / "cut")
    again, _, observed = made(policy, texts, tmp_path / "cut")
    assert observed["went_on_from_step"] == 4
    assert again == metrics
    for name in ("checkpoint/model.safetensors", "checkpoint/config.json", "log.parquet", "heldout.parquet"):
        assert (tmp_path / "cut/out" / name).read_bytes() == (tmp_path / "whole/out" / name).read_bytes(), name
    assert not list((tmp_path / "cut/scratch").iterdir())

    log = pl.read_parquet(tmp_path / "whole/out/log.parquet")
    assert log["step"].to_list() == [1, 2, 3, 4, 5, 6]
    # Warm-up over two steps, then half a cosine from the full rate to a tenth of it.
    assert log["learning_rate"][:3].to_list() == pytest.approx([1.5e-3, 3e-3, 3e-3])
    assert learning_rate(6, SETTINGS) == pytest.approx(3e-4)
    # Embedding and head stay the policy's.
    whole = load_file(policy / "model.safetensors")
    draft = load_file(tmp_path / "whole/out/checkpoint/model.safetensors")
    moved = {name for name in draft if not torch.equal(draft[name], whole[name])}
    assert not {"lm_head.weight", "model.embed_tokens.weight"} & moved
    assert any(".layers.0." in name for name in moved)


def test_agreement_is_the_share_of_equal_greedy_choices(policy: Path, texts: tuple[Path, Path], tmp_path: Path) -> None:
    metrics, _, _ = made(policy, texts, tmp_path, SETTINGS.model_copy(update={"steps": 0}))
    table = pl.read_parquet(tmp_path / "out/heldout.parquet")
    # Bytes are tokens here: 3 sequences of 16, the first token of each is given.
    assert table.height == 3 * 15
    from transformers import AutoModelForCausalLM

    draft = AutoModelForCausalLM.from_pretrained(tmp_path / "out/checkpoint", dtype=torch.float64)
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float64)
    from oneaxis.checkpoint.load import load_tokenizer

    ids = load_tokenizer(policy)("the cat is on the mat, " * 20, add_special_tokens=False).input_ids
    prefix = load_tokenizer(policy)("a").input_ids[:-1]
    body = 16 - len(prefix)
    equal, distance = [], []
    for number in range(3):
        row = torch.tensor([prefix + ids[number * body : (number + 1) * body]])
        with torch.no_grad():
            p, q = (each(row).logits[0, :-1].softmax(-1) for each in (model, draft))
        equal += (p.argmax(-1) == q.argmax(-1)).tolist()
        distance += (p * (p / q).log()).sum(-1).tolist()
    assert metrics["agreement_after"] == pytest.approx(sum(equal) / 45)
    assert metrics["kl_after"] == pytest.approx(sum(distance) / 45, rel=1e-4)


def test_kl_by_hand() -> None:
    # 0.5 ln(0.5/0.25) + 0.5 ln(0.5/0.75) = 0.1438
    wanted, given = torch.tensor([[[0.5, 0.5]]]).log(), torch.tensor([[[0.25, 0.75]]]).log()
    assert kl(wanted, given).item() == pytest.approx(0.14384, abs=1e-5)


def test_as_many_layers_as_the_policy_has_are_refused(policy: Path, texts: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"draft\.num_layers=2: allowed: fewer than the policy has \(2\)"):
        made(policy, texts, tmp_path, SETTINGS.model_copy(update={"num_layers": 2}))


def test_too_little_text_names_the_key(policy: Path, texts: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"draft\.steps \* draft\.batch_size=2000"):
        made(policy, texts, tmp_path, SETTINGS.model_copy(update={"steps": 1000}))


def test_the_first_layers_share_the_policys_kinds_of_attention(tmp_path: Path) -> None:
    policy = random_llama(tmp_path / "policy", num_hidden_layers=2)
    assert first_layers(policy, 1).config.num_hidden_layers == 1
