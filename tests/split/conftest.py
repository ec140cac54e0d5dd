"""Shared by the tests of split."""

from tests.serve.conftest import tiny_checkpoint

__all__ = ["tiny_checkpoint"]
