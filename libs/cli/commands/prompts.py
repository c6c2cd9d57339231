"""`leyden prompts …`"""

from __future__ import annotations

import importlib
import itertools
from pathlib import Path
from typing import Annotated

import typer

from leyden.libs.cli.commands.runs import Changes, RunFile
from leyden.libs.cli.context import Context, context_of
from leyden.libs.cli.document import Document, read_document
from leyden.libs.cli.errors import CommandError, Exit
from leyden.libs.cli.view.output import AsJson, as_text, error_console, print_result, table
from leyden.libs.client import Client
from leyden.libs.contracts.placeholders import as_literal
from leyden.libs.prompts.cleaning import remove_made
from leyden.libs.prompts.errors import PromptError
from leyden.libs.prompts.journal import Journal
from leyden.libs.prompts.measuring import Example, Measuring
from leyden.libs.prompts.reflection import Reflection
from leyden.libs.prompts.results import Version, best_of, best_run

OUTAGE_SECONDS = 600.0
"""How long an optimisation that has begun waits for the platform."""

app = typer.Typer(no_args_is_help=True, help="Prompts of agents whose models are not trained.")


# Without a callback the only command would lose its name.
@app.callback()
def prompts() -> None: ...


@app.command("optimise")
def optimise(
    ctx: typer.Context,
    file: RunFile,
    prompt: Annotated[
        list[str],
        typer.Option(metavar="NAME", help="A variable of agent.environment that holds a prompt; repeatable."),
    ],
    reflection: Annotated[
        str, typer.Option(metavar="MODEL", help="The model that rewrites the prompt, by its name at the server.")
    ],
    budget: Annotated[int, typer.Option(min=1, help="The most rollouts.")],
    reflection_url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Its server of OpenAI's chat completions; LEYDEN_REFLECTION_API_KEY has the key.",
            show_default="LEYDEN_REFLECTION_URL, or https://api.openai.com/v1",
        ),
    ] = None,
    to: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="For the results.", show_default="run.prompts for run.json")
    ] = None,
    examples: Annotated[int, typer.Option(min=1, help="Training tasks that a reflection sees.")] = 3,
    solved: Annotated[float, typer.Option(help="The reward from which a task teaches nothing more.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the choice of examples and parents.")] = 0,
    changes: Changes = None,
    as_json: AsJson = False,
) -> None:
    """Improve a prompt by GEPA: rollouts, their rewards and a model that reads both and rewrites the prompt.

    The document's `agent.environment` has the present prompt, and the agent reads it there. Each version is a run
    without training; `dataset` gives the examples of reflections, and `evaluation.dataset` the held-out tasks that
    choose the best version. FOLDER then has NAME.txt, the best prompt, and versions.json with all versions and scores.

    Ctrl-C cancels the run that is measured. The same command goes on where it ended, also with a larger budget.

    Example: leyden prompts optimise run.json --prompt SYSTEM_PROMPT --reflection gpt-5 --budget 300
    """
    context = context_of(ctx)
    document = read_document(file, changes or [])
    prompts_of(document, prompt)
    _check_package()
    # A platform that is not there fails this first request, within the usual seconds.
    with context.client() as leyden:
        document = _with_ids(leyden, document)
    folder = to if to is not None else Path(f"{file.stem}.prompts")
    try:
        with context.client(patience_seconds=OUTAGE_SECONDS) as leyden:
            versions = _optimise(
                context,
                leyden,
                document,
                folder,
                names=prompt,
                model=reflection,
                url=reflection_url,
                budget=budget,
                examples=examples,
                solved=solved,
                seed=seed,
            )
    except PromptError as error:
        raise CommandError(str(error)) from error
    best = best_of(versions)
    rows = [(one.number, _words(one.parents), one.score, one.run, "best" if one is best else None) for one in versions]
    print_result(
        as_json,
        {"best": best.number, "score": best.score, "folder": str(folder), "prompts": dict(best.texts)},
        table(("version", "from", "score", "run", ""), rows),
        f"The best prompt: {', '.join(str(folder / f'{name}.txt') for name in best.texts)}",
    )


def _optimise(
    context: Context,
    leyden: Client,
    document: Document,
    folder: Path,
    *,
    names: list[str],
    model: str,
    url: str | None,
    budget: int,
    examples: int,
    solved: float,
    seed: int,
) -> list[Version]:
    from leyden.libs.prompts.optimise import Plan
    from leyden.libs.prompts.optimise import optimise as by_gepa

    texts = prompts_of(document, names)
    training = _examples(leyden, document["dataset"], None)
    held_out = _examples(leyden, document["evaluation"]["dataset"], document["evaluation"].get("max_tasks"))
    count = min(examples, len(training))
    settings = {"document": document, "prompts": texts, "examples": count, "seed": seed, "solved": solved}
    journal = Journal(folder, settings)
    address = url or context.settings.reflection_url
    asked = Reflection(address, model, context.settings.reflection_api_key, journal, _tell)
    try:
        measuring = Measuring(leyden, document, held_out, journal, _tell)
        repeats = measuring.rollouts_per_task
        plan = Plan(texts, training, held_out, repeats, budget, count, seed, solved)
        kept = list(texts.values())
        return by_gepa(plan, measuring, lambda words: as_literal(asked(words), kept), folder, journal, _tell)
    finally:
        asked.close()
        journal.close()


def _check_package() -> None:
    """Raises: CommandError: GEPA is not installed"""
    try:
        importlib.import_module("leyden.libs.prompts.optimise")
    except ModuleNotFoundError as error:
        raise CommandError(f"the package {error.name} is missing: pip install 'leyden[gepa]'") from error


@app.command("clean")
def clean(
    ctx: typer.Context,
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="That of the results, such as run.prompts.")],
) -> None:
    """Delete the runs of an optimisation and its datasets of examples; the best version's run stays, for its rollouts.

    The results stay in FOLDER, and the journal goes: the optimisation cannot go on, and the same command begins anew.

    Example: leyden prompts clean run.prompts
    """
    try:
        journal = Journal(folder, None)
        try:
            with context_of(ctx).client() as leyden:
                left = remove_made(leyden, journal, best_run(folder))
            if left:
                raise CommandError(f"not deleted: {'; '.join(left)}; run the command again once that is mended")
            journal.remove()
        finally:
            journal.close()
    except PromptError as error:
        raise CommandError(str(error)) from error


def prompts_of(document: Document, names: list[str]) -> dict[str, str]:
    """Returns the present prompts. Raises: CommandError: the document lacks one, or held-out tasks"""
    if document.get("agents"):
        raise CommandError(
            "the document has several agents, and prompts are those of one: write it as `agent` in place of `agents`",
            Exit.USAGE,
        )
    agent = document.get("agent")
    environment = agent.get("environment") if isinstance(agent, dict) else None
    found = environment if isinstance(environment, dict) else {}
    for name in names:
        if not isinstance(found.get(name), str):
            raise CommandError(
                f"agent.environment has no text {name!r}: write the present prompt there, and let the agent read it,"
                f" such as os.environ[{name!r}]",
                Exit.USAGE,
            )
        if "/" in name:
            raise CommandError(f"--prompt {name!r} names a file of the results: choose a name without /", Exit.USAGE)
    evaluation = document.get("evaluation")
    if not isinstance(evaluation, dict) or "dataset" not in evaluation or "dataset" not in document:
        raise CommandError(
            "the document needs `dataset`, for the examples of reflections, and `evaluation.dataset`, for the held-out"
            " tasks that choose the best version; they may be the same",
            Exit.USAGE,
        )
    return {name: found[name] for name in names}


def _with_ids(leyden: Client, document: Document) -> Document:
    """The document with the ids of its datasets: a name may be another dataset's later."""
    evaluation = document["evaluation"]
    held_out = leyden.dataset(str(evaluation["dataset"])).id
    return {
        **document,
        "dataset": leyden.dataset(str(document["dataset"])).id,
        "evaluation": {**evaluation, "dataset": held_out},
    }


def _examples(leyden: Client, dataset_id: str, count: int | None) -> list[Example]:
    tasks = itertools.islice(leyden.tasks(dataset_id), count)
    return [Example(dataset_id, task.number, task.payload) for task in tasks]


def _words(numbers: tuple[int, ...]) -> str | None:
    return ", ".join(map(str, numbers)) or None


def _tell(line: str) -> None:
    error_console.print(as_text(line), soft_wrap=True)
