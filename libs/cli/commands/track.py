"""`leyden run track`: copies the curves of runs to TensorBoard, Trackio, W&B or MLflow."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from leyden.libs.cli.context import context_of
from leyden.libs.cli.errors import CommandError, Exit
from leyden.libs.cli.view.output import as_text, error_console
from leyden.libs.trackers.destination import Tracker, TrackerError
from leyden.libs.trackers.follow import follow
from leyden.libs.trackers.mlflow import MLflow

OUTAGE_SECONDS = 600.0
"""The longest outage of the API through which runs are followed."""


def track(
    ctx: typer.Context,
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Ids or names of runs.")],
    to: Annotated[
        str,
        typer.Option(
            "--to", metavar="TRACKER", help="tensorboard:FOLDER, trackio:PROJECT, wandb:PROJECT or mlflow:URL."
        ),
    ],
    once: Annotated[bool, typer.Option("--once", help="Write what there is now, and end.")] = False,
) -> None:
    """Copy steps and evaluations of runs to a tracker, until the runs have ended; Ctrl-C leaves them running.

    It may be started again at any time: it asks the tracker for the points that it has, and writes the missing ones.

    Example: leyden run track RUN --to tensorboard:logs
    """
    tracker = _tracker(to)
    with context_of(ctx).client(patience_seconds=OUTAGE_SECONDS) as leyden:
        found = [leyden.find_run(run).id for run in runs]
        try:
            follow(leyden, found, tracker, _tell, once=once)
        except TrackerError as error:
            raise CommandError(str(error)) from error


def _tell(line: str) -> None:
    error_console.print(as_text(line), soft_wrap=True)


def _tracker(to: str) -> Tracker:
    kind, _, place = to.partition(":")
    if kind == "mlflow" and place.startswith(("http://", "https://")):
        return MLflow(place)
    if kind not in ("tensorboard", "trackio", "wandb") or not place:
        raise CommandError(
            f"--to {to!r} names no tracker: write tensorboard:FOLDER, trackio:PROJECT, wandb:PROJECT or"
            " mlflow:http://HOST:PORT",
            Exit.USAGE,
        )
    try:
        return _by_package(kind, place)
    except ModuleNotFoundError as error:
        raise CommandError(f"the package {error.name} is missing: pip install 'leyden[{kind}]'") from error
    except TrackerError as error:
        raise CommandError(str(error), Exit.USAGE) from error


def _by_package(kind: str, place: str) -> Tracker:
    """A tracker whose package is an extra. Raises: ModuleNotFoundError: it is missing"""
    if kind == "trackio":
        from leyden.libs.trackers.trackio import Trackio

        return Trackio(place)
    if kind == "wandb":
        from leyden.libs.trackers.wandb import WandB

        return WandB(place)
    from leyden.libs.trackers.tensorboard import TensorBoard

    return TensorBoard(Path(place))
