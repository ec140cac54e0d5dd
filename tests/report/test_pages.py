"""What both pages owe every reader: they load nothing, can be walked by keyboard and ear, and their colours carry."""

import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from oneaxis.report import write_multirun_report, write_report
from oneaxis.report.page import TEMPLATES

Make = Callable[..., Any]
PPL, TTFT = "quantize/perplexity_after", "sweep/decode_heavy/r1/ttft_p50_ms"


@pytest.fixture(scope="module", params=["run", "multirun"])
def page(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, fill_artifacts: Make,
    params: dict[str, Any], multirun: Make, judged: Make, outline: Make,
) -> Any:  # fmt: skip
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "run":
        fill_artifacts(folder / "artifacts", params)
        write_report(folder / "artifacts", folder, "a title")
        return outline(folder / "report.html")
    verdicts = [judged(point, metric, decision, effect, 0.1, recommendations=["more pairs"])
                for metric in (PPL, TTFT)
                for point, decision, effect in (("a=1", "accept", -0.3), ("a=2", "invalid", -0.9))]  # fmt: skip
    multirun(folder, candidates={"a=1": 1.0, "a=2": 2.0, "a=3": 3.0}, metrics=[PPL, TTFT], verdicts=verdicts,
             repetitions=2, failed={"a=3": "broken"})  # fmt: skip
    return outline(write_multirun_report(folder))


def test_loads_nothing_and_runs_nothing(page: Any) -> None:
    policy = next(a["content"] for a in page.all("meta") if "http-equiv" in a)
    assert policy == "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
    assert not {"script", "link", "iframe", "object", "embed", "img", "form"} & {tag for tag, _ in page.tags}
    assert "http" not in page.page.replace("http-equiv", "")
    assert "//" not in re.sub(r"<style>.*?</style>", "", page.page, flags=re.S).replace("</", "")
    assert "@import" not in page.page
    assert "url(" not in page.page.replace("url(#", "")


def test_links_lead_somewhere(page: Any) -> None:
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    for attributes in page.all("a"):
        target = attributes["href"] or ""
        assert target.startswith("points/") or target.removeprefix("#") in ids, target
    for match in re.findall(r"url\(#([^)]+)\)", page.page):
        assert match in ids


def test_landmarks_and_headings(page: Any) -> None:
    tags = [tag for tag, _ in page.tags]
    assert [tags.count(tag) for tag in ("header", "nav", "main", "footer", "h1")] == [1] * 5
    levels = [level for level, _ in page.headings]
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))
    assert all(words.strip() for _, words in page.headings)
    assert page.all("html")[0]["lang"] == "en"
    assert page.all("a")[0] == {"class": "skip", "href": "#main"}
    assert page.all("main")[0]["tabindex"] == "-1"


def test_every_plot_and_table_is_named(page: Any) -> None:
    plots = page.all("svg")
    assert plots
    assert all(plot["role"] == "img" and len(plot["aria-label"] or "") > 20 for plot in plots)
    assert page.tables
    assert all(table.caption.strip() for table in page.tables)
    assert all(len(row) == len(table.rows[0]) for table in page.tables for row in table.rows)
    assert {attributes.get("scope") for attributes in page.all("th")} == {"col", "row"}


def test_what_scrolls_or_folds_is_reached_by_keyboard(page: Any) -> None:
    scrolls = [attributes for attributes in page.all("div") if attributes.get("class") == "scroll"]
    assert len(scrolls) == len(page.tables)
    assert all(attributes["tabindex"] == "0" and attributes["aria-label"] for attributes in scrolls)
    assert len(page.all("summary")) == len(page.all("details")) > 0


def test_plots_take_the_colours_of_the_page(page: Any) -> None:
    """A colour of matplotlib's own would be invisible on one of the two grounds."""
    for svg in re.findall(r"<svg.*?</svg>", page.page, flags=re.S):
        assert not re.findall(r"(?:fill|stroke): ?#[0-9a-f]{3,6}", svg)
        assert "currentColor" in svg
        assert "font-family" not in svg


def test_no_number_is_missing_its_digits(page: Any) -> None:
    assert not re.search(r"\b(nan|NaN|inf|None)\b", page.text)


# --- colours -------------------------------------------------------------------------------------------------


def themes() -> dict[str, dict[str, str]]:
    """The variables of the style sheet: light, and dark and print, which say what differs."""
    text = (TEMPLATES / "report.css").read_text(encoding="utf-8")
    blocks = re.findall(r":root \{(.*?)\}", text, flags=re.S)
    assert len(blocks) == 3
    light, dark, paper = (dict(re.findall(r"--([\w-]+): (#[0-9a-f]{3,6})", block)) for block in blocks)
    return {"light": light, "dark": light | dark, "print": light | paper}


def contrast(one: str, other: str) -> float:
    """WCAG 2.2: (L1 + .05) / (L2 + .05), L of sRGB."""

    def luminance(colour: str) -> float:
        digits = colour.removeprefix("#")
        digits = "".join(2 * d for d in digits) if len(digits) == 3 else digits
        parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
        red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_contrast_formula() -> None:
    """Worked: black on white is 21; #767676 on white is the well-known 4.54."""
    assert contrast("#000", "#fff") == pytest.approx(21)
    assert contrast("#767676", "#ffffff") == pytest.approx(4.54, abs=0.005)


@pytest.mark.parametrize("theme", ["light", "dark", "print"])
def test_text_contrast(theme: str) -> None:
    """Every ink on every ground that it is set on: 4.5 at least."""
    colours = themes()[theme]
    for ink, grounds in {
        "ink": ("paper", "raised", "bad-paper"), "muted": ("paper", "raised"),
        "link": ("paper", "raised", "bad-paper"), "good": ("paper", "good-paper"), "bad": ("paper", "bad-paper"),
        "warn": ("warn-paper",),
    }.items():  # fmt: skip
        for ground in grounds:
            assert contrast(colours[ink], colours[ground]) >= 4.5, (ink, ground)


@pytest.mark.parametrize("theme", ["light", "dark", "print"])
def test_series_contrast(theme: str) -> None:
    """Lines and marks: 3 at least against the page (WCAG 1.4.11)."""
    colours = themes()[theme]
    for number in range(1, 7):
        assert contrast(colours[f"c{number}"], colours["paper"]) >= 3, number


def test_dark_names_every_colour_that_light_has() -> None:
    text = (TEMPLATES / "report.css").read_text(encoding="utf-8")
    names = [set(re.findall(r"--([\w-]+):", block)) for block in re.findall(r":root \{(.*?)\}", text, flags=re.S)]
    assert names[0] == names[1] == names[2]


def test_style_sheet_shows_focus_and_opens_folds_on_paper() -> None:
    text = Path(TEMPLATES / "report.css").read_text(encoding="utf-8")
    assert ":focus-visible" in text
    assert "prefers-color-scheme: dark" in text
    printed = text[text.index("@media print") :]
    assert "details-content" in printed
    assert "break-inside: avoid" in printed
