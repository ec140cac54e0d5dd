"""Settings of a `load` section that a plain open loop leaves alone."""

UNUSED: dict[str, object] = {
    "together": False,
    "burstiness": None,
    "users": [],
    "think_time_s": None,
    "requests_per_user": None,
    "trace": None,
    "trace_speed": [],
    "repeat_prompts": None,
    "classes": {},
}
