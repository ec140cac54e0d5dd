"""Prefill and decode on two engines: proof that keys and values moved, equal answers, and where the time went."""
