"""The kinds of trouble that the program reports, and their exit codes."""

EXIT_USAGE = 2
EXIT_SOFTWARE = 70  # EX_SOFTWARE of sysexits.h


class InputError(Exception):
    """Something that was handed in is wrong: an argument, a file, a request."""


class EnvironmentTrouble(Exception):
    """The surroundings are wrong: a missing package, another torch, a full disk."""


class UnusablePython(EnvironmentTrouble):
    """This Python lacks a package, or has another one than is wanted: another Python may do."""
