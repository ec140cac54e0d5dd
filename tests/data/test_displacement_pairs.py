"""The pairs of `data=displacement`, as committed: what conf/experiment/displacement.yaml takes for granted of them."""

from pathlib import Path

from rapidfuzz.distance import Levenshtein

from oneaxis.config import compose
from oneaxis.prepare import make_pairs


def test_displacement_pairs_are_near_duplicates_of_different_prompts_enough_for_a_filter(root: Path) -> None:
    config = compose(root / "conf", ["experiment=displacement", "pairs=ches"])
    assert config.train.kind == "dpo"
    rows = make_pairs(config.data.pairs, seed=0, root=root)[0]["pairs"]
    sides = {side: [row for row in rows if row["split"] == side] for side in ("train", "heldout")}
    assert {side: len(pairs) for side, pairs in sides.items()} == {"train": 88, "heldout": 40}
    # Whichever filter: no pair is seen twice.
    assert config.pairs.value * len(sides["train"]) >= config.train.steps * config.train.batch_size
    assert len({row["prompt"] for row in rows}) == len(rows)
    assert min(Levenshtein.normalized_similarity(row["chosen"], row["rejected"]) for row in rows) > 0.6
