"""`leyden logs`: the logs of services, trainers and agents, on this machine or on a cluster."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import IO, Annotated

import typer

from leyden.libs.cli.cluster.release import COMPONENT, RUN, Release, pod_state
from leyden.libs.cli.context import Context, Home, context_of
from leyden.libs.cli.errors import CommandError, Exit
from leyden.libs.cli.local.services import LOGS
from leyden.libs.cli.view.output import console
from leyden.libs.cli.view.safe_text import safe_line

TAIL_BYTES = 4 * 2**20
POLL_SECONDS = 0.2
MOST_STREAMS = 100
"""Pods of which kubectl follows the logs at once."""
ALL = "all"


def logs(
    ctx: typer.Context,
    service: Annotated[
        str | None,
        typer.Argument(help="A service, `engine`, `trainer`, `postgres` or `redis`; without one, their names."),
    ] = None,
    run: Annotated[str | None, typer.Option("--run", help="Trainer and agents of this run alone.")] = None,
    policy: Annotated[
        str | None, typer.Option("--policy", help="With --run: the trainer of this further policy in place of its own.")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print new lines until Ctrl-C.")] = False,
    lines: Annotated[int, typer.Option("--lines", "--tail", "-n", min=0, help="Lines from the end of each log.")] = 50,
    home: Home = None,
) -> None:
    """Print logs. Each line names its log where there are several.

    Agents on this machine have no log: `leyden rollout show` prints their output.
    """
    context = context_of(ctx, home)
    name = None if service == ALL else service
    if run is None and policy is not None:
        raise CommandError("--policy names a policy of a run: add --run", Exit.USAGE)
    run_id = None if run is None else _run_id(context, run, policy)
    if context.on_cluster:
        _print_pods(context.release(), name, run_id, follow, lines)
    else:
        _print_files(log_files(context.home), name, run_id, follow, lines)


def _run_id(context: Context, run: str, policy: str | None) -> str:
    """The id that the logs have: the run's, or that of its further policy."""
    with context.client() as leyden:
        found = leyden.find_run(run)
    if policy is None:
        return found.id
    if policy not in found.policies:
        names = ", ".join(found.policies) or "none"
        raise CommandError(f"run {found.id} has no policy {policy!r} with a trainer: it has {names}", Exit.NOT_FOUND)
    return found.policies[policy].id


def _print_files(files: dict[str, Path], service: str | None, run_id: str | None, follow: bool, lines: int) -> None:
    if service is None and run_id is None:
        console.print("\n".join(sorted(files)))
        return
    chosen = {name: path for name, path in files.items() if _matches(name, service, run_id)}
    if not chosen:
        wanted = service if run_id is None else f"trainer-{run_id}"
        raise CommandError(f"no log of {wanted!r}; there are: {', '.join(sorted(files)) or 'none'}", Exit.NOT_FOUND)
    with contextlib.ExitStack() as files_open:
        tails = []
        for name, path in sorted(chosen.items()):
            file = files_open.enter_context(path.open("r", errors="replace"))
            tails.append(_Tail(path, file, f"[{name}] " if len(chosen) > 1 else ""))
        for tail in tails:
            tail.print_last(lines)
        while follow:
            sys.stdout.flush()
            time.sleep(POLL_SECONDS)
            for tail in tails:
                tail.print_new()


def _matches(name: str, service: str | None, run_id: str | None) -> bool:
    if run_id is not None:
        return name == f"trainer-{run_id}" and service in {None, "trainer"}
    return name == service or (service == "trainer" and name.startswith("trainer-"))


class _Tail:
    """The end of a log file, and the lines that follow."""

    def __init__(self, path: Path, file: IO[str], prefix: str) -> None:
        self._path = path
        self._file = file
        self._prefix = prefix

    def print_last(self, lines: int) -> None:
        self._file.seek(max(0, os.fstat(self._file.fileno()).st_size - TAIL_BYTES))
        found = self._file.read().splitlines(keepends=True)
        self._print(found[-lines:] if lines else [])

    def print_new(self) -> None:
        if self._path.stat().st_size < self._file.tell():
            # The supervisor has emptied a log that grew too long.
            self._file.seek(0)
        self._print(self._file.read().splitlines(keepends=True))

    def _print(self, lines: list[str]) -> None:
        for line in lines:
            words = line.removesuffix("\n")
            sys.stdout.write(f"{self._prefix}{safe_line(words)}{line[len(words) :]}")


def log_files(home: Path) -> dict[str, Path]:
    """Every log of a home by its name."""
    found = {path.stem: path for path in (home / LOGS).glob("*.log")}
    servers = {name: home / name / f"{name}.log" for name in ("postgres", "redis")}
    return found | {name: path for name, path in servers.items() if path.exists()}


def _print_pods(release: Release, component: str | None, run_id: str | None, follow: bool, lines: int) -> None:
    pods = release.listed("/api/v1", "pods", *([] if run_id is None else [f"{RUN}={run_id}"]))
    found = {(state.namespace, state.component) for state in map(pod_state, pods)}
    names = sorted({name for _, name in found})
    if component is None and run_id is None:
        console.print("\n".join(names))
        return
    namespaces = sorted({namespace for namespace, name in found if component in (None, name)})
    if not namespaces:
        wanted = " of ".join(word for word in (component or "a pod", run_id) if word)
        raise CommandError(f"no log of {wanted!r}; there are: {', '.join(names) or 'none'}", Exit.NOT_FOUND)
    parts = [f"{label}={value}" for label, value in ((COMPONENT, component), (RUN, run_id)) if value is not None]
    options = ["--prefix", "--all-containers", "--ignore-errors", f"--tail={lines}"]
    options += ["--follow", f"--max-log-requests={MOST_STREAMS}"] if follow else []
    selector = release.selector(*parts)
    commands = [
        release.kubectl.command("logs", "--namespace", namespace, "--selector", selector, *options)
        for namespace in namespaces
    ]
    sys.stdout.flush()
    _run_together(commands)


def _print_lines(output: IO[bytes]) -> None:
    """Prints the lines of pods, agents' too: nothing in them acts on the terminal or looks like another line."""
    with output:
        while line := output.readline(TAIL_BYTES):
            # One call for a line: others print at the same time.
            sys.stdout.write(safe_line(line.removesuffix(b"\n").decode(errors="replace")) + "\n")
            sys.stdout.flush()


def _run_together(commands: list[list[str]]) -> None:
    """Runs kubectl for each namespace, side by side, until the last one ends. Raises: CommandError"""
    started = [subprocess.Popen(command, stdout=subprocess.PIPE) for command in commands]
    with ThreadPoolExecutor(len(started)) as threads:
        try:
            printing = [threads.submit(_print_lines, process.stdout) for process in started if process.stdout]
            for one in as_completed(printing):
                one.result()
            codes = [process.wait() for process in started]
        finally:
            for process in started:
                process.terminate()
                process.wait()
    if any(codes):
        raise CommandError("kubectl could not read every log", Exit.UNREACHABLE)
