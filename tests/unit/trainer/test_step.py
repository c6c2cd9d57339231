from dataclasses import replace

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from transformers import get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup

from leyden.libs.contracts.config import Optimizer, RunConfig, Training
from leyden.libs.store.training import ReadyGroup, StartTokens
from leyden.services.trainer.loop import PoliciesDisagree, require_agreement
from leyden.services.trainer.model.forward import Policy
from leyden.services.trainer.rows.batch import Sample, mini_batches, to_go, trained_tokens, with_whitened_advantages
from leyden.services.trainer.rows.selection import select_groups
from leyden.services.trainer.step.gradients import Interrupted, batch_logprobs, plan_batch
from leyden.services.trainer.step.learner import Learner, Reference
from leyden.services.trainer.step.optimizers import learning_rate, make_optimizer
from leyden.services.trainer.step.step import TrainingDiverged, optimizer_step
from tests.unit.trainer.cases import agent_samples, sample, tiny_llama

CPU = Accelerator(cpu=True)


def learner(rate: float = 1e-2) -> Learner:
    policy = Policy(tiny_llama(dtype=torch.float32))
    return Learner(policy, make_optimizer(policy, Optimizer(learning_rate=rate)), CPU)


def step(
    subject: Learner,
    samples: list[Sample],
    rate: float = 1e-2,
    algorithm: dict[str, object] | None = None,
    credit: dict[str, object] | None = None,
    **arguments: object,
) -> dict[str, float]:
    changes = {
        "optimizer": {"learning_rate": rate},
        "training": {"micro_batch_tokens": 64},
        "algorithm": {"type": "ppo_clip", **(algorithm or {})},
        "credit": credit or {},
    }
    config = RunConfig.model_validate({"name": "n", "dataset": "d", "agent": {"command": ["x"]}, **changes})
    return optimizer_step(subject, samples, config, **arguments)  # type: ignore[arg-type]


def weights(subject: Learner) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in subject.policy.named_parameters()}


def logprob(subject: Learner, of: Sample) -> float:
    tokens = trained_tokens([of])
    return float(batch_logprobs(subject.policy, plan_batch([of], tokens, 100), len(tokens), CPU).sum())


def test_a_step_raises_the_probability_of_good_tokens_and_lowers_that_of_bad_ones() -> None:
    subject = learner()
    good = sample("run.0.0", [1, 2, 3, 4], [0, 0, 1, 1], advantage=1.0)
    bad = sample("run.0.1", [1, 2, 5, 6], [0, 0, 1, 1], advantage=-1.0)
    before = logprob(subject, good), logprob(subject, bad)
    metrics = step(subject, [good, bad])
    assert subject.step == 1
    assert logprob(subject, good) > before[0]
    assert logprob(subject, bad) < before[1]
    assert metrics["trained_tokens"] == 4
    # Shared: the prompt's 2 tokens; read: the parents of 4 tokens, of which two coincide.
    assert (metrics["computed_tokens"], metrics["row_tokens"]) == (4, 8)


def test_groups_without_variance_count_only_in_denominators() -> None:
    moving = sample("run.0.0", [1, 2, 3], [0, 0, 1])
    unmoved = sample("run.1.0", [1, 2, 4], [0, 0, 1], advantage=0.0)
    subject, other = learner(), learner()
    left_out, together = step(subject, [moving], zero_variance=[unmoved]), step(other, [moving, unmoved])
    assert left_out["loss"] == pytest.approx(together["loss"])
    assert left_out["gradient_norm"] == pytest.approx(together["gradient_norm"])
    assert left_out["groups_without_variance"] == 1
    assert step(learner(), [moving])["loss"] == pytest.approx(2 * left_out["loss"])


def test_a_step_without_anything_to_learn_changes_no_weight() -> None:
    subject = learner()
    step(subject, agent_samples(0))
    before = weights(subject)
    metrics = step(subject, [], zero_variance=[sample("run.0.0", [1, 2, 3], [0, 0, 1], advantage=0.0)])
    assert subject.step == 2
    assert "gradient_norm" not in metrics
    for name, weight in weights(subject).items():
        assert torch.equal(weight, before[name])


def test_an_update_without_a_token_has_no_part_in_the_gradient_norm() -> None:
    moving = sample("run.0.0", [1, 2, 3], [0, 0, 1])
    unmoved = sample("run.1.0", [1, 2, 4], [0, 0, 1], advantage=0.0)
    metrics = step(learner(), [moving], algorithm={"mini_batches": 2}, zero_variance=[unmoved])
    assert metrics["updates"] == 2
    assert metrics["gradient_norm"] == pytest.approx(step(learner(), [moving])["gradient_norm"])


def test_the_logprob_gap_uses_only_tokens_of_the_same_version() -> None:
    subject = learner()
    samples = agent_samples(1)
    tokens = trained_tokens(samples)
    exact_K = batch_logprobs(subject.policy, plan_batch(samples, tokens, 100), len(tokens), CPU)
    for number, row in enumerate(samples):
        row.generator_logprobs[row.mask] = exact_K[tokens.rows_K == number]
        row.policy_versions[row.mask] = 0
    off = sample("run.8.0", [1, 2, 3], [0, 0, 1], logprob=-9.0, version=-1)
    metrics = step(subject, [*samples, off])
    assert metrics["logprob_gap_max"] < 1e-5
    assert metrics["policy_lag_max"] == 1
    assert "logprob_gap_mean" not in step(subject, samples) or subject.step == 2


@pytest.mark.parametrize("algorithm", [{}, {"epochs": 2}], ids=["one update", "two"])
def test_logprobs_and_entropies_of_the_steps_start_are_kept_for_each_sample(algorithm: dict[str, object]) -> None:
    subject, kept = learner(), dict[str, StartTokens]()
    samples = [
        sample("run.0.0", [1, 2, 3, 4], [0, 1, 0, 1], advantage=1.0),
        sample("run.0.1", [1, 2, 5], [0, 0, 1], advantage=0.0),
        sample("run.0.2", [1, 2, 6], [0, 0, 1], advantage=-1.0),
    ]
    tokens = trained_tokens(samples)
    exact_K = batch_logprobs(subject.policy, plan_batch(samples, tokens, 100), len(tokens), CPU)
    with torch.no_grad():
        logits = [subject.model(torch.tensor([one.token_ids[:-1].tolist()])).logits[0] for one in samples]
    logits_K = torch.stack([logits[0][0], logits[0][2], logits[1][1], logits[2][1]])
    entropies_K = torch.distributions.Categorical(logits=logits_K).entropy().numpy()
    step(subject, samples, algorithm=algorithm, keep_start=kept.update)
    found = {name: [np.frombuffer(column, "<f4") for column in columns] for name, columns in kept.items()}
    assert list(found) == [one.id for one in samples]
    for place, exact in enumerate((exact_K, entropies_K)):
        np.testing.assert_allclose(found[samples[0].id][place], exact[:2], atol=1e-5)
        # Nothing computes a row that cannot move the loss.
        assert np.isnan(found[samples[1].id][place]).tolist() == [True]
        np.testing.assert_allclose(found[samples[2].id][place], exact[3:], atol=1e-5)
    step(subject, [], keep_start=kept.update)


def test_a_loss_that_is_not_finite_changes_nothing() -> None:
    subject = learner()
    before = weights(subject)
    with torch.no_grad():
        subject.policy.model.model.norm.weight[0] = float("nan")
    samples = agent_samples(2)
    with pytest.raises(TrainingDiverged, match="learning_rate") as raised:
        step(subject, samples)
    assert "trained run.0, run.1; samples" in str(raised.value)
    assert "samples whose log-probabilities are not finite: run.0.0:0" in str(raised.value)
    assert subject.step == 0
    changed = [name for name, weight in weights(subject).items() if not torch.equal(weight, before[name])]
    assert changed == ["model.model.norm.weight"]


@pytest.mark.parametrize("whiten", [False, True])
def test_kl_in_the_reward_lowers_the_advantages_of_tokens_before_it(whiten: bool) -> None:
    penalised, lowered = learner(), learner()
    samples, tokens = agent_samples(3), trained_tokens(agent_samples(3))
    reference = Policy(tiny_llama(1, dtype=torch.float32))
    plan = plan_batch(samples, tokens, 100)
    own_K, reference_K = (batch_logprobs(p, plan, len(tokens), CPU) for p in (penalised.policy, reference))
    by_hand = []
    for row, one in enumerate(samples):
        distances = (own_K - reference_K)[tokens.rows_K == row]
        advantages = one.advantages.copy()
        for place, position in enumerate(np.flatnonzero(one.mask)):
            advantages[position] -= 0.3 * distances[place:].sum()
        by_hand.append(replace(one, advantages=advantages))
    # A run whose groups have no variance still pays the penalty.
    credit = {"baseline": {"type": "mean", "whiten": whiten}}
    penalty = {"kl_coefficient": 0.3, "kl_estimator": "k1", "kl_in": "reward"}
    penalised.reference = Reference(reference)
    metrics = step(penalised, samples, algorithm=penalty, credit=credit)
    step(lowered, by_hand, credit=credit)
    assert metrics["kl_reference"] == pytest.approx(float((own_K - reference_K).mean()), rel=1e-4)
    pairs = zip(weights(penalised).values(), weights(lowered).values(), strict=True)
    assert all(torch.allclose(one, other, atol=1e-4) for one, other in pairs)
    assert any(
        not torch.equal(one, other)
        for one, other in zip(weights(penalised).values(), weights(learner()).values(), strict=True)
    )


def test_sums_to_go_by_hand() -> None:
    values_K, rows_K = np.array([1.0, 2.0, 4.0, 8.0, 16.0]), np.array([0, 0, 0, 1, 1])
    assert to_go(values_K, rows_K).tolist() == [7.0, 6.0, 4.0, 24.0, 16.0]
    assert to_go(values_K, rows_K, 0.5).tolist() == [3.0, 4.0, 4.0, 16.0, 16.0]
    assert to_go(np.zeros(0), np.zeros(0, np.int64)).tolist() == []


def test_an_interrupted_step_changes_nothing() -> None:
    subject = learner()
    before = weights(subject)
    with pytest.raises(Interrupted):
        step(subject, agent_samples(2), interrupted=lambda: True)
    assert all(torch.equal(weight, before[name]) for name, weight in weights(subject).items())


def test_steps_are_the_same_bits_every_time() -> None:
    one, other = learner(), learner()
    for seed in range(3):
        assert step(one, agent_samples(seed))["loss"] == step(other, agent_samples(seed))["loss"]
    assert all(torch.equal(a, b) for a, b in zip(weights(one).values(), weights(other).values(), strict=True))


def test_each_epoch_shuffles_the_groups_into_mini_batches() -> None:
    groups = {f"run.{number}" for number in range(7)}
    parts = list(mini_batches(groups, 3, 2, seed=-1, step=4))
    assert [len(part) for part in parts] == [3, 2, 2] * 2
    for epoch in (parts[:3], parts[3:]):
        assert set[str]().union(*epoch) == groups
    assert parts[:3] != parts[3:]
    assert parts == list(mini_batches(groups, 3, 2, seed=-1, step=4))
    assert parts != list(mini_batches(groups, 3, 2, seed=-1, step=5))
    assert list(mini_batches({"a"}, 3, 1, seed=0, step=0)) == [{"a"}]


def test_the_updates_of_mini_batches_are_those_of_steps_on_their_groups() -> None:
    samples = agent_samples(0, groups=4)
    unmoved = [sample(f"run.{number}.0", [1, 2, 3], [0, 0, 1], advantage=0.0) for number in (8, 9)]
    one, other = learner(), learner()
    metrics = step(one, samples, algorithm={"mini_batches": 3}, zero_variance=unmoved)
    assert (metrics["updates"], one.step) == (3, 1)
    for part in mini_batches({row.group_id for row in [*samples, *unmoved]}, 3, 1, seed=0, step=0):
        chosen, left_out = ([row for row in rows if row.group_id in part] for rows in (samples, unmoved))
        step(other, chosen, zero_variance=left_out)
    assert all(torch.equal(a, b) for a, b in zip(weights(one).values(), weights(other).values(), strict=True))


def test_later_updates_of_a_step_are_clipped_at_the_policy_of_its_start() -> None:
    samples = agent_samples(0, groups=4)
    decoupled = {"correction": {"type": "decoupled"}}
    assert step(learner(), samples, algorithm=decoupled)["clipped_share"] == 0
    subject, tokens = learner(), trained_tokens(samples)
    start_K = batch_logprobs(subject.policy, plan_batch(samples, tokens, 100), len(tokens), CPU)
    metrics = step(subject, samples, algorithm={**decoupled, "epochs": 3, "mini_batches": 2, "clip_high": 0.1})
    assert metrics["updates"] == 6
    assert metrics["clipped_share"] > 0 and metrics["clipped_share_last"] > 0
    assert metrics["importance_mean"] == pytest.approx(np.exp(start_K - tokens.generator_logprobs_K).mean(), rel=1e-5)
    assert metrics["entropy"] == pytest.approx(-start_K.mean(), rel=1e-5)
    assert metrics["trained_tokens"] == len(tokens)


def test_entropy_counts_the_tokens_of_groups_without_variance() -> None:
    samples = agent_samples(0, groups=1)
    unmoved = [sample("run.9.0", [1, 2, 3], [0, 1, 1], advantage=0.0)]
    subject, tokens = learner(), trained_tokens(samples)
    start_K = batch_logprobs(subject.policy, plan_batch(samples, tokens, 100), len(tokens), CPU)
    left_out_K = trained_tokens(unmoved).generator_logprobs_K
    metrics = step(subject, samples, zero_variance=unmoved)
    assert metrics["entropy"] == pytest.approx(-np.concatenate([start_K, left_out_K]).mean(), rel=1e-5)
    assert step(learner(), [], zero_variance=unmoved)["entropy"] == pytest.approx(-left_out_K.mean(), rel=1e-5)


def test_an_interruption_between_two_updates_makes_no_step() -> None:
    subject = learner()
    asked = iter([False] * 3 + [True] * 100)
    with pytest.raises(Interrupted):
        step(subject, agent_samples(0, groups=4), algorithm={"epochs": 50}, interrupted=lambda: next(asked))
    assert subject.step == 0


def test_a_two_armed_bandit_is_learned() -> None:
    subject = learner()
    random = np.random.default_rng(0)
    prompt, good, bad = [1, 2], 7, 9
    for number in range(40):
        arms = random.choice([good, bad], 8)
        rewards = (arms == good).astype(float)
        rows = [
            sample(f"run.{number}.{i}", [*prompt, int(arm)], [0, 0, 1], advantage=float(reward - rewards.mean()))
            for i, (arm, reward) in enumerate(zip(arms, rewards, strict=True))
        ]
        for row in rows:
            row.generator_logprobs[2] = logprob(subject, row)
        step(subject, rows)
    odds = {arm: np.exp(logprob(subject, sample("run.0.0", [*prompt, arm], [0, 0, 1]))) for arm in (good, bad)}
    assert odds[good] / (odds[good] + odds[bad]) > 0.95


def test_whitening_centres_the_advantages_of_all_trained_tokens() -> None:
    rows = [sample("run.0.0", [1, 2, 3], [0, 1, 1]), sample("run.0.1", [1, 2, 4], [0, 0, 1], advantage=0.0)]
    found = with_whitened_advantages(rows)
    assert found[0].advantages.tolist() == pytest.approx([0, 0.57735, 0.57735], abs=1e-4)
    assert found[1].advantages.tolist() == pytest.approx([0, 0, -1.1547], abs=1e-4)
    credit = {"credit": {"baseline": {"whiten": True}}}
    subject, other = learner(), learner()
    config = RunConfig.model_validate({"name": "n", "dataset": "d", "agent": {"command": ["x"]}, **credit})
    plain = RunConfig.model_validate({**config.model_dump(), "credit": {}})
    assert optimizer_step(subject, rows, config)["loss"] == optimizer_step(other, found, plain)["loss"]


def test_learning_rate_warms_up() -> None:
    config = Optimizer(learning_rate=1.0, warmup_steps=4)
    assert [learning_rate(config, number, 9) for number in (1, 2, 4, 5, 9)] == [0.25, 0.5, 1.0, 1.0, 1.0]
    assert learning_rate(Optimizer(learning_rate=1.0), 1, 1) == 1.0


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [("linear", [1, 2, 2, 1.5, 1, 0.5]), ("cosine", [1, 2, 2, 1 + 0.5**0.5, 1, 1 - 0.5**0.5])],
)
def test_learning_rate_falls_after_the_warm_up(schedule: str, rates: list[float]) -> None:
    config = Optimizer.model_validate({"learning_rate": 1.0, "warmup_steps": 2, "schedule": schedule})
    doubled = [2 * learning_rate(config, number, 6) for number in range(1, 7)]
    assert doubled == pytest.approx(rates, rel=1e-12)


def test_schedules_equal_those_of_transformers() -> None:
    for schedule, theirs in (
        ("linear", get_linear_schedule_with_warmup),
        ("cosine", get_cosine_schedule_with_warmup),
    ):
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        scheduler = theirs(optimizer, num_warmup_steps=0, num_training_steps=20)
        config = Optimizer.model_validate({"learning_rate": 1.0, "schedule": schedule})
        for number in range(1, 21):
            assert learning_rate(config, number, 20) == pytest.approx(scheduler.get_last_lr()[0], abs=1e-12)
            optimizer.step()
            scheduler.step()


def ready(name: str, version: int | None, has_variance: bool = True) -> ReadyGroup:
    return ReadyGroup(name, version, has_variance)


def test_groups_too_old_are_refused_and_the_oldest_of_the_others_consumed() -> None:
    groups = [ready("a", 0), ready("b", 1), ready("c", 2, has_variance=False), ready("d", 2), ready("e", None)]
    selection = select_groups(groups, step=3, groups_per_step=3, max_lag=1)
    assert (selection.stale, selection.trained, selection.zero_variance) == (["a"], ["b", "d"], ["c"])
    assert selection.complete


def test_groups_without_variance_are_replaced_up_to_a_limit() -> None:
    flat = {"version": 0, "has_variance": False}
    groups = [ready("a", **flat), ready("b", 0), ready("c", **flat), ready("d", **flat), ready("e", 0)]
    arguments = {"step": 1, "groups_per_step": 2, "max_lag": 0}
    selections = [select_groups(groups, **arguments, refills=refills) for refills in (0, 1, 2, 9)]
    assert [(found.trained, found.zero_variance, found.replaced) for found in selections] == [
        (["b"], ["a"], []),
        (["b"], ["c"], ["a"]),
        (["b"], ["d"], ["a", "c"]),
        (["b", "e"], [], ["a", "c", "d"]),
    ]
    # Groups that follow the step's last one wait for the next step.
    assert select_groups([*groups, ready("f", **flat)], **arguments, refills=9).replaced == ["a", "c", "d"]
    assert not select_groups(groups[:4], **arguments, refills=9).complete


def test_a_kl_penalty_trains_groups_without_variance() -> None:
    groups = [ready("a", 0, has_variance=False), ready("b", 0)]
    selection = select_groups(groups, step=1, groups_per_step=2, max_lag=0, every_group=True)
    assert (selection.trained, selection.zero_variance) == (["a", "b"], [])


@pytest.mark.parametrize("every_group", [False, True])
def test_a_group_without_a_trainable_token_has_a_verdict_of_its_own_and_is_not_replaced(every_group: bool) -> None:
    groups = [ready("a", None, has_variance=False), ready("b", 0), ready("c", 0)]
    arguments = {"step": 1, "groups_per_step": 2, "max_lag": 0, "every_group": every_group, "refills": 9}
    selection = select_groups(groups, **arguments)
    assert (selection.trained, selection.zero_variance, selection.untrainable) == (["b"], [], ["a"])
    assert select_groups([groups[0]] * 2, **arguments).complete


def test_too_few_groups_make_no_step() -> None:
    selection = select_groups([ready("a", 0)], step=1, groups_per_step=2, max_lag=0)
    assert not selection.complete
    assert selection.stale == []


def test_enough_steps_in_a_row_that_disagree_are_refused() -> None:
    limits = Training(max_logprob_gap=0.05, min_effective_share=0.5)
    large, fine, uneven = (
        {"logprob_gap_mean": gap, "logprob_gap_sample_share": share}
        for gap, share in ((0.06, 1.0), (0.05, 0.5), (0.01, 0.49))
    )
    for steps in ([large], [large, fine], [fine, large, large]):
        require_agreement(steps, limits, patience=2)
    for steps in ([large, large], [uneven, large, fine]):
        with pytest.raises(PoliciesDisagree, match="max_logprob_gap"):
            require_agreement(steps, limits, patience=2)


def test_defaults_of_a_run_make_a_step() -> None:
    config = RunConfig.model_validate({"name": "n", "dataset": "d", "agent": {"command": ["x"]}})
    metrics = optimizer_step(learner(), agent_samples(0), config)
    assert all(np.isfinite(value) for value in metrics.values())
