import numpy as np

from leyden.services.credit.forest import call_forest
from leyden.services.credit.paths import Path, paths, row_calls
from leyden.services.credit.records import Call
from tests.unit.credit.cases import call, chain


def rows(calls: list[Call]) -> list[Path]:
    return paths(call_forest(calls), {one.id: 10.0 * (i + 1) for i, one in enumerate(calls)})


def test_a_chain_is_one_row_with_each_calls_credit_on_its_tokens() -> None:
    (row,) = rows(chain("a", 3))
    assert row.token_ids.tolist() == [1, 10, 2, 11, 2, 12]
    assert row.mask.tolist() == [0, 1, 0, 1, 0, 1]
    assert row.advantages.tolist() == [0, 10, 0, 20, 0, 30]
    assert row.generator_logprobs.tolist() == [0, -0.5, 0, -0.5, 0, -0.5]
    assert row.policy_versions.tolist() == [-1, 3, -1, 3, -1, 3]
    assert row.temperatures.tolist() == [1, np.float32(0.8), 1, np.float32(0.8), 1, np.float32(0.8)]
    assert (row.branch, row.trained_tokens, row.min_policy_version) == (0, 3, 3)


def test_each_sampled_token_is_trained_in_exactly_one_row() -> None:
    calls = [
        call("root", [1], [2, 3], at=0),
        call("left", [1, 2, 3, 4], [5], at=1),
        call("right", [1, 2, 3, 6], [7, 8], at=2),
        call("deeper", [1, 2, 3, 6, 7, 8, 9], [10], at=3),
    ]
    left, right = rows(calls)
    assert (left.token_ids.tolist(), left.mask.tolist()) == ([1, 2, 3, 4, 5], [0, 1, 1, 0, 1])
    assert right.token_ids.tolist() == [1, 2, 3, 6, 7, 8, 9, 10]
    assert right.mask.tolist() == [0, 0, 0, 0, 1, 1, 0, 1]
    assert left.trained_tokens + right.trained_tokens == 6


def test_untrainable_and_aborted_calls_remain_as_context() -> None:
    first, second, third = chain("a", 3)
    cut = call("a0", [1], [10], at=0, completed=False)
    greedy = call("a1", [1, 10, 2], [11], at=1, temperature=0.0)
    constrained = call("a1", [1, 10, 2], [11], at=1, trainable=False)
    for calls in ([cut, second, third], [first, greedy, third], [first, constrained, third]):
        (row,) = rows(calls)
        assert row.token_ids.tolist() == [1, 10, 2, 11, 2, 12]
        assert row.trained_tokens == 2
        assert row.temperatures[row.mask == 0].tolist() == [1.0] * 4


def test_a_path_without_a_token_to_train_makes_no_row() -> None:
    trained = call("a", [1], [2], at=0)
    judged = call("b", [9], [2], at=1, trainable=False)
    later = call("c", [8], [2], at=2)
    assert [row.branch for row in rows([trained, judged, later])] == [0, 1]
    assert rows([judged]) == []


def test_tokens_that_a_grammar_forced_do_not_train() -> None:
    logprobs = np.array([0.0, -0.0005, -0.7, -1e-7], "<f4").tobytes()
    constrained = call("a", [1], [2, 3, 4, 5], at=0, logprobs=logprobs, masks_forced=True)
    (row,) = rows([constrained])
    assert row.mask.tolist() == [0, 0, 0, 1, 0]
    assert row.generator_logprobs.tolist() == [0, 0, 0, np.float32(-0.7), 0]
    assert row.policy_versions.tolist() == [-1, -1, -1, 3, -1]
    assert row.advantages.tolist() == [0, 0, 0, 10, 0]
    forced = call("b", [1], [2], at=0, logprobs=np.zeros(1, "<f4").tobytes(), masks_forced=True)
    assert rows([forced]) == []


def test_calls_share_the_return_of_the_one_they_continue_and_untrained_ones_pass_it_on() -> None:
    calls = [
        call("root", [1], [2, 3], at=0),
        call("left", [1, 2, 3, 4], [5], at=1),
        call("judge", [1, 2, 3, 6], [7], at=2, trainable=False),
        call("after", [1, 2, 3, 6, 7, 8], [9], at=3),
        call("end", [1, 2, 3, 6, 7, 9], [9], at=4, trainable=False),
    ]
    forest = call_forest(calls)
    rewards = dict(zip((one.id for one in calls), (0.1, 1.0, 10.0, 100.0, 1000.0), strict=True))
    left, right = paths(forest, dict.fromkeys(rewards, 0.0), row_calls(forest, rewards))
    root, first = left.calls
    (after,) = right.calls
    assert (root.id, root.parent, root.begin, root.end) == (calls[0].id, None, 1, 2)
    # Half of the judge's reward, and half of that of each call after it.
    assert root.reward == 0.1 + 10 / 2 + 1000 / 4
    assert (first.parent, first.share, first.reward) == (calls[0].id, 0.5, 1.0)
    assert (after.parent, after.share, after.reward, after.begin) == (calls[0].id, 0.25, 100.0, 6)
