"""An endpoint that runs already: waited for, asked what it is, never started, never stopped.

    with attached_endpoint(settings, observed=observed) as endpoint:
        endpoint.post("/v1/completions", {"model": endpoint.model_name, ...})

What a server does not tell is *unverified*, and said (`realised.py`). vLLM tells all of it with
`VLLM_SERVER_DEV_MODE=1`; other servers have `/v1/models` at the least.
"""

import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import psutil
from tqdm import tqdm

from oneaxis.config.schema import ServeAttach
from oneaxis.errors import RunError, UserError
from oneaxis.serve.endpoint import Endpoint, NoAnswer, shown
from oneaxis.serve.preflight import check_key

POLL_S = (0.1, 5.0)
"""Shortest and longest pause between two looks at a server that does not answer yet; each is half longer."""


def is_here(base_url: str) -> bool:
    """Whether an endpoint is on this machine's loopback; a lease of this machine's devices says nothing of others."""
    host = urlsplit(base_url).hostname or ""
    return host in ("localhost", "::1") or host.startswith("127.")


@dataclass
class AttachedEndpoint(Endpoint):
    """A server that was found running."""

    def processes(self) -> list[int]:
        """Those that listen on its port, when it is on this machine and this user may see them."""
        if not is_here(self.base_url):
            return []
        parts = urlsplit(self.base_url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        with suppress(psutil.Error, OSError):
            return sorted({
                connection.pid
                for connection in psutil.net_connections(kind="tcp")
                if connection.status == psutil.CONN_LISTEN and connection.laddr[1:] == (port,) and connection.pid
            })  # fmt: skip
        return []


@contextmanager
def attached_endpoint(settings: ServeAttach, *, observed: dict[str, Any]) -> Iterator[AttachedEndpoint]:
    """Wait for the server at `settings.base_url`, find its model, and leave it running.

    `observed` gets `phase` (waiting, loading, ready) as it goes, `start` (attached), `waited_s`, and `attached`: the
    address, the model's name and what the server says it was loaded from.

    Raises:
        UserError: no key in the environment, a key that is refused, a model that is not served or not named where
            several are, a context that is too short, a host that has no address.
        RunError: when the server does not come up within `start_timeout_s`; at once when it is no server of OpenAI's
            protocol.
    """
    base_url = settings.base_url.rstrip("/").removesuffix("/v1")
    endpoint = AttachedEndpoint(base_url, settings.model or "", settings, headers=_headers(settings))
    began = time.monotonic()
    card = _model(settings, _wait_until_it_serves(endpoint, settings, observed))
    endpoint.model_name, endpoint.card = card["id"], card
    length = card.get("max_model_len")
    if isinstance(length, int) and length < settings.max_model_len:
        raise UserError(
            f"serve.max_model_len={settings.max_model_len}: allowed: up to {length}, which {base_url} serves"
        )
    observed.update(
        start="attached",
        phase="ready",
        waited_s=round(time.monotonic() - began, 3),
        attached={"base_url": base_url, "model": card["id"], "root": card.get("root")},
    )
    yield endpoint


def _headers(settings: ServeAttach) -> dict[str, str]:
    key = check_key(settings)
    return {} if key is None else {"Authorization": f"Bearer {key}"}


def _wait_until_it_serves(endpoint: Endpoint, settings: ServeAttach, observed: dict[str, Any]) -> list[dict[str, Any]]:
    """The models that the server lists, once it is healthy. What will not pass by waiting is not waited for."""
    key = f"serve.base_url={settings.base_url}"
    began, (pause_s, longest_s) = time.monotonic(), POLL_S
    said = False
    with tqdm(desc="endpoint", bar_format="{desc} ({elapsed})", leave=False, delay=2) as bar:
        while True:
            try:
                return _models_when_well(endpoint)
            except NoAnswer as problem:
                if problem.status in (401, 403):
                    named = settings.api_key_env
                    refused = f"the key in {named}" if named else "requests without a key (serve.api_key_env)"
                    raise UserError(f"{key}: refuses {refused}") from problem
                if isinstance(problem.reason, socket.gaierror):
                    raise UserError(f"{key}: {problem}; allowed: an address that this machine finds") from problem
                if not problem.passing:
                    where = "" if problem.status is None else f" to /v1/models: {problem.said}"
                    raise RunError(f"{key}: {problem}{where}; needed: a server that speaks OpenAI's protocol"
                                   ) from problem  # fmt: skip
                state = str(problem)
                observed["phase"] = "loading" if problem.status == 503 else "waiting"
            if not said:
                bar.write(f"oneaxis: {key}: {state}; waiting for it, at most {settings.start_timeout_s:g} s "
                          "(serve.start_timeout_s)", file=sys.stderr)  # fmt: skip
                said = True
            bar.set_description_str(f"endpoint: {state[:60]}")
            if time.monotonic() - began + pause_s > settings.start_timeout_s:
                raise RunError(f"{key}: not ready within serve.start_timeout_s={settings.start_timeout_s:g}: {state}")
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, longest_s)


def _models_when_well(endpoint: Endpoint) -> list[dict[str, Any]]:
    """Its models, once `/health` is well; a server that has no such page is asked for its models alone."""
    try:
        endpoint.ask("/health", timeout_s=5)
    except NoAnswer as problem:
        if problem.status is None or problem.status in (401, 403) or problem.passing:
            raise
    return _models(endpoint)


def _models(endpoint: Endpoint) -> list[dict[str, Any]]:
    path = "/v1/models"
    said = endpoint.ask(path)
    models = endpoint.read_object(path, said).get("data")
    if not isinstance(models, list) or not all(
        isinstance(model, dict) and isinstance(model.get("id"), str) for model in models
    ):
        raise RunError(f"serve.base_url={endpoint.base_url}: {path} lists no models: {shown(said)!r}; needed: a server "
                       "that speaks OpenAI's protocol")  # fmt: skip
    return models


def _model(settings: ServeAttach, models: list[dict[str, Any]]) -> dict[str, Any]:
    named = {model["id"]: model for model in models}
    if settings.model is None and len(named) == 1:
        return models[0]
    if settings.model is None or settings.model not in named:
        raise UserError(f"serve.model={settings.model}: allowed: {', '.join(sorted(named)) or 'none is served'}, of "
                        f"{settings.base_url}")  # fmt: skip
    return named[settings.model]
