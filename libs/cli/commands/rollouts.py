"""`leyden rollout …`"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from leyden.libs.cli.commands.exports import export
from leyden.libs.cli.commands.filters import (
    ComponentMax,
    ComponentMin,
    Failed,
    OfAgent,
    OfEvaluation,
    OfStep,
    OfTask,
    OfVersion,
    RewardMax,
    RewardMin,
    WithCause,
    WithComponent,
    WithRole,
    WithText,
    WithTool,
)
from leyden.libs.cli.commands.runs import Changes, RunFile
from leyden.libs.cli.context import context_of
from leyden.libs.cli.document import reward_of
from leyden.libs.cli.errors import CommandError, Exit
from leyden.libs.cli.view.output import (
    AsJson,
    Count,
    Part,
    as_block,
    as_text,
    facts,
    format_value,
    heading,
    print_result,
    table,
)
from leyden.libs.cli.view.report import answer_text, embedding_facts, last_question, tool_spans, unmatched_spans
from leyden.libs.cli.view.transitions import NOTHING, transition_parts
from leyden.libs.client import Client, Conflict
from leyden.libs.contracts.api.groups import Sibling
from leyden.libs.contracts.api.rollouts import (
    Artifact,
    Attempt,
    Call,
    Feedback,
    Outcome,
    Regrade,
    RewardComponent,
    Rollout,
    RolloutDetail,
    Span,
)
from leyden.libs.contracts.config import Reward
from leyden.libs.contracts.model_folder import TokenText, find_tokenizer

TAIL_LINES, TAIL_CHARACTERS = 10, 2000
DELIVERED = {True: "yes", False: "no: its client had left", None: "unknown"}
"""The part of a stored output that is shown without --output."""
NO_TEXTS = "For the text of tokens, install `tokenizers` and have the model's folder here: name it with --model."

app = typer.Typer(no_args_is_help=True, help="Rollouts: the work of each agent, token by token.")
app.command("export")(export)


@app.command("list")
def list_(
    ctx: typer.Context,
    run: Annotated[str | None, typer.Option(help="Id or name of a run.")] = None,
    state: Annotated[
        str | None, typer.Option(help="queued, running, grading, finished, excluded or cancelled.")
    ] = None,
    evaluation: OfEvaluation = None,
    step: OfStep = None,
    version: OfVersion = None,
    task: OfTask = None,
    agent: OfAgent = None,
    failed: Failed = None,
    reward_min: RewardMin = None,
    reward_max: RewardMax = None,
    text: WithText = None,
    cause: WithCause = None,
    role: WithRole = None,
    tool: WithTool = None,
    component: WithComponent = None,
    component_min: ComponentMin = None,
    component_max: ComponentMax = None,
    sort: Annotated[
        str | None, typer.Option(help="newest, oldest, highest or lowest reward.", show_default="newest")
    ] = None,
    limit: Count = 20,
    as_json: AsJson = False,
) -> None:
    """List rollouts that the filters leave, newest first."""
    with context_of(ctx).client() as leyden:
        run_id = leyden.find_run(run).id if run else None
        listed = leyden.rollouts(
            run=run_id,
            state=state,
            evaluation=evaluation,
            step=step,
            version=version,
            task=task,
            agent=agent,
            failed=failed,
            reward_min=reward_min,
            reward_max=reward_max,
            text=text,
            cause=cause,
            role=role,
            tool=tool,
            component=component,
            component_min=component_min,
            component_max=component_max,
            sort=sort,
        )
        found = list(itertools.islice(listed, limit))
    rows = [
        (r.id, r.state, ended(r.reason), r.reward, r.task_number, r.admitted_version, r.step, r.created_at)
        for r in found
    ]
    head = ("rollout", "state", "ended", "reward", "task", "version", "step", "made")
    print_result(as_json, found, table(head, rows))


@app.command("show")
def show(
    ctx: typer.Context,
    rollout: Annotated[str, typer.Argument(metavar="ROLLOUT", help="Id of a rollout.")],
    attempt: Annotated[
        int | None, typer.Option(min=1, help="Attempt number.", show_default="the one that counts, else the newest")
    ] = None,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="Every sampled token: id, text, log-probability and policy version.")
    ] = False,
    model: Annotated[
        Path | None,
        typer.Option(help="Folder with the tokenizer of --tokens.", show_default="the run's newest version"),
    ] = None,
    output: Annotated[bool, typer.Option("--output", help="The attempt's stored output in full, not its end.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show a trajectory call by call: conversation, tools, tokens, credit and the agent's output."""
    with context_of(ctx).client() as leyden:
        found = leyden.rollout(rollout)
        shown = _shown_attempt(found, attempt)
        number = shown.number if shown else attempt
        calls = list(leyden.calls(rollout, attempt=number, prompt=as_json, whole=as_json))
        spans = list(leyden.spans(rollout, attempt=number))
        texts = _tokenizer(leyden, found.run_id, model) if tokens and not as_json else None
    parts = trajectory(found, calls, spans, attempt=attempt, output=output, token_rows=tokens, texts=texts)
    parts += [NO_TEXTS] if tokens and texts is None else []
    print_result(as_json, {**found.model_dump(mode="json"), "calls": calls, "spans": spans}, *parts)


@app.command("trajectory")
def transitions(
    ctx: typer.Context,
    rollout: Annotated[str, typer.Argument(metavar="ROLLOUT", help="Id of a rollout.")],
    limit: Count = 20,
    as_json: AsJson = False,
) -> None:
    """Show a rollout as transitions: state, action, reward and next state of each call and tool, the first ones."""
    with context_of(ctx).client() as leyden:
        found = list(itertools.islice(leyden.trajectory(rollout), limit + 1))
    shown = found[:limit]
    parts = [part for number, step in enumerate(shown, 1) for part in transition_parts(number, step)]
    more = [f"\nThese are the first {limit}: --limit shows more."] if len(found) > limit else []
    print_result(as_json, shown, *(parts or [NOTHING]), *more)


@app.command("files")
def files(
    ctx: typer.Context,
    rollout: Annotated[str, typer.Argument(metavar="ROLLOUT", help="Id of a rollout.")],
    to: Annotated[Path, typer.Option(help="A new folder for them.")],
    attempt: Annotated[
        int | None, typer.Option(min=1, help="Attempt number.", show_default="the one that counts")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Download the files that an agent left and that `agent.artifacts` names. They are what the agent wrote: look at
    them before you run any."""
    with context_of(ctx).client() as leyden:
        shown = _shown_attempt(leyden.rollout(rollout), attempt)
        if shown is None or shown.outcome is None or not shown.outcome.artifacts:
            raise CommandError("its agent left no files: name some in agent.artifacts")
        if to.exists():
            raise CommandError(f"{to} exists: name a new folder with --to", Exit.USAGE)
        for one in shown.outcome.artifacts:
            target = _below(to, one.path)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(leyden.artifact(rollout, one.path, attempt=shown.number))
    rows = [(one.path, _size(one)) for one in shown.outcome.artifacts]
    print_result(as_json, shown.outcome.artifacts, table(("file", "bytes"), rows), *_left_out_files(shown.outcome))


def _below(folder: Path, path: str) -> Path:
    """Raises: CommandError: the path leads out of the folder"""
    if path.startswith("/") or not {"", ".", ".."}.isdisjoint(path.split("/")):
        raise CommandError(f"{path!r} is no path below a folder: its API is not to be trusted")
    return folder / path


def _size(one: Artifact) -> str:
    cut = "" if one.stored_bytes == one.size_bytes else f", of which {one.stored_bytes} are stored"
    return f"{one.size_bytes}{cut}"


def _left_out_files(outcome: Outcome) -> list[Part]:
    if not outcome.artifacts_left_out:
        return []
    return [f"{outcome.artifacts_left_out} more are not kept: too many, links, or not readable"]


@app.command("group")
def group(
    ctx: typer.Context,
    group: Annotated[str, typer.Argument(metavar="GROUP", help="Id of a group: a rollout's without its last part.")],
    as_json: AsJson = False,
) -> None:
    """Show the siblings of one task side by side: rewards with their parts, calls and advantages, the best first."""
    with context_of(ctx).client() as leyden:
        found = leyden.group(group)
    best = sorted(found.siblings, key=lambda one: (math.inf if one.reward is None else -one.reward, one.sibling))
    names = list(dict.fromkeys(part.component for one in best for part in one.components))
    rows = [
        (one.id, one.state, one.reward, *_parts(one, names), _advantages(one), one.call_count, one.sampled_tokens)
        for one in best
    ]
    head = ("rollout", "state", "reward", *names, "advantage", "calls", "tokens")
    words = facts(
        ("group", found.id),
        ("task", json.dumps(found.task, ensure_ascii=False)),
        *([("agent", found.agent)] if found.agent else []),
        ("verdict", found.consumption or found.verdict or found.state),
        ("mean reward", found.reward_mean),
        ("standard deviation", found.reward_std),
        ("step", found.step),
    )
    print_result(as_json, found, words, table(head, rows))


def _parts(sibling: Sibling, names: Sequence[str]) -> list[float | str | None]:
    by_name = {one.component: one.state if one.value is None else one.value for one in sibling.components}
    return [by_name.get(name) for name in names]


def _advantages(sibling: Sibling) -> str | None:
    """One number where all calls have the same, else the least and the largest."""
    found = sorted({one.credit.advantage for one in sibling.calls if one.credit is not None})
    return None if not found else " to ".join(f"{value:+.3f}" for value in dict.fromkeys((found[0], found[-1])))


@app.command("waiting")
def waiting(
    ctx: typer.Context,
    run: Annotated[str | None, typer.Option(help="Id or name of a run.", show_default="all runs")] = None,
    limit: Count = 20,
    as_json: AsJson = False,
) -> None:
    """List the rollouts that wait for people's grades, those that ended first at the top."""
    with context_of(ctx).client() as leyden:
        of_run = None if run is None else leyden.find_run(run).id
        found = list(itertools.islice(leyden.waiting(of_run), limit))
    rows = [
        (
            *(one.rollout_id, one.run_name, one.task),
            ", ".join(f"{part.component} ({part.given} of {part.needed})" for part in one.missing),
            one.due_at,
        )
        for one in found
    ]
    print_result(as_json, found, table(("rollout", "run", "task", "waits for", "until"), rows))


# A value may be negative: without the setting it would be taken for an option.
@app.command("rate", context_settings={"ignore_unknown_options": True})
def rate(
    ctx: typer.Context,
    rollout: Annotated[str, typer.Argument(metavar="ROLLOUT", help="Id of a rollout.")],
    component: Annotated[str, typer.Argument(metavar="COMPONENT", help="A component that is `from: feedback`.")],
    value: Annotated[float, typer.Argument(metavar="VALUE", help="Such as 1 or 0.")],
    comment: Annotated[str | None, typer.Option(help="A note for readers of the rollout.")] = None,
    as_json: AsJson = False,
) -> None:
    """Give a value to a component of a rollout's reward."""
    with context_of(ctx).client() as leyden:
        given = leyden.rate(rollout, component, value, comment=comment)
    print_result(as_json, given, f"{rollout}: {given.component} {given.value:+g} for attempt {given.attempt}")


@app.command("regrade")
def regrade(
    ctx: typer.Context,
    file: RunFile,
    changes: Changes = None,
    rollout: Annotated[str | None, typer.Option(help="Id of one rollout.")] = None,
    run: Annotated[
        str | None, typer.Option(help="Id or name of a run: all of its graded rollouts, and the ungraded.")
    ] = None,
    evaluation: Annotated[
        str | None, typer.Option(help="Of the run: id of an evaluation, or `none` for training rollouts.")
    ] = None,
    apply: Annotated[bool, typer.Option("--apply", help="Store the grades as the newest revision.")] = False,
    as_json: AsJson = False,
) -> None:
    """Grade rollouts again with the components of a document; without --apply nothing is stored.

    Example: leyden rollout regrade run.json --run support --evaluation run-4hq2.e3 --apply
    """
    reward = reward_of(file, changes)
    if (rollout is None) == (run is None):
        raise CommandError("name --rollout or --run", Exit.USAGE)
    with context_of(ctx).client() as leyden:
        if rollout:
            asked: Iterable[Rollout] = [leyden.rollout(rollout)]
        else:
            asked = _gradable(leyden, leyden.find_run(run or "").id, evaluation)
        found = [(one, _regraded(leyden, one, reward, apply=apply)) for one in asked]
    rows = [(one.id, one.reward, total, reason) for one, (total, reason) in found]
    shown = [{"rollout": row[0], "reward": row[1], "total": row[2], "reason": row[3]} for row in rows]
    counts = f"{sum(total is not None for _, _, total, _ in rows)} of {len(rows)} rollouts have a new total"
    stored = counts if apply else f"{counts}; nothing is stored without --apply"
    print_result(as_json, shown, table(("rollout", "reward", "new total", "reason"), rows), stored)


def _gradable(leyden: Client, run_id: str, evaluation: str | None) -> Iterator[Rollout]:
    """The finished rollouts, then those that were excluded because their grading ended without a total."""
    yield from leyden.rollouts(run=run_id, evaluation=evaluation, state="finished")
    excluded = leyden.rollouts(run=run_id, evaluation=evaluation, state="excluded")
    yield from (one for one in excluded if one.reason == "ungraded")


def _regraded(leyden: Client, one: Rollout, reward: Reward, *, apply: bool) -> tuple[float | None, str | None]:
    """Returns the new total, or the reason why there is none."""
    if not apply:
        graded = leyden.grade(one.id, reward)
        return graded.total, graded.reason
    try:
        return leyden.regrade(one.id, reward).total, None
    except Conflict as error:
        return None, str(error)


def trajectory(
    rollout: RolloutDetail,
    calls: Sequence[Call],
    spans: Sequence[Span],
    *,
    attempt: int | None = None,
    output: bool = False,
    token_rows: bool = False,
    texts: TokenText | None = None,
) -> list[Part]:
    """A rollout, its calls with their tools, and its output.

    Args: attempt: None for the one that counts, else the newest; output: whether the stored output is shown in full;
        token_rows: whether each call has a table of its tokens, with their `texts` where these are known
    """
    parts = list(_of_rollout(rollout))
    shown = _shown_attempt(rollout, attempt)
    if attempt is None and rollout.attempt is None and shown:
        parts.append(f"No attempt counts: these are the calls of attempt {shown.number}, the newest.")
    for number, call in enumerate(calls, 1):
        parts += _of_call(number, call, spans)
        parts += [_tokens(call, texts)] if token_rows else []
    if rest := unmatched_spans(calls, spans):
        parts += [heading("tool spans that name no call"), *map(_of_span, rest)]
    return [*parts, *_of_files(shown), *_of_output(shown, full=output)]


def ended(reason: str | None, exit_code: int | None = None) -> str | None:
    """How the agent ended, without a word that sounds like a reward: exit status 0 is no success at the task."""
    if reason is None:
        return None
    return "exited 0" if reason == "succeeded" else f"{reason}{f', exit status {exit_code}' if exit_code else ''}"


def _of_rollout(rollout: RolloutDetail) -> Iterator[Part]:
    yield facts(
        ("rollout", rollout.id),
        ("state", f"{rollout.state}{f' ({ended(rollout.reason)})' if rollout.reason else ''}"),
        ("reward", rollout.reward),
        ("task", json.dumps(rollout.task, ensure_ascii=False)),
        *([("agent", rollout.agent)] if rollout.agent else []),
        ("policy version", rollout.admitted_version),
        ("trained in step", rollout.step),
        ("attempts", ", ".join(map(_attempt, rollout.attempts))),
        *(
            (f"attempt {one.number}", one.outcome.detail)
            for one in rollout.attempts
            if one.outcome and one.outcome.detail
        ),
        *((f"reward {reward.name}", f"{reward.value:+.3g} from {reward.source}") for reward in rollout.rewards),
        *((f"reward {one.component}", _component(one)) for one in rollout.components),
        *((f"revision {one.revision}", _regrade(one)) for one in rollout.regrades),
        *((f"feedback {one.component}", _given(one)) for one in rollout.feedback),
    )
    outcome = next((a.outcome for a in rollout.attempts if a.number == rollout.attempt and a.outcome), None)
    if outcome is not None:
        yield facts(("facts", outcome.facts))


def _component(one: RewardComponent) -> str:
    part = "" if one.contribution is None else f", of the total {one.contribution:+.4g}"
    value = one.state if one.value is None else f"{one.value:+.4g} × {one.weight:g}{part}"
    answer = "" if one.extracted is None else f"; answer {one.extracted!r}"
    return f"{value} from {one.source}: {one.explanation}{answer}"


def _regrade(one: Regrade) -> str:
    return f"{one.total:+.4g} for attempt {one.attempt}, asked by {one.given_by}"


def _given(one: Feedback) -> str:
    comment = f": {one.comment}" if one.comment else ""
    return f"{one.value:+.4g} from {one.given_by or 'telemetry'} for attempt {one.attempt}{comment}"


def _attempt(attempt: Attempt) -> str:
    outcome = attempt.outcome
    return f"{attempt.number} {ended(outcome.kind, outcome.exit_code) if outcome else attempt.state}"


def _shown_attempt(rollout: RolloutDetail, number: int | None) -> Attempt | None:
    """The attempt of this number, else the one that counts, else the last."""
    wanted = number or rollout.attempt
    matching = [attempt for attempt in rollout.attempts if wanted is None or attempt.number == wanted]
    return matching[-1] if matching else None


def _of_files(attempt: Attempt | None) -> Iterator[Part]:
    """The files that the attempt's agent left, without their contents."""
    if attempt is None or attempt.outcome is None or not attempt.outcome.artifacts:
        return
    yield facts(*((f"file {one.path}", f"{_size(one)} bytes") for one in attempt.outcome.artifacts))
    yield from _left_out_files(attempt.outcome)


def _of_output(attempt: Attempt | None, *, full: bool) -> Iterator[Part]:
    """The end of the attempt's stored output, or all of it; the runner stores the last part of long outputs."""
    if attempt is None or attempt.outcome is None:
        return
    outcome = attempt.outcome
    for name, stored in (("stdout", outcome.stdout_tail), ("stderr", outcome.stderr_tail)):
        shown = stored if full else "\n".join(stored.rstrip().splitlines()[-TAIL_LINES:])[-TAIL_CHARACTERS:]
        if shown.strip():
            more = "" if shown.strip() == stored.strip() else " (its end; --output shows all that is stored)"
            yield heading(f"{name} of attempt {attempt.number}{more}")
            yield as_block(shown.rstrip(), "red" if name == "stderr" and outcome.kind != "succeeded" else "")


def _tokenizer(leyden: Client, run_id: str, model: Path | None) -> TokenText | None:
    versions = [] if model else [Path(version.path) for version in leyden.policies(run_id)]
    return find_tokenizer([model] if model else reversed(versions))


def words_of_override(call: Call) -> str:
    """The parameters that the run replaced: `asked temperature 0, sampled 1; asked top_p 0.9, left out`."""
    return "; ".join(
        f"asked {name} {format_value(value)}, "
        + (f"sampled {format_value(call.temperature)}" if name == "temperature" else "left out")
        for name, value in (call.asked or {}).items()
    )


def _tokens(call: Call, texts: TokenText | None) -> Part:
    rows = [
        (token, json.dumps(texts(token), ensure_ascii=False) if texts else None, f"{logprob:.4f}", version)
        for token, logprob, version in zip(call.sampled_ids, call.logprobs, call.policy_versions, strict=True)
    ]
    return table(("token", "text", "log-probability", "version"), rows)


def _of_call(number: int, call: Call, spans: Sequence[Span]) -> Iterator[Part]:
    yield heading(f"call {number}  {call.id}  {call.status}")
    yield as_block(last_question(call)[-600:], "dim")
    yield as_block(answer_text(call))
    yield facts(
        ("tokens", f"{call.prompt_tokens} + {call.completion_tokens} ({call.cached_tokens} cached)"),
        ("log-probability", sum(call.logprobs)),
        ("policy versions", ", ".join(map(str, sorted(set(call.policy_versions))))),
        ("trainable", call.untrainable_reason or call.trainable),
        *([("sampling", words_of_override(call))] if call.asked else []),
        *_left_out(call),
        ("delivered", DELIVERED.get(call.delivered)),
        *_credit(call),
    )
    yield from map(_of_span, tool_spans(call, spans))


def _left_out(call: Call) -> list[tuple[str, object]]:
    marks = (("hosted tools", "hosted_tools"), ("items of hosted tools", "hosted_items"))
    found = [f"{words} {', '.join(call.request[mark])}" for words, mark in marks if call.request.get(mark)]
    return [("left out", "; ".join(found))] if found else []


def _credit(call: Call) -> list[tuple[str, object]]:
    if call.credit is None:
        return []
    credit = call.credit
    parts = (credit.intermediate_reward, credit.return_, credit.baseline, credit.advantage)
    names = ("intermediate", "return", "baseline", "advantage")
    words = ", ".join(f"{name} {format_value(value)}" for name, value in zip(names, parts, strict=True))
    tools = ", ".join(f"{use['tool']} {use['status']} ({use['source']})" for use in credit.tools.get("calls", ()))
    return [("credit", f"{words} (state {credit.state_key or 'start'})"), *([("tools", tools)] if tools else [])]


def _of_span(span: Span) -> Part:
    detail = f" {span.error_type}" if span.error_type else ""
    milliseconds = (span.end_ns - span.start_ns) / 1e6
    facts = f", {found}" if (found := embedding_facts(span)) else ""
    words = f"  {span.tool or span.name}: {span.status}{detail} ({milliseconds:.0f} ms{facts})"
    return as_text(words, "red" if span.status == "error" else "green")
