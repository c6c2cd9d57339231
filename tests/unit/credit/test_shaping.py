import pytest
from pydantic import ValidationError

from leyden.libs.contracts.config import Credit, Shaping
from leyden.services.credit.group import Credited, credit_group
from leyden.services.credit.shaping import overlong_reward, shaped_outcome
from tests.unit.credit.cases import call, rollout


def shaping(**fields: object) -> Shaping:
    return Shaping.model_validate(fields)


@pytest.mark.parametrize(("tokens", "reward"), [(0, 0.0), (60, 0.0), (80, -0.5), (99, -0.975), (100, -1.0), (500, -1)])
def test_the_penalty_grows_within_the_buffer(tokens: int, reward: float) -> None:
    overlong = shaping(overlong={"max_tokens": 100, "buffer_tokens": 40}).overlong
    assert overlong_reward(tokens, overlong) == pytest.approx(reward)
    assert overlong_reward(tokens, None) == 0.0


def test_the_clip_comes_before_the_scale_and_the_penalty_last() -> None:
    every = shaping(clip_low=-1, clip_high=2, scale=0.5, overlong={"max_tokens": 10, "buffer_tokens": 10})
    assert shaped_outcome(5.0, 5, every) == 0.5 * 2 - 0.5
    assert shaped_outcome(-5.0, 0, every) == -0.5
    assert shaped_outcome(5.0, 5, shaping(clip_low=0)) == 5.0
    assert shaped_outcome(5.0, 5, None) == 5.0


def test_a_long_rollout_or_each_long_call_loses_reward_and_the_raw_one_is_reported() -> None:
    calls = [call("a", [1], [2, 3], at=0), call("b", [1, 2, 3], [4, 5, 6, 7], at=1)]
    overlong = {"max_tokens": 4, "buffer_tokens": 4}

    def credited(**fields: object) -> Credited:
        credit = {"rule": {"type": "temporal", "gamma": 1}, "baseline": {"type": "none"}, "shaping": fields}
        result = credit_group([rollout("r", 3, calls)], Credit.model_validate(credit), min_siblings=1)
        assert isinstance(result, Credited)
        return result

    by_rollout = credited(scale=0.5, overlong=overlong)
    assert [one.return_ for one in by_rollout.credits] == [0.5, 0.5]
    assert by_rollout.rewards == [3]
    by_call = credited(clip_high=2, overlong={**overlong, "per": "call"})
    assert [one.intermediate_reward for one in by_call.credits] == [-0.5, -1.0]
    assert [one.return_ for one in by_call.credits] == [0.5, 1.0]


@pytest.mark.parametrize(
    ("fields", "remedy"),
    [
        ({"clip_low": 1, "clip_high": 1}, "exchange"),
        ({"overlong": {"max_tokens": 10}}, "at most as many"),
        ({"scale": 0}, "greater than 0"),
    ],
)
def test_shaping_that_cannot_work_is_refused(fields: dict[str, object], remedy: str) -> None:
    with pytest.raises(ValidationError, match=remedy):
        shaping(**fields)
