"""What a node sends home is unpacked within its folder and nowhere else, by any Python 3.11."""

import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from oneaxis.errors import RunError
from oneaxis.multirun.node import extract_within


def packed(*members: tarfile.TarInfo) -> tarfile.TarFile:
    """An archive of these members, files with a letter in them."""
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w:gz") as archive:
        for member in members:
            member.size = int(member.isfile())
            archive.addfile(member, io.BytesIO(b"x"))
    return tarfile.open(fileobj=io.BytesIO(held.getvalue()))


def link(name: str, target: str) -> tarfile.TarInfo:
    """A symbolic link."""
    member = tarfile.TarInfo(name)
    member.type, member.linkname = tarfile.SYMTYPE, target
    return member


@pytest.fixture(params=[True, False], ids=["filter", "no filter"])
def unpack(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[tarfile.TarFile, Path], None]:
    """With the filter of Python 3.11.4, and as on a Python that is older."""
    if not request.param:
        monkeypatch.delattr(tarfile, "data_filter", raising=False)
    elif not hasattr(tarfile, "data_filter"):
        pytest.skip("this Python has no filters")
    return extract_within


def test_files_land_in_the_folder(tmp_path: Path, unpack: Callable[[tarfile.TarFile, Path], None]) -> None:
    unpack(packed(tarfile.TarInfo("./params.yaml"), tarfile.TarInfo("./artifacts/a")), tmp_path)
    assert (tmp_path / "artifacts" / "a").read_bytes() == (tmp_path / "params.yaml").read_bytes() == b"x"


@pytest.mark.parametrize("member", [tarfile.TarInfo("../out"), link("a", "../out")], ids=["above", "link"])
def test_what_leads_out_is_refused(
    tmp_path: Path, unpack: Callable[[tarfile.TarFile, Path], None], member: tarfile.TarInfo
) -> None:
    (tmp_path / "in").mkdir()
    with pytest.raises((RunError, tarfile.TarError)):
        unpack(packed(member), tmp_path / "in")
    assert not (tmp_path / "out").exists()
    assert list((tmp_path / "in").iterdir()) == []
