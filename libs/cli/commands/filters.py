"""Options by which commands select rollouts."""

from __future__ import annotations

from typing import Annotated

import typer

OfEvaluation = Annotated[str | None, typer.Option(help="Id of an evaluation, or `none` for training rollouts.")]
OfStep = Annotated[int | None, typer.Option(min=1, help="The optimiser step that consumed them.")]
OfVersion = Annotated[int | None, typer.Option(min=0, help="The policy version they were admitted at.")]
OfTask = Annotated[int | None, typer.Option(min=0, help="Number of the task in its dataset.")]
OfAgent = Annotated[str | None, typer.Option(help="The one of the run's agents that played them.")]
Failed = Annotated[
    bool | None, typer.Option("--failed/--succeeded", help="Whether agent or platform failed.", show_default=False)
]
RewardMin = Annotated[float | None, typer.Option(help="The least reward.")]
RewardMax = Annotated[float | None, typer.Option(help="The largest reward.")]
WithText = Annotated[
    str | None, typer.Option(help="Part of the reason, the output, the task or an answer, of one run's rollouts.")
]
WithCause = Annotated[
    str | None,
    typer.Option(
        help="Why they were excluded, failed or taught nothing, such as agent_error, ungraded or no_variance, of one"
        " run's rollouts."
    ),
]
WithRole = Annotated[str | None, typer.Option(help="A role of one of its calls, of one run's rollouts.")]
WithTool = Annotated[str | None, typer.Option(help="A tool that an answer calls, or that ran, of one run's rollouts.")]
WithComponent = Annotated[str | None, typer.Option(help="A component of the reward that has a value.")]
ComponentMin = Annotated[float | None, typer.Option(help="The least value of --component.")]
ComponentMax = Annotated[float | None, typer.Option(help="The largest value of --component.")]
