"""Structured output of the served model: what a grammar does to answers, on documents whose truth is known."""
