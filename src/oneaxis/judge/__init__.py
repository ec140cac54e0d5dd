"""Whether a number can be trusted, and whether a difference is one: validity guards and paired statistics."""
