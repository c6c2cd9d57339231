"""A run as one self-contained HTML page: curves, evaluations, and two trajectories call by call with their credit.

Pure functions from API bodies to text; nothing is fetched by the page.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from leyden.libs.contracts.api import Call, Evaluation, Fact, RolloutDetail, Run, Span, Statistic, Step

WIDTH, HEIGHT, MARGIN = 640, 220, 36
COLOURS = ("#2f6f9f", "#c2571a", "#3d8b4f", "#7d4f9e", "#a33b4b")

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1d2733; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.6rem } h2 { margin-top: 2.5rem; font-size: 1.2rem; border-bottom: 1px solid #d8dee6 }
table { border-collapse: collapse; margin: 1rem 0; width: 100% } th, td { padding: .3rem .6rem; text-align: left }
th { border-bottom: 1px solid #9aa7b5; font-weight: 600 } td { border-bottom: 1px solid #e6eaef; vertical-align: top }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums }
svg text { font: 11px system-ui, sans-serif; fill: #4a5866 } pre { white-space: pre-wrap; margin: 0 }
.muted { color: #66758a } .good { color: #24713a } .bad { color: #a32a2a } .scroll { overflow-x: auto }
.call { border-left: 3px solid #9aa7b5; padding-left: .8rem; margin: .8rem 0 }
.said { background: #f3f6f9; padding: .4rem .6rem; border-radius: 4px }
"""


@dataclass(frozen=True)
class Trajectory:
    """One rollout as it went."""

    title: str
    rollout: RolloutDetail
    calls: Sequence[Call]
    spans: Sequence[Span]


@dataclass(frozen=True)
class Curve:
    """One line of a chart: values by step, and half the height of a band around each."""

    name: str
    points: Sequence[tuple[int, float]]
    spread: Sequence[float] = ()


def render_report(
    run: Run, steps: Sequence[Step], evaluations: Sequence[Evaluation], trajectories: Sequence[Trajectory]
) -> str:
    """The page."""
    sections = [
        _summary(run, steps),
        _section(
            "Reward",
            _chart(_reward_curves(steps)),
            "Mean over the rollouts of each step; the band is one standard deviation.",
        ),
        _section(
            "What the grader saw",
            _chart(_fact_curves(steps), low=0.0, high=1.0),
            "Shares over the rollouts of each step.",
        ),
        _section("Held-out tasks", _evaluations(evaluations), "The same settings for each version; 95 % intervals."),
        _section("First and last words", "".join(map(_trajectory, trajectories))),
        _section("Steps", _steps(steps)),
        _section("Configuration", f"<pre>{escape(json.dumps(run.config.model_dump(mode='json'), indent=2))}</pre>"),
    ]
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{escape(run.name)}</title><style>{STYLE}</style></head><body>{''.join(sections)}</body></html>\n"
    )


def _section(title: str, body: str, note: str = "") -> str:
    muted = f"<p class='muted'>{escape(note)}</p>" if note else ""
    return f"<h2>{escape(title)}</h2>{muted}{body or '<p class=muted>Nothing yet.</p>'}"


def _summary(run: Run, steps: Sequence[Step]) -> str:
    tokens = sum(step.metrics.get("trained_tokens") or 0 for step in steps)
    facts = [
        f"run {run.id}",
        f"{run.phase}{f': {run.reason}' if run.reason else ''}",
        f"{len(steps)} steps",
        f"{sum(step.rollouts for step in steps)} training rollouts",
        f"{tokens:,.0f} tokens trained",
    ]
    return f"<h1>{escape(run.name)}</h1><p>{escape(' · '.join(facts))}</p>"


def _reward_curves(steps: Sequence[Step]) -> list[Curve]:
    known = [(step.number, step.reward_mean, step.reward_std or 0.0) for step in steps if step.reward_mean is not None]
    return [Curve("reward", [(n, mean) for n, mean, _ in known], [spread for _, _, spread in known])] if known else []


def _fact_curves(steps: Sequence[Step]) -> list[Curve]:
    names = sorted({name for step in steps for name, value in step.facts.items() if 0.0 <= value <= 1.0})
    return [
        Curve(name, [(step.number, step.facts[name]) for step in steps if name in step.facts])
        for name in names
        if name != "reward"
    ]


@dataclass(frozen=True)
class _Scale:
    """From steps and values to places in the picture."""

    first: int
    last: int
    bottom: float
    top: float

    def x(self, step: float) -> float:
        return MARGIN + (step - self.first) / max(self.last - self.first, 1) * (WIDTH - 2 * MARGIN)

    def y(self, value: float) -> float:
        return HEIGHT - MARGIN - (value - self.bottom) / ((self.top - self.bottom) or 1.0) * (HEIGHT - 2 * MARGIN)

    def place(self, step: float, value: float) -> str:
        return f"{self.x(step):.1f},{self.y(value):.1f}"


def _chart(curves: Sequence[Curve], low: float | None = None, high: float | None = None) -> str:
    """An SVG of the curves over steps; empty without points."""
    values = [value for curve in curves for _, value in curve.points]
    if not values:
        return ""
    spread = max((s for curve in curves for s in curve.spread), default=0.0)
    numbers = [number for curve in curves for number, _ in curve.points]
    bottom = min(values) - spread if low is None else low
    top = max(values) + spread if high is None else high
    scale = _Scale(min(numbers), max(numbers), bottom, top)
    lines = "".join(_line(scale, index, curve) for index, curve in enumerate(curves))
    return f"<svg viewBox='0 0 {WIDTH} {HEIGHT}' role='img' width='100%'>{_axes(scale)}{lines}</svg>"


def _line(scale: _Scale, index: int, curve: Curve) -> str:
    colour = COLOURS[index % len(COLOURS)]
    parts = [f"<text x='{MARGIN + index * 130}' y='14' style='fill:{colour}'>{escape(curve.name)}</text>"]
    if curve.spread:
        pairs = list(zip(curve.points, curve.spread, strict=True))
        edge = [scale.place(n, v + s) for (n, v), s in pairs] + [scale.place(n, v - s) for (n, v), s in reversed(pairs)]
        parts.append(f"<polygon points='{' '.join(edge)}' fill='{colour}' opacity='.15'/>")
    places = " ".join(scale.place(n, v) for n, v in curve.points)
    parts.append(f"<polyline points='{places}' fill='none' stroke='{colour}' stroke-width='2'/>")
    parts += [f"<circle cx='{scale.x(n):.1f}' cy='{scale.y(v):.1f}' r='2.5' fill='{colour}'/>" for n, v in curve.points]
    return "".join(parts)


def _axes(scale: _Scale) -> str:
    ticks = []
    for value in (scale.bottom, (scale.bottom + scale.top) / 2, scale.top):
        height = f"{scale.y(value):.1f}"
        ticks.append(
            f"<line x1='{MARGIN}' x2='{WIDTH - MARGIN}' y1='{height}' y2='{height}' stroke='#e0e5eb'/>"
            f"<text x='2' y='{height}' dy='4'>{value:.2f}</text>"
        )
    for number in sorted({scale.first, (scale.first + scale.last) // 2, scale.last}):
        ticks.append(f"<text x='{scale.x(number):.1f}' y='{HEIGHT - 12}' text-anchor='middle'>{number}</text>")
    return "".join(ticks)


def _evaluations(evaluations: Sequence[Evaluation]) -> str:
    measured = [e for e in evaluations if e.results.reward is not None]
    if not measured:
        return ""
    names = list(dict.fromkeys(fact.name for e in measured for fact in e.results.facts if fact.name != "reward"))
    head = [
        "",
        *(f"version {e.measured_version} ({e.results.reward.count} rollouts)" for e in measured if e.results.reward),
    ]
    rows = [["reward", *(_statistic(e.results.reward) for e in measured)]]
    rows += [[name, *(_fact(_named(e.results.facts, name)) for e in measured)] for name in names]
    return _table(head, rows)


def _named(facts: Sequence[Fact], name: str) -> Fact | None:
    return next((fact for fact in facts if fact.name == name), None)


def _fact(fact: Fact | None) -> str:
    if fact is None:
        return "–"
    if fact.counts is not None:
        total = sum(fact.counts.values())
        return ", ".join(f"{name} {count} ({count / total:.0%})" for name, count in fact.counts.items())
    return _statistic(fact.statistic, share=fact.kind == "share")


def _statistic(statistic: Statistic | None, *, share: bool = False) -> str:
    if statistic is None:
        return "–"
    if share:
        count = round(statistic.mean * statistic.count)
        return f"{count} of {statistic.count}: {statistic.mean:.1%} [{statistic.low:.1%}, {statistic.high:.1%}]"
    return f"{statistic.mean:.3f} [{statistic.low:.3f}, {statistic.high:.3f}]"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<div class='scroll'><table><tr>{cells}</tr>{body}</table></div>"


def _steps(steps: Sequence[Step]) -> str:
    if not steps:
        return ""
    phases = list(dict.fromkeys(name for step in steps for name in step.metrics if name.endswith("_seconds")))
    head = ["step", "reward", "spread", "no variance", *(name.replace("_", " ") for name in phases)]
    rows = []
    for step in steps:
        flat = step.groups.get("no_variance", 0)
        cells = [
            str(step.number),
            _number(step.reward_mean),
            _number(step.reward_std),
            f"{flat} of {sum(step.groups.values())}",
        ]
        rows.append([*cells, *(_number(step.metrics.get(name)) for name in phases)])
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
    return head + "".join(_call(number, call, trajectory.spans) for number, call in enumerate(trajectory.calls, 1))


def _call(number: int, call: Call, spans: Sequence[Span]) -> str:
    facts = [f"{call.completion_tokens} tokens", f"log-probability {sum(call.logprobs):.2f}"]
    if call.credit is not None:
        facts += [
            f"intermediate reward {call.credit.intermediate_reward:+.2f}",
            f"return {call.credit.return_:+.2f}",
            f"advantage {call.credit.advantage:+.2f}",
        ]
    tools = "".join(
        _tool(span) for span in spans if span.kind == "tool" and span.response_id == f"chatcmpl-{call.request_id}"
    )
    return (
        f"<div class='call'><p class='muted'>call {number}: {escape(last_question(call))}</p>"
        f"<pre class='said'>{escape(answer_text(call))}</pre>"
        f"{tools}<p class='muted'>{escape(' · '.join(facts))}</p></div>"
    )


def last_question(call: Call) -> str:
    """The content of the last turn that the model was sent, or the reason why it cannot be shown."""
    if call.turns is None:
        return call.missing_parent or ""
    return call.turns[-1].content if call.turns else ""


def answer_text(call: Call) -> str:
    """The model's answer: its text and the tool calls in it."""
    if call.answer is None:
        return "(nothing)"
    tool_calls = [f"{tool.name}({tool.arguments})" for tool in call.answer.tool_calls]
    return "\n".join(filter(None, [call.answer.content, *tool_calls])) or "(nothing)"


def _tool(span: Span) -> str:
    mark = "bad" if span.status == "error" else "good"
    detail = span.error_type or span.attributes.get("gen_ai.tool.call.result") or ""
    return f"<p class='{mark}'>{escape(span.tool or span.name)}: {escape(span.status)} {escape(str(detail))}</p>"
