"""Attaching to a server that runs already: to local ones that say little, refuse, or are still loading; and, slow, to a
real engine that somebody else has started with settings that it keeps to itself."""

import itertools
import json
import os
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oneaxis.config.compose import validate
from oneaxis.config.schema import Serve, ServeAttach
from oneaxis.errors import RunError, UserError
from oneaxis.load.capacity import run_load
from oneaxis.load.draws import draw_answers
from oneaxis.load.plan import draw_plan
from oneaxis.load.summary import judge, summarise
from oneaxis.serve import is_here, realised_config, realised_table, serving
from oneaxis.serve.command import engine_command, engine_environment
from oneaxis.serve.engine import engine_folder
from oneaxis.serve.forked import fork_engine
from oneaxis.serve.preflight import WIDE, cpu_flags, reserve_port
from tests.checkpoint.quantised import write_quantised
from tests.load.faults import BOUNDS, SMALL
from tests.load.test_sweep import ALONE, HELD
from tests.quantize.checkpoints import scheme
from tests.serve.tiny import random_llama, serve

Answer = tuple[int, Any]


@contextmanager
def server(answer: Callable[[str, dict[str, str]], Answer]) -> Iterator[str]:
    """A fake server: `answer(path, headers)` gives status and JSON, or bytes. Its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = answer(self.path, dict(self.headers))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body if isinstance(body, bytes) else json.dumps(body).encode())

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.do_GET()

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_address[1]}"
        running.shutdown()


def attach(base_url: str, **changes: Any) -> ServeAttach:
    """The section, with changes."""
    values = {"model": None, "api_key_env": None, "max_model_len": 512, "max_num_seqs": 8, "start_timeout_s": 5.0}
    return ServeAttach(**({"kind": "attach", "base_url": base_url} | values | changes))


def models(*names: str, **card: Any) -> Callable[[str, dict[str, str]], Answer]:
    """A server that has nothing but `/v1/models`."""

    def answer(path: str, _headers: dict[str, str]) -> Answer:
        data = [{"id": name, **card} for name in names]
        return (200, {"data": data}) if path == "/v1/models" else (404, {})

    return answer


def test_what_other_servers_do_not_tell_is_unverified(tiny_checkpoint: Path, tmp_path: Path) -> None:
    observed: dict[str, Any] = {}
    with server(models("llama")) as url:
        with serving(tiny_checkpoint, attach(f"{url}/v1/"), log_path=tmp_path / "log", observed=observed) as endpoint:
            assert (endpoint.base_url, endpoint.model_name) == (url, "llama")
            assert endpoint.alive()
            assert endpoint.processes() == [os.getpid()]
            realised = realised_config(endpoint, tiny_checkpoint)
    assert realised["differences"] == []
    assert {"checkpoint", "dtype", "quantization", "kv_cache_dtype", "prefix_caching"} <= set(realised["unverified"])
    assert observed["attached"] == {"base_url": url, "model": "llama", "root": None}
    assert (observed["start"], "cold_start" in observed) == ("attached", False)
    table = dict(realised_table(realised).select("setting", "verdict").iter_rows())
    assert table["dtype"] == "unverified"
    assert table["max_model_len"] == "as asked"


@pytest.mark.parametrize(("copy", "differs"), [(False, []), (True, ["checkpoint"])])
def test_another_checkpoint_is_a_difference(
    copy: bool, differs: list[str], tiny_checkpoint: Path, tmp_path: Path
) -> None:
    """A copy of the same files is the same; with one weight changed it is not."""
    there = random_llama(tmp_path / "there")  # the same seed: the same bytes
    if copy:
        weights = there / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-2] + b"\x00\x01")
    with server(models("llama", root=str(there))) as url:
        with serving(tiny_checkpoint, attach(url), log_path=tmp_path / "log", observed={}) as endpoint:
            realised = realised_config(endpoint, tiny_checkpoint)
    assert [difference["key"] for difference in realised["differences"]] == differs
    assert "checkpoint" not in realised["unverified"]


@pytest.mark.parametrize(
    ("names", "changes", "says"),
    [
        (["a", "b"], {}, r"serve\.model=None: allowed: a, b, of http"),
        (["a"], {"model": "c"}, r"serve\.model=c: allowed: a, of http"),
        ([], {}, r"serve\.model=None: allowed: none is served"),
    ],
)
def test_a_model_that_is_not_served_or_not_named(
    names: list[str], changes: dict[str, Any], says: str, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    with server(models(*names)) as url, pytest.raises(UserError, match=says):
        with serving(tiny_checkpoint, attach(url, **changes), log_path=tmp_path / "log", observed={}):
            pass


def test_a_context_that_is_too_short_is_refused(tiny_checkpoint: Path, tmp_path: Path) -> None:
    with server(models("a", max_model_len=256)) as url, pytest.raises(UserError, match=r"=512: allowed: up to 256"):
        with serving(tiny_checkpoint, attach(url), log_path=tmp_path / "log", observed={}):
            pass


def test_a_key_comes_from_the_environment_and_is_not_repeated(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(path: str, headers: dict[str, str]) -> Answer:
        if headers.get("Authorization") != "Bearer s3cret":
            return 401, {}
        return models("a")(path, headers)

    def open_with(url: str, name: str | None) -> dict[str, Any]:
        observed: dict[str, Any] = {}
        settings = attach(url, api_key_env=name)
        with serving(tiny_checkpoint, settings, log_path=tmp_path / "log", observed=observed) as endpoint:
            assert "s3cret" not in repr(endpoint)
        return observed

    monkeypatch.setenv("GOOD", "s3cret")
    monkeypatch.setenv("BAD", "t0psecret")
    with server(answer) as url:
        assert "s3cret" not in str(open_with(url, "GOOD"))
        with pytest.raises(UserError, match="refuses the key in BAD") as refused:
            open_with(url, "BAD")
        assert "t0psecret" not in str(refused.value)
        with pytest.raises(UserError, match="refuses requests without a key"):
            open_with(url, None)
        with pytest.raises(UserError, match=r"serve\.api_key_env=NONE: not set"):
            open_with(url, "NONE")


def test_a_server_that_is_loading_is_waited_for(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """503 for half a second, then well: asked ever less often, and the phase is seen meanwhile."""
    began = time.monotonic()
    asked: list[float] = []
    observed: dict[str, Any] = {}
    phases = set()

    def answer(path: str, headers: dict[str, str]) -> Answer:
        if path != "/health":
            return models("a")(path, headers)
        asked.append(time.monotonic() - began)
        phases.add(observed.get("phase"))
        return (503, {}) if asked[-1] < 0.5 else (200, {})

    with server(answer) as url:
        with serving(tiny_checkpoint, attach(url), log_path=tmp_path / "log", observed=observed):
            assert observed["phase"] == "ready"
    pauses = [later - earlier for earlier, later in itertools.pairwise(asked)]
    assert len(pauses) >= 2
    assert pauses == sorted(pauses)
    assert "loading" in phases
    assert observed["waited_s"] >= 0.5


@contextmanager
def says_only(banner: bytes) -> Iterator[str]:
    """Whatever is asked, it says this and hangs up, as a server of another protocol. Its address."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.sendall(banner)
            self.request.recv(4096)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_address[1]}"
        running.shutdown()


OPENAI = "needed: a server that speaks OpenAI's protocol"


@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        (404, b"nothing here", rf"HTTP 404 to /v1/models: nothing here; {OPENAI}"),
        (200, b"<html>\n hello", r"answered /v1/models with no JSON: '<html> hello'; http://127"),
        pytest.param(200, b"[" * 100_000, r"answered /v1/models with no JSON: '\[\[\[+\.\.\.'; http", id="nested"),
        (200, b'{"data": "\xff"}', r"answered in no UTF-8: .*xff"),
        (200, [1], r"answered /v1/models with a list, where an object is due: '\[1\]'; http://127"),
        (200, {"data": [{"name": "a"}]}, rf"/v1/models lists no models: .*name.*{OPENAI}"),
        (None, b"SSH-2.0-OpenSSH_9\r\n", rf"no HTTP that can be read \(BadStatusLine: SSH-2.0-OpenSSH_9\); {OPENAI}"),
    ],
)
def test_what_is_no_server_of_this_protocol_ends_at_once_in_one_line(
    status: int | None, body: Any, says: str, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    """With a patience of a minute, of which nothing is used."""
    began = time.monotonic()
    with says_only(body) if status is None else server(lambda path, headers: (status, body)) as url:
        with pytest.raises(RunError, match=says) as refused:
            with serving(tiny_checkpoint, attach(url, start_timeout_s=60.0), log_path=tmp_path / "log", observed={}):
                pass
    assert "\n" not in str(refused.value)
    assert url in str(refused.value)
    assert time.monotonic() - began < 5


def test_a_host_without_an_address_ends_at_once(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """One that the resolver knows to be none without asking the network."""
    section = attach("http://[fe80::1%nosuch]:8000", start_timeout_s=60.0)
    with pytest.raises(UserError, match=r"^serve\.base_url=http://\[fe80::1%nosuch\]:8000: its host has no address"):
        with serving(tiny_checkpoint, section, log_path=tmp_path / "log", observed={}):
            pass


INFO = "/server_info?config_format=json"


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        (INFO, b"<html>", r"answered /server_info\?config_format=json with no JSON: '<html>'; URL"),
        (INFO, {}, r"serve\.base_url=URL: its /server_info is not as vLLM's \(KeyError: 'vllm_config'\): \{\}"),
        (INFO, {"vllm_config": {"model_config": 1}}, r"serve\.base_url=URL: its /server_info is not as vLLM's"),
        ("/metrics", b"<html>a b</html>", r"URL/metrics is no page of Prometheus metrics, it begins '<html>a b"),
        ("/v1/completions", b"<html>", r"answered /v1/completions with no JSON: '<html>'; URL"),
        ("/v1/completions", ["a"], r"answered /v1/completions with a list, where an object is due: .*URL"),
        ("/v1/completions", {"choices": []}, r"answered /v1/completions without choices: .*URL"),
    ],
)
def test_a_page_that_is_another_is_said_in_one_line(
    path: str, body: Any, says: str, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    with server(lambda asked, headers: (200, body) if asked == path else models("a")(asked, headers)) as url:
        with serving(tiny_checkpoint, attach(url), log_path=tmp_path / "log", observed={}) as endpoint:
            posts = path.startswith("/v1/")
            with pytest.raises(RunError, match=says.replace("URL", url)) as refused:
                endpoint.post(path, {"model": "a"}) if posts else realised_config(endpoint, tiny_checkpoint)
    assert "\n" not in str(refused.value)


def test_a_page_of_another_servers_own_tells_nothing(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """SGLang has a /server_info too."""
    with server(lambda asked, headers: (200, {"tp": 1}) if asked == INFO else models("a")(asked, headers)) as url:
        with serving(tiny_checkpoint, attach(url), log_path=tmp_path / "log", observed={}) as endpoint:
            assert "dtype" in realised_config(endpoint, tiny_checkpoint)["unverified"]


def test_one_that_does_not_come_up_is_said_in_one_line(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with server(lambda path, headers: (503, {})) as url:
        with pytest.raises(RunError, match=r"not ready within serve\.start_timeout_s=0\.3: HTTP 503, still loading"):
            with serving(tiny_checkpoint, attach(url, start_timeout_s=0.3), log_path=tmp_path / "log", observed={}):
                pass
    capsys.readouterr()
    with pytest.raises(RunError, match="does not listen"):
        with serving(tiny_checkpoint, attach(url, start_timeout_s=0.3), log_path=tmp_path / "log", observed={}):
            pass
    said = f"oneaxis: serve.base_url={url}: does not listen; waiting for it, at most 0.3 s (serve.start_timeout_s)"
    assert capsys.readouterr().err.count(said) == 1


@pytest.mark.parametrize(
    "url",
    [
        "127.0.0.1:8000", "ftp://host", "http://", "http://127.0.0.1:abc", "http://127.0.0.1:99999", "http://host:0",
        "http://host:", "http://[::1", "http://[::g]:1", "http://[::1]x:1", "http://::1", "http://a..b", "http://a b",
        "http://host/\u00e4", f"http://{'a' * 64}", "http://host:1:2", "http://host\n",
    ],
)  # fmt: skip
def test_what_no_request_can_be_sent_to_is_no_address(url: str) -> None:
    with pytest.raises(UserError, match=r"^settings: serve\.base_url: .*; allowed: .* such as http://127") as refused:
        validate({"serve": attach("http://a").model_dump() | {"base_url": url}}, origin="settings", sections=["serve"])
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "url", ["http://me:s3cret@host", "http://me:s3 cret@host", "me:s3cret@host", "http://host/v1?key=s3cret"]
)
def test_a_key_in_an_address_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(UserError, match=r"serve\.base_url: .*host.* holds a user, a password or a query") as refused:
        validate({"serve": attach("http://a").model_dump() | {"base_url": url}}, origin="settings", sections=["serve"])
    assert "s3" not in str(refused.value)


def test_addresses_that_requests_can_be_sent_to() -> None:
    for url in ("http://127.0.0.1:8000", "https://gpu.example/v1/", "http://my_service:1", "http://[::1]:65535/a/b"):
        assert attach(url).base_url == url


def test_only_loopback_is_here() -> None:
    assert [is_here(url) for url in ("http://localhost:1", "http://127.0.0.2", "http://[::1]:8", "https://h/v1")] == [
        True, True, True, False,
    ]  # fmt: skip
    assert not is_here("http://10.0.0.1:8000")


@contextmanager
def somebody_elses(checkpoint: Path, settings: Serve, folder: Path) -> Iterator[str]:
    """A vLLM server that nobody has checked the settings of. Its address."""
    own = engine_folder()
    port, holder = reserve_port(0)
    environment, _ = engine_environment(os.environ, settings, device="cpu", folder=own)
    command = engine_command(checkpoint, settings, served_name="theirs", port=port, device="cpu")
    with (folder / "theirs.log").open("wb") as log:
        process = fork_engine(command[2:], environment, log=log.fileno(), folder=own, grace_s=5)
    assert process is not None
    try:
        yield f"http://127.0.0.1:{port}"
        assert process.poll() is None
    except RunError as error:
        raise AssertionError((folder / "theirs.log").read_text(encoding="utf-8")[-6000:]) from error
    finally:
        holder.close()
        process.terminate()
        process.wait(20)


@pytest.mark.slow
@pytest.mark.skipif(bool(cpu_flags()) and not cpu_flags() & WIDE, reason="a CPU without AVX-512 runs no packed INT4")
def test_a_real_engine_is_waited_for_asked_and_left_running(tmp_path: Path) -> None:
    """W4A8 weights, which it runs as W4A16, and a KV cache whose answers are garbage: it tells, without a word of it.

    Ours refuses the first before the start (tests/serve/test_preflight.py), and has no name for the second. A sweep is
    run against it as the stage does, and what it runs is all that a guard finds.
    """
    checkpoint = write_quantised(random_llama(tmp_path / "policy"), tmp_path / "w4", scheme("w4a16"))
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    for group in config["quantization_config"]["config_groups"].values():
        group["input_activations"] = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True,
                                      "dynamic": True}  # fmt: skip
    (checkpoint / "config.json").write_text(json.dumps(config), encoding="utf-8")
    settings = serve(threads=1, kv_cache_gib=0.25).model_copy(update={"kv_cache_dtype": "int8_per_token_head"})
    observed: dict[str, Any] = {}
    with somebody_elses(checkpoint, settings, tmp_path) as url:
        section = attach(url, start_timeout_s=240)
        with serving(checkpoint, section, log_path=tmp_path / "none", observed=observed) as endpoint:
            realised = realised_config(endpoint, checkpoint)
            assert len(endpoint.processes()) == 1
        with serving(checkpoint, section, log_path=tmp_path / "none", observed={}) as again:
            assert again.post("/v1/completions", {"model": "theirs", "prompt": "a", "max_tokens": 2})["choices"]
            text = np.random.default_rng(0).integers(3, 250, size=500).astype(np.int32)
            drawn: dict[str, Any] = {"seed": 0, "session": "attached", "repetition": 0}
            plan = draw_plan(SMALL, text, **drawn)
            draws = draw_answers(again, text[:16].tolist(), seed=0)
            plan, sweep, _ = run_load(again, plan, SMALL, text, most_users=section.max_num_seqs, **drawn)
            verdicts = judge(plan, sweep, summarise(sweep, SMALL), realised["differences"], BOUNDS, load=SMALL,
                             lease=HELD, tenants=ALONE, draws=draws)  # fmt: skip
    assert [guard for guard in verdicts if not guard.valid and guard.number != 3] == []
    assert (sweep.requests["status"] == "ok").all()
    assert all(cell["prefix_cache_reset"] for cell in sweep.conditions)
    assert observed["attached"] == {"base_url": url, "model": "theirs", "root": str(checkpoint)}
    assert [(item["key"], item["asked"], item["resolved"]) for item in realised["differences"]] == [
        ("checkpoint.quantization_config", "W4A8", "W4A16"),
        ("serve.kv_cache_dtype", "int8_per_token_head", "garbage"),
    ]
    found = realised["resolved"]
    assert (found["max_num_seqs"], found["max_model_len"], found["threads"], found["async_scheduling"]) == (
        8, 512, 1, False,
    )  # fmt: skip
    assert realised["unverified"] == []
