"""Each loss and correction as a run would name it: refusals, and a two-armed bandit.

The bandit's policy is a softmax over two logits; a rollout samples an arm with an older policy, and earns 1 for arm 1.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from leyden.libs.contracts.config import Algorithm, RunConfig
from leyden.services.trainer.loss.objective import Terms, objective
from tests.support.builders import run_document

PENALTY = {"kl_coefficient": 0.1}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "ppo_clip": {"type": "ppo_clip"},
    "gspo": {"type": "gspo"},
    "cispo": {"type": "cispo"},
    "sapo": {"type": "sapo"},
    "dppo_tv": {"type": "dppo_tv"},
    "importance_sampling": {"type": "importance_sampling"},
    "reinforce": {"type": "reinforce"},
    **{
        name: {"type": "ppo_clip", "correction": {"type": "decoupled", "weights": name, **bounds}}
        for name, bounds in {
            "tis_token": {},
            "tis_seq": {},
            "icepop": {},
            "seq_mask": {},
            "mis_geo": {"floor": 0.5, "cap": 2.0},
        }.items()
    },
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_two_armed_bandit_is_learned(name: str) -> None:
    algorithm: Algorithm = TypeAdapter(Algorithm).validate_python(ALGORITHMS[name])
    torch.manual_seed(0)
    logits = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    older = logits.detach()
    weights_K, rows_K = torch.full((64,), 1 / 64, dtype=torch.float64), torch.arange(64)
    for _ in range(60):
        generator = older.log_softmax(0)
        arms_K = torch.multinomial(generator.exp(), 64, replacement=True)
        rewards_K = arms_K.double()
        terms = Terms(generator[arms_K], rewards_K - rewards_K.mean(), weights_K, rows_K)
        older = logits.detach().clone()
        result = objective(algorithm, logits.log_softmax(0)[arms_K], terms)
        (gradient,) = torch.autograd.grad(result.loss, logits)
        with torch.no_grad():
            logits -= 2.0 * gradient
    assert float(logits.softmax(0)[1].detach()) > 0.95


@pytest.mark.parametrize("algorithm", ALGORITHMS.values(), ids=ALGORITHMS)
def test_a_run_names_the_algorithm(algorithm: dict[str, Any]) -> None:
    document = RunConfig.model_validate(run_document(algorithm=algorithm)).model_dump(mode="json")
    assert RunConfig.stored(document).model_dump(mode="json") == document


def decoupled(**fields: Any) -> dict[str, Any]:
    return {"correction": {"type": "decoupled", **fields}}


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"algorithm": {"type": "dppo_tv", **decoupled()}}, "write 'bypass'"),
        ({"algorithm": {"type": "sapo", "tau_positive": 2.0, **decoupled()}}, "tau_positive cannot act"),
        ({"algorithm": {"type": "reinforce", **decoupled(floor=0.5)}}, "floor has no effect with weights 'tis_token'"),
        ({"algorithm": {"type": "reinforce", **decoupled(weights="icepop", cap=0.4)}}, "lower floor, or raise cap"),
        ({"algorithm": {"type": "cispo", "kl_estimator": "k2"}}, "kl_estimator has no effect with kl_coefficient 0"),
        ({"algorithm": {"type": "cispo", "kl_reference_every": 5}}, "kl_reference_every has no effect"),
        ({"algorithm": {"type": "cispo", **PENALTY, "kl_estimator": "k1"}}, "write 'k3\\+' or 'k2'"),
        ({"algorithm": {"type": "cispo", **PENALTY, "kl_estimator": "k3+", "kl_in": "reward"}}, "write 'k3'"),
        (
            {
                "algorithm": {"type": "cispo", **PENALTY, "kl_in": "reward", "critic": {}},
                "credit": {"baseline": {"type": "value"}},
            },
            "write kl_in 'loss'",
        ),
        ({"algorithm": {"type": "reinforce", **decoupled(weights="mis_geo")}}, "write sampling.max_policy_lag 0"),
        (
            {"algorithm": {"type": "cispo", "entropy_coefficient": 0.01}, "sampling": {"refill_zero_variance": 1}},
            "entropy_coefficient above 0 trains: remove one",
        ),
    ],
)
def test_a_contradiction_is_refused_with_the_remedy(changes: dict[str, Any], remedy: str) -> None:
    with pytest.raises(ValidationError, match=remedy) as refused:
        RunConfig.model_validate(run_document(**changes))
    assert "algorithm" in str(refused.value)


def test_a_narrow_band_is_fine_on_policy() -> None:
    algorithm = {"type": "reinforce", **decoupled(weights="mis_geo")}
    correction = RunConfig.model_validate(run_document(algorithm=algorithm, sampling={"max_policy_lag": 0}))
    assert correction.algorithm.correction.type == "decoupled"
    assert correction.algorithm.correction.bounds == (0.99, 1.01)
