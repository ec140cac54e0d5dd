"""A run beside its plans: a folder of artifacts whose every number is known, and the ratios that follow by hand."""

import json

import polars as pl
import pytest

from oneaxis.errors import UserError
from oneaxis.load.client import REQUEST_SCHEMA
from oneaxis.plan.compare import compare, conditional, read_run, require_same, require_same_kind
from oneaxis.plan.cost import bills, events_of_run, read_prices
from oneaxis.plan.hardware import Device
from oneaxis.plan.scored import candidate_of_run
from tests.serve.tiny import random_llama

HERE = {"cpu": "Test CPU", "cpus": 2, "machine": "x86_64", "memory_gib": 8.0}
DEVICE = Device(name="test", memory_bytes=8e9, bandwidth_bytes_s=1e9, peak_flops_s={"bf16": 1e10, "f32": 1e9})


def request(shape: str, level: str, n: int, sent: float, ttft: float, tpot: float, prompt: int, output: int) -> dict:
    return {
        "shape": shape, "level": level, "rate_rps": 1.0, "request_id": f"{shape}-{level}-{n}", "intended_s": sent,
        "sent_s": sent, "first_token_s": sent + ttft, "done_s": sent + ttft + tpot * (output - 1),
        "ended_s": sent + ttft + tpot * (output - 1), "asked_prompt_tokens": prompt, "asked_output_tokens": output,
        "prompt_tokens": prompt, "output_tokens": output, "chunks": output, "token_times": [], "status": "ok",
        "error": None, "finish_reason": "length",
    }  # fmt: skip


@pytest.fixture
def run_folder(tmp_path):
    """A project with a tiny model, `serve` and `sweep`: two shapes, two levels of the longer one."""
    artifacts = tmp_path / "artifacts"
    random_llama(artifacts / "fetch_model" / "checkpoint")
    settings = {
        "fetch_model": {"model": {"kind": "path", "path": "/models/mine"}},
        "serve": {},
        "sweep": {"train": {"kind": "none"}, "quantize": {"kind": "none", "kv": "none"}},
    }
    for stage, params in settings.items():
        (artifacts / stage).mkdir(exist_ok=True)
        (artifacts / stage / "manifest.json").write_text(json.dumps({"params": params, "files": {}}))
    (artifacts / "sweep.provenance.json").write_text(
        json.dumps({"hardware": HERE, "peak_rss_mib": 1000.0, "finished_at": "2026-01-01T00:00:00+00:00"})
    )
    resolved = {"device": "cpu", "kv_cache_gib": 0.001, "block_size": 16, "kv_cache_tokens": 2096,
                "kv_cache_dtype": "auto", "dtype": "bfloat16", "threads": 2, "speculative": False}  # fmt: skip
    (artifacts / "serve" / "realised.json").write_text(json.dumps({"resolved": resolved}))
    rows = [request("long", "r1", n, 10.0 * n, 0.5, tpot, 40, 11) for n, tpot in enumerate((0.02, 0.01, 0.04))]
    rows += [request("long", "r9", n, 0.1 * n, 0.5, 0.5, 40, 11) for n in range(3)]
    rows += [request("wide", "r1", n, 10.0 * n, ttft, 0.01, 200, 2) for n, ttft in enumerate((0.3, 0.2, 0.9))]
    failed = request("wide", "r1", 9, 0.0, 1e-6, 1e-6, 200, 2) | {"status": "timeout"}
    pl.DataFrame([*rows, failed], schema=REQUEST_SCHEMA).write_parquet(artifacts / "sweep" / "requests.parquet")
    samples = [{"shape": "long", "level": "r1", "time_s": at, "running": seen}
               for at, seen in ((0.1, 1.0), (5.0, 0.0), (10.1, 3.0), (99.0, 0.0))]  # fmt: skip
    pl.DataFrame(samples).write_parquet(artifacts / "sweep" / "server_samples.parquet")
    cells = [
        {"shape": "long", "level": "r1", "output_tok_s": 33.0, "tokens_per_verification": 2.0, "accepted_at_1": 0.5,
         "accepted_at_2": 0.4, "accepted_at_3": 0.1, "server_prompt_tokens": 1000.0, "server_prefix_cache_hits": 400.0,
         "server_output_tokens": 50.0},
        {"shape": "wide", "level": "r1", "output_tok_s": 3.0, "tokens_per_verification": None, "accepted_at_1": None,
         "accepted_at_2": None, "accepted_at_3": None, "server_prompt_tokens": 600.0, "server_prefix_cache_hits": 0.0,
         "server_output_tokens": 6.0},
    ]  # fmt: skip
    pl.DataFrame(cells).write_parquet(artifacts / "sweep" / "cells.parquet")
    metrics = {"sweep/long/r1/tpot_p50_ms": 20.0, "sweep/long/r9/tpot_p50_ms": 500.0}
    (artifacts / "sweep.metrics.json").write_text(json.dumps(metrics))
    return tmp_path


def by_name(found):
    return {(one.plan, one.what): one for one in found}


# The tiny Llama: hidden 128, inner 256, 2 layers, 2 heads of 64, 1 KV head, vocabulary 320, head not tied.
LAYER = 128 * 128 + 2 * 64 * 128 + 128 * 128 + 3 * 128 * 256
READ = 2 * (2 * (LAYER + 256) + 128 + 320 * 128)
KV = 2 * 2 * 1 * 64 * 2


def test_every_ratio_by_hand(run_folder):
    found = by_name(compare(read_run(run_folder), DEVICE))
    stored = found["kv", "weights as stored"]
    assert stored.predicted == stored.measured == READ + 2 * 320 * 128

    # 0.001 GiB / (512 B x 16) = 131.07 -> 131 blocks of 16.
    cache = found["kv", "tokens of the KV cache"]
    assert (cache.predicted, cache.measured, cache.ratio) == (131 * 16, 2096, 1.0)

    # The fastest request of the less loaded level: 10 ms a token; context 40 + 11/2 = 45.5 -> 46 tokens (half to even).
    ceiling = found["decode", "ceiling, one stream"]
    assert ceiling.predicted == pytest.approx(1e9 / (READ + 46 * KV))
    assert ceiling.measured == pytest.approx(100)
    step = found["decode", "step at a batch of 2.0"]
    assert step.predicted == pytest.approx(1e3 * (READ + 2 * 46 * KV) / 1e9)
    assert step.measured == pytest.approx(20)

    # 200 tokens: 2 FLOPs a weight and token, the head once, 200 x 201 / 2 pairs of 2 heads of 64 in 2 layers.
    flops = 2 * 200 * 2 * LAYER + 2 * 320 * 128 + 4 * 2 * 64 * 2 * 200 * 201 / 2
    fastest, median = (found["prefill", f"200 tokens, {which} TTFT"] for which in ("fastest", "median"))
    assert fastest.predicted == median.predicted == pytest.approx(1e3 * flops / 1e10)
    assert (fastest.measured, median.measured) == (pytest.approx(200), pytest.approx(300))

    # Three requests in the 20.9 s from the first to the last's end, 11 tokens of 23.3 ms; the server saw 1, 0, 3.
    slots = found["transfer", "decode slots held"]
    assert slots.predicted == pytest.approx(3 / 20.9 * 11 * (0.02 + 0.01 + 0.04) / 3)
    assert slots.measured == pytest.approx(4 / 3)

    # 1 + 0.5 + 0.4 + 0.1 = 2.0 as counted; uniform 0.5: 1 + 0.5 + 0.25 + 0.125.
    exact, uniform = (
        found["speculation", what] for what in ("tokens a verification, per position", "the same, uniform")
    )
    assert exact.ratio == pytest.approx(1.0)
    assert uniform.predicted == pytest.approx(1.875)
    assert uniform.measured == 2.0


def test_acceptance_given_those_before():
    assert conditional([0.5, 0.4, 0.1]) == pytest.approx([0.5, 0.8, 0.25])
    assert conditional([0.5, 0.0, 0.0]) == [0.5, 0.0, 0.0]


def test_a_quantised_prefill_needs_that_peak(run_folder):
    config = run_folder / "artifacts" / "fetch_model" / "checkpoint" / "config.json"
    values = json.loads(config.read_text())
    numbers = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {"targets": ["Linear"], "weights": {**numbers, "strategy": "channel", "dynamic": False},
             "input_activations": {**numbers, "strategy": "token", "dynamic": True}}  # fmt: skip
    values["quantization_config"] = {"quant_method": "compressed-tensors", "format": "int-quantized",
                                     "config_groups": {"group_0": group}, "ignore": ["lm_head"]}  # fmt: skip
    config.write_text(json.dumps(values))
    (only,) = [one for one in compare(read_run(run_folder), DEVICE) if one.plan == "prefill"]
    assert (only.predicted, only.ratio) == (None, None)
    assert "no peak for int8" in only.note
    both = DEVICE.model_copy(update={"peak_flops_s": {"bf16": 1e10, "int8": 4e10}})
    fastest = by_name(compare(read_run(run_folder), both))["prefill", "200 tokens, fastest TTFT"]
    rest = 2 * 320 * 128 + 4 * 2 * 64 * 2 * 200 * 201 / 2
    assert fastest.predicted == pytest.approx(1e3 * (2 * 200 * 2 * LAYER / 4e10 + rest / 1e10))


def test_ceilings_of_another_machine_are_refused(run_folder):
    run = read_run(run_folder)
    require_same(run, HERE)
    for change in ({"cpu": "Other"}, {"cpus": 64}):
        with pytest.raises(UserError, match="ran on Test CPU with 2 CPUs, and the ceilings are of"):
            require_same(run, HERE | change)


def test_a_device_of_another_kind_is_refused(run_folder):
    run = read_run(run_folder)
    assert run.realised["device"] == "cpu"
    require_same_kind(run, DEVICE)
    with pytest.raises(UserError, match=r"ran on a CPU \(cpu\), and test is a GPU; allowed: --hardware of the device"):
        require_same_kind(run, DEVICE.model_copy(update={"kind": "gpu"}))


def test_a_run_that_has_not_served_is_refused(run_folder):
    for name in ("serve", "sweep"):
        (run_folder / "artifacts" / name / "manifest.json").unlink()
    (run_folder / "artifacts" / "sweep" / "requests.parquet").unlink()
    with pytest.raises(UserError, match="neither serve nor sweep has run there"):
        read_run(run_folder)


def test_a_split_that_sends_nothing_says_so(run_folder):
    path, cells = (
        run_folder / "artifacts" / "serve" / "realised.json",
        run_folder / "artifacts" / "sweep" / "cells.parquet",
    )
    document = json.loads(path.read_text())
    document["resolved"]["engine_args.kv_transfer_config"] = {"kv_connector": "NixlConnector"}
    path.write_text(json.dumps(document))
    for sent, ratio in ((0.0, 0.0), (800.0, 1.0)):
        table = pl.read_parquet(cells).with_columns(server_prompt_tokens_transferred=pl.lit(sent))
        table.write_parquet(cells)
        one = by_name(compare(read_run(run_folder), None))["transfer", "prompt tokens sent over"]
        assert (one.predicted, one.ratio) == (1600, ratio)


def test_artifacts_of_two_runs_are_refused(run_folder):
    """The engine served a quantised checkpoint, and the settings name a plain one."""
    path = run_folder / "artifacts" / "serve" / "realised.json"
    document = json.loads(path.read_text())
    path.write_text(json.dumps(document | {"checkpoint": {"quantization_config": {"format": "int-quantized"}}}))
    with pytest.raises(UserError, match="served another checkpoint"):
        read_run(run_folder)


def test_a_sweep_of_an_older_version_is_refused(run_folder):
    path = run_folder / "artifacts" / "sweep" / "requests.parquet"
    pl.read_parquet(path).drop("level").write_parquet(path)
    with pytest.raises(UserError, match="no column `level`"):
        read_run(run_folder)


def test_a_run_is_metered_by_what_its_server_counted(run_folder, tmp_path):
    prices = tmp_path / "prices.yaml"
    prices.write_text("mine: {input: 1.0, cached_input: 0.1, output: 2.0}\n")
    results = read_run(run_folder).results
    # Metered twice, it counts once: 1,200 fresh x 1 + 400 cached x 0.1 + 56 x 2 = 1,352 USD a million.
    (bill,) = bills([*events_of_run(results, "mine"), *events_of_run(results, "mine")], read_prices(prices))
    assert (bill.events, bill.repeats, bill.conflicts) == (2, 2, 0)
    assert bill.usd == pytest.approx(1352e-6)


def test_a_run_as_a_row_of_the_table(run_folder):
    (run_folder / "artifacts" / "score").mkdir()
    (run_folder / "artifacts" / "score.metrics.json").write_text(
        json.dumps({"score/a/acc_bytes": 0.4, "score/b/acc_bytes": 0.6, "score/a/acc": 0.9})
    )
    row = candidate_of_run(read_run(run_folder), 70.0)
    assert (row.model, row.H, row.I, row.F) == ("mine (none)", 70.0, 50.0, 50.0)
    assert pytest.approx(1000 * 2**20 / 1e9) == row.T
    assert pytest.approx(READ / 2 / 1e9) == row.S
    assert candidate_of_run(read_run(run_folder), None).H is None
