"""`leyden rollout …`"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.text import Text

from leyden.libs.cli.context import context_of
from leyden.libs.cli.output import AsJson, Count, console, format_value, print_facts, print_json, print_table
from leyden.libs.cli.report import answer_text, last_question, tool_spans
from leyden.libs.contracts.api import Call, RolloutDetail, Span

app = typer.Typer(no_args_is_help=True, help="Rollouts: the work of each agent, token by token.")


@app.command("list")
def list_(
    ctx: typer.Context,
    run: Annotated[str | None, typer.Option(help="Id or name of a run.")] = None,
    state: Annotated[str | None, typer.Option(help="queued, finished, excluded or cancelled.")] = None,
    evaluation: Annotated[
        str | None, typer.Option(help="Id of an evaluation, or `none` for training rollouts.")
    ] = None,
    step: Annotated[int | None, typer.Option(min=1, help="The optimiser step that consumed them.")] = None,
    version: Annotated[int | None, typer.Option(min=0, help="The policy version they were admitted at.")] = None,
    limit: Count = 20,
    as_json: AsJson = False,
) -> None:
    """List rollouts, newest first."""
    with context_of(ctx).client() as leyden:
        run_id = leyden.find_run(run).id if run else None
        listed = leyden.rollouts(run=run_id, state=state, evaluation=evaluation, step=step, version=version)
        found = list(itertools.islice(listed, limit))
    if as_json:
        print_json(found)
        return
    rows = [(r.id, r.state, r.reason, r.reward, r.task_number, r.admitted_version, r.step, r.created_at) for r in found]
    print_table(("rollout", "state", "reason", "reward", "task", "version", "step", "made"), rows)


@app.command("show")
def show(
    ctx: typer.Context,
    rollout: Annotated[str, typer.Argument(metavar="ROLLOUT", help="Id of a rollout.")],
    attempt: Annotated[int | None, typer.Option(min=1, help="Attempt number [default: the one that counts].")] = None,
    tokens: Annotated[bool, typer.Option("--tokens", help="Every sampled token with its log-probability.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show a trajectory call by call: conversation, tools, tokens and credit."""
    with context_of(ctx).client() as leyden:
        found = leyden.rollout(rollout)
        shown = attempt or found.attempt
        calls = list(leyden.calls(rollout, attempt=shown, prompt=as_json))
        spans = list(leyden.spans(rollout, attempt=shown))
    if as_json:
        print_json({**found.model_dump(mode="json"), "calls": calls, "spans": spans})
        return
    _print_rollout(found)
    for number, call in enumerate(calls, 1):
        _print_call(number, call, spans, tokens)
    _print_unmatched(calls, spans)


def _print_rollout(rollout: RolloutDetail) -> None:
    attempts = [f"{a.number} {a.outcome.kind if a.outcome else a.state}" for a in rollout.attempts]
    print_facts(
        [
            ("rollout", rollout.id),
            ("state", f"{rollout.state}{f' ({rollout.reason})' if rollout.reason else ''}"),
            ("reward", rollout.reward),
            ("task", json.dumps(rollout.task, ensure_ascii=False)),
            ("policy version", rollout.admitted_version),
            ("trained in step", rollout.step),
            ("attempts", ", ".join(attempts)),
        ]
    )
    outcome = next((a.outcome for a in rollout.attempts if a.number == rollout.attempt and a.outcome), None)
    if outcome is not None:
        print_facts([("facts", outcome.facts), ("detail", outcome.detail)])
    last = rollout.attempts[-1].outcome if rollout.attempts else None
    if last is not None and last.kind != "succeeded" and last.stderr_tail:
        console.print(Text(last.stderr_tail[-2000:], style="red"))
    for reward in rollout.rewards:
        print_facts([(f"reward {reward.name}", f"{reward.value:+.3g} from {reward.source}")])


def _print_call(number: int, call: Call, spans: Sequence[Span], tokens: bool) -> None:
    console.print(Text(f"\ncall {number}  {call.id}  {call.status}", style="bold"))
    console.print(Text(last_question(call)[-600:], style="dim"))
    console.print(Text(answer_text(call)))
    versions = sorted(set(call.policy_versions))
    print_facts(
        [
            ("tokens", f"{call.prompt_tokens} + {call.completion_tokens} ({call.cached_tokens} cached)"),
            ("log-probability", sum(call.logprobs)),
            ("policy versions", ", ".join(map(str, versions))),
            ("trainable", call.untrainable_reason or call.trainable),
            *_credit(call),
        ]
    )
    for span in tool_spans(call, spans):
        _print_span(span)
    if tokens:
        rows = zip(call.sampled_ids, call.logprobs, call.policy_versions, strict=True)
        print_table(("token", "log-probability", "version"), [(t, f"{p:.4f}", v) for t, p, v in rows])


def _credit(call: Call) -> list[tuple[str, object]]:
    if call.credit is None:
        return []
    credit = call.credit
    parts = (credit.intermediate_reward, credit.return_, credit.baseline, credit.advantage)
    names = ("intermediate", "return", "baseline", "advantage")
    words = ", ".join(f"{name} {format_value(value)}" for name, value in zip(names, parts, strict=True))
    return [("credit", f"{words} (state {credit.state_key or 'start'})")]


def _print_span(span: Span) -> None:
    style = "red" if span.status == "error" else "green"
    detail = f" {span.error_type}" if span.error_type else ""
    milliseconds = (span.end_ns - span.start_ns) / 1e6
    console.print(Text(f"  {span.tool or span.name}: {span.status}{detail} ({milliseconds:.0f} ms)", style=style))


def _print_unmatched(calls: Sequence[Call], spans: Sequence[Span]) -> None:
    matched = [span for call in calls for span in tool_spans(call, spans)]
    if rest := [span for span in spans if span.kind == "tool" and span not in matched]:
        console.print(Text("\ntool spans that name no call", style="bold"))
        for span in rest:
            _print_span(span)
