"""A draft model for speculative decoding, made from the policy, and how an engine is told to guess."""
