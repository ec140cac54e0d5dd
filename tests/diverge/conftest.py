"""Shared by the tests of diverge."""

from tests.serve.conftest import tiny_checkpoint

__all__ = ["tiny_checkpoint"]
