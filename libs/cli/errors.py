"""Exit statuses, and the messages that end a command."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

import typer
from pydantic import ValidationError

from leyden.libs.cli.view.output import as_block, error_console
from leyden.libs.client import Conflict, Forbidden, LeydenError, NotFound, Refused, Unauthorised, Unreachable


class Exit(IntEnum):
    """Meanings of the exit status."""

    DONE = 0
    ERROR = 1
    USAGE = 2
    NOT_FOUND = 3
    UNREACHABLE = 4
    REFUSED = 5
    NOT_ALLOWED = 6
    INTERRUPTED = 130


class CommandError(Exception):
    """An error with its own exit status."""

    def __init__(self, message: str, status: Exit = Exit.ERROR) -> None:
        super().__init__(message)
        self.status = status


_STATUSES: dict[type[LeydenError], Exit] = {
    NotFound: Exit.NOT_FOUND,
    Unreachable: Exit.UNREACHABLE,
    Refused: Exit.REFUSED,
    Conflict: Exit.REFUSED,
    Unauthorised: Exit.NOT_ALLOWED,
    Forbidden: Exit.NOT_ALLOWED,
}


@contextmanager
def exit_on_error() -> Iterator[None]:
    """Ends the command with a message and a status instead of a traceback, for errors that people can act on."""
    try:
        yield
    except CommandError as error:
        _end(str(error), error.status)
    except LeydenError as error:
        _end(_message(error), _STATUSES.get(type(error), Exit.ERROR))
    except ValidationError as error:
        _end(f"settings: {error}", Exit.USAGE)
    except OSError as error:
        _end(str(error), Exit.ERROR)
    except KeyboardInterrupt:
        raise typer.Exit(Exit.INTERRUPTED) from None


def _message(error: LeydenError) -> str:
    problem = error.problem
    if problem is None or not problem.errors:
        return str(error)
    return "\n".join([problem.title, *(f"  {field.path}: {field.message}" for field in problem.errors)])


def _end(message: str, status: Exit) -> None:
    error_console.print(as_block(message, first="error: ", then="  "), soft_wrap=True)
    raise typer.Exit(status)
