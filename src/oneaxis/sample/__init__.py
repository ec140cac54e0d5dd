"""Preference pairs from the model's own responses: prompts, sampling, verifiable rules, pairs."""
