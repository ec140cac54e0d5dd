"""Shared by the tests of serve."""

from pathlib import Path

import pytest

from tests.serve.tiny import random_llama


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint; do not change it."""
    return random_llama(tmp_path_factory.mktemp("serve") / "checkpoint")
