"""An OpenAI server as those who send it requests see it: where it is, how it is asked, what it says of itself."""

import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from oneaxis.config.schema import ServeSection
from oneaxis.errors import RunError
from oneaxis.serve.metrics import parse_metrics

# A proxy from the environment must not see requests to this machine.
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


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
            request = urllib.request.Request(f"{self.base_url}/health", headers=dict(self.headers))
            with _direct.open(request, timeout=timeout_s):
                return ""
        except urllib.error.HTTPError as error:
            error.close()
            return "HTTP 503, still loading" if error.code == 503 else f"HTTP {error.code}"
        except urllib.error.URLError as error:
            refused = isinstance(error.reason, ConnectionRefusedError)
            return "does not listen" if refused else f"does not answer: {error.reason}"
        except (OSError, ValueError) as error:
            return f"does not answer: {error}"

    def get(self, path: str, *, timeout_s: float = 30.0) -> str:
        """GET `path`, as text.

        Raises:
            RunError: when it is gone or does not answer.
        """
        return self._request(path, None, timeout_s)

    def post(self, path: str, body: dict[str, Any], *, timeout_s: float = 120.0) -> dict[str, Any]:
        """POST JSON to `path`, and its JSON answer.

        Raises:
            RunError: when it is gone, does not answer, or answers with an error.
        """
        answer = json.loads(self._request(path, json.dumps(body).encode(), timeout_s) or "{}")
        assert isinstance(answer, dict)
        return answer

    def _request(self, path: str, body: bytes | None, timeout_s: float) -> str:
        json_type = {"Content-Type": "application/json"} if body is not None else {}
        request = urllib.request.Request(f"{self.base_url}{path}", body, {**self.headers, **json_type})
        try:
            with _direct.open(request, timeout=timeout_s) as response:
                return str(response.read().decode("utf-8"))
        except urllib.error.HTTPError as error:
            said = " ".join(error.read().decode("utf-8", "replace").split())[:300]
            raise RunError(f"the engine answered {error.code} to {path}: {said}; {self.where()}") from error
        except (OSError, TimeoutError) as error:
            # A dying engine closes its connections a moment before it is gone.
            for _ in range(20):
                self.require_alive()
                time.sleep(0.1)
            raise RunError(f"the engine does not answer {path}: {error}; {self.where()}") from error

    def metrics(self) -> dict[str, float]:
        """Every sample of `/metrics`, by `name{label="value",...}` with sorted labels (see `metric_total`)."""
        return parse_metrics(self.get("/metrics"))

    def offers(self, path: str) -> str | None:
        """The page at `path`; None where the server has no such page."""
        try:
            return self.get(path, timeout_s=120)
        except RunError as error:
            if "answered 404" in str(error) or "answered 405" in str(error):
                return None
            raise

    def server_info(self) -> dict[str, Any]:
        """`/server_info?config_format=json`: the engine's own configuration."""
        info = json.loads(self.get("/server_info?config_format=json", timeout_s=120))
        assert isinstance(info, dict)
        return info
