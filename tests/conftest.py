"""Shared by all tests: the project's root, and an environment in which no library calls home."""

import os
from pathlib import Path

import pytest

from oneaxis.stage import QUIET

os.environ.update(QUIET)

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def root() -> Path:
    """The root of the project under test."""
    return ROOT
