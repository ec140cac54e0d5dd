"""Open-loop load on a serving engine: what is sent and when, what came back, and the latency and goodput of it."""
