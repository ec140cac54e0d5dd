"""Preference pairs: which of them displace probability (CHES), DPO with its anchor, and the verdict on the result."""
