"""How the command line fails: one message on stderr and an exit code, never a traceback."""

from typing import Final, NoReturn

EXIT_FAILURE: Final = 1
EXIT_USAGE: Final = 2
EXIT_FORCED: Final = 130


class CliError(Exception):
    """Ends the command. The message is for the user and says what to do."""

    def __init__(self, message: str, *, exit_code: int = EXIT_FAILURE) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def refuse_usage(message: str) -> NoReturn:
    """Ends the command because of what the user wrote: flags, arguments or a manifest."""
    raise CliError(message, exit_code=EXIT_USAGE)
