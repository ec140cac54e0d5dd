"""Tables of text, items, pairs, prompts and probes: parsed, cleaned, de-duplicated, sampled, split."""
