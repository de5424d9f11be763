"""The two kinds of trouble that the program reports, each with its exit code."""

EXIT_USAGE = 2
EXIT_SOFTWARE = 70  # EX_SOFTWARE of sysexits.h


class InputError(Exception):
    """Something that was handed in is wrong: an argument, a file, a request."""


class EnvironmentTrouble(Exception):
    """The surroundings are wrong: a missing package, another torch, a full disk."""
