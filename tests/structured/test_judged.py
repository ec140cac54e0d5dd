"""Verdicts on measures of answers: paired by document, from hand-made records. Nothing here was measured."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from oneaxis.config.schema import Claim
from oneaxis.judge.compare import Verdict, compare
from oneaxis.judge.multirun import headline_claims
from oneaxis.judge.records import read_record
from oneaxis.judge.units import better_of, kind_of
from oneaxis.structured.measures import MEASURES
from tests.judge.records import GATE, edit, settings, write_run


def write(folder: Path, way_out: bool, **columns: Sequence[float | None]) -> Path:
    """A run whose answers have these measures, in turns of a legible and an illegible document."""
    write_run(folder, config=settings(extract={"kind": "documents", "way_out": way_out}))
    n = len(next(iter(columns.values())))
    rows = pl.DataFrame({
        "document_id": [f"d{place // 2:03d}" for place in range(n)],
        "condition": ["legible", "illegible"] * (n // 2), "kind": ["receipt"] * n, **columns,
    })  # fmt: skip
    table = rows.with_columns(pl.lit(None, dtype=pl.Float64).alias(name) for name in MEASURES if name not in columns)
    table.sample(fraction=1.0, shuffle=True).write_parquet(folder / "artifacts" / "extract" / "answers.parquet")

    def tell(metrics: dict[str, float]) -> None:
        for name, values in columns.items():
            for part, own in (("records", values), ("legible", values[::2]), ("illegible", values[1::2])):
                known = [value for value in own if value is not None]
                if known:
                    metrics[f"extract/{part}/{name}"] = sum(known) / len(known)
        metrics["extract/answers"] = n

    edit(folder / "artifacts" / "extract.metrics.json", tell)
    return folder


def judged(tmp_path: Path, metric: str, one: dict[str, Any], other: dict[str, Any], **claim: Any) -> Verdict:
    write(tmp_path / "b", False, **one)
    write(tmp_path / "c", True, **other)
    asked = Claim.model_validate({"metric": metric, "better": better_of(metric) or "higher", **claim})
    return compare([tmp_path / "b"], [tmp_path / "c"], asked, GATE)


def test_right_or_wrong_is_mcnemar_over_the_documents_of_one_condition(tmp_path: Path) -> None:
    # Of 20 illegible ones 18 are forced, then 6; 12 lost, none gained: p = 2 / 2^12. Legible ones do not count.
    one = [value for place in range(20) for value in (1.0, float(place < 18))]
    other = [value for place in range(20) for value in (0.0, float(place < 6))]
    verdict = judged(tmp_path, "extract/illegible/label_forced", {"label_forced": one}, {"label_forced": other})
    assert (verdict.decision, verdict.n, verdict.unit_of_pairing) == ("accept", 20, "document")
    assert verdict.test == "McNemar, exact (0 gained, 12 lost)"
    assert verdict.p_value == pytest.approx(2 / 2**12)
    assert (verdict.baseline_value, verdict.candidate_value) == (0.9, 0.3)
    assert verdict.floor is None
    assert verdict.changed_axis == "extract.way_out"


def test_what_is_described_where_nothing_is_claimed(tmp_path: Path) -> None:
    columns = {"parse_failed": [0.0, 1.0] * 4, "label_right": [1.0, 0.0] * 4, "label_forced": [0.0, 1.0] * 4}
    arms = {name: [read_record(write(tmp_path / name, name == "c", **columns), name, 0)] for name in ("b", "c")}
    found = {claim.metric: claim.better for claim in headline_claims(arms, timed=False)}
    assert {name: better for name, better in found.items() if name.startswith("extract/")} == {
        "extract/records/parse_failed": "lower",
        "extract/legible/label_right": "higher",
        "extract/illegible/label_forced": "lower",
    }


def test_two_renderings_of_a_document_are_one_unit(tmp_path: Path) -> None:
    one, other = [0.0, 0.0] * 10, [1.0, 0.0] * 5 + [0.0, 0.0] * 5
    verdict = judged(tmp_path, "extract/records/label_right", {"label_right": one}, {"label_right": other})
    assert (verdict.n, verdict.test) == (10, "paired t")
    assert verdict.effect == pytest.approx(0.25)


def test_a_rate_that_is_near_zero_has_no_floor(tmp_path: Path) -> None:
    one, other = [0.0, 1.0] + [0.0] * 38, [0.0, 1.0, 0.0, 1.0] + [0.0] * 36
    verdict = judged(tmp_path, "extract/illegible/truncated", {"truncated": one}, {"truncated": other}, margin=0.4)
    assert (verdict.decision, verdict.floor) == ("accept", None)


def test_a_measure_that_the_arms_know_of_other_answers_decides_nothing(tmp_path: Path) -> None:
    one, other = [0.0, None] * 4 + [0.0, 1.0] * 4, [0.0, 1.0] * 8
    verdict = judged(tmp_path, "extract/illegible/label_guess", {"label_guess": one}, {"label_guess": other})
    assert verdict.decision == "unresolved"
    assert "known of 4 of 8 answers of the baseline and of 8 of 8 of the candidate" in verdict.reasons[0]


def test_other_documents_are_no_pairs_and_nothing_answered_is_invalid(tmp_path: Path) -> None:
    verdict = judged(tmp_path, "extract/illegible/exact", {"exact": [0.0, 1.0] * 4}, {"exact": [0.0, 1.0] * 5})
    assert "not measured on the same documents" in verdict.reasons[0]
    edit(tmp_path / "c/artifacts/extract.metrics.json", lambda m: m.update({"extract/answers": 0.0}))
    again = compare([tmp_path / "b"], [tmp_path / "c"], Claim(metric="extract/illegible/exact", better="higher"), GATE)
    assert again.decision == "invalid"
    assert "no document was answered" in again.reasons[0]


@pytest.mark.parametrize(
    ("metric", "better"),
    [
        ("extract/legible/label_right", "higher"), ("extract/n12/rows_right", "higher"),
        ("extract/lists/exact", "higher"), ("extract/illegible/label_forced", "lower"),
        ("extract/records/parse_failed", "lower"), ("extract/n12/early_stop", "lower"),
        ("extract/records/tokens", "lower"), ("extract/legible/label_guess", "lower"),
        ("extract/legible/label_unknown", None), ("extract/legible/label_kept", None),
        ("extract/legible/label_confidence", None),
    ],
)  # fmt: skip
def test_which_way_is_better(metric: str, better: str | None) -> None:
    assert (kind_of(metric), better_of(metric)) == ("documents", better)
    assert kind_of("extract/answers") == kind_of("extract/legible/n") == "none"
