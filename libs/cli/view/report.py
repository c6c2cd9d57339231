"""A run as one self-contained HTML page: curves, evaluations, and trajectories call by call with their credit.

Pure functions from API bodies to text; the page fetches nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape as html_escape
from pathlib import PurePath

from leyden.libs.cli.view.output import counted_rollouts, mean_and_interval, pass_words
from leyden.libs.cli.view.safe_text import safe_lines
from leyden.libs.cli.view.watch import policy_words
from leyden.libs.contracts.api.rollouts import Call, RolloutDetail, Span
from leyden.libs.contracts.api.runs import Evaluation, Fact, Run, Statistic, Step
from leyden.libs.contracts.call_counts import tool_failures
from leyden.libs.contracts.conversation import Json
from leyden.libs.contracts.states import GATEWAY_SCOPE

WIDTH, HEIGHT, MARGIN = 640, 220, 36
COLOURS = ("#2f6f9f", "#c2571a", "#3d8b4f", "#7d4f9e", "#a33b4b")

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1d2733; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.6rem } h2 { margin-top: 2.5rem; font-size: 1.2rem; border-bottom: 1px solid #d8dee6 }
table { border-collapse: collapse; margin: 1rem 0; width: 100% } th, td { padding: .3rem .6rem; text-align: left }
th { border-bottom: 1px solid #9aa7b5; font-weight: 600 } td { border-bottom: 1px solid #e6eaef; vertical-align: top }
svg text { font: 11px system-ui, sans-serif; fill: #4a5866 } pre { white-space: pre-wrap; margin: 0 }
.headline { font-size: 1.1rem }
.muted { color: #66758a } .good { color: #24713a } .bad { color: #a32a2a } .scroll { overflow-x: auto }
.call { border-left: 3px solid #9aa7b5; padding-left: .8rem; margin: .8rem 0 }
.answer { background: #f3f6f9; padding: .4rem .6rem; border-radius: 4px }
"""


SHOWN_OF_TEXT = 80
COMPONENTS_NOTE = "Means before the weight, over the rollouts of a step that have the component."
TOOLS_NOTE = "Share of the calls of a tool whose end is known."
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
"""The page may style itself: it runs nothing and asks nothing, whatever an agent wrote into it."""


def escape(text: str) -> str:
    """Text for the page: no markup, and no character that controls or turns what is around it; lines stay."""
    return html_escape("\n".join(safe_lines(text)))


@dataclass(frozen=True)
class Trajectory:
    """One attempt with its calls and spans."""

    title: str
    rollout: RolloutDetail
    calls: Sequence[Call]
    spans: Sequence[Span]


@dataclass(frozen=True)
class Curve:
    """One line of a chart: step, value, and half the height of a band around the value."""

    name: str
    points: Sequence[tuple[int, float, float]]


def render_report(
    run: Run,
    steps: Sequence[Step],
    evaluations: Sequence[Evaluation],
    trajectories: Sequence[Trajectory],
    *,
    held_out: Sequence[tuple[int, float]] = (),
    model: str | None = None,
) -> str:
    """The page.

    Args: held_out: versions with their means on the tasks by which they are compared; model: the base model's folder;
        None for the platform's default
    """
    tools = _tool_curves(steps)
    rewards = [(s.number, s.reward_mean, s.reward_std or 0.0) for s in steps if s.reward_mean is not None]
    reward_note = "Mean over the rollouts of each step; the band is one standard deviation."
    sections = [
        _heading(run, steps, held_out, model),
        _section("Reward", _chart([Curve("reward", rewards)]), reward_note),
        *([_section("Components of the reward", _components(steps), COMPONENTS_NOTE)] if _components(steps) else []),
        *([_section("Failed tool calls", _chart(tools, (0.0, 1.0)), TOOLS_NOTE)] if tools else []),
        _section("Facts of the grader", _chart(_fact_curves(steps), (0.0, 1.0)), "Shares over the rollouts of a step."),
        _section("Held-out tasks", _evaluations(evaluations), "The same settings for each version; 95 % intervals."),
        _section("Trajectories", "".join(map(_trajectory, trajectories))),
        _section("Steps", _steps(steps)),
        _section("Configuration", f"<pre>{escape(_document(run))}</pre>"),
    ]
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        f"<meta http-equiv='Content-Security-Policy' content=\"{POLICY}\">"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{escape(run.name)}</title><style>{STYLE}</style></head><body>{''.join(sections)}</body></html>\n"
    )


def _document(run: Run) -> str:
    return run.reason or "" if run.config is None else json.dumps(run.config.model_dump(mode="json"), indent=2)


def _section(title: str, body: str, note: str = "") -> str:
    muted = f"<p class='muted'>{escape(note)}</p>" if note else ""
    return f"<h2>{escape(title)}</h2>{muted}{body or '<p class=muted>Nothing yet.</p>'}"


def _heading(run: Run, steps: Sequence[Step], held_out: Sequence[tuple[int, float]], model: str | None) -> str:
    tokens = sum(step.metrics.get("trained_tokens") or 0 for step in steps)
    facts = [
        f"run {run.id}",
        f"{run.phase}{f': {run.reason}' if run.reason else ''}",
        f"{len(steps)} steps",
        *([f"learning rate {run.config.optimizer.rate:.3g}"] if run.config else []),
        *([f"{run.computation.words}, on {run.computation.device}"] if run.computation else []),
        f"{sum(step.rollouts for step in steps)} training rollouts",
        f"{tokens:,.0f} tokens trained",
        *(f"policy {name}: {policy_words(one)}" for name, one in run.policies.items()),
    ]
    name = PurePath(model).name if model else "the platform's model"
    headline = f"{name}: {_change(steps, held_out)}"
    return (
        f"<h1>{escape(run.name)}</h1><p class='headline'>{escape(headline)}</p>"
        f"<p class='muted'>{escape(' · '.join(facts))}</p>"
    )


def _change(steps: Sequence[Step], held_out: Sequence[tuple[int, float]]) -> str:
    """From the first to the last reward: on held-out tasks by version, else on training tasks by step."""
    found, title, unit = list(held_out), "held-out reward", "version"
    if len(found) == 1 and not steps:
        return f"{title} {found[0][1]:.3f} ({unit} {found[0][0]})"
    if len(found) < 2:
        found = [(step.number, step.reward_mean) for step in steps if step.reward_mean is not None]
        title, unit = "training reward", "step"
    if not found:
        return "no reward yet"
    (first, before), (last, after) = min(found), max(found)
    return f"{title} {before:.3f} → {after:.3f} ({unit} {first} → {last})"


def _fact_curves(steps: Sequence[Step]) -> list[Curve]:
    numbers = {name for step in steps for name, value in step.facts.items() if not 0.0 <= value <= 1.0}
    shares = {name for step in steps for name in step.facts} - numbers - {"reward"}
    return [
        Curve(name, [(step.number, step.facts[name], 0.0) for step in steps if name in step.facts])
        for name in sorted(shares)
    ]


def _tool_curves(steps: Sequence[Step]) -> list[Curve]:
    found = [(step.number, tool_failures(step.calls)) for step in steps]
    names = sorted({name for _, tools in found for name in tools})
    return [
        Curve(name, [(number, tools[name][0] / tools[name][1], 0.0) for number, tools in found if name in tools])
        for name in names
    ]


def _components(steps: Sequence[Step]) -> str:
    """The curve of each component's mean, and those that failed."""
    names = list(dict.fromkeys(name for step in steps for name in step.components))
    found = {
        name: [(step.number, step.components[name]) for step in steps if name in step.components] for name in names
    }
    curves = [
        Curve(name, [(number, one.mean, 0.0) for number, one in found[name] if one.mean is not None]) for name in names
    ]
    failures = [(name, max(found[name], key=lambda one: one[1].failed_share)) for name in names]
    rows = [[name, f"{one.failed_share:.1%} in step {number}"] for name, (number, one) in failures if one.failed_share]
    return _chart(curves) + (_table(["component", "failed most"], rows) if rows else "")


def _chart(curves: Sequence[Curve], bounds: tuple[float, float] | None = None) -> str:
    """An SVG of the curves over steps; empty without points."""
    points = [point for curve in curves for point in curve.points]
    if not points:
        return ""
    first, last = min(n for n, _, _ in points), max(n for n, _, _ in points)
    low, high = bounds or (min(v - s for _, v, s in points), max(v + s for _, v, s in points))
    if min(v for _, v, _ in points) >= 0:
        low = 0.0

    def x(step: float) -> float:
        return MARGIN + (step - first) / max(last - first, 1) * (WIDTH - 2 * MARGIN)

    def y(value: float) -> float:
        return HEIGHT - MARGIN - (value - low) / ((high - low) or 1.0) * (HEIGHT - 2 * MARGIN)

    def path(places: Iterable[tuple[int, float]]) -> str:
        return " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in places)

    parts = []
    for value in (low, (low + high) / 2, high):
        parts.append(f"<line x1='{MARGIN}' x2='{WIDTH - MARGIN}' y1='{y(value):.1f}' y2='{y(value):.1f}'")
        parts.append(f" stroke='#e0e5eb'/><text x='2' y='{y(value):.1f}' dy='4'>{value:.2f}</text>")
    for step in sorted({first, (first + last) // 2, last}):
        parts.append(f"<text x='{x(step):.1f}' y='{HEIGHT - 12}' text-anchor='middle'>{step}</text>")
    for index, curve in enumerate(curves):
        colour = COLOURS[index % len(COLOURS)]
        edge = [(n, v + s) for n, v, s in curve.points] + [(n, max(low, v - s)) for n, v, s in reversed(curve.points)]
        line = path((n, v) for n, v, _ in curve.points)
        parts.append(f"<text x='{MARGIN + index * 130}' y='14' style='fill:{colour}'>{escape(curve.name)}</text>")
        parts.append(f"<polygon points='{path(edge)}' fill='{colour}' opacity='.15'/>")
        parts.append(f"<polyline points='{line}' fill='none' stroke='{colour}' stroke-width='2'/>")
    return f"<svg viewBox='0 0 {WIDTH} {HEIGHT}' role='img' width='100%'>{''.join(parts)}</svg>"


def _evaluations(evaluations: Sequence[Evaluation]) -> str:
    measured = [(e, e.results.reward) for e in evaluations if e.results.reward is not None]
    if not measured:
        return ""
    names = list(dict.fromkeys(fact.name for e, _ in measured for fact in e.results.facts if fact.name != "reward"))
    head = ["", *(f"version {e.measured_version} ({counted_rollouts(e.results)})" for e, _ in measured)]
    rows = [["reward", *(_statistic(reward) for _, reward in measured)]]
    for k in sorted({one.k for e, _ in measured for one in e.results.pass_at}):
        found = [next((one for one in e.results.pass_at if one.k == k), None) for e, _ in measured]
        shown = zip(measured, found, strict=True)
        rows.append([f"pass@{k}", *("–" if one is None else pass_words(one, e) for (e, _), one in shown)])
    for name in names:
        facts = [next((fact for fact in e.results.facts if fact.name == name), None) for e, _ in measured]
        rows.append([name, *map(_fact, facts)])
    return _table(head, rows)


def _fact(fact: Fact | None) -> str:
    if fact is None:
        return "–"
    if fact.counts is not None:
        shown = list(fact.counts.items())
        if rest := fact.total - sum(fact.counts.values()):
            shown.append(("others", rest))
        return ", ".join(f"{name} {count} ({count / fact.total:.0%})" for name, count in shown)
    return _statistic(fact.statistic, share=fact.kind == "share")


def _statistic(statistic: Statistic | None, *, share: bool = False) -> str:
    if statistic is None:
        return "–"
    if share:
        count = round(statistic.mean * statistic.count)
        return f"{count} of {statistic.count}: {mean_and_interval(statistic, '.1%')}"
    return mean_and_interval(statistic, ".3f")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<div class='scroll'><table><tr>{cells}</tr>{body}</table></div>"


def _steps(steps: Sequence[Step]) -> str:
    if not steps:
        return ""
    phases = list(dict.fromkeys(name for step in steps for name in step.metrics if name.endswith("_seconds")))
    head = ["step", "reward", "spread", "no variance", "replayed", *(name.replace("_", " ") for name in phases)]
    rows = [
        [
            str(step.number),
            _number(step.reward_mean),
            _number(step.reward_std),
            f"{step.groups.get('no_variance', 0)} of {sum(step.groups.values()) - step.groups.get('replayed', 0)}",
            f"{step.metrics.get('samples_replayed') or 0:.0f} samples",
            *(_number(step.metrics.get(name)) for name in phases),
        ]
        for step in steps
    ]
    return _table(head, rows)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


def _trajectory(trajectory: Trajectory) -> str:
    rollout = trajectory.rollout
    task = escape(json.dumps(rollout.task, ensure_ascii=False))
    head = (
        f"<h3>{escape(trajectory.title)}</h3><p class='muted'>rollout {escape(rollout.id)}, policy version"
        f" {rollout.admitted_version}, reward {_number(rollout.reward)}</p><pre class='muted'>{task}</pre>"
    )
    calls = "".join(_call(number, call, trajectory.spans) for number, call in enumerate(trajectory.calls, 1))
    rest = unmatched_spans(trajectory.calls, trajectory.spans)
    others = f"<p class='muted'>tool spans that name no call</p>{''.join(map(_tool, rest))}" if rest else ""
    return head + calls + others


def _call(number: int, call: Call, spans: Sequence[Span]) -> str:
    facts = [f"{call.completion_tokens} tokens", f"log-probability {sum(call.logprobs):.2f}"]
    if call.credit is not None:
        facts += [
            f"intermediate reward {call.credit.intermediate_reward:+.2f}",
            f"return {call.credit.return_:+.2f}",
            f"advantage {call.credit.advantage:+.2f}",
        ]
    found = tool_spans(call, spans)
    tools = "".join(map(_tool, found)) + "".join(map(_use, _uses_without_span(call, found)))
    return (
        f"<div class='call'><p class='muted'>call {number}: {escape(last_question(call))}</p>"
        f"<pre class='answer'>{escape(answer_text(call))}</pre>"
        f"{tools}<p class='muted'>{escape(' · '.join(facts))}</p></div>"
    )


def _tool(span: Span) -> str:
    mark = "bad" if span.status == "error" else "good"
    detail = span.error_type or span.attributes.get("gen_ai.tool.call.result") or embedding_facts(span)
    return f"<p class='{mark}'>{escape(span.tool or span.name)}: {escape(span.status)} {escape(str(detail))}</p>"


def _uses_without_span(call: Call, spans: Sequence[Span]) -> list[Json]:
    """The tools that credit found for a call beside those with a span."""
    left = [span.tool for span in spans]
    found: list[Json] = []
    for use in call.credit.tools.get("calls", ()) if call.credit is not None else ():
        if use["tool"] in left:
            left.remove(use["tool"])
        else:
            found.append(use)
    return found


def _use(use: Json) -> str:
    mark = {"ok": "good", "error": "bad"}.get(use["status"], "muted")
    return (
        f"<p class='{mark}'>{escape(str(use['tool']))}: {escape(str(use['status']))} ({escape(str(use['source']))})</p>"
    )


def unmatched_spans(calls: Sequence[Call], spans: Sequence[Span]) -> list[Span]:
    """The tool spans that name the response of none of these calls."""
    matched = [span for call in calls for span in tool_spans(call, spans)]
    return [span for span in spans if span.kind == "tool" and span not in matched]


def tool_spans(call: Call, spans: Sequence[Span]) -> list[Span]:
    """The tool spans that name this call's response."""
    return [span for span in spans if span.kind == "tool" and (span.response_id or "").endswith(call.request_id)]


def embedding_facts(span: Span) -> str:
    """The facts of an embedding, as `2 inputs, 256 dimensions, MODEL: "the first text"`; empty for other tools."""
    if span.scope != GATEWAY_SCOPE:
        return ""
    found = span.attributes
    count, dimensions = found["leyden.embeddings.inputs"], found.get("gen_ai.embeddings.dimension.count")
    facts = [
        f"{count} {'input' if count == 1 else 'inputs'}",
        f"{dimensions} dimensions" if dimensions else None,
        found.get("gen_ai.response.model") or found.get("gen_ai.request.model"),
    ]
    text = next(iter(found["leyden.embeddings.texts"]), "")
    shown = f"{text[:SHOWN_OF_TEXT]}{'…' if len(text) > SHOWN_OF_TEXT else ''}"
    return ", ".join(filter(None, facts)) + (f': "{shown}"' if text else "")


def last_question(call: Call) -> str:
    """The content of the last turn that the model was sent, or the reason why it cannot be shown."""
    if call.turns is None:
        return call.missing_parent or ""
    if not call.turns:
        return "(the same as an earlier call)" if call.shared_turns else ""
    return call.turns[-1].content


def answer_text(call: Call) -> str:
    """The model's answer: its text and the tool calls in it."""
    if call.answer is None:
        return "(nothing)"
    tool_calls = [f"{tool.name}({tool.arguments})" for tool in call.answer.tool_calls]
    return "\n".join(filter(None, [call.answer.content, *tool_calls])) or "(nothing)"
