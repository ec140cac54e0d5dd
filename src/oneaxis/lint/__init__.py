"""Lint of what a model is made to write (`oneaxis lint`): schemas, Pydantic models, requests; and a loop detector."""
