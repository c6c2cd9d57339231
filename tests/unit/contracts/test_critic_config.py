from typing import Any

import pytest
from pydantic import ValidationError

from leyden.libs.contracts.config import RunConfig

PLAIN = {"name": "n", "dataset": "d", "agent": {"command": ["x"]}}
CRITIC = {"type": "ppo_clip", "critic": {}}


def test_a_critic_goes_with_its_baseline_through_a_stored_document() -> None:
    run = RunConfig.model_validate({**PLAIN, "algorithm": CRITIC, "credit": {"baseline": {"type": "value"}}})
    assert RunConfig.stored(run.model_dump(mode="json")) == run


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"algorithm": CRITIC}, "credit.baseline.type is 'mean': write 'value', or remove the critic"),
        ({"credit": {"baseline": {"type": "value"}}}, "set algorithm.critic"),
        (
            {"algorithm": CRITIC, "credit": {"baseline": {"type": "value"}, "rule": {"type": "identical"}}},
            "credit.rule and credit.baseline.per do not act with algorithm.critic",
        ),
        (
            {"algorithm": CRITIC, "credit": {"baseline": {"type": "value", "per": "state"}}},
            "credit.rule and credit.baseline.per do not act with algorithm.critic",
        ),
        (
            {"algorithm": CRITIC, "credit": {"baseline": {"type": "value", "whiten": True}}},
            "algorithm.critic whitens advantages itself",
        ),
        (
            {
                "algorithm": CRITIC,
                "credit": {"baseline": {"type": "value"}},
                "sampling": {"refill_zero_variance": 2},
            },
            "remove credit.baseline.whiten and sampling.refill_zero_variance",
        ),
        (
            {
                "algorithm": CRITIC,
                "credit": {"baseline": {"type": "value"}},
                "sampling": {"replay": {"priority": "advantage"}},
            },
            "write 'freshness' or 'solve_rate'",
        ),
        (
            {"algorithm": {"type": "ppo_clip", "critic": {"trunk_learning_rate": 0.1, "model": "/models/other"}}},
            "model, trunk_learning_rate has no effect on a shared trunk: write trunk 'own', or remove it",
        ),
        ({"algorithm": {"type": "ppo_clip", "critic": {"lambda": 1}}}, "algorithm.ppo_clip.critic.lambda"),
    ],
)
def test_contradictions_are_refused_with_the_remedy(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError) as refused:
        RunConfig.model_validate({**PLAIN, **changes})
    assert words in str(refused.value)
