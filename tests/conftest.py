"""Shared by all tests: the project's root, an environment in which no library calls home, and leases of their own."""

import atexit
import os
import shutil
import tempfile
from pathlib import Path

import pytest

from oneaxis.stage import QUIET

os.environ.update(QUIET)
# Tests wait neither for what else runs on this machine nor for each other's workers.
os.environ["ONEAXIS_LEASE_DIR"] = tempfile.mkdtemp(prefix="oneaxis-test-leases-")
atexit.register(shutil.rmtree, os.environ["ONEAXIS_LEASE_DIR"], ignore_errors=True)

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def root() -> Path:
    """The root of the project under test."""
    return ROOT
