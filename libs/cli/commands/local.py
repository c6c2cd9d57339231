"""`leyden up`, `down` and `status`: the platform of this machine, and the state of any."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from leyden.libs.cli.cluster.release import lasts, pod_state
from leyden.libs.cli.context import Context, Home, context_of
from leyden.libs.cli.errors import CommandError, Exit
from leyden.libs.cli.local.agent_folders import check_apart, code_folders
from leyden.libs.cli.local.engines import EngineChoice
from leyden.libs.cli.local.managed_service import ENGINE_READY_SECONDS
from leyden.libs.cli.local.platform import (
    AlreadyRunning,
    Platform,
    PlatformError,
    exclusive_home,
    make_home,
    platform_options,
    readiness,
    stop_servers,
)
from leyden.libs.cli.local.record import PlatformRecord, ServiceRecord, write_record
from leyden.libs.cli.local.services import ADMIN_TOKEN, LOGS
from leyden.libs.cli.view.console_link import console_link, link_line
from leyden.libs.cli.view.output import AsJson, Part, as_text, facts, print_result, report_event, steps_words, table
from leyden.libs.client import Client, LeydenError
from leyden.libs.contracts.api.platform import Engine
from leyden.libs.contracts.api.runs import Run
from leyden.libs.contracts.api.waiting import Platform as PlatformFacts
from leyden.libs.contracts.api.waiting import Volume
from leyden.libs.contracts.states import ENDED

STOP_SECONDS = 120.0
WORK = {"queued_rollouts", "live_attempts", "waiting_grades", "waiting_feedback"}
"""The counts of the platform that `status` shows."""


def up(
    ctx: typer.Context,
    home: Home = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return once it is ready and let it run.")] = False,
    free_ports: Annotated[bool, typer.Option("--free-ports", help="Any free ports, not the usual ones.")] = False,
    as_json: AsJson = False,
    engine_urls: Annotated[
        list[str] | None, typer.Option("--engine-url", help="A running SGLang; repeat it for several.")
    ] = None,
    engine: Annotated[
        Literal["cpu", "sglang"], typer.Option("--engine", help="The engine to start: the CPU engine, or SGLang.")
    ] = "cpu",
    engine_args: Annotated[
        str, typer.Option("--engine-args", help="Further arguments of sglang.launch_server.", show_default=False)
    ] = "",
    engine_python: Annotated[
        Path | None,
        typer.Option("--engine-python", help="Python of an environment that has SGLang.", show_default="this one"),
    ] = None,
    agents: Annotated[
        list[Path] | None,
        typer.Option(
            "--agents",
            metavar="DIR",
            help="Folder of your agents, from which runs may name an `agent.directory`; repeat it for several.",
            show_default="the examples alone",
        ),
    ] = None,
    graders: Annotated[
        list[Path] | None,
        typer.Option(
            "--graders",
            metavar="DIR",
            help="Folder of your graders' code, from which runs may name the `directory` of a grader; agents cannot"
            " read it. Repeat it for several.",
            show_default="none",
        ),
    ] = None,
    silent: Annotated[bool, typer.Option("--silent", hidden=True, help="Print no addresses and no token.")] = False,
) -> None:
    """Run the platform on this machine until Ctrl-C: embedded Postgres and Redis, and every service.

    LEYDEN_DATABASE_URL and LEYDEN_REDIS_URL name servers of your own; LEYDEN_MODEL_PATH names another base model.
    Engines serve that model, and read the home's folder `weights`. Services inherit variables such as TRAINER_THREADS.
    """
    context = context_of(ctx, home)
    urls = tuple(url.rstrip("/") for url in engine_urls or ())
    choice = EngineChoice(engine, urls, engine_args, engine_python)
    sglang = choice.sglang()
    folders, of_graders = code_folders(agents or (), "--agents"), code_folders(graders or (), "--graders")
    check_apart(folders, of_graders)
    if detach:
        allowed = [word for folder in folders for word in ("--agents", str(folder))]
        allowed += [word for folder in of_graders for word in ("--graders", str(folder))]
        _detach(context, [*(["--free-ports"] if free_ports else []), *choice.options(), *allowed])
        _print_platform(context, as_json)
        return
    options = platform_options(
        context.settings, free_ports=free_ports, engine_urls=urls, sglang=sglang, agents=folders, graders=of_graders
    )
    on_ready = None if silent else partial(_print_platform, context, as_json)
    _supervise(Platform(context.home, options, report=report_event), on_ready)


def _supervise(platform: Platform, on_ready: Callable[[], None] | None) -> None:
    """Runs the platform until a signal, or until a service gives up. Raises: PlatformError; CommandError"""
    with _stop_on_signal(platform):
        platform.start()
        try:
            platform.ready(ENGINE_READY_SECONDS)
            if on_ready is not None:
                on_ready()
            report_event("ready; Ctrl-C stops everything")
            platform.wait()
        except PlatformError:
            if not platform.stopping:
                raise
        else:
            if platform.failure is not None:
                raise CommandError(str(platform.failure))
        finally:
            platform.stop()
    report_event("stopped; `leyden up` continues where it stopped")


@contextlib.contextmanager
def _stop_on_signal(platform: Platform) -> Iterator[None]:
    """The first SIGINT or SIGTERM stops services in order; a second one kills them."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda *_: platform.request_stop()) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _detach(context: Context, options: list[str]) -> None:
    record = context.record()
    if record is not None and record.is_running():
        raise AlreadyRunning(f"a platform already runs in {context.home}: see `leyden status`")
    logs = context.home / LOGS
    make_home(context.home)
    logs.mkdir(exist_ok=True)
    # Silent, because its output is a log, and a log must not contain the token.
    command = [sys.executable, "-m", "leyden.libs.cli", "up", "--silent", "--home", str(context.home)]
    with (logs / "supervisor.log").open("ab") as log:
        began = log.tell()
        supervisor = subprocess.Popen(
            [*command, *options],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )

    def is_ready() -> bool:
        record = context.record()
        return record is not None and record.supervisor.pid == supervisor.pid and record.state == "ready"

    if not _within(ENGINE_READY_SECONDS, lambda: supervisor.poll() is not None or is_ready()):
        raise CommandError(f"not ready after {ENGINE_READY_SECONDS:g} s: see {logs / 'supervisor.log'}")
    if supervisor.poll() is not None:
        output = (logs / "supervisor.log").read_bytes()[began:].decode(errors="replace")
        raise CommandError(f"the supervisor ended:\n{output[-3000:]}")


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
    url, token = record.url, (context.home / ADMIN_TOKEN).read_text().strip()
    assert url is not None
    with Client(url, token) as client:
        link = console_link(client, url)
    print_result(
        as_json,
        {**record.model_dump(mode="json"), "token": token, "console": link},
        facts(*((name, service.url) for name, service in record.services.items() if service.url is not None)),
        facts(("API documents", f"{url}/docs"), ("token", token), ("logs", context.home / LOGS)),
        link_line(link),
    )


def down(ctx: typer.Context, home: Home = None, as_json: AsJson = False) -> None:
    """Stop the platform of this home, and the servers that a killed supervisor left."""
    context = context_of(ctx, home)
    record = context.record()
    ran = record is not None and record.is_running()
    if record is not None and ran:
        pid = record.supervisor.pid
        os.kill(pid, signal.SIGTERM)
        if not _within(STOP_SECONDS, lambda: not record.supervisor.is_alive()):
            raise CommandError(f"the supervisor (pid {pid}) still runs: see its log in {context.home}")
    elif record is not None and record.state != "stopped":
        # The services died with their killed supervisor; Postgres and Redis still run.
        with exclusive_home(context.home):
            stop_servers(context.home, record.embedded)
            write_record(context.home, record.model_copy(update={"state": "stopped"}))
        ran = True
    print_result(as_json, {"stopped": ran}, "stopped" if ran else f"no platform runs in {context.home}")


def _running(context: Context) -> PlatformRecord:
    """Raises: CommandError: no platform runs"""
    record = context.record()
    if record is None or not record.is_running():
        raise CommandError(f"no platform runs in {context.home}: start it with `leyden up`", Exit.UNREACHABLE)
    return record


def status(ctx: typer.Context, home: Home = None, as_json: AsJson = False) -> None:
    """Show services, engines and runs. Exit status 4 when no platform runs, 1 when a service cannot work."""
    context = context_of(ctx, home)
    if context.on_cluster:
        _cluster_status(context, as_json)
        return
    record = _running(context)
    states = {name: _state(service) for name, service in record.services.items()}
    seen = _from_api(context)
    services = {
        name: {**service.model_dump(mode="json"), "status": states[name]} for name, service in record.services.items()
    }
    document = {"state": record.state, "services": services, **seen.document()}
    print_result(as_json, document, *_status(record, states, seen))
    if any(state != "ok" for state in states.values()):
        raise typer.Exit(Exit.ERROR)


def _state(service: ServiceRecord) -> str:
    """`ok`, or the reason why a service cannot work."""
    failing = {check: result for check, result in readiness(service).items() if result != "ok"}
    return ", ".join(f"{check} {result}".strip() for check, result in failing.items()) or "ok"


@dataclass(frozen=True)
class _Seen:
    """The answers of the API; `error`: it gave none."""

    engines: list[Engine] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    platform: PlatformFacts | None = None
    error: str | None = None

    def document(self) -> dict[str, object]:
        of_platform = {} if self.platform is None else self.platform.model_dump(mode="json", include=WORK)
        volumes = [] if self.platform is None else self.platform.volumes
        return {"engines": self.engines, "runs": self.runs, "volumes": volumes, **of_platform}


def _from_api(context: Context) -> _Seen:
    try:
        with context.client() as leyden:
            # Runs that have ended come last.
            active = itertools.takewhile(lambda run: run.phase not in ENDED, leyden.runs(sort="phase"))
            return _Seen(list(leyden.engines()), list(active), leyden.platform())
    except (LeydenError, CommandError) as error:
        return _Seen(error=str(error))


def _status(record: PlatformRecord, states: dict[str, str], seen: _Seen) -> Iterator[Part]:
    services = [
        (name, states[name], one.url or one.internal_url, one.process.pid if one.process else None, one.restarts)
        for name, one in record.services.items()
    ]
    yield table(("service", "status", "address", "pid", "restarts"), services)
    yield from _parts(seen)


def _cluster_status(context: Context, as_json: bool) -> None:
    release = context.release()
    pods = sorted(map(pod_state, release.pods()), key=lambda pod: (pod.component, pod.name))
    seen = _from_api(context)
    document = {
        "release": release.name,
        "namespace": release.namespace,
        "pods": [asdict(pod) for pod in pods],
        **seen.document(),
    }
    rows = [(pod.component, pod.name, pod.reason or pod.phase.lower(), pod.restarts, pod.node) for pod in pods]
    shown = table(("component", "pod", "status", "restarts", "node"), rows)
    print_result(as_json, document, shown, *_parts(seen))
    if any(pod.reason for pod in pods if lasts(pod.component)):
        raise typer.Exit(Exit.ERROR)


def _parts(seen: _Seen) -> Iterator[Part]:
    if seen.error is not None:
        yield as_text(f"the API answers: {seen.error}")
        return
    rows = [(e.url, e.pool, e.state, e.run_id, e.policy_version, e.updated_at, e.detail) for e in seen.engines]
    heads = ("engine", "pool", "state", "run", "version", "seen", "detail")
    yield table(heads, rows) if rows else "No engine has been seen yet."
    active = [(run.id, run.name, run.phase, steps_words(run.progress), run.reason) for run in seen.runs]
    yield table(("run", "name", "phase", "step", "reason"), active) if active else "No run is active."
    if seen.platform is None:
        return
    of = seen.platform
    yield (
        f"rollouts: {of.queued_rollouts} queued, {of.live_attempts} at work, {of.waiting_grades} wait for grades,"
        f" {of.waiting_feedback} for people"
    )
    if of.volumes:
        yield table(("disk", "free", "of", "folder"), [_disk_row(one) for one in of.volumes])


def _disk_row(one: Volume) -> tuple[str, str, str, str | None]:
    if one.free_bytes is None or one.total_bytes is None:
        return one.name, "unknown", "unknown", one.reason
    low = " (nearly full)" if one.nearly_full and one.same_disk_as is None else ""
    same = f" (disk of {one.same_disk_as})" if one.same_disk_as else ""
    return f"{one.name}{same}", f"{one.free_bytes / 2**30:.1f} GiB{low}", f"{one.total_bytes / 2**30:.1f} GiB", one.path
