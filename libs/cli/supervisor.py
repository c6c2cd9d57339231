"""`leyden up`, `down`, `status`, `logs`: the platform of this machine."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from leyden.libs.cli import control_files
from leyden.libs.cli.context import Context, Home, context_of
from leyden.libs.cli.errors import CommandError, Exit
from leyden.libs.cli.output import AsJson, console, print_facts, print_json, print_table
from leyden.libs.cli.platform import AlreadyRunning, Platform, PlatformError, platform_options, readiness, stop_servers
from leyden.libs.cli.record import PlatformRecord, ServiceRecord, read_record, write_record
from leyden.libs.cli.watch import OVER
from leyden.libs.client import LeydenError
from leyden.libs.contracts.api import Engine, Run

READY_SECONDS = 600.0
STOP_SECONDS = 120.0
NEWEST_RUNS = 50


def up(
    ctx: typer.Context,
    home: Home = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return once it is ready and let it run.")] = False,
    free_ports: Annotated[bool, typer.Option("--free-ports", help="Any free ports, not the usual ones.")] = False,
    as_json: AsJson = False,
    silent: Annotated[bool, typer.Option("--silent", hidden=True, help="Print no addresses and no token.")] = False,
) -> None:
    """Run the platform on this machine until Ctrl-C: embedded Postgres and Redis, and every service.

    LEYDEN_DATABASE_URL and LEYDEN_REDIS_URL name servers of your own; LEYDEN_MODEL_PATH another base model.
    Variables such as TRAINER_THREADS reach their services.
    """
    context = context_of(ctx, home)
    if detach:
        _detach(context, free_ports)
        _print_platform(context, as_json)
        return
    platform = Platform(context.home, platform_options(context.settings, free_ports=free_ports), report=_say)
    with _ends_on_signal(platform):
        platform.start()
        try:
            platform.ready(READY_SECONDS)
            if not silent:
                _print_platform(context, as_json)
            _say("ready; Ctrl-C stops everything")
            platform.wait()
        except PlatformError:
            if not platform.stopping:
                raise
        else:
            if platform.failure is not None:
                raise CommandError(str(platform.failure))
        finally:
            platform.stop()
    _say("stopped; `leyden up` goes on where it was")


def _say(words: str) -> None:
    sys.stderr.write(f"leyden: {words}\n")
    sys.stderr.flush()


@contextlib.contextmanager
def _ends_on_signal(platform: Platform) -> Iterator[None]:
    """The first SIGINT or SIGTERM ends services in order, a second one at once."""

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        platform.request_stop()

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _detach(context: Context, free_ports: bool) -> None:
    record = context.record()
    if record is not None and record.running():
        raise AlreadyRunning(f"a platform already runs in {context.home}: see `leyden status`")
    logs = context.home / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    # Silent: its output is a log, and the token does not belong into one.
    command = [sys.executable, "-m", "leyden.libs.cli", "up", "--silent", "--home", str(context.home)]
    with (logs / "supervisor.log").open("ab") as log:
        began = log.tell()
        child = subprocess.Popen(
            [*command, *(["--free-ports"] if free_ports else [])],
            cwd=context.home,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    if not _within(READY_SECONDS, lambda: child.poll() is not None or _is_ready(context, child.pid)):
        raise CommandError(f"not ready after {READY_SECONDS:g} s: see {logs / 'supervisor.log'}")
    if child.poll() is not None:
        said = (logs / "supervisor.log").read_bytes()[began:].decode(errors="replace")
        raise CommandError(f"the supervisor ended:\n{said[-3000:]}")


def _is_ready(context: Context, pid: int) -> bool:
    record = context.record()
    return record is not None and record.supervisor.pid == pid and record.state == "ready"


def _within(seconds: float, condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def _print_platform(context: Context, as_json: bool) -> None:
    record = context.record()
    assert record is not None
    token_file = context.home / "secrets" / "admin-token"
    if as_json:
        print_json({**record.model_dump(mode="json"), "token": token_file.read_text().strip()})
        return
    print_facts([(name, service.url) for name, service in record.services.items() if service.url is not None])
    print_facts(
        [
            ("API documents", f"{record.url}/docs"),
            ("token", token_file.read_text().strip()),
            ("logs", context.home / "logs"),
        ]
    )


def down(ctx: typer.Context, home: Home = None, as_json: AsJson = False) -> None:
    """Stop the platform of this home, whoever started it; what a killed supervisor left, too."""
    context = context_of(ctx, home)
    record = context.record()
    ran = record is not None and record.running()
    if record is not None and ran:
        os.kill(record.supervisor.pid, signal.SIGTERM)
        if not _within(STOP_SECONDS, lambda: not record.supervisor.lives()):
            raise CommandError(
                f"the supervisor (pid {record.supervisor.pid}) still runs: see its log in {context.home}"
            )
    elif record is not None and record.state != "stopped":
        # Its supervisor was killed: services died with it, Postgres and Redis did not.
        with Platform.alone(context.home):
            stop_servers(context.home, record.embedded)
            write_record(context.home, record.model_copy(update={"state": "stopped"}))
        ran = True
    if as_json:
        print_json({"stopped": ran})
    else:
        console.print("stopped" if ran else f"no platform runs in {context.home}")


def restart(
    ctx: typer.Context,
    services: Annotated[
        list[str] | None, typer.Argument(help="Services, in this order; all of them when none.")
    ] = None,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Replace services one after another while agents work: nobody is refused, what a service holds is finished.

    Exit status 1 when a successor does not become ready; the process before it then goes on.
    """
    context = context_of(ctx, home)
    record = context.record()
    if record is None or not record.running():
        raise CommandError(f"no platform runs in {context.home}: start it with `leyden up`", Exit.UNREACHABLE)
    if record.state != "ready":
        raise CommandError(f"the platform in {context.home} is {record.state}: see `leyden status`", Exit.REFUSED)
    wanted = services or list(record.services)
    unknown = [name for name in wanted if name not in record.services]
    if unknown:
        raise CommandError(f"no service {unknown[0]!r}; there are: {', '.join(record.services)}", Exit.NOT_FOUND)
    replaced, failure = _replaced(context.home, wanted, record, report=None if as_json else console.print)
    if as_json:
        print_json({"restarted": replaced, "failure": failure})
    if failure is not None:
        raise CommandError(failure)


def _replaced(
    home: Path, wanted: list[str], record: PlatformRecord, *, report: Callable[[str], None] | None
) -> tuple[list[str], str | None]:
    """Which services were replaced, and why the next one was not."""
    replaced: list[str] = []
    try:
        for progress in control_files.follow(home, control_files.place(home, wanted), record.supervisor.lives):
            if report is not None and progress.state != "failed":
                report(f"{progress.service}: {_STAGES[progress.state]}")
            if progress.state == "failed":
                return replaced, f"{progress.service}: {progress.detail}"
            if progress.state == "done":
                replaced.append(progress.service)
    except EOFError as error:
        return replaced, str(error)
    return replaced, None


_STAGES = {
    "starting": "its successor starts",
    "finishing": "the process before finishes what it holds",
    "done": "restarted",
}


def status(ctx: typer.Context, home: Home = None, as_json: AsJson = False) -> None:
    """Show services, engines and runs. Exit status 4 when no platform runs, 1 when a service cannot work."""
    context = context_of(ctx, home)
    record = read_record(context.home)
    if record is None or not record.running():
        raise CommandError(f"no platform runs in {context.home}: start it with `leyden up`", Exit.UNREACHABLE)
    states = {name: _state(service) for name, service in record.services.items()}
    engines, runs, cause = _from_api(context)
    if as_json:
        print_json(
            {
                "state": record.state,
                "services": {
                    name: {**service.model_dump(mode="json"), "status": states[name]}
                    for name, service in record.services.items()
                },
                "engines": [engine.model_dump(mode="json") for engine in engines],
                "runs": [run.model_dump(mode="json") for run in runs],
            }
        )
    else:
        _print_status(record, states, engines, runs, cause)
    if any(state != "ok" for state in states.values()):
        raise typer.Exit(Exit.ERROR)


def _state(service: ServiceRecord) -> str:
    """`ok`, or why a service cannot work."""
    wrong = {check: result for check, result in readiness(service).items() if result != "ok"}
    return ", ".join(f"{check} {result}".strip() for check, result in wrong.items()) or "ok"


def _from_api(context: Context) -> tuple[list[Engine], list[Run], str | None]:
    try:
        with context.client() as leyden:
            newest = itertools.islice(leyden.runs(), NEWEST_RUNS)
            return list(leyden.engines()), [run for run in newest if run.phase not in OVER], None
    except LeydenError as error:
        return [], [], str(error)


def _print_status(
    record: PlatformRecord, states: dict[str, str], engines: list[Engine], runs: list[Run], cause: str | None
) -> None:
    services = [
        (name, states[name], one.url or one.internal_url, one.process.pid if one.process else None, one.restarts)
        for name, one in record.services.items()
    ]
    print_table(("service", "status", "address", "pid", "restarts"), services)
    if cause is not None:
        console.print(f"the API says: {cause}")
        return
    rows = [(e.url, e.state, e.run_id, e.policy_version, e.updated_at) for e in engines]
    print_table(("engine", "state", "run", "version", "seen"), rows, empty="No engine has been seen yet.")
    shown = [(run.id, run.name, run.phase, f"{run.progress.step}/{run.progress.steps}", run.reason) for run in runs]
    print_table(("run", "name", "phase", "step", "reason"), shown, empty="No run is under way.")


def logs(
    ctx: typer.Context,
    service: Annotated[str, typer.Argument(help="A service, `postgres`, `redis`, or `trainer-…`; `all` lists them.")],
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as lines come, until Ctrl-C.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Last lines to show.")] = 50,
    home: Home = None,
) -> None:
    """Print the log of a service."""
    context = context_of(ctx, home)
    files = log_files(context.home)
    if service == "all":
        console.print("\n".join(sorted(files)))
        return
    if service not in files:
        raise CommandError(f"no log of {service!r}; there are: {', '.join(sorted(files)) or 'none'}", Exit.NOT_FOUND)
    path = files[service]
    sys.stdout.write("".join(line + "\n" for line in last_lines(path, lines)))
    sys.stdout.flush()
    if follow:
        _follow(path)


def log_files(home: Path) -> dict[str, Path]:
    """Every log of a home by its name."""
    found = {path.stem: path for path in (home / "logs").glob("*.log")}
    servers = {name: home / name / f"{name}.log" for name in ("postgres", "redis")}
    return found | {name: path for name, path in servers.items() if path.exists()}


def last_lines(path: Path, count: int) -> list[str]:
    """The end of a file, of which at most some megabytes are read."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 4 * 2**20))
        lines = file.read().decode(errors="replace").splitlines()
    return lines[-count:] if count else []


def _follow(path: Path) -> None:
    with path.open("r", errors="replace") as file:
        file.seek(0, os.SEEK_END)
        while True:
            if text := file.read():
                sys.stdout.write(text)
                sys.stdout.flush()
            elif path.stat().st_size < file.tell():
                # Emptied when it grew too long.
                file.seek(0)
            else:
                time.sleep(0.2)
