"""An OpenAI server as those who send it requests see it: where it is, how it is asked, what it says of itself."""

import json
import socket
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any

from oneaxis.config.schema import ServeSection
from oneaxis.errors import RunError
from oneaxis.serve.metrics import parse_metrics

# A proxy from the environment must not see requests to this machine.
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


SERVER_INFO = "/server_info?config_format=json"
"""Where vLLM tells its configuration, with `VLLM_SERVER_DEV_MODE=1`."""

LOADING = (408, 425, 429)
"""Beside 500 and up, what a server, or a proxy before it, may answer that is well a moment later."""


class NoAnswer(RunError):
    """A request that got no answer, or one that says that it is an error."""

    def __init__(self, words: str, reason: Exception, *, status: int | None = None, said: str = "") -> None:
        super().__init__(words)
        self.reason, self.status, self.said = reason, status, said
        """`status`: of HTTP; None where none came. `said`: the beginning of the answer's text."""

    @property
    def passing(self) -> bool:
        """Whether the same request may be answered later, by a server that is still loading."""
        if self.status is not None:
            return self.status >= 500 or self.status in LOADING
        lasting = isinstance(self.reason, socket.gaierror | ssl.SSLError)
        return isinstance(self.reason, OSError) and (not lasting or isinstance(self.reason, ssl.SSLEOFError))


def shown(text: str, characters: int = 100) -> str:
    """The beginning of a text, in one line."""
    line = " ".join(text[: 2 * characters].split())
    return line if len(line) <= characters else f"{line[:characters]}..."


def _why(reason: Exception) -> str:
    if isinstance(reason, ConnectionRefusedError):
        return "does not listen"
    if isinstance(reason, socket.gaierror):
        return f"its host has no address ({reason.strerror})"
    if isinstance(reason, UnicodeDecodeError):
        return f"answered in no UTF-8: {shown(repr(reason.object[:50]))}"
    if isinstance(reason, HTTPException) and not isinstance(reason, OSError):
        return f"answered in no HTTP that can be read ({type(reason).__name__}: {shown(str(reason))})"
    return f"does not answer: {reason}"


@dataclass
class Endpoint:
    """A server that answers, whoever has started it."""

    base_url: str
    """`http://127.0.0.1:PORT`, without `/v1`."""
    model_name: str
    """The name that requests give as `model`."""
    settings: ServeSection
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Sent with every request. May hold a secret: never printed, never stored."""
    card: Mapping[str, Any] = field(default_factory=dict)
    """What `/v1/models` says of the model, where that was asked."""

    def alive(self) -> bool:
        """Whether its processes are there; True where that cannot be seen."""
        return True

    def require_alive(self) -> None:
        """Raise RunError when it is known to be gone."""

    def processes(self) -> list[int]:
        """Processes on this machine at the head of what serves; none where that cannot be seen."""
        return []

    def where(self) -> str:
        """Where more is to be read, for the end of an error."""
        return self.base_url

    def state(self, *, timeout_s: float = 5.0) -> str:
        """What `/health` says: empty when it is well, else why not, in a few words."""
        try:
            self.ask("/health", timeout_s=timeout_s)
        except NoAnswer as problem:
            return str(problem)
        return ""

    def ask(self, path: str, body: bytes | None = None, *, timeout_s: float = 30.0) -> str:
        """GET `path`, or POST JSON to it, once: the answer's text, whatever it says.

        Raises:
            NoAnswer: in a few words, without the path.
        """
        json_type = {"Content-Type": "application/json"} if body is not None else {}
        request = urllib.request.Request(f"{self.base_url}{path}", body, {**self.headers, **json_type})
        try:
            with _direct.open(request, timeout=timeout_s) as response:
                return str(response.read().decode("utf-8"))
        except urllib.error.HTTPError as error:
            said = ""
            with error, suppress(OSError, HTTPException):
                said = shown(error.read().decode("utf-8", "replace"), 300)
            loading = ", still loading" if error.code == 503 else ""
            raise NoAnswer(f"HTTP {error.code}{loading}", error, status=error.code, said=said) from error
        except (OSError, HTTPException, ValueError) as error:
            wrapped = getattr(error, "reason", None) if isinstance(error, urllib.error.URLError) else None
            reason = wrapped if isinstance(wrapped, Exception) else error
            raise NoAnswer(_why(reason), reason) from error

    def get(self, path: str, *, timeout_s: float = 30.0) -> str:
        """GET `path`, as text.

        Raises:
            RunError: when it is gone or does not answer.
        """
        return self._request(path, None, timeout_s)

    def post(self, path: str, body: dict[str, Any], *, timeout_s: float = 120.0) -> dict[str, Any]:
        """POST JSON to `path`, and its JSON answer.

        Raises:
            RunError: when it is gone, does not answer, or answers with an error or with what is no such answer.
        """
        answer = self.read_object(path, self._request(path, json.dumps(body).encode(), timeout_s) or "{}")
        choices = answer.get("choices")
        if path.startswith("/v1/") and not (isinstance(choices, list) and choices and isinstance(choices[0], dict)):
            raise RunError(f"the engine answered {path} without choices: {shown(str(answer))}; {self.where()}")
        return answer

    def read_object(self, path: str, text: str) -> dict[str, Any]:
        """The JSON object that `path` answered with.

        Raises:
            RunError: naming the address and what came instead.
        """
        try:
            answer = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise RunError(f"the engine answered {path} with no JSON: {shown(text)!r}; {self.where()}") from error
        if not isinstance(answer, dict):
            raise RunError(f"the engine answered {path} with a {type(answer).__name__}, where an object is due: "
                           f"{shown(text)!r}; {self.where()}")  # fmt: skip
        return answer

    def _request(self, path: str, body: bytes | None, timeout_s: float) -> str:
        try:
            return self.ask(path, body, timeout_s=timeout_s)
        except NoAnswer as problem:
            if problem.status is not None:
                said = f"the engine answered {problem.status} to {path}: {problem.said}"
            else:
                said = f"the engine, asked for {path}, {problem}"
            # A dying engine closes its connections a moment before it is gone.
            for _ in range(20 if problem.status is None else 0):
                self.require_alive()
                time.sleep(0.1)
            raise NoAnswer(f"{said}; {self.where()}", problem.reason, status=problem.status) from problem

    def metrics(self) -> dict[str, float]:
        """Every sample of `/metrics`, by `name{label="value",...}` with sorted labels (see `metric_total`)."""
        return parse_metrics(self.get("/metrics"), f"{self.base_url}/metrics")

    def offers(self, path: str) -> str | None:
        """The page at `path`; None where the server has no such page."""
        try:
            return self.get(path, timeout_s=120)
        except NoAnswer as problem:
            if problem.status in (404, 405):
                return None
            raise

    def server_info(self) -> dict[str, Any]:
        """`/server_info?config_format=json`: the engine's own configuration."""
        return self.read_object(SERVER_INFO, self.get(SERVER_INFO, timeout_s=120))
