"""Divergence: the same prompts at temperature 0, over and over, one at a time and many at a time; what came out."""
