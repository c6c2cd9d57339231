"""`leyden reward …`"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from typing import Annotated

import typer

from leyden.libs.cli.commands.runs import Changes, RunFile
from leyden.libs.cli.context import context_of
from leyden.libs.cli.document import reward_of
from leyden.libs.cli.errors import CommandError, Exit
from leyden.libs.cli.view.output import AsJson, mean_and_interval, print_result, table
from leyden.libs.client import Client, LeydenError
from leyden.libs.contracts.api.duels import MAX_PAIRS, DuelPair, WinRate
from leyden.libs.contracts.api.rollouts import Rollout
from leyden.libs.contracts.config import Reward
from leyden.libs.contracts.config.graders import RelativeModel

app = typer.Typer(no_args_is_help=True, help="Rewards: the components of a run's document.")


# Without a callback the only command would lose its name.
@app.callback()
def rewards() -> None: ...


@app.command("test")
def grade_stored(
    ctx: typer.Context,
    file: RunFile,
    rollout: Annotated[str, typer.Option(help="Id of a rollout whose attempt has ended.")],
    changes: Changes = None,
    as_json: AsJson = False,
) -> None:
    """Grade a stored rollout with the components of a document, and store nothing.

    Example: leyden reward test run.json --rollout run-4hq2.7.3
    """
    reward = reward_of(file, changes)
    with context_of(ctx).client() as leyden:
        graded = leyden.grade(rollout, reward)
    rows = [
        (one.component, one.state, one.value, one.weight, one.contribution, one.extracted, one.explanation)
        for one in graded.components
    ]
    head = ("component", "state", "value", "weight", "of the total", "answer", "explanation")
    total = f"none: {graded.reason}" if graded.total is None else f"{graded.total:g}"
    print_result(as_json, graded, table(head, rows), f"reward of attempt {graded.attempt}: {total}")


AT_ONCE = 4
"""Pairs that a judge reads at the same time. After more failures in a row no further pair is asked about."""
PATIENCE_SECONDS = 60.0
"""An API restarts meanwhile: an answer of a judge that was paid is not lost."""
HEAD = ("component", "win rate", "wins", "ties", "losses", "not compared")


@app.command("duel")
def duel(
    ctx: typer.Context,
    file: RunFile,
    evaluation: Annotated[str, typer.Option(help="Id of the evaluation whose win rate is wanted.")],
    against: Annotated[str, typer.Option(help="Id of another one of the same dataset, as of version 0.")],
    changes: Changes = None,
    as_json: AsJson = False,
) -> None:
    """Compare the answers of two evaluations pair by pair, by each `relative_model` of a document.

    A judge reads both answers to a task, with each of them first. The pairs are stored; no reward changes. An
    error or Ctrl-C ends it with an exit status above 0, and those judged so far are stored.

    Example: leyden reward duel run.json --evaluation run-4hq2.e5 --against run-4hq2.e0
    """
    reward = reward_of(file, changes)
    judges = [one for one in reward.components if isinstance(one.grader, RelativeModel)]
    if not judges:
        raise CommandError(f"{file} has no component with the grader relative_model: add one", Exit.USAGE)
    compared = reward.model_copy(update={"components": judges, "wait": None, "missing": "exclude"})
    with context_of(ctx).client(patience_seconds=PATIENCE_SECONDS) as leyden:
        pairs = list(_pairs(leyden, evaluation, against))
        if not pairs:
            raise CommandError(f"{evaluation} and {against} have no task with a finished rollout in both", Exit.USAGE)
        if len(pairs) > MAX_PAIRS:
            raise CommandError(f"{len(pairs)} pairs are too many for one duel: at most {MAX_PAIRS}", Exit.USAGE)
        found, error = _judge(leyden, compared, pairs)
        judged = [
            DuelPair(rollout=mine.id, against=rival.id, values=values)
            for (mine, rival), values in zip(pairs, found, strict=True)
        ]
        rates = leyden.add_duel(pairs[0][0].run_id, evaluation, against, compared, judged).rates
    print_result(as_json, rates, table(HEAD, [_row(one) for one in rates]))
    if error is not None:
        raise error


@app.command("duels")
def list_duels(
    ctx: typer.Context,
    run: Annotated[str, typer.Argument(help="Id or name of the run whose evaluations were compared.")],
    as_json: AsJson = False,
) -> None:
    """Print the stored duels of a run's evaluations, the newest first.

    Example: leyden reward duels run-4hq2
    """
    with context_of(ctx).client() as leyden:
        found = list(leyden.duels(leyden.find_run(run).id))
    rows = [(one.evaluation_id, one.against_id, *_row(rate)) for one in found for rate in one.rates]
    print_result(as_json, found, table(("evaluation", "against", *HEAD), rows))


def _row(found: WinRate) -> tuple[object, ...]:
    rate = mean_and_interval(found.rate, ".3f") if found.rate else "unknown"
    return found.component, rate, found.wins, found.ties, found.losses, found.lost


def _pairs(leyden: Client, evaluation: str, against: str) -> Iterator[tuple[Rollout, Rollout]]:
    """The finished rollouts of both evaluations by task, agent and number of the sibling."""
    others = {_place(one): one for one in _finished(leyden, against)}
    for mine in _finished(leyden, evaluation):
        rival = others.get(_place(mine))
        if rival is not None:
            yield mine, rival


def _place(one: Rollout) -> tuple[str, int, str | None, int]:
    return one.dataset_id, one.task_number, one.agent, one.sibling


def _finished(leyden: Client, evaluation: str) -> Iterator[Rollout]:
    return leyden.rollouts(evaluation=evaluation, state="finished")


def _judge(
    leyden: Client, reward: Reward, pairs: Sequence[tuple[Rollout, Rollout]]
) -> tuple[list[dict[str, float | None]], LeydenError | KeyboardInterrupt | None]:
    """The values of pairs, in their order, and the error that left some without any.

    Raises: LeydenError: a judge has told nothing
    """
    known = [_by_failure(reward, *pair) for pair in pairs]
    error: LeydenError | KeyboardInterrupt | None = None
    with ThreadPoolExecutor(AT_ONCE) as threads:
        asked = {
            place: threads.submit(_values, leyden, reward, *pairs[place])
            for place, values in enumerate(known)
            if values is None
        }
        try:
            failures = 0
            for future in asked.values():
                failures = failures + 1 if future.exception() else 0
                if failures > AT_ONCE:
                    break
        except KeyboardInterrupt as interrupt:
            error = interrupt
        # Answers that are on their way are paid.
        threads.shutdown(cancel_futures=True)
    for place, future in asked.items():
        try:
            known[place] = future.result()
        except LeydenError as failure:
            error = error or failure
        except CancelledError:
            pass
    if isinstance(error, LeydenError) and not any(known[place] for place in asked):
        raise error
    nothing: dict[str, float | None] = dict.fromkeys(one.name for one in reward.components)
    return [nothing if values is None else values for values in known], error


def _by_failure(reward: Reward, mine: Rollout, rival: Rollout) -> dict[str, float | None] | None:
    """An agent that failed loses to one that did not; None where a judge has to tell."""
    has_succeeded = (mine.reason == "succeeded", rival.reason == "succeeded")
    if all(has_succeeded):
        return None
    value = 0.5 + 0.5 * (has_succeeded[0] - has_succeeded[1])
    return dict.fromkeys((one.name for one in reward.components), value)


def _values(leyden: Client, reward: Reward, mine: Rollout, rival: Rollout) -> dict[str, float | None]:
    """1, 0.5 or 0 by component; None where the judge failed."""
    graded = leyden.grade(mine.id, reward, against=rival.id)
    values = {one.component: one.value for one in graded.components}
    return {one.name: values.get(one.name) for one in reward.components}
