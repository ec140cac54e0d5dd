"""The page from synthetic artifacts: its numbers, what it says when parts are missing, and that it is safe to open."""

import re
import shutil
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from oneaxis.artifacts import read_json, write_json
from oneaxis.config import STAGE_SECTIONS
from oneaxis.errors import UserError
from oneaxis.judge.validity import Validity, judge_run
from oneaxis.pipeline import verdict
from oneaxis.report import write_report
from oneaxis.report.facts import card, question
from oneaxis.report.results import read_results
from oneaxis.report.sections import preference
from tests.quantize.checkpoints import scheme
from tests.report.conftest import all_guards

Make = Callable[..., Path]


class Page(HTMLParser):
    """Collects the text, the tags with their attributes, and the rows of all tables."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[list[str]] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(page)
        self.text = " ".join(" ".join(self.words).split())
        self.plots = " ".join(str(attributes["aria-label"]) for tag, attributes in self.tags if tag == "svg")

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if "style" not in self._open:
            self.words.append(data)
        if self._open and self._open[-1] in ("td", "th") and self.rows and self.rows[-1]:
            self.rows[-1][-1] += data

    def row(self, *start: str) -> list[str]:
        return next(row for row in self.rows if row[: len(start)] == list(start))


def write(artifacts: Path, tmp_path: Path) -> tuple[dict[str, float], Page, str]:
    out = tmp_path / "out"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    metrics = write_report(artifacts, out, "a title")
    page = (out / "report.html").read_text(encoding="utf-8")
    return metrics, Page(page), (out / "card.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def whole(
    tmp_path_factory: pytest.TempPathFactory, fill_artifacts: Callable[..., None], params: dict[str, Any]
) -> tuple[Path, dict[str, float], Page, str]:
    """The page of complete artifacts, made once: (folder, metrics, page, text)."""
    folder = tmp_path_factory.mktemp("whole")
    fill_artifacts(folder / "artifacts", params)
    metrics, page, _ = write(folder / "artifacts", folder)
    return folder, metrics, page, (folder / "out" / "report.html").read_text(encoding="utf-8")


Whole = tuple[Path, dict[str, float], Page, str]


def test_headline_says_what_the_metrics_say(whole: Whole) -> None:
    """Oracle: the literal numbers of conftest.py; exp(x) - 1 of .018, .012 and .024 is 1.8%, 1.2% and 2.4%."""
    folder, metrics, page, _ = whole
    assert metrics == {"report/valid": 1, "report/reasons": 0, "report/warnings": 0, "report/stages_missing": 0}
    assert page.row("Perplexity, by quantisation")[1:] == ["15.39", "15.67", "+1.8%", "+1.2% to +2.4%", "16 sequences"]
    assert page.row("Chosen log-probability, by training")[1:] == [
        "−42.25", "−40.50", "+1.75 nats", "+1.25 to +2.25", "32 held-out pairs"]  # fmt: skip
    row = page.row("decode_heavy", "1 req/s")
    assert row[3].startswith("612 [")
    assert row[4].startswith("1,403 [")
    assert row[5:8] == ["51", "67", "23.4"]
    assert row[8].startswith("70% [")
    assert "capacity: prefill_heavy 11.7 tokens/s at 0.5 req/s, decode_heavy none." in page.text
    assert page.row("Refusals of benign prompts, by training")[1:] == [
        "0.0%", "6.2%", "+6.2 points", "−3.0 to +16.0 points", "48 prompts"]  # fmt: skip
    accuracy = read_json(folder / "artifacts" / "score.metrics.json")["score/openbookqa/pmi_dc"]
    assert page.row("pmi_dc")[3] == f"{100 * accuracy:.1f}% ± 3.1 (n 200)"
    assert "VALID" in page.text
    assert "INVALID" not in page.text.replace("makes the run INVALID", "")


def test_quantisation_says_what_moved_each_with_its_interval(whole: Whole) -> None:
    """Oracle: the literal numbers of conftest.py."""
    _, _, page, _ = whole
    assert page.row("Perplexity")[1:] == ["15.39", "15.67", "+1.8%", "+1.2% to +2.4%", "16"]
    assert page.row("Perplexity, novel")[1:4] == ["21.90", "22.27", "+1.7%"]
    assert page.row("KL from the policy, nats a token")[1:] == ["0", "0.0213", "+0.0213", "0.0197 to 0.0229", "16"]
    assert page.row("Same most likely token")[1:] == ["100%", "94.2%", "−5.8 points", "−6.2 to −5.4 points", "16"]
    assert page.row("all kinds")[1:] == ["65%", "60%", "−5.2 points", "−10.0 to −0.4 points", "13", "1", "228", "20"]
    assert page.row("digits")[3:5] == ["0.0 points", "−11.0 to +11.0 points"]
    assert page.row("retrieval from a long text")[4] == "–"
    assert "The suite tells a weak quantisation apart: the model copies 65.3% of 228 strings" in page.text
    assert page.row("Exact copies, by quantisation")[1:] == [
        "65.3%", "60.1%", "−5.2 points", "−10.0 to −0.4 points", "228 strings"]  # fmt: skip
    assert "Exact copies: 65.3% to 60.1% of 228 strings (−5.2 points, 95% interval −10.0 to −0.4 points)." in page.text
    assert page.row("Linear layers quantised")[1] == "210"
    assert page.row("Weights on disk")[1] == "163 MB"


def test_a_suite_that_cannot_tell_says_so_in_the_summary(artifacts: Make, tmp_path: Path) -> None:
    folder = artifacts()
    report = read_json(folder / "quantize" / "quality.json")
    report["suite"] = {"discriminates": False, "why": "The suite cannot tell."}
    write_json(folder / "quantize" / "quality.json", report)
    _, page, _ = write(folder, tmp_path)
    assert "the suite cannot tell a known-weak model apart here, so this is no proof" in page.text


def test_a_context_that_was_cut_is_said(artifacts: Make, tmp_path: Path) -> None:
    folder = artifacts()
    pl.DataFrame({"position": [0, 1023]}).write_parquet(folder / "calibrate" / "copy_tokens.parquet")
    _, page, _ = write(folder, tmp_path)
    assert "Texts are cut to 1,024 of 2,048 tokens, the model's positions." in page.text


def test_every_scheme_is_described(artifacts: Make, tmp_path: Path) -> None:
    for settings, words in (
        (scheme("w8a8_int8_static", alpha="auto", kv="fp8"),
         "W8A8 INT8, one static activation scale a tensor; SmoothQuant α chosen per tensor at qkv, o, gate_up, down; "
         "KV cache FP8"),
        (scheme("w4a16", [], symmetric=False, rounding="gptq"),
         "W4A16, groups of 32, with zero points; activations as they are, GPTQ; no smoothing"),
        (scheme("w8a8_fp8", ["down"], site_alpha={"qkv": None, "o": None, "gate_up": None, "down": 0.7}),
         "W8A8 FP8 (E4M3), activations per token at run time; SmoothQuant α = 0.5 at down (0.7)"),
    ):  # fmt: skip
        shutil.rmtree(tmp_path / "artifacts", ignore_errors=True)
        _, page, _ = write(artifacts(quantize=settings.model_dump(mode="json")), tmp_path)
        assert words in page.text
        assert ("alpha of each tensor" in page.plots) == (settings.smooth.alpha == "auto")


def test_a_kv_cache_alone_is_a_change(artifacts: Make, tmp_path: Path) -> None:
    folder = artifacts(quantize={"kind": "none", "kv": "fp8"})
    assert question(read_results(folder)).startswith("What does DPO training with an FP8 KV cache do to ")
    _, page, _ = write(folder, tmp_path)
    assert page.row("KV cache")[1] == "FP8 (E4M3), calibrated scales"
    assert page.row("Weights and activations")[1] == "as they are"
    assert "Not quantised" not in page.text


def test_same_artifacts_give_the_same_bytes(whole: Whole, tmp_path: Path) -> None:
    folder, _, _, text = whole
    write(folder / "artifacts", tmp_path)
    assert (tmp_path / "out" / "report.html").read_text(encoding="utf-8") == text


def test_page_loads_nothing_and_runs_nothing(whole: Whole) -> None:
    _, _, page, text = whole
    assert "script" not in {tag for tag, _ in page.tags}
    assert not {"link", "iframe", "object", "embed", "img"} & {tag for tag, _ in page.tags}
    for tag, attributes in page.tags:
        for name in ("src", "href", "data", "xlink:href"):
            assert (attributes.get(name) or "#").startswith("#"), (tag, attributes)
        assert not [name for name in attributes if name.startswith("on")]
    assert "http" not in text.replace("http-equiv", "")
    assert "url(" not in text.replace("url(#", "")
    policy = next(a["content"] for tag, a in page.tags if tag == "meta" and "http-equiv" in a)
    assert policy is not None
    assert policy.startswith("default-src 'none'")


def test_every_plot_is_named_and_ids_are_unique(whole: Whole) -> None:
    _, _, page, _ = whole
    plots = [attributes for tag, attributes in page.tags if tag == "svg"]
    assert len(plots) == 11
    assert all(plot["role"] == "img" and len(plot["aria-label"] or "") > 20 for plot in plots)
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    known = {f"#{name}" for name in ids}
    assert {a["href"] for _, a in page.tags if "href" in a} <= known


def test_plots_take_the_colours_of_the_page(whole: Whole) -> None:
    """A colour of matplotlib's own would be invisible on one of the two grounds."""
    _, _, _, text = whole
    for svg in re.findall(r"<svg.*?</svg>", text, flags=re.S):
        assert not re.findall(r"(?:fill|stroke): ?#[0-9a-f]{3,6}", svg)
        assert "currentColor" in svg


def test_hostile_text_is_shown_not_run(artifacts: Make, tmp_path: Path) -> None:
    """In the model's name, a pair, a guard and the title."""
    evil = '<script>alert(1)</script><img src=x onerror="alert(1)">'
    folder = artifacts(model={"kind": "path", "path": evil.replace("/", ""), "trust_remote_code": False})
    path = folder / "filter_pairs" / "pairs.parquet"
    pl.read_parquet(path).with_columns(pl.lit(evil).alias("chosen")).write_parquet(path)
    write_json(
        folder / "sweep" / "guards.json",
        [{"guard": 1, "name": evil, "valid": False, "evidence": {evil: evil}, "reason": evil}],
    )
    out = tmp_path / "out"
    out.mkdir()
    write_report(folder, out, evil)
    page = Page((out / "report.html").read_text(encoding="utf-8"))
    assert not {"script", "img"} & {tag for tag, _ in page.tags}
    assert page.text.count("alert(1)") > 10


def test_failed_guard_makes_the_run_invalid_with_its_reason(artifacts: Make, tmp_path: Path) -> None:
    folder = artifacts()
    write_json(folder / "sweep" / "guards.json", all_guards(
        {"guard": 5, "name": "load fidelity", "valid": False, "evidence": {"lag_p99_ms": 812.0}, "reason": "sent late"},
    ))  # fmt: skip
    metrics, page, words = write(folder, tmp_path)
    assert (metrics["report/valid"], metrics["report/reasons"]) == (0, 1)
    assert "guard 5, load fidelity: sent late" in page.text
    assert page.row("5 load fidelity") == ["5 load fidelity", "INVALID", "lag p99 ms: 812", "sent late"]
    assert words.startswith("**INVALID**")
    assert "sent late" in words


def test_engine_that_runs_otherwise_than_asked_makes_the_run_invalid(artifacts: Make) -> None:
    folder = artifacts()
    realised = read_json(folder / "serve" / "realised.json")
    difference = {"name": "kv_cache_dtype", "asked": "auto", "resolved": "fp8"}
    write_json(folder / "serve" / "realised.json", {**realised, "differences": [difference]})
    assert judge_run(read_results(folder)) == Validity(
        False, ["engine: kv_cache_dtype: asked: auto; resolved: fp8"], []
    )


@pytest.mark.parametrize(("needed", "code"), [(["serve", "sweep"], 1), (["serve"], 0)])
def test_a_load_that_is_invalid_fails_a_run_that_ends_before_the_report(
    artifacts: Make, needed: list[str], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """What an earlier run left of other stages says nothing."""
    folder = artifacts()
    write_json(folder / "sweep" / "guards.json", all_guards(
        {"guard": 1, "name": "unique prompts", "valid": False, "evidence": {}, "reason": "4 of 8 prompts repeat"},
    ))  # fmt: skip
    assert verdict(folder.parent, needed) == code
    said = "oneaxis: the run is INVALID: guard 1, unique prompts: 4 of 8 prompts repeat\n"
    assert capsys.readouterr().err == said * code


@pytest.mark.parametrize(
    ("stage", "lease", "reason"),
    [
        ("serve", None, "serve: the device was not held: another run may have used it"),
        (
            "sweep",
            {"device": "cpu 0-1", "exclusive": False, "waited_s": 0.0},
            "sweep: cpu 0-1 was shared with other runs",
        ),
    ],
)
def test_a_timing_without_an_exclusive_lease_makes_the_run_invalid(
    artifacts: Make, stage: str, lease: dict[str, Any] | None, reason: str
) -> None:
    folder = artifacts()
    path = folder / f"{stage}.provenance.json"
    write_json(path, {**read_json(path), "lease": lease})
    assert judge_run(read_results(folder)) == Validity(False, [reason], [])


def test_what_became_of_benign_prompts_and_where_probability_went(whole: Whole) -> None:
    """Oracle: the literal numbers of conftest.py."""
    _, _, page, _ = whole
    assert page.row("Refused, answered greedily")[2:] == ["0.0%", "6.2%", "+6.2 points", "−3.0 to +16.0 points", "48"]
    assert page.row("Escape text wont")[1:] == [
        "“I won't help with that.”", "−31.60", "−31.00", "+0.60", "+0.30 to +0.90", "16"]  # fmt: skip
    assert page.row("Escape text empty")[1] == "(ends at once)"
    assert "98.0% right [93.1%, 99.5%], precision 100.0%, recall 95.7% on 102 validation answers" in page.text
    assert page.row("where they part: anything else")[1:] == ["10.0%", "50.0%", "+40.0 points", "+38.0 to +42.0 points"]
    for row in (["␣I", "+4.00", "80.0%", "12.5%", "25.0%", "30"], ["How does 2 work?", "It works well."]):
        assert page.row(*row)
    assert page.row("␣I won't help")
    assert "refusals of benign prompts 0.0% → 6.2%" in page.text


def test_a_training_that_was_stopped_early_makes_the_run_invalid(artifacts: Make) -> None:
    """Its policy is none of the settings'; what does not rest on the training stays valid."""
    folder = artifacts()
    found = read_json(folder / "train_dpo" / "displacement.json")
    stopped = {"step": 6, "steps": 24, "heldout_chosen_change": -1.3, "reason": "stopped at step 6 of 24: it fell"}
    write_json(folder / "train_dpo" / "displacement.json", {**found, "stopped": stopped})
    said = "train_dpo: stopped at step 6 of 24: it fell; the policy is that of an unfinished training"
    assert judge_run(read_results(folder)).reasons == [said]
    assert judge_run(read_results(folder), ["filter_pairs"]).valid


def test_displacement_is_a_warning_of_a_valid_run(artifacts: Make) -> None:
    folder = artifacts()
    found = read_json(folder / "train_dpo" / "displacement.json")
    write_json(folder / "train_dpo" / "displacement.json", {**found, "verdict": "severe", "reasons": ["both fell"]})
    assert judge_run(read_results(folder)) == Validity(True, [], ["preference training: severe (both fell)"])


def test_what_sft_changed_and_a_reference_that_is_not_its_result_are_shown(artifacts: Make) -> None:
    folder = artifacts()
    found = read_json(folder / "train_dpo" / "displacement.json")
    sft = {"chosen": {"effect": 12.5, "ci_low": 11.5, "ci_high": 13.5}}
    said = "DPO did not begin at its reference: by 7 nats"
    write_json(folder / "train_dpo" / "displacement.json", {**found, "sft": sft, "warnings": [said]})
    assert judge_run(read_results(folder)).warnings == [f"preference training: {said}"]
    table = next(table for table in preference(read_results(folder)).tables if "Held-out" in table.head[0])
    assert table.rows[0] == ["chosen, by SFT before", "+12.50", "+11.50", "+13.50"]


def test_what_the_machine_computes_otherwise_is_a_warning(artifacts: Make) -> None:
    folder = artifacts()
    found = read_json(folder / "serve" / "realised.json")
    write_json(folder / "serve" / "realised.json", {**found, "cautions": ["this CPU has no VNNI"]})
    assert judge_run(read_results(folder)) == Validity(True, [], ["engine: this CPU has no VNNI"])


def test_a_server_that_ran_already_is_told_by_what_it_says_of_itself(artifacts: Make, tmp_path: Path) -> None:
    attached = {"kind": "attach", "base_url": "http://127.0.0.1:8000", "model": None, "api_key_env": None,
                "max_model_len": 512, "max_num_seqs": 16, "start_timeout_s": 300}  # fmt: skip
    folder = artifacts(serve=attached)
    found = read_json(folder / "serve" / "realised.json")
    for told, said in (({"vllm_version": "9.8.7", "dtype": "float16"}, "vLLM 9.8.7, float16, running already at http"),
                       ({}, "a server that tells no version, running already at http://127.0.0.1:8000")):  # fmt: skip
        write_json(folder / "serve" / "realised.json", {**found, "resolved": told})
        assert said in write(folder, tmp_path)[1].text


def test_random_weights_carry_a_banner(artifacts: Make, tmp_path: Path) -> None:
    model = {"kind": "random", "num_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2,
             "num_kv_heads": 1, "vocab_size": 1024, "max_position": 1024}  # fmt: skip
    _, page, words = write(artifacts(model=model), tmp_path)
    assert "Random weights: for tests, never for a claim." in page.text
    assert "Random weights, no claim." in words


def test_untrained_and_unquantised_read_as_not_run(artifacts: Make, tmp_path: Path) -> None:
    folder = artifacts(train={"kind": "none"}, quantize={"kind": "none", "kv": "none"})
    metrics, page, _ = write(folder, tmp_path)
    assert metrics["report/valid"] == 1
    assert page.row("Perplexity (not quantised)")[1:3] == ["15.39", "same"]
    assert "Training was not run" in page.text
    assert "not quantised · not trained · SmolLM2-135M-Instruct" in page.text


@pytest.mark.parametrize("stage", ["filter_pairs", "train_dpo", "calibrate", "quantize", "serve", "sweep", "score"])
def test_a_missing_stage_is_said(artifacts: Make, tmp_path: Path, stage: str) -> None:
    folder = artifacts()
    shutil.rmtree(folder / stage)
    for kind in ("metrics", "provenance"):
        (folder / f"{stage}.{kind}.json").unlink()
    metrics, page, _ = write(folder, tmp_path)
    assert metrics["report/stages_missing"] == 1
    assert page.row(stage)[1] == "not run"
    assert metrics["report/valid"] == (0 if stage in ("sweep", "score") else 1)


@pytest.mark.parametrize("part", [0, 1, 2])
def test_payload_files_may_be_missing(artifacts: Make, tmp_path: Path, part: int) -> None:
    """Two thirds of the files are taken away, each third kept once."""
    folder = artifacts()
    files = sorted(path for path in folder.glob("*/*") if path.name != "manifest.json")
    assert len(files) > 12
    for path in files[part::3] + files[(part + 1) % 3 :: 3]:
        path.unlink()
    _, page, _ = write(folder, tmp_path)
    assert page.row("fetch_model")[2] == "30.0 s"


def test_empty_folder_gives_an_invalid_page(tmp_path: Path) -> None:
    (tmp_path / "artifacts").mkdir()
    metrics, page, words = write(tmp_path / "artifacts", tmp_path)
    assert (metrics["report/valid"], metrics["report/stages_missing"]) == (0, len(STAGE_SECTIONS) - 1)
    assert "Nothing was measured." in page.text
    assert words.startswith("**INVALID**")


def test_broken_artifact_is_named(artifacts: Make, tmp_path: Path) -> None:
    folder = artifacts()
    (folder / "sweep" / "guards.json").write_text("{", encoding="utf-8")
    with pytest.raises(UserError, match=r"guards\.json: not JSON"):
        write(folder, tmp_path)


@pytest.mark.parametrize("reason", ["short", "long " * 80])
def test_card_has_at_most_60_words(artifacts: Make, reason: str) -> None:
    folder = artifacts()
    write_json(folder / "sweep" / "guards.json", all_guards(*(
        {"guard": i, "name": "x", "valid": False, "evidence": {}, "reason": reason} for i in range(5)
    )))  # fmt: skip
    results = read_results(folder)
    words = card(results, judge_run(results), "a name")
    assert len(words.split()) <= 60
    assert "[report.html](report.html)" in words
    assert "(and 4 more)" in words


def test_page_of_a_heavy_load_stays_small(artifacts: Make, tmp_path: Path, params: dict[str, Any]) -> None:
    """About 12,000 requests: plots draw some of them and say so, tables count all."""
    folder = artifacts(load={**params["load"], "rates_rps": [5.0, 15.0], "duration_s": 300.0})
    requests = pl.read_parquet(folder / "sweep" / "requests.parquet").height
    assert requests > 10_000
    _, page, _ = write(folder, tmp_path)
    assert (tmp_path / "out" / "report.html").stat().st_size < 1_000_000
    assert "300 of up to 4," in page.text
    counted = sum(int(page.row(shape["name"], rate)[2].replace(",", "")) for shape in params["load"]["shapes"]
                  for rate in ("5 req/s", "15 req/s"))  # fmt: skip
    assert counted == requests


def test_question_names_what_was_done(artifacts: Make, tmp_path: Path) -> None:
    asked = question(read_results(artifacts()))
    assert asked.startswith("What does DPO training with W8A8 INT8 quantisation do to SmolLM2-135M-Instruct, ")
    shutil.rmtree(tmp_path / "artifacts")
    asked = question(read_results(artifacts(train={"kind": "none"}, quantize={"kind": "none", "kv": "none"})))
    assert asked.startswith("How good is SmolLM2-135M-Instruct as fetched, ")


def test_the_servers_counters_stand_under_the_requests(whole: Whole) -> None:
    _, _, page, text = whole
    drawn = text[text.index('aria-label="Timeline of every request in 4 cells') :]
    drawn = drawn[: drawn.index("</svg>")]
    for axis in ("tok/s", "requests", "KV %"):
        assert drawn.count(f">{axis}</text>") == 2
    assert "by the server's own counters" in page.text


def test_a_load_beyond_capacity_is_said_with_its_growth(artifacts: Make, tmp_path: Path) -> None:
    """40 answers, each a second after the one before, to a request every half second: one more in flight a second."""
    folder = artifacts()
    first = pl.read_parquet(folder / "sweep" / "requests.parquet").filter(pl.col("status") == "ok").row(0, named=True)
    rows = [
        first | {"request_id": f"q{k}", "intended_s": k / 2, "sent_s": k / 2, "first_token_s": k + 0.5,
                 "done_s": k + 1.0, "ended_s": k + 1.0, "token_times": [k + 0.5, k + 1.0]}
        for k in range(40)
    ]  # fmt: skip
    pl.DataFrame(rows, infer_schema_length=None).write_parquet(folder / "sweep" / "requests.parquet")
    _, page, _ = write(folder, tmp_path)
    said = f"Beyond capacity (▲): the queue grew all through the cell, {first['shape']} at "
    assert said in page.text
    assert "by 1 requests/s [" in page.text
    assert page.row(first["shape"], f"{first['rate_rps']:g} req/s ▲")
    # 40 requests bear a p90 (29), not a p99 (299).
    cells = page.row(first["shape"], f"{first['rate_rps']:g} req/s", "TTFT")
    assert [cell.endswith("*") for cell in cells[3:6]] == [False, False, True]


def test_what_a_search_found_stands_with_its_interval(artifacts: Make, tmp_path: Path) -> None:
    folder = artifacts()
    found = {"goodput_tok_s": 88.2, "goodput_low_tok_s": 70.0, "goodput_high_tok_s": None, "level": "r0.5",
             "rate_rps": 0.5, "rate_low_rps": 0.4, "rate_high_rps": None, "reason": ""}  # fmt: skip
    how = {"serial_e2e_ms": 412.0, "saturated_rps": 3.21, "drift": -0.034, "probes": [{}] * 6}
    write_json(folder / "sweep" / "summary.json", {
        "capacity": {"prefill_heavy": found, "decode_heavy": None},
        "search": {"prefill_heavy": found | how, "decode_heavy": found | how | {
            "goodput_tok_s": None, "rate_rps": None, "reason": "unresolved: the machine is not quiet"}},
    })  # fmt: skip
    _, page, _ = write(folder, tmp_path)
    assert page.row("prefill_heavy", "88.2") == [
        "prefill_heavy", "88.2", "70.0–?", "0.5", "0.400–?", "412", "3.21", "−3.4%", "6", ""
    ]  # fmt: skip
    assert page.row("decode_heavy", "none")[-1] == "unresolved: the machine is not quiet"
    assert "prefill_heavy 88.2 tokens/s at 0.5 req/s [0.4 to ?], decode_heavy none" in page.text


def test_capacity_is_marked_in_its_curve(whole: Whole) -> None:
    """Of the summary: prefill_heavy 11.7 tokens/s at 0.5 req/s, decode_heavy none."""
    _, _, page, text = whole
    assert "Capacity: prefill_heavy 11.7 tokens/s at 0.5 req/s, decode_heavy none." in page.text
    curve = text[text.index('aria-label="Goodput and attainment over the load') :]
    assert ">capacity</text>" in curve[: curve.index("</svg>")]
