"""The two ways in which a run ends that is not a success and not a bug of ours.

Exit codes, everywhere: 0 done; 1 the run failed, is INVALID, or a gate said no; 2 refused before it ran,
for a mistake in the settings or the input.
"""


class UserError(Exception):
    """A mistake in settings or input: one line that says where, what, and what is allowed. Exit code 2."""

    exit_code = 2


class RunError(Exception):
    """The work itself failed (engine died, disk full, load did not hold): one line of why. Exit code 1."""

    exit_code = 1
