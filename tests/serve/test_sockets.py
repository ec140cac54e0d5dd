"""Where an engine's sockets lie when the temporary folder has a long name."""

import os
import socket
import tempfile
from pathlib import Path

import pytest

from oneaxis.errors import UserError
from oneaxis.serve.engine import engine_folder
from oneaxis.serve.forked import VARIABLE, preloaded_engines
from oneaxis.serve.sockets import LONGEST, socket_parent

UUID = "0" * 36


@pytest.fixture
def deep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / ("d" * 80)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def bind(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


def test_the_system_takes_the_longest_path_and_no_longer_one(tmp_path: Path) -> None:
    room = LONGEST - len(os.fsencode(tmp_path)) - 1
    bind(tmp_path / ("a" * room))
    with pytest.raises(OSError, match="too long"):
        bind(tmp_path / ("a" * (room + 1)))


def test_a_folder_that_is_short_enough_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    room = LONGEST - len(os.fsencode(tmp_path))
    assert socket_parent(room) == tmp_path
    assert socket_parent(room + 1) == Path("/tmp")


def test_an_engines_sockets_fit_below_a_long_temporary_folder(deep: Path) -> None:
    with pytest.raises(OSError, match="too long"):
        bind(deep / UUID)
    folder = engine_folder()
    try:
        assert folder.stat().st_mode & 0o777 == 0o700
        bind(folder / UUID)
        (folder / UUID).unlink()
    finally:
        folder.rmdir()


def test_so_do_those_of_preloaded_engines(deep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with preloaded_engines():
        named = Path(os.environ[VARIABLE])
    assert named.parent == Path("/tmp")


def test_without_a_shorter_folder_it_is_said(deep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(UserError, match=r"TMPDIR=.*: too long .* at most 53 bytes"):
        engine_folder()
