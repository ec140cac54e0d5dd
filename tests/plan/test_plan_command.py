"""`oneaxis plan` as a user types it: what it prints, what it draws, and one line for every mistake."""

import json
import subprocess
import sys

import pytest

from oneaxis.cli import main
from oneaxis.errors import UserError
from oneaxis.plan.hardware import CEILINGS, FOLDER, read_ceilings, read_device
from oneaxis.plan.measure import better, measure, of_this_machine
from oneaxis.plan.units import BYTES, BYTES_PER_S, SECONDS, quantity, share, show
from oneaxis.stage import hardware
from tests.plan.test_plan_model import LLAMA8B, MOE30B


@pytest.fixture
def config(tmp_path):
    (tmp_path / "llama8b.json").write_text(json.dumps(LLAMA8B))
    return str(tmp_path / "llama8b.json")


def answer(capsys, *words: str) -> dict:
    assert main(["plan", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


# --- answers -------------------------------------------------------------------------------------------------


def test_decode_from_a_config_and_a_device(root, monkeypatch, capsys, config):
    monkeypatch.chdir(root)
    words = ("decode", "--model", config, "--hardware", "h100_sxm", "--context", "1000", "--batch", "1,10")
    found = answer(capsys, *words)
    # All weights but the input embedding, BF16; 1,000 tokens of 128 KiB.
    read, kv = 2 * (8_030_261_248 - 128256 * 4096), 1000 * 128 * 1024
    assert found["facts"]["ceiling_tok_s"] == pytest.approx(3.35e12 / read)
    assert found["rows"][1]["step_s"] == pytest.approx((read + 10 * kv) / 3.35e12)
    assert found["rows"][1]["fleet_tok_s"] == pytest.approx(10 * 3.35e12 / (read + 10 * kv))
    assert found["facts"]["fleet_limit_tok_s"] == pytest.approx(3.35e12 / kv)


def test_text_says_units(capsys):
    assert main(["plan", "decode", "--weights", "8.2GB", "--bandwidth", "3.35TB/s", "--batch", "1"]) == 0
    text = capsys.readouterr().out
    assert "8.2 GB  of weights" in text
    assert "2.448 ms" in text
    assert "408.5 tok/s" in text


def test_kv_prefill_and_experts_from_a_config(root, monkeypatch, capsys, config, tmp_path):
    monkeypatch.chdir(root)
    found = answer(capsys, "kv", "--model", config, "--memory", "24GB", "--runtime", "2GB", "--context", "8192")
    assert found["facts"]["kv_bytes_per_token"] == 128 * 1024
    assert found["facts"]["most_sequences"] == 5
    half = answer(capsys, "kv", "--model", config, "--memory", "24GB", "--runtime", "2GB", "--kv-dtype", "fp8")
    assert half["facts"]["kv_bytes_per_token"] == 64 * 1024
    (row,) = answer(capsys, "prefill", "--model", config, "--flops", "400TFLOP/s", "--gpus", "4", "--tokens", "8192")[
        "rows"
    ]
    # Without attention 2 x (8.03 - 2 x 0.525) billion x 8,192, and the head once.
    dense = 2 * (8_030_261_248 - 2 * 128256 * 4096) * 8192 + 2 * 128256 * 4096
    assert row["s"] * 1600e12 * (1 - row["attention"]) == pytest.approx(dense, rel=1e-4)
    (tmp_path / "moe.json").write_text(json.dumps(MOE30B))
    (row,) = answer(capsys, "experts", "--model", str(tmp_path / "moe.json"), "--batch", "32")["rows"]
    assert row["distinct"] == pytest.approx(111.8, abs=0.05)


def test_speculation_transfer_cost_and_shift(root, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(root)
    found = answer(capsys, "speculation", "--accept", "0.80,0.72,0.66,0.60,0.55", "--draft-cost", "0.1",
                   "--hardware", "h100_sxm", "--batch", "64")  # fmt: skip
    assert found["facts"]["best_drafts"] == 4
    assert [row["shown_64"] for row in found["rows"]] == ["128", "192", "256", "320 past", "384 past"]
    found = answer(capsys, "transfer", "--params", "70B", "--kv-per-token", "320KiB", "--gpus", "4", "--flops",
                   "400TFLOP/s", "--link", "100Gb/s", "--rate", "8/s", "--output", "128", "--tpot", "10.4ms",
                   "--max-num-seqs", "16", "--setup", "14.7ms")["facts"]  # fmt: skip
    assert found["ratio"] == pytest.approx(0.30, abs=0.001)
    assert found["decode_slots"] == pytest.approx(10.65, abs=0.005)
    assert found["slots_share"] == pytest.approx(10.65 / 16, abs=0.001)
    assert found["loop_share"] == pytest.approx(0.1176)
    found = answer(capsys, "cost", "--hourly", "2.5USD/h", "--throughput", "650tok/s", "--utilisation", "60%",
                   "--overhead", "1.15")  # fmt: skip
    assert found["facts"]["usd_per_million_tokens"] == pytest.approx(2.05, abs=0.005)
    (tmp_path / "models.csv").write_text("model,H,I,F,S,T,params_b,bits\na,90,70,50,4,3,,\nb,100,60,100,3.6,1.5,21,\n")
    rows = answer(capsys, "shift", str(tmp_path / "models.csv"))["rows"]
    assert [(row["model"], row["wcs"] is None) for row in rows] == [("a", False), ("b", True)]
    assert "10.5 GB of 1.5" in rows[1]["why"]
    found = answer(capsys, "hybrid", "--accept", "0.6", "--drafts", "4")["facts"]
    assert found["copy_rule"] == pytest.approx(0.92, abs=0.005)
    assert found["state_bytes"] == 160 * 2**20


def test_state_and_replay_in_numbers(capsys):
    found = answer(capsys, "state", "--tokens", "512", "--windows", "1,16")
    assert 0 < found["facts"]["replay_difference"] < 1e-12
    assert [row["window"] for row in found["rows"]] == [1, 16]


def test_events_from_files(capsys, tmp_path):
    line = json.dumps({"id": "a", "model": "m", "input_tokens": 1000, "cached_tokens": 400, "output_tokens": 10})
    (tmp_path / "e1.jsonl").write_text(line + "\n")
    (tmp_path / "e2.jsonl").write_text(line + "\n" + line.replace('"a"', '"b"').replace('"m"', '"new"') + "\n")
    (tmp_path / "prices.yaml").write_text("m: {input: 1, cached_input: 0.5, output: 3}\n")
    events = [str(tmp_path / f"e{n}.jsonl") for n in (1, 2)]
    found = answer(capsys, "meter", "--events", *events, "--prices", str(tmp_path / "prices.yaml"))
    assert found["facts"]["usd"] == pytest.approx(830e-6)
    assert [row["usd"] for row in found["rows"]] == [pytest.approx(830e-6), "unpriced"]
    assert "new" in found["notes"][0]


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_a_curve_is_drawn(capsys, tmp_path, suffix):
    path = tmp_path / f"curve.{suffix}"
    words = ["plan", "routing", "--shared", "0.5", "--plot"]
    assert main([*words, str(path)]) == 0
    first = path.read_bytes()
    assert first.startswith(b"\x89PNG" if suffix == "png" else b"<?xml")
    assert main([*words, str(path)]) == 0
    assert path.read_bytes() == first, "the same answer, the same bytes"
    assert len(first) > 5000


# --- mistakes ------------------------------------------------------------------------------------------------

DECODE = ("decode", "--weights", "8GB", "--bandwidth", "2TB/s")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("decode", "--weights", "8", "--bandwidth", "2TB/s"), "--weights=8: no unit; allowed"),
        (("decode", "--weights", "8GB/s", "--bandwidth", "2TB/s"), "--weights=8GB/s: no such unit here"),
        (("decode", "--weights", "8gb", "--bandwidth", "2TB/s"), "--weights=8gb"),
        (("decode", "--weights", "0GB", "--bandwidth", "2TB/s"), "--weights=0GB: allowed: more than 0"),
        (("decode", "--weights", "-8GB", "--bandwidth", "2TB/s"), "--weights"),
        (("decode", "--weights=-8GB", "--bandwidth", "2TB/s"), "--weights=-8GB: allowed: more than 0"),
        (("decode", "--weights", "8GB", "--bandwidth", "2TB"), "--bandwidth=2TB: no such unit here"),
        ((*DECODE, "--batch", "0"), "--batch=0: allowed: a whole number, 1 or more"),
        ((*DECODE, "--batch", "1,x"), "--batch=x"),
        ((*DECODE, "--context", "-5"), "--context"),
        ((*DECODE, "--overhead", "5"), "--overhead=5: no unit"),
        ((*DECODE, "--hardware", "h200"), "--bandwidth and --hardware"),
        ((*DECODE, "--kv", "-1GB"), "--kv"),
        (("routing", "--shared", "1.5"), "--shared=1.5: allowed: a share from 0 to 1"),
        (("routing", "--shared", "half"), "--shared=half"),
        (("routing", "--shared", "0.5", "--workers", "0"), "--workers=0"),
        (("speculation",), "no acceptance; allowed: --accept"),
        (("speculation", "--accept", "-0.1"), "--accept"),
        (("speculation", "--accept", "0.8", "--drafts", "0"), "--drafts=0"),
        (("speculation", "--accept", "0.8", "--draft-cost", "nan"), "--draft-cost=nan"),
        (("hybrid", "--accept", "2", "--drafts", "4"), "--accept=2"),
        (("experts", "--experts", "8", "--per-token", "9"), "per_token=9: allowed: up to experts=8"),
        (("experts", "--experts", "8"), "--experts and --per-token: allowed: both"),
        (("transfer",), "nothing to compute"),
        (("transfer", "--link", "100GbE", "--flops", "1TFLOP/s", "--params", "1B", "--kv-per-token", "1KiB"),
         "--link=100GbE: no such unit here"),
        (("transfer", "--link", "100Gb/s"), "--link: needs --flops"),
        (("transfer", "--setup", "1ms"), "belong to a rate"),
        (("transfer", "--rate", "8/s", "--output", "128"), "--output and --tpot"),
        (("cost", "--hourly", "2.5", "--throughput", "650tok/s"), "--hourly=2.5: no unit"),
        (("cost", "--hourly", "2.5USD/h"), "allowed: one of --throughput"),
        (("cost", "--hourly", "2.5USD/h", "--throughput", "650tok/s", "--utilisation", "0"), "--utilisation=0"),
        (("cost", "--hourly", "2.5USD/h", "--throughput", "650tok/s", "--utilisation", "60"), "--utilisation=60"),
        (("state", "--dtype", "int3"), "dtype=int3: allowed"),
        (("state", "--decay", "0"), "--decay=0"),
        (("roofline", "--hardware", "h1000"), "--hardware=h1000: allowed: a100_80g"),
        (("roofline", "--hardware", "a100_80g", "--scheme", "w8a8_fp8"), "no peak for fp8"),
        (("roofline", "--hardware", "h200", "--scheme", "w2"), "--scheme=w2"),
        (("roofline", "--hardware", "h200", "--threads", "2"), "--threads=2: belongs to --hardware here"),
        (("routing", "--shared", "0.5", "--plot", "x.gif"), "--plot=x.gif: allowed: a file that ends in"),
        (("routing", "--shared", "0.5", "--plot", "/no/such/x.svg"), "allowed: a folder that exists"),
        (("compare", "/no/such"), "/no/such"),
        (("decode", "--model", "/no/such.json", "--bandwidth", "2TB/s"), "/no/such.json: missing"),
        (("decode", "--run", ".", "--weights", "8GB"), "--run takes all from the run"),
        ((), "plan: say what; allowed: roofline"),
        (("--measure", "--threads", "999"), "--threads=999: allowed: 1 to"),
    ],
    ids=lambda value: " ".join(value)[:50] if isinstance(value, tuple) else "",
)  # fmt: skip
def test_a_mistake_is_one_line(root, monkeypatch, capsys, words, says):
    monkeypatch.chdir(root)
    try:
        code = main(["plan", *words])
    except SystemExit as error:
        # argparse's own: a value that begins with a dash reads as an option.
        code = error.code
    captured = capsys.readouterr()
    assert code == 2
    assert captured.out == ""
    assert says in captured.err
    assert captured.err.splitlines()[-1].count("\n") == 0
    if captured.err.startswith("oneaxis: "):
        assert len(captured.err.splitlines()) == 1


def test_outside_a_project(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["plan", "routing", "--shared", "0.5"]) == 0
    capsys.readouterr()
    assert main(["plan", "roofline"]) == 2
    assert "holds no conf" in capsys.readouterr().err


def test_units():
    assert quantity("x", "400Gb/s", BYTES_PER_S) == 50e9
    assert quantity("x", "80 GiB", BYTES) == 80 * 2**30
    assert quantity("x", "1e3us", SECONDS) == pytest.approx(1e-3)
    assert share("x", "60%") == share("x", "0.6") == 0.6
    assert show(1.5e12, "B/s") == "1.5 TB/s"
    assert show(0.0104, "s") == "10.4 ms"
    assert show(160 * 2**20, "iB") == "160 MiB"
    for text in ("nanGB", "infGB", "GB", "", "1,5GB", "1 2GB"):
        with pytest.raises(UserError):
            quantity("x", text, BYTES)


# --- devices -------------------------------------------------------------------------------------------------


def test_every_file_of_devices_is_one(root):
    for path in sorted((root / FOLDER).glob("*.yaml")):
        told = read_device(root, path.stem)
        assert path.read_text().startswith("# "), "each says where its figures come from"
        assert told.peak("bf16") > told.bandwidth_bytes_s


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("name: x\nmemory_bytes: 1\nbandwidth_bytes_s: 0\npeak_flops_s: {bf16: 1}", "bandwidth_bytes_s=0"),
        ("name: x\nmemory_bytes: 1\nbandwidth_bytes_s: 1\npeak_flops_s: {bf16: -1}", "peak_flops_s.bf16=-1"),
        ("name: x\nmemory_bytes: 1\npeak_flops_s: {}", "bandwidth_bytes_s"),
        ("name: [", "not YAML"),
    ],
)
def test_a_device_that_is_none(tmp_path, text, says):
    (tmp_path / FOLDER).mkdir(parents=True)
    (tmp_path / FOLDER / "mine.yaml").write_text(text)
    with pytest.raises(UserError, match=says) as caught:
        read_device(tmp_path, "mine")
    assert "\n" not in str(caught.value)


def test_ceilings_are_measured_stored_and_kept_to_their_machine(tmp_path):
    """The real kernels, a few tries each; the figures are held between bounds that no CPU of today leaves."""
    here = hardware()
    impossible = {"name": "x", "memory_bytes": 1.0, "bandwidth_bytes_s": 9e15, "peak_flops_s": {"f32": 9e15}}
    entry = {"measured_at": "2020-01-01T00:00:00+00:00", "device": impossible}
    (tmp_path / CEILINGS).parent.mkdir()
    (tmp_path / CEILINGS).write_text(json.dumps({"hardware": here | {"cpu": "Other"}, "threads": {"1": entry}}))
    with pytest.raises(UserError, match=r"measured on Other .* and this is"):
        read_ceilings(tmp_path, 1, here)

    told = measure(tmp_path, 1, seconds_each=0.02)
    assert [row["what"] for row in told.rows] == ["read bandwidth", "f32", "bf16", "int8"]
    found = read_ceilings(tmp_path, 1, here)
    assert found.device.name.endswith("1 thread")
    assert 1e8 < found.device.bandwidth_bytes_s < 1e12, "those of another machine do not stand"
    assert set(found.device.peak_flops_s) == {"f32", "bf16", "int8"}
    assert all(1e8 < rate < 1e14 for rate in found.device.peak_flops_s.values())
    for change in ({"cpu": "Another CPU"}, {"cpus": 1000}):
        with pytest.raises(UserError, match="and this is"):
            read_ceilings(tmp_path, 1, here | change)
    with pytest.raises(UserError, match="measured with 1 threads, and 7 are asked for"):
        read_ceilings(tmp_path, 7, here)


def test_the_better_figure_stands_on_the_same_machine():
    here = {"cpu": "A", "cpus": 2, "machine": "x86_64"}
    entry = {"device": {"bandwidth_bytes_s": 20.0, "peak_flops_s": {"f32": 5.0, "bf16": 50.0}}}
    stored = {"hardware": here, "threads": {"1": entry}}
    assert of_this_machine(stored, here) == {"1": entry}
    assert better(entry, 30.0, {"f32": 7.0, "bf16": 40.0}) == (30.0, {"f32": 7.0, "bf16": 50.0})
    assert better(entry, 10.0, {"int8": 9.0}) == (20.0, {"int8": 9.0})
    assert better(None, 10.0, {"f32": 1.0}) == (10.0, {"f32": 1.0})
    for other in (here | {"cpu": "B"}, here | {"cpus": 4}, here | {"machine": "aarch64"}):
        assert of_this_machine(stored, other) == {}
    for broken in (None, [], {}, {"hardware": here}, {"hardware": here, "threads": 3}):
        assert of_this_machine(broken, here) == {}


def test_ceilings_that_are_missing_or_broken(tmp_path):
    with pytest.raises(UserError, match="not measured; allowed: `oneaxis plan --measure` first"):
        read_ceilings(tmp_path, 1, hardware())
    (tmp_path / CEILINGS).parent.mkdir()
    (tmp_path / CEILINGS).write_text('{"hardware": {}, "threads": {}}')
    with pytest.raises(UserError, match="measure again"):
        read_ceilings(tmp_path, 1, hardware())


def test_the_parser_alone_imports_no_library():
    """Every command builds the parser of `plan`: it must not load torch, polars or matplotlib."""
    code = "import sys, oneaxis.cli; oneaxis.cli._parser(); print([m for m in ('torch', 'polars', "
    code += "'matplotlib') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
