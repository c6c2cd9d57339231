from __future__ import annotations

import pytest

from leyden.libs.contracts.states import OutcomeKind
from leyden.libs.sandbox.ended import Ended
from leyden.libs.sandbox.output import Output
from leyden.services.runner.outcome import FACTS_BYTES, outcome_of


def ended(stdout: str | bytes = "", *, chunk_bytes: int = 65536, **changes: object) -> Ended:
    raw, output = stdout if isinstance(stdout, bytes) else stdout.encode(), Output()
    for start in range(0, len(raw), chunk_bytes):
        output.add(raw[start : start + chunk_bytes], 1000)
    values = {"exit_code": 0, "stdout": output.last(1000), "stderr": b"", "seconds": 1.0}
    return Ended(**{**values, "reward_line": output.reward_line(), **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("stdout", "reward", "facts"),
    [
        ('{"reward": 1}', 1.0, {"reward": 1}),
        ('noise\n {"reward": -0.5, "success": true} \nmore noise\n\n', -0.5, {"reward": -0.5, "success": True}),
        ('{"reward": 0.1}\n{"reward": 0.9}\n', 0.9, {"reward": 0.9}),
        ('{"rewards": {"format": 0.25, "answer": 0.5}}', 0.75, {"rewards": {"format": 0.25, "answer": 0.5}}),
        ('{"reward": 2, "rewards": {"a": 1}}', 2.0, {"reward": 2, "rewards": {"a": 1}}),
        ('{"reward": 1}\n{"note": "no \\"reward\\" here"}', 1.0, {"reward": 1}),
        # JSON has these characters as they are, and only a newline ends a line.
        ('{"reward": 1, "text": "a\u2028b\x85c"}\r\n', 1.0, {"reward": 1, "text": "a\u2028b\x85c"}),
        ("", None, {}),
        ('[{"reward": 1}]\n"reward"\n1.5', None, {}),
    ],
)
def test_the_last_json_line_with_a_reward_counts(stdout: str, reward: float | None, facts: dict[str, object]) -> None:
    outcome = outcome_of(ended(stdout))
    assert (outcome.kind, outcome.reward, outcome.facts) == (OutcomeKind.SUCCEEDED, reward, facts)
    outcome = outcome_of(ended(stdout), stdout_reward=False)
    assert (outcome.kind, outcome.reward, outcome.facts) == (OutcomeKind.SUCCEEDED, None, {})


@pytest.mark.parametrize(
    ("line", "detail"),
    [
        ('{"reward": NaN}', "'reward' is not finite: nan"),
        ('{"reward": -Infinity}', "'reward' is not finite: -inf"),
        ('{"reward": 1e999}', "'reward' is not finite: inf"),
        (f'{{"reward": 1{"0" * 400}}}', "'reward' is not finite: 1000"),
        ('{"reward": true}', "'reward' must be a number, not 'True'"),
        ('{"reward": "1"}', "'reward' must be a number, not '1'"),
        ('{"reward": null}', "'reward' must be a number, not 'None'"),
        ('{"reward": [1]}', "'reward' must be a number, not '[1]'"),
        ('{"rewards": {"a": 1, "b": "x"}}', "'rewards.b' must be a number, not 'x'"),
        ('{"rewards": {"a": 6e5, "b": 6e5}}', "'rewards' is beyond 1e+06: 1200000.0"),
        ('{"reward": -1e300}', "'reward' is beyond 1e+06: -1e+300"),
        ('{"rewards": [1]}', "'rewards' must be an object of numbers, not [1]"),
        ('{"rewards": {}}', "'rewards' must be an object of numbers, not {}"),
        ('{"reward": ' + "[" * 900 + "]" * 900 + "}", "'reward' must be a number, not 'deeper than 64 levels'"),
        ('{"reward": 1', "the last line with a reward is broken JSON"),
        ('{"reward":' + "[" * 100_000, "the last line with a reward is broken JSON"),
    ],
)
def test_a_broken_reward_is_the_agents_error_and_is_named(line: str, detail: str) -> None:
    outcome = outcome_of(ended('{"reward": 1}\n' + line))
    assert (outcome.kind, outcome.reward) == (OutcomeKind.AGENT_ERROR, None)
    assert outcome.detail is not None
    assert outcome.detail.startswith(detail)


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"exit_code": 1}, OutcomeKind.AGENT_ERROR),
        ({"exit_code": -11}, OutcomeKind.AGENT_ERROR),
        ({"exit_code": -9}, OutcomeKind.AGENT_ERROR),
        ({"exit_code": -9, "platform_failure": "the machine had no memory"}, OutcomeKind.INFRA_ERROR),
        ({"exit_code": 0, "platform_failure": "the node went away"}, OutcomeKind.INFRA_ERROR),
        ({"exit_code": -9, "timed_out": True}, OutcomeKind.TIMEOUT),
        ({"exit_code": 0, "timed_out": True}, OutcomeKind.TIMEOUT),
        ({"exit_code": None}, OutcomeKind.AGENT_ERROR),
    ],
)
def test_only_an_exit_with_zero_earns_the_printed_reward(changes: dict[str, object], kind: OutcomeKind) -> None:
    outcome = outcome_of(ended('{"reward": 1}', **changes))
    assert (outcome.kind, outcome.reward, outcome.facts) == (kind, None, {})
    assert outcome.detail


def test_binary_output_is_stored_as_readable_text() -> None:
    outcome = outcome_of(ended(stdout=b'\xff\xfe\n{"reward": 1}\n'))
    assert outcome.stdout_tail == '\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}\n{"reward": 1}\n'


def test_facts_nested_too_deep_are_dropped() -> None:
    outcome = outcome_of(ended('{"reward": 1, "a": [[1]], "b": ' + '{"c":' * 900 + "1" + "}" * 900 + "}"))
    assert outcome.facts == {"reward": 1, "a": [[1]], "b": "deeper than 64 levels"}


def test_an_agent_that_ignores_its_cpu_limit_failed_itself() -> None:
    outcome = outcome_of(
        ended('{"reward": 1}', exit_code=-9, limit_exceeded="the agent went on after its limit of CPU time")
    )
    assert (outcome.kind, outcome.detail) == (OutcomeKind.AGENT_ERROR, "the agent went on after its limit of CPU time")


def test_facts_are_bounded() -> None:
    outcome = outcome_of(ended('{"reward": 1, "note": "' + "x" * FACTS_BYTES + '"}'))
    assert outcome.reward == 1.0
    assert list(outcome.facts) == ["truncated"]


@pytest.mark.parametrize("line", ['{"reward": NaN}', '{"reward": "1"}', '{"reward": 1', '{"rewards": {}}'])
def test_without_stdout_reward_no_line_fails_the_attempt(line: str) -> None:
    outcome = outcome_of(ended(line), stdout_reward=False)
    assert (outcome.kind, outcome.reward, outcome.detail) == (OutcomeKind.SUCCEEDED, None, None)


@pytest.mark.parametrize("size", [1, 7, 65536])
def test_a_reward_counts_however_much_follows_it(size: int) -> None:
    noise = b"x" * 500 + b'\n{"note": "no \\"reward\\" here"}\n'
    after = noise * (3 if size == 1 else 6)
    found = ended(b'{"reward": 0.25}\n{"reward": 0.5}\n' + after, chunk_bytes=size)
    assert b"0.5" not in found.stdout
    assert outcome_of(found).reward == 0.5


def test_a_reward_before_three_megabytes_of_output_counts() -> None:
    assert outcome_of(ended(b'{"reward": 0.5}\n' + b"y" * 3_000_000)).reward == 0.5


@pytest.mark.parametrize(
    "line", ['{"reward_model": "m"}', '{"reward_model": ', '{"at": {"reward": 1}}', '{"note": "\\"rewards\\": 1"}']
)
def test_a_reward_counts_however_many_lines_look_like_one(line: str) -> None:
    assert outcome_of(ended('{"reward": 0.5}\n' + (line + "\n") * 9)).reward == 0.5


def test_a_line_with_a_reward_that_is_too_large_is_an_error_of_the_agent() -> None:
    line = b'{"text": "' + b"z" * 1_000_000 + b'", "reward": 1}\n'
    outcome = outcome_of(ended(line))
    assert outcome.kind is OutcomeKind.AGENT_ERROR
    assert str(outcome.detail).startswith("the last line with a reward has more than 262144 bytes")
