"""Two real engines with NIXL between them, where it is installed; what is asked of them; the refusal without it."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oneaxis.config.schema import SplitNixl
from oneaxis.split.deployment import engine_specs, prompts_of, run_split
from tests.serve.tiny import HEAD_DIM, KV_HEADS, LAYERS, serve

PULL = SplitNixl(kind="pull", requests=4, prompt_tokens=300, output_tokens=12, rate_rps=8.0)
WITH_NIXL = pytest.mark.skipif(find_spec("nixl") is None, reason="nixl is optional, and not installed")


def test_without_nixl_it_is_refused_with_that_reason() -> None:
    # Without site-packages, nothing can be found.
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c",
         "import sys; sys.path = [p for p in sys.argv[1:] if p] + sys.path; from oneaxis.split.nixl import check_nixl\n"
         "from oneaxis.errors import UserError\n"
         "try: check_nixl('pull')\nexcept UserError as error: print(error)",
         str(Path(__file__).parents[2] / "src")],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.startswith("split=pull: the package nixl is not installed")
    assert "--no-deps nixl nixl-cu12" in done.stdout


def test_prompts_are_pieces_of_the_text_that_do_not_overlap() -> None:
    prompts = prompts_of(np.arange(2000), PULL, seed=5)
    assert [len(prompt) for prompt in prompts] == [300] * 4
    assert len({prompt[0] // 300 for prompt in prompts}) == 4
    assert prompts != prompts_of(np.arange(2000), PULL, seed=6)


def test_each_engine_has_its_role_and_a_channel_of_its_own(tmp_path: Path) -> None:
    first, second = engine_specs(tmp_path, serve(threads=0), PULL, tmp_path, cores=4)
    transfers = [spec.settings.engine_args["kv_transfer_config"] for spec in (first, second)]
    assert [transfer["kv_role"] for transfer in transfers] == ["kv_producer", "kv_consumer"]
    assert {transfer["kv_connector"] for transfer in transfers} == {"NixlConnector"}
    assert [spec.settings.threads for spec in (first, second)] == [2, 2]
    ports = {spec.environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] for spec in (first, second)}
    assert len(ports) == 2
    pushed = engine_specs(tmp_path, serve(), PULL.model_copy(update={"kind": "push"}), tmp_path, cores=2)
    assert {s.settings.engine_args["kv_transfer_config"]["kv_connector"] for s in pushed} == {"NixlPushConnector"}


@WITH_NIXL
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("kind", "transfer"), [("pull", True), ("push", True), ("pull", False)])
def test_keys_and_values_move_and_where_they_do_not_it_is_invalid(
    tiny_checkpoint: Path, tmp_path: Path, kind: Any, transfer: bool
) -> None:
    split = PULL.model_copy(update={"kind": kind})
    prompts = prompts_of(np.random.default_rng(0).integers(2, 300, 4000), split, seed=0)
    table, summary, realised = run_split(tiny_checkpoint, serve(threads=1, kv_cache_gib=0.25), split, prompts, seed=0,
                                         cores=2, logs=tmp_path, observed={}, transfer=transfer)  # fmt: skip
    assert table["prompt_tokens"].to_list() == [300] * 4
    assert [found["differences"] for found in realised.values()] == [[], [], []]
    with_connector = {name for name, found in realised.items() if "engine_args.kv_transfer_config" in found["resolved"]}
    assert with_connector == {"prefill", "decode"}
    if not transfer:
        assert summary["transferred_tokens"] == 0
        assert any("no token of keys and values was transferred" in reason for reason in summary["invalid"])
        return
    # HTTP's share of so small a model's request is more than the account allows.
    assert [reason for reason in summary["invalid"] if "the account has a hole" not in reason] == []
    assert summary["answers_equal"] == 1.0
    # Keys and values, two bytes each; whole blocks move, so a little more than the tokens'.
    per_token = 2 * LAYERS * KV_HEADS * HEAD_DIM * 2
    assert per_token <= summary["bytes_per_token"] < 1.5 * per_token
    assert summary["transferred_share"] >= 299 / 300
