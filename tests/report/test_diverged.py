"""Divergence on the page, from a record that the stage's own code wrote of outputs laid out by hand."""

from collections.abc import Callable
from pathlib import Path

from oneaxis.artifacts import read_json, write_json
from oneaxis.config import compose
from oneaxis.report.results import read_results
from oneaxis.report.sections import all_sections, divergence
from tests.diverge.outputs import write_outputs


def test_levels_stand_side_by_side(root: Path, artifacts: Callable[..., Path]) -> None:
    """12 prompts of 3 outputs of 20 tokens; under load one output of each of 5 prompts parts at token 6, a tie."""
    settings = compose(root / "conf", ["diverge=greedy"]).diverge
    folder = artifacts(diverge=settings.model_dump(mode="json"))
    write_outputs(folder / "diverge", several=5)
    path = folder / "diverge.provenance.json"
    write_json(path, {**read_json(path), "observed": {"tokens_per_s": {"alone": 50.0, "loaded": 200.0}}})
    section = divergence(read_results(folder))
    levels, places = section.tables
    rows = {row[0]: row[1:] for row in levels.rows}
    assert levels.head == ("At temperature 0", "one at a time", "4 at a time")
    # 1 - 0.025^(1/12) = 26.5%; 5 of 12 by Clopper and Pearson: 15.2% to 72.3%.
    assert rows["Prompts with several outputs"] == ["0 of 12 [0.0%, 26.5%]", "5 of 12 [15.2%, 72.3%]"]
    assert rows["Outputs that left the commonest one"] == ["0 of 24", "5 of 24"]
    assert rows["First divergence, token: least, median"] == ["never", "6, 6.00"]
    # At risk: 5 outputs of 7 tokens and 19 of 20.
    assert rows["Flips a token"][1].startswith(f"{5 / (5 * 7 + 19 * 20):.3%} (at most ")
    assert rows["Divergences at an exact tie"] == ["–", "5 of 5"]
    assert rows["Divergences to the second choice"] == ["–", "100%"]
    assert rows["Positions with an exact tie of the top two"] == ["5.00%", "5.00%"]
    assert rows["Tokens a second, while asked"] == ["50.0", "200"]
    # Three equal outputs of three: 1 - 0.05^(1/2) = 78%.
    assert "up to 78% of the time" in levels.note
    assert [row[:4] for row in places.rows] == [[str(n), "loaded", "2", "6"] for n in range(5)]
    assert places.rows[0][4:] == ["0", "100", "7"]
    # 31 of 36 outputs under load are those given alone.
    assert "Of the outputs under load 86.1% are those given alone" in section.lead
    assert "for 0 of 12 prompts [0.0%, 26.5%]" in section.lead


def test_a_run_without_the_stage_has_no_such_section(artifacts: Callable[..., Path]) -> None:
    assert "divergence" not in [section.id for section in all_sections(read_results(artifacts()))]


def test_a_stage_that_did_not_end_says_so(root: Path, artifacts: Callable[..., Path]) -> None:
    settings = compose(root / "conf", ["diverge=greedy"]).diverge
    section = divergence(read_results(artifacts(diverge=settings.model_dump(mode="json"))))
    assert section.absent == "diverge did not run."
