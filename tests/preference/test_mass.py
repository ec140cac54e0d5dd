"""Where probability went: literal distributions whose gains are worked by hand, and a tiny model read naively."""

from typing import Any

import numpy as np
import pytest
import torch

from oneaxis.preference.mass import Look, continuation_logps, fork_of, look, looked_at, moved, next_token, shown
from oneaxis.preference.pairs import Sequence

from .conftest import small_model, small_tokenizer

TOKENIZER = small_tokenizer()
PAIRS = [
    # Prompt 7; both begin with 10, then chosen 11 and rejected 12.
    (Sequence([7, 10, 11, 0], 1), Sequence([7, 10, 12, 0], 1)),
    # Prompt 8 9; they part at once: 13 and 10.
    (Sequence([8, 9, 13, 0], 2), Sequence([8, 9, 10, 0], 2)),
]


def row(**probabilities: float) -> list[float]:
    """A distribution over 20 tokens; what is not named is shared by token 19."""
    line = [0.0] * 20
    for name, value in probabilities.items():
        line[int(name[1:])] = value
    line[19] = 1 - sum(line)
    return line


def test_forks() -> None:
    assert [fork_of(pair) for pair in PAIRS] == [2, 2]
    assert fork_of((Sequence([1, 2], 1), Sequence([1, 2, 3], 1))) is None, "one begins the other"
    assert looked_at(PAIRS * 50)[0] is PAIRS[0]
    assert len(looked_at(PAIRS * 50)) == 32


def test_gains_by_hand() -> None:
    """First prompt: token 15 takes 0.3, 11 and 12 lose. Second: 15 takes 0.1, 16 takes 0.1, 13 and 10 lose.

    Moved in all 0.5; token 15 gains 0.4 (80%), 16 gains 0.1 (20%). Chosen (11, 13): 0.5 -> 0.4 and 0.3 -> 0.2;
    rejected (12, 10): 0.4 -> 0.2 and 0.3 -> 0.2; neither: 0.1 -> 0.4 and 0.4 -> 0.6.
    """
    before = np.array([row(t11=0.5, t12=0.4), row(t13=0.3, t10=0.3)], dtype=np.float32)
    after = np.array([row(t11=0.4, t12=0.2, t15=0.3), row(t13=0.2, t10=0.2, t15=0.1, t16=0.1)], dtype=np.float32)
    same = [[10, 11], [13, 0]]
    logps = [[np.log([0.25, 0.5]), np.log([0.5, 0.125])]] * 2
    told = moved(PAIRS, Look(before, before, same), Look(before, after, same), logps, TOKENIZER, 0.95)
    assert told["first"]["moved"] == 0
    assert told["first"]["gained"] == []
    # The first pair begins alike, with 10, which holds nothing: counted once.
    assert told["first"]["held_by"]["neither"]["before"] == pytest.approx((1 + 0.4) / 2)
    fork = told["fork"]
    assert fork["moved"] == pytest.approx(0.5)
    assert [line["text"] for line in fork["gained"]] == [shown(TOKENIZER, [15]), shown(TOKENIZER, [16])]
    assert [line["gain"] for line in fork["gained"]] == pytest.approx([0.4, 0.1])
    assert [line["share"] for line in fork["gained"]] == pytest.approx([0.8, 0.2])
    assert [line["num_prompts"] for line in fork["gained"]] == [2, 1]
    assert fork["gained"][0]["after"] == pytest.approx(0.2), "mean over prompts"
    held = fork["held_by"]
    assert (held["chosen"]["before"], held["chosen"]["after"]) == pytest.approx((0.4, 0.3))
    assert (held["rejected"]["effect"], held["neither"]["effect"]) == pytest.approx((-0.15, 0.25))
    assert held["chosen"]["ci_high"] == pytest.approx(-0.1, abs=1e-6), "both lost as much: no width"


def test_equal_greedy_texts_are_one_and_their_gains_add_up() -> None:
    """Both prompts now go on with 15, at 0.1 -> 0.6 and 0.2 -> 0.6; before they went on with 11 and 13."""
    flat = np.array([row(), row()], dtype=np.float32)
    before, after = Look(flat, flat, [[11], [13]]), Look(flat, flat, [[15], [15]])
    logps = [[np.log([0.5, 0.5]), np.log([0.2, 0.1])], [np.log([0.1, 0.2]), np.log([0.6, 0.6])]]
    told = moved(PAIRS, before, after, logps, TOKENIZER, 0.95)["greedy"]
    assert (told["num_prompts"], told["num_changed"]) == (2, 2)
    assert told["moved"] == pytest.approx(0.9)
    (line,) = told["gained"]
    assert line["text"] == shown(TOKENIZER, [15])
    assert (line["gain"], line["share"], line["before"], line["after"]) == pytest.approx((0.9, 1.0, 0.15, 0.6))
    assert line["num_prompts"] == 2


def test_a_look_is_what_the_model_says_one_prompt_at_a_time() -> None:
    """Oracle: the model alone on each prefix, in float64."""
    model, model64 = small_model(5), small_model(5).double()
    seen = look(model, PAIRS, [0])

    def naive(ids: list[int]) -> np.ndarray:
        with torch.no_grad():
            return torch.softmax(model64(torch.tensor([ids])).logits[0, -1], -1).numpy()

    assert seen.first_PV == pytest.approx(np.stack([naive([7]), naive([8, 9])]), abs=1e-5)
    assert seen.fork_PV == pytest.approx(np.stack([naive([7, 10]), naive([8, 9])]), abs=1e-5)
    for (chosen, _), continuation in zip(PAIRS, seen.continuations, strict=True):
        grown = chosen.ids[: chosen.start]
        for token in continuation:
            assert token == naive(grown).argmax()
            grown = [*grown, token]
    logps = continuation_logps(model, PAIRS, [[5, 6], [4]], [[5, 6], [3]])
    one, same, other = naive([7])[5] * naive([7, 5])[6], naive([8, 9])[4], naive([8, 9])[3]
    assert np.stack(logps) == pytest.approx(np.log([[one, same], [one, other]]), abs=1e-4)


def test_nothing_to_look_at() -> None:
    """Responses of which one begins the other have no fork, and that is said."""
    pairs: Any = [(Sequence([7, 10], 1), Sequence([7, 10, 12], 1))] * 2
    empty = next_token(small_model(), [])
    assert empty.shape == (0, 0)
    flat = np.array([row(), row()], dtype=np.float32)
    told = moved(pairs, Look(flat, empty, [[1], [1]]), Look(flat, empty, [[1], [1]]), [[np.zeros(2)] * 2] * 2,
                 TOKENIZER, 0.95)  # fmt: skip
    assert told["first"]["held_by"]["neither"]["after"] == 1
    assert told["fork"] == {"num_prompts": 0, "moved": 0.0, "gained": []}


def test_a_space_and_a_line_end_can_be_seen() -> None:
    ids = TOKENIZER(" a\nb")["input_ids"]
    assert shown(TOKENIZER, ids) == "␣a⏎b"
