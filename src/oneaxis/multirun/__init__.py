"""Multirun: the points of one question, each a run of the pipeline of its own, and what came of the comparison."""
