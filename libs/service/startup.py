"""The start of a process: a wrong setting or an unusable file ends it with one line and no traceback."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from pydantic import AliasChoices, ValidationError
from pydantic_settings import BaseSettings, SettingsError

from leyden.libs.service.errors import Misconfigured
from leyden.libs.service.settings import ServiceSettings
from leyden.libs.telemetry import configure_logs, configure_tracing
from leyden.libs.telemetry.imports import without_rich

Configured = TypeVar("Configured", bound=ServiceSettings)


@contextmanager
def exit_on_config_error(settings: type[BaseSettings]) -> Iterator[None]:
    """Decorates a process's main function: status 1 and a line on stderr replace the traceback of a wrong setting.

    Each wrong variable has a line; a `Misconfigured` is one. No line shows a value.

    SIGTERM ends the process from here on. Until `run_until_signal` no garbage is collected.
    """
    _end_on_sigterm()
    # Why: in the imports, collections find nothing; without them a trainer starts in 9.2 s of CPU time instead of 10.9.
    gc.disable()
    try:
        yield
    except ValidationError as error:
        # Another invalid document is a fault of ours, and a traceback helps.
        if error.title != settings.__name__:
            raise
        raise SystemExit("\n".join(_lines(settings, error))) from None
    except SettingsError as error:
        raise SystemExit(_line(_named(settings, str(error)), "should be JSON")) from None
    except Misconfigured as error:
        raise SystemExit(" ".join(str(error).split())) from None
    finally:
        gc.enable()


def service_main(name: str, settings: type[Configured]) -> Callable[[Callable[[Configured], None]], Callable[[], None]]:
    """Decorates the function that runs a service: reads its settings, starts logs and traces, and calls it with them.

    The function imports what it runs: a wrong setting is reported before slow imports.
    """

    def decorate(run: Callable[[Configured], None]) -> Callable[[], None]:
        @exit_on_config_error(settings)
        def main() -> None:
            found = settings()
            configure_logs(name, found.log_level)
            configure_tracing(name, found.otlp_endpoint)
            with without_rich():
                run(found)

        return main

    return decorate


def _end_on_sigterm() -> None:
    """Ends a container's first process at SIGTERM, until its event loop handles the signal."""
    # The kernel keeps SIGTERM from process 1 without a handler: a pod deleted during its imports waited for SIGKILL.
    if os.getpid() == 1:
        signal.signal(signal.SIGTERM, lambda number, _frame: os._exit(128 + number))


def variable(settings: type[BaseSettings], name: str) -> str:
    """The environment variable of a field, by the field's name or its alias."""
    field = settings.model_fields.get(name)
    if field is None:
        return name
    alias = field.validation_alias
    if isinstance(alias, AliasChoices):
        return str(alias.choices[0])
    return str(alias) if isinstance(alias, str) else f"{settings.model_config.get('env_prefix', '')}{name}".upper()


def _lines(settings: type[BaseSettings], error: ValidationError) -> list[str]:
    found = error.errors(include_url=False, include_input=False, include_context=False)
    return [_line(variable(settings, str(one["loc"][0])), _wanted(one["msg"])) for one in found]


def _line(name: str, wanted: str) -> str:
    return f"{name}: {wanted}; correct it, or unset it where it has a default (docs/reference/settings.md)"


def _wanted(message: str) -> str:
    words = message.removeprefix("Value error, ").removeprefix("Input ")
    return words[:1].lower() + words[1:]


def _named(settings: type[BaseSettings], message: str) -> str:
    """The variable of the field in the message of a settings source, which names it in words alone."""
    return next((variable(settings, name) for name in settings.model_fields if f'"{name}"' in message), message)
