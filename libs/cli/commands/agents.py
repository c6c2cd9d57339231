"""`leyden agent …`"""

from __future__ import annotations

import typer

from leyden.libs.cli.commands.rollouts import trajectory
from leyden.libs.cli.commands.runs import Changes, RunFile
from leyden.libs.cli.context import context_of
from leyden.libs.cli.document import read_document
from leyden.libs.cli.errors import Exit
from leyden.libs.cli.trial import try_agent
from leyden.libs.cli.view.output import AsJson, as_text, format_value, print_result

NOTHING_FOUND = "nothing keeps this rollout from training; one alone cannot show whether the rewards of a group differ"

app = typer.Typer(no_args_is_help=True, help="Agents: try one before a run trains it.")


@app.callback()
def root() -> None:
    """Makes `try` a command of its own: typer would merge a single command into its group."""


@app.command("try")
def try_(ctx: typer.Context, file: RunFile, changes: Changes = None, as_json: AsJson = False) -> None:
    """Run the agent once on the document's first task and train nothing: calls, tools, output and reward.

    The last lines name everything that would keep the rollout from training; exit status 1 when there is anything.
    The trial is a run of its own with one evaluation rollout of the base model. Ctrl-C cancels it.
    """
    with context_of(ctx).client() as leyden:
        trial = try_agent(leyden, read_document(file, changes or []))
    rollout, calls, spans, problems = trial.rollout, trial.calls, trial.spans, trial.problems
    document = {**rollout.model_dump(mode="json"), "calls": calls, "spans": spans, "problems": problems}
    tools = sum(span.kind == "tool" for span in spans)
    counts = f"\nmodel calls {len(calls)}, spans {len(spans)} ({tools} of tools), reward {format_value(rollout.reward)}"
    verdict = [as_text(f"would not train: {problem}", "red") for problem in problems]
    parts = [*trajectory(rollout, calls, spans), counts, *(verdict or [as_text(NOTHING_FOUND, "green")])]
    print_result(as_json, document, *parts)
    if problems:
        raise typer.Exit(Exit.ERROR)
