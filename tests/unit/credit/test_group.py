from dataclasses import replace

import pytest

from leyden.libs.contracts.call_counts import CallCounts
from leyden.libs.contracts.config import Credit
from leyden.libs.contracts.states import OutcomeKind
from leyden.services.credit.group import Credited, Excluded, credit_group
from leyden.services.credit.records import AskedTool, BrokenRecord, Call, Reward, Rollout, ToolResult
from tests.unit.credit.cases import asking, call, chain, rollout, span


def credited(rollouts: list[Rollout], **credit: object) -> Credited:
    result = credit_group(rollouts, Credit.model_validate(credit), min_siblings=1)
    assert isinstance(result, Credited)
    return result


def advantages(result: Credited) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for one in result.credits:
        found.setdefault(one.rollout_id, []).append(one.advantage)
    return found


IDENTICAL = {"rule": {"type": "identical"}}


def test_identical_credit_of_a_group_by_hand() -> None:
    # Outcomes 1, 0, 0.5, 0 with 2, 3, 1, 1 calls; mean 0.375.
    group = [
        rollout(name, outcome, chain(name, calls))
        for name, outcome, calls in (("a", 1, 2), ("b", 0, 3), ("c", 0.5, 1), ("d", 0, 1))
    ]
    result = credited(group, **IDENTICAL)
    assert advantages(result) == {"a": [0.625] * 2, "b": [-0.375] * 3, "c": [0.125], "d": [-0.375]}
    assert result.rewards == [1, 0, 0.5, 0]
    assert (result.has_variance(), result.min_policy_version()) == (True, 3)


def test_the_flight_agents_credit_by_hand() -> None:
    # Sibling a: memory ok, search ok, answer, outcome 1. Sibling b: search fails, memory ok, answer, outcome 0.
    # γ = 0.5, weights 0.3 and 0.2. a: G3 = 1, G2 = 0.2 + 0.5, G1 = 0.3 + 0.35; b: G3 = 0, G2 = 0.3, G1 = 0.15.
    a = rollout("a", 1, chain("a", 3, "memory", "search"), span("memory", at=0.5), span("search", at=1.5))
    b = rollout("b", 0, chain("b", 3, "search", "memory"), span("search", "error", at=0.5), span("memory", at=1.5))
    air = {"weights": {"memory": 0.3, "search": 0.2}, "failure": 0.0}
    rule = {"type": "discounted", "gamma": 0.5}
    by_state = credited([a, b], rule=rule, air=air, baseline={"type": "mean", "per": "state"})
    assert [one.return_ for one in by_state.credits] == pytest.approx([0.65, 0.7, 1.0, 0.15, 0.3, 0.0])
    assert [one.intermediate_reward for one in by_state.credits] == pytest.approx([0.3, 0.2, 0, 0, 0.3, 0])
    # Only the first calls were made in the same state, mean 0.4; the others stand alone.
    assert advantages(by_state)["a"] == pytest.approx([0.25, 0, 0])
    assert advantages(by_state)["b"] == pytest.approx([-0.25, 0, 0])
    by_rollout = credited([a, b], rule=rule, air=air)
    # Values 2.35 / 3 and 0.45 / 3, mean 1.4 / 3.
    mean = 1.4 / 3
    assert advantages(by_rollout)["a"] == pytest.approx([0.65 - mean, 0.7 - mean, 1 - mean])
    assert advantages(by_rollout)["b"] == pytest.approx([0.15 - mean, 0.3 - mean, -mean])


RULES = ("identical", "equal_split", "discounted", "temporal", "token_discounted", "temporal_discount", "own")


def _crashed(name: str, *tools: str, given: float = 0.0) -> Rollout:
    calls = chain(name, 2, *tools)
    rewards = [Reward(given, call_id=calls[0].id)] if given else []
    return Rollout(name, 0.0, calls, rewards=rewards, ended=OutcomeKind.AGENT_ERROR, failed=True)


def test_a_crash_before_a_tool_is_no_better_than_a_call_that_the_tool_refuses() -> None:
    # Returns -0.3, 0, 0 and, for the crash, -0.3 in place of 0; mean -0.15.
    refused = rollout("a", 0, chain("a", 2, "search"), span("search", "error", at=0.5))
    group = [refused, rollout("b", 0, chain("b", 2)), rollout("c", 0, chain("c", 2)), _crashed("d")]
    air = {"weights": {"search": 0.3}}
    found = advantages(credited(group, **IDENTICAL, air=air))
    assert [value for of in found.values() for value in of] == pytest.approx([-0.15] * 2 + [0.15] * 4 + [-0.15] * 2)
    # A run whose document has a number for failures means that number.
    result = credit_group(
        group, Credit.model_validate({**IDENTICAL, "air": air}), min_siblings=1, bounds_failures=False
    )
    assert isinstance(result, Credited)
    assert advantages(result)["d"] == pytest.approx([0.075] * 2)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("tools", [(), ("search", "search")], ids=["no-tools", "tools"])
def test_no_call_of_a_failure_has_a_better_return_than_the_worst_of_its_siblings(
    rule: str, tools: tuple[str, ...]
) -> None:
    refused = rollout("a", -0.5, chain("a", 3, "search"), span("search", "error", at=0.5))
    worked = rollout("b", 1, chain("b", 3, "search"), span("search", at=0.5))
    failed = _crashed("c", *tools, given=0.4)
    failed.spans.extend(span("search", at=at + 0.5) for at in range(len(tools)))
    baseline = {"type": "none" if rule == "token_discounted" else "mean"}
    credit = {"rule": {"type": rule}, "air": {"weights": {"search": 0.3}}, "baseline": baseline}
    result = credited([refused, worked, failed], **credit)
    returns: dict[str, list[float]] = {}
    for one in result.credits:
        returns.setdefault(one.rollout_id, []).append(one.return_)
    assert max(returns["c"]) <= min(returns["a"] + returns["b"])
    assert max(advantages(result)["c"]) <= min(advantages(result)["a"] + advantages(result)["b"])
    # Its siblings have the returns that they have without it.
    assert [one.return_ for one in credited([refused, worked], **credit).credits] == returns["a"] + returns["b"]


def test_a_call_of_a_failure_is_bounded_by_the_calls_of_its_role() -> None:
    # The planner's calls earn 0.4 and 0.5, the searcher's -0.3: the planner of the crash keeps its 0.4.
    def of(name: str, planner: float, *, crashed: bool = False) -> Rollout:
        calls = [replace(one, role=role) for one, role in zip(chain(name, 2), ("planner", "searcher"), strict=True)]
        rewards = [Reward(planner, call_id=calls[0].id), Reward(-0.3, call_id=calls[1].id)]
        ended = {"ended": OutcomeKind.AGENT_ERROR, "failed": True} if crashed else {}
        return Rollout(name, 0.0, calls, rewards=rewards, **ended)

    group = [of("a", 0.4), of("b", 0.5), of("c", 0.45, crashed=True)]
    rule = {"rule": {"type": "own"}}
    found = credited(group, **rule, baseline={"type": "mean", "per": "role"})
    returns = {(one.rollout_id, one.role): one.return_ for one in found.credits}
    assert returns["a", "planner"] == pytest.approx(0.4)
    assert returns["c", "planner"] == pytest.approx(0.4)
    assert returns["c", "searcher"] == pytest.approx(-0.35)
    # One baseline for all calls: one bound for all.
    found = credited(group, **rule)
    assert max(one.return_ for one in found.credits if one.rollout_id == "c") == pytest.approx(-0.3)


def test_alpha_mixes_status_and_outcome() -> None:
    # α = 0.25: the call earns 0.25 · 0.4 = 0.1 and the outcome counts 0.75 · 2 = 1.5.
    one = rollout("a", 2, chain("a", 1, "memory"), span("memory", at=0.5))
    result = credited([one], air={"weights": {"memory": 0.4}, "alpha": 0.25}, baseline={"type": "none"}, **IDENTICAL)
    assert [c.advantage for c in result.credits] == pytest.approx([1.6])


def test_forged_tool_spans_earn_no_reward() -> None:
    forged = [span("search", at=0.5 + k / 10_000, seconds=0.00001) for k in range(300)]
    cheat = rollout("a", 0, chain("a", 1), *forged)
    honest = rollout("b", 1, chain("b", 1))
    result = credited([cheat, honest], air={"weights": {"search": 1.0}})
    assert advantages(result) == {"a": [-0.5], "b": [0.5]}


def test_rewards_are_added_to_their_call_or_rollout() -> None:
    first = asking("x0", [1], [10], "search", at=0)
    second = call("x1", [1, 10, 2], [11], at=1)
    rewards = [
        Reward(0.5),
        Reward(0.25, response_id=f"resp_{second.id}"),
        Reward(0.125, tool_call_id=first.asked[0].tool_call_id),
        Reward(0.0625, call_id=first.id),
        Reward(1.0, response_id="chatcmpl-unknown"),
    ]
    one = Rollout("a", 2.0, [first, second], [], rewards)
    result = credited([one], rule={"type": "discounted", "gamma": 1.0}, baseline={"type": "none"})
    assert [c.intermediate_reward for c in result.credits] == [0.1875, 0.25]
    assert [c.return_ for c in result.credits] == [3.9375, 3.75]
    assert result.rewards == [3.9375]


def test_equal_siblings_have_no_variance() -> None:
    group = [rollout(name, 1, chain(name, 3)) for name in "ab"]
    result = credited(group)
    assert not result.has_variance()
    assert {c.advantage for c in result.credits} == {0.0}


def test_too_few_siblings_are_excluded_with_the_reason() -> None:
    result = credit_group([rollout("a", 1, chain("a", 1))], Credit(), min_siblings=2)
    assert isinstance(result, Excluded)
    assert "min_siblings" in result.reason
    assert isinstance(credit_group([], Credit(), min_siblings=1), Excluded)


def test_a_crash_before_the_first_call_counts_with_its_outcome() -> None:
    result = credited([rollout("a", 1, chain("a", 1)), rollout("b", 0, [])], **IDENTICAL)
    assert advantages(result) == {"a": [0.5]}
    assert result.rewards == [1, 0]


def test_a_group_without_trainable_tokens_has_no_variance() -> None:
    group = [rollout(n, r, [call(n, [1], [2], at=0, trainable=False)]) for n, r in (("a", 1), ("b", 0))]
    result = credited(group, **IDENTICAL)
    assert (result.has_variance(), result.min_policy_version()) == (False, None)
    assert result.samples == {"a": [], "b": []}


def test_calls_are_counted_with_the_reasons_for_which_they_do_not_train() -> None:
    asked = (AskedTool("search", "1", is_malformed=True),)
    calls = [
        call("a0", [1], [2], at=0, text="an answer"),
        call("a1", [3], [2], at=1, trainable=False, recorded_reason="role checker does not train", text="no"),
        call("a2", [4], [2], at=2, temperature=0.0, text=" "),
        call("a3", [5], [2], at=3, completed=False),
        call("a4", [6], [2], at=4, asked=asked, is_cut=True),
        call("a5", [7], [], at=5),
        call("a6", [8], [], at=6, completed=False, is_overflow=True),
    ]
    [(policy, counts)] = credited([rollout("a", 1, calls)], baseline={"type": "none"}).counts.items()
    reasons = {
        "role checker does not train": 1,
        "sampled with temperature": 1,
        "without a complete answer": 1,
        "without a sampled token": 1,
        "beyond the model's context": 1,
    }
    assert policy is None
    assert counts == CallCounts(
        calls=7, untrainable=reasons, malformed=1, empty=2, cut=1, overflows=1,
        tools={"search": {"error": 1}}, roles={},
    )  # fmt: skip


def test_computing_credit_twice_gives_the_same_result() -> None:
    group = [rollout(n, r, chain(n, 4), span("s", at=0.5)) for n, r in (("a", 1.0), ("b", 0.0))]
    first, second = credited(group), credited(group)
    assert first.credits == second.credits
    assert [row.advantages.tobytes() for row in first.samples["a"]] == [
        row.advantages.tobytes() for row in second.samples["a"]
    ]


def test_a_broken_record_is_named() -> None:
    with pytest.raises(BrokenRecord, match="differ in length"):
        call("a", [1], [2, 3], at=0, logprobs=b"\0\0\0\0")


def test_one_baseline_per_role_compares_a_role_with_itself() -> None:
    # Two roles of different returns: writers 1 and 0, and a checker that only sibling a called, with return 1.
    def sibling(name: str, outcome: float, *roles: str) -> Rollout:
        return rollout(name, outcome, [call(f"{name}{k}", [k], [9], at=k, role=role) for k, role in enumerate(roles)])

    group = [sibling("a", 1, "writer", "checker"), sibling("b", 0, "writer"), rollout("c", 0.5, [])]
    result = credited(group, **IDENTICAL, baseline={"type": "mean", "per": "role"})
    assert advantages(result) == {"a": [0.5, 0.0], "b": [-0.5]}


def test_calls_of_frozen_roles_are_context_and_count_in_the_baseline() -> None:
    first = call("first", [1], [2], at=0, trainable=False, role="planner")
    second = call("second", [1, 2, 3], [4], at=1, role="writer")
    result = credited([rollout("a", 1, [first, second]), rollout("b", 0, [])], **IDENTICAL)
    [path] = result.samples["a"]
    assert path.mask.tolist() == [0, 0, 0, 1]
    assert advantages(result) == {"a": [0.5, 0.5]}


def test_auxiliary_calls_are_left_out_unless_the_run_trains_them() -> None:
    work = call("work", [1], [2], at=0, offers_tools=True)
    title = call("title", [7], [8], at=1, offers_tools=False)
    planner = call("planner", [5], [6], at=2, offers_tools=False, role="planner")
    group = [rollout("a", 1, [work, title, planner]), rollout("b", 0, [])]
    assert [one.call_id for one in credited(group).credits] == [work.id, planner.id]
    assert len(credited(group, auxiliary_calls="train").credits) == 3
    # Without tools anywhere nothing tells the agent's work from the rest.
    assert len(credited([rollout("a", 1, [title, call("other", [3], [4], at=3, offers_tools=False)])]).credits) == 2


def test_a_critics_calls_earn_the_outcome_once_with_airs_share() -> None:
    credit = Credit.model_validate({"air": {"alpha": 0.25}, "baseline": {"type": "value"}})
    found = credit_group([rollout("r.0", 1.0, chain("a", 2))], credit, min_siblings=1)
    assert isinstance(found, Credited)
    ((row,),) = found.samples.values()
    assert [call.reward for call in row.calls] == [0.0, 0.75]


def test_own_credit_has_the_published_values() -> None:
    # Statuses +1, -1, +1, then the answer; α 0.2, outcome 1.
    calls = chain("a", 4, "search", "search", "search")
    spans = [span("search", one, at=at + 0.5) for at, one in enumerate(["ok", "error", "ok"])]
    air = {"weights": {"search": 1.0}, "alpha": 0.2}
    credit = Credit.model_validate({"rule": {"type": "own"}, "air": air, "baseline": {"type": "none"}})
    found = credit_group([rollout("a", 1.0, calls, *spans)], credit, min_siblings=1)
    assert isinstance(found, Credited)
    assert [one.return_ for one in found.credits] == pytest.approx([1.0, 0.6, 1.0, 1.0], abs=1e-9)


def with_results(name: str, *texts: str, tool: str = "search") -> list[Call]:
    """Calls that each ask for a tool, whose results the next ones send, and a last one with the answer."""
    calls = chain(name, len(texts) + 1, *[tool] * len(texts))
    for at, text in enumerate(texts):
        results = (ToolResult(calls[at].asked[0].tool_call_id, text),)
        calls[at + 1] = replace(calls[at + 1], results=results)
    return calls


def test_own_credit_has_the_published_values_from_results_without_spans() -> None:
    calls = with_results("a", '{"flights": 3}', "Encountered error: no flights", "42")
    air = {"weights": {"search": 1.0}, "alpha": 0.2}
    credit = {"rule": {"type": "own"}, "air": air, "baseline": {"type": "none"}}
    found = credited([rollout("a", 1.0, calls)], **credit)
    assert [one.return_ for one in found.credits] == pytest.approx([1.0, 0.6, 1.0, 1.0], abs=1e-9)
    # A bare message is neither: its call has the outcome, unmixed.
    calls = with_results("a", '{"flights": 3}', "no flights", "42")
    found = credited([rollout("a", 0.5, calls)], **credit)
    assert [one.return_ for one in found.credits] == pytest.approx([0.6, 0.5, 0.6, 0.5], abs=1e-9)


@pytest.mark.parametrize("failure", [-1.0, 0.0])
@pytest.mark.parametrize("text", [None, "three connections"], ids=["lost", "bare"])
def test_own_credit_of_a_call_without_status_is_the_outcome(failure: float, text: str | None) -> None:
    # Two successes earn 0.2 · 1 + 0.8 · 1; the third call has no status, and neither an average nor a middle beside 1.
    worked = [rollout(name, 1, with_results(name, '{"flights": 3}')) for name in "ab"]
    unknown = rollout("c", 1, chain("c", 2, "search") if text is None else with_results("c", text))
    air = {"weights": {"search": 1.0}, "alpha": 0.2, "failure": failure}
    found = credited([*worked, unknown], rule={"type": "own"}, air=air, baseline={"type": "mean", "per": "depth"})
    assert [use.status for one in found.credits for use in one.uses] == ["ok", "ok", "unset"]
    assert [one.return_ for one in found.credits] == pytest.approx([1.0] * 6, abs=1e-9)
    assert [one.intermediate_reward for one in found.credits] == pytest.approx([0.2, 0, 0.2, 0, 0, 0], abs=1e-9)
    assert not found.has_variance()


@pytest.mark.parametrize(
    ("failure", "middle"),
    [(-1.0, 0.0), (0.0, 0.15), (-0.5, 0.075)],
)
def test_a_bare_text_is_worth_the_middle_of_success_and_failure(failure: float, middle: float) -> None:
    air = {"weights": {"search": 0.3}, "failure": failure}
    bare = rollout("a", 1, with_results("a", "no connection from Atlantis"))
    worked = rollout("b", 1, with_results("b", '{"flights": 3}'))
    failed = rollout("c", 1, with_results("c", "Error: no connection"))
    # Agno: a success is JSON and a failure bare. LangGraph: a success is bare and a failure marked.
    for sibling, value in ((worked, 0.3), (failed, 0.3 * failure)):
        found = credited([bare, sibling], air=air)
        assert [one.intermediate_reward for one in found.credits] == pytest.approx([middle, 0, value, 0], abs=1e-9)
    # AutoGen: nothing is known of the tool, so that it earns nothing, and equal siblings are equal.
    other = rollout("d", 1, with_results("d", "three connections"))
    found = credited([bare, other], air=air)
    assert [one.intermediate_reward for one in found.credits] == [0.0] * 4
    assert not found.has_variance()
    assert [use.source for one in found.credits for use in one.uses] == ["bare", "bare"]
    assert found.counts[None].tools == {"search": {"bare": 2}}


def test_a_lost_span_makes_equal_siblings_no_different() -> None:
    with_span = rollout("a", 1, chain("a", 2, "search"), span("search", at=0.5))
    without = rollout("b", 1, chain("b", 2, "search"))
    failed = rollout("c", 1, chain("c", 2, "search"), span("search", "error", at=0.5))
    air = {"weights": {"search": 0.3}, "from_results": False}
    assert not credited([with_span, without], air=air).has_variance()
    # Beside a failure the lost span is worth the mean of both.
    found = credited([with_span, failed, without], air=air)
    assert [one.intermediate_reward for one in found.credits] == pytest.approx([0.3, 0, -0.3, 0, 0, 0])
    assert credited([without], air=air, baseline={"type": "none"}).credits[0].intermediate_reward == 0


def test_an_empty_result_that_earns_nothing_is_no_lost_one() -> None:
    ok = rollout("a", 1, chain("a", 2, "search"), span("search", at=0.5))
    calls = chain("b", 2, "search")
    calls[1] = replace(calls[1], results=(ToolResult(calls[0].asked[0].tool_call_id, "[]"),))
    found = credited([ok, rollout("b", 1, calls)], air={"weights": {"search": 0.3}, "null": "nothing"})
    assert [one.intermediate_reward for one in found.credits] == [0.3, 0, 0, 0]
