"""Shared by all tests: the project's root, an environment in which no library calls home, and leases of their own."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from oneaxis.serve import preloaded_engines
from oneaxis.stage import QUIET

os.environ.update(QUIET)
if "PYTEST_XDIST_WORKER" in os.environ:
    # Each worker takes a core of its own: with all cores each, their threads wait for each other in turns.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def root() -> Path:
    """The root of the project under test."""
    return ROOT


@pytest.fixture(scope="session", autouse=True)
def leases(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Tests wait neither for what else runs on this machine nor for each other's workers."""
    os.environ["ONEAXIS_LEASE_DIR"] = str(tmp_path_factory.mktemp("leases"))


@pytest.fixture(scope="session", autouse=True)
def engines() -> Iterator[None]:
    """Engines that tests start, themselves or through stages, are forks of one preloaded process of this session."""
    with preloaded_engines():
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A slow or timed test that fails is tried once more, and listed as RERUN: something to look into.

    Such tests run real engines and clusters beside each other on what may be two cores.
    """
    for item in items:
        if item.get_closest_marker("slow") or item.get_closest_marker("clock"):
            item.add_marker(pytest.mark.flaky(reruns=1))
