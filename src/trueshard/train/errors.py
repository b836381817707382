"""The one exception that stands for 'what was asked for cannot be done'."""


class UserError(Exception):
    """A wrong input: its text is one line that names the key, path or option, and the remedy.

    The command line prints that line on stderr and exits with code 2. Everything else that is raised is
    a failure of the program and keeps its traceback.
    """
