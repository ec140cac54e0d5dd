"""The `draft` section as an argument of the engine."""

from pathlib import Path

import pytest

from oneaxis.config.schema import DraftLayers, DraftNgram, DraftNone
from oneaxis.draft.engine import speculating
from oneaxis.errors import UserError
from tests.serve.tiny import serve

NGRAM = DraftNgram(kind="ngram", num_tokens=4, lookup_min=2, lookup_max=5)


def test_each_kind_is_one_argument(tmp_path: Path) -> None:
    layers = DraftLayers(kind="layers", num_tokens=3, num_layers=1, steps=0, batch_size=1, sequence_tokens=16,
                         learning_rate=1e-3, warmup_steps=0, heldout_sequences=1, checkpoint_s=None)  # fmt: skip
    plain = serve(engine_args={"block_size": 128})
    assert speculating(plain, DraftNone(kind="none"), tmp_path) == plain
    assert speculating(plain, NGRAM, tmp_path).engine_args == {
        "block_size": 128,
        "speculative_config": {
            "method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 5,
        },
    }  # fmt: skip
    assert speculating(plain, layers, tmp_path).engine_args["speculative_config"] == {
        "method": "draft_model", "num_speculative_tokens": 3, "model": str(tmp_path),
    }  # fmt: skip
    assert plain.engine_args == {"block_size": 128}


def test_two_ways_of_telling_it_are_refused(tmp_path: Path) -> None:
    told = serve(engine_args={"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}})
    with pytest.raises(UserError, match=r"serve\.engine_args\.speculative_config: draft=ngram sets this"):
        speculating(told, NGRAM, tmp_path)
