"""`leyden agent …`"""

from __future__ import annotations

import typer

from leyden.libs.cli.commands.rollouts import trajectory
from leyden.libs.cli.commands.runs import Changes, RunFile
from leyden.libs.cli.context import context_of
from leyden.libs.cli.document import read_document
from leyden.libs.cli.errors import Exit
from leyden.libs.cli.trial import Trial, try_agents
from leyden.libs.cli.view.output import AsJson, Part, as_text, format_value, heading, print_result

NOTHING_FOUND = "nothing keeps this rollout from training; one alone cannot show whether the rewards of a group differ"

app = typer.Typer(no_args_is_help=True, help="Agents: try one before a run trains it.")


@app.callback()
def root() -> None:
    """Makes `try` a command of its own: typer would merge a single command into its group."""


@app.command("try")
def try_(ctx: typer.Context, file: RunFile, changes: Changes = None, as_json: AsJson = False) -> None:
    """Run each agent once on the document's first task and train nothing: calls, tools, output and reward.

    The last lines name everything that would keep the rollout from training; exit status 1 when there is anything.
    The trial is a run of its own with one evaluation rollout of the base model for each agent. Ctrl-C cancels it.
    With --json a run with `agents` gives a list, one trial for each.
    """
    document = read_document(file, changes or [])
    with context_of(ctx).client() as leyden:
        trials = try_agents(leyden, document)
    documents = [_as_document(one) for one in trials]
    parts = [part for one in trials for part in _parts(one)]
    print_result(as_json, documents if document.get("agents") else documents[0], *parts)
    if any(one.problems for one in trials):
        raise typer.Exit(Exit.ERROR)


def _as_document(trial: Trial) -> dict[str, object]:
    found = {"calls": trial.calls, "spans": trial.spans, "problems": trial.problems}
    return {**trial.rollout.model_dump(mode="json"), **found}


def _parts(trial: Trial) -> list[Part]:
    rollout, calls, spans, problems = trial.rollout, trial.calls, trial.spans, trial.problems
    tools = sum(span.kind == "tool" for span in spans)
    counts = f"\nmodel calls {len(calls)}, spans {len(spans)} ({tools} of tools), reward {format_value(rollout.reward)}"
    verdict = [as_text(f"would not train: {problem}", "red") for problem in problems]
    name = [heading(f"agent {rollout.agent}")] if rollout.agent else []
    return [*name, *trajectory(rollout, calls, spans), counts, *(verdict or [as_text(NOTHING_FOUND, "green")])]
