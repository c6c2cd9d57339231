"""`leyden policy …`"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from leyden.libs.cli.context import context_of
from leyden.libs.cli.errors import CommandError, Exit
from leyden.libs.cli.output import AsJson, console, print_json, print_table
from leyden.libs.contracts.api import PolicyVersion

app = typer.Typer(no_args_is_help=True, help="Policies: the weights that a run made.")

Run = Annotated[str, typer.Argument(metavar="RUN", help="Id, or the name of the newest run that has it.")]


@app.command("list")
def list_(ctx: typer.Context, run: Run, as_json: AsJson = False) -> None:
    """List the policy versions of a run; 0 is the base model."""
    with context_of(ctx).client() as leyden:
        found = list(leyden.policies(leyden.find_run(run).id))
    if as_json:
        print_json(found)
        return
    rows = [
        (p.version, f"{p.size_bytes / 2**20:.0f} MiB", p.content_sha256[:12], _place(p), p.created_at) for p in found
    ]
    print_table(("version", "size", "sha256", "folder", "made"), rows)


def _place(policy: PolicyVersion) -> str:
    return policy.path if policy.pruned_at is None else "removed (training.keep_checkpoints)"


@app.command("export")
def export(
    ctx: typer.Context,
    run: Run,
    to: Annotated[Path, typer.Option("--to", help="Folder to make; it must not exist.")],
    version: Annotated[int | None, typer.Option(min=0, help="Policy version [default: the last].")] = None,
    as_json: AsJson = False,
) -> None:
    """Copy a policy version as an ordinary Hugging Face folder."""
    with context_of(ctx).client() as leyden:
        kept = [p for p in leyden.policies(leyden.find_run(run).id) if p.pruned_at is None]
    chosen = kept[-1] if kept and version is None else next((p for p in kept if p.version == version), None)
    if chosen is None:
        there = ", ".join(str(p.version) for p in kept) or "none yet"
        raise CommandError(f"no weights of that version; there are: {there}", Exit.NOT_FOUND)
    if to.exists():
        raise CommandError(f"{to} exists: name a folder that does not", Exit.REFUSED)
    if not Path(chosen.path).is_dir():
        raise CommandError(f"{chosen.path} is not on this machine: run this where the trainer writes", Exit.NOT_FOUND)
    shutil.copytree(chosen.path, to)
    if as_json:
        print_json({**chosen.model_dump(mode="json"), "exported_to": str(to.resolve())})
    else:
        console.print(f"version {chosen.version} is in {to}; open it with transformers or serve it with SGLang")
