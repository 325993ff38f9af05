"""The errors that a user sees as one line, without a traceback."""


class UserError(Exception):
    """Bad input: the message names the thing, the numbers and the mend. The command line exits with 2."""


class RunFailed(Exception):
    """A run that was well asked for but broke on the way. The command line exits with 1."""
