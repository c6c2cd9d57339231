"""GAE and value loss against verl's recorded numbers, a recursion over calls, and one plain call per row."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from torch import Tensor

from leyden.libs.contracts.config import Critic, Optimizer, PpoClip, RunConfig
from leyden.libs.contracts.samples import RowCall
from leyden.services.credit.forest import Forest, Node, call_forest
from leyden.services.credit.paths import paths, row_calls
from leyden.services.trainer.loss.critic import Estimates, estimate, value_loss
from leyden.services.trainer.model.forward import Policy
from leyden.services.trainer.ranks.messages import Load
from leyden.services.trainer.rows.batch import Sample, mini_batches, trained_tokens, weights_of
from leyden.services.trainer.rows.progress import Progress
from leyden.services.trainer.state.assembly import assemble_learner, make_accelerator
from leyden.services.trainer.state.checkpoints import checkpoint_state
from leyden.services.trainer.state.resume import restore_learner
from leyden.services.trainer.state.saving import save_checkpoint
from leyden.services.trainer.state.versions import export_version
from leyden.services.trainer.step.batch import Anchors, Batch
from leyden.services.trainer.step.gradients import batch_outputs, plan_batch
from leyden.services.trainer.step.learner import Learner
from leyden.services.trainer.step.optimizers import make_optimizer
from leyden.services.trainer.step.step import optimizer_step
from tests.unit.credit.cases import call
from tests.unit.trainer import oracle
from tests.unit.trainer.cases import VOCABULARY, gradients_of, one_call, sample, tiny_llama
from tests.unit.trainer.test_compute import plain_logprobs

CPU = Accelerator(cpu=True)


def oracle_rows() -> list[Sample]:
    rewards = [sum(row) for row in oracle.VECTORS["inputs"]["token_level_rewards"]]
    return [
        one_call(sample(f"run.0.{number}", [0] * 7, [0, *mask]), reward)
        for number, (mask, reward) in enumerate(zip(oracle.MASK.int().tolist(), rewards, strict=True))
    ]


@pytest.mark.parametrize(("name", "gamma", "gae_lambda"), [("gae(g1,l.95)", 1.0, 0.95), ("gae(g.99,l.9)", 0.99, 0.9)])
def test_gae_equals_verl(name: str, gamma: float, gae_lambda: float) -> None:
    rows, recorded = oracle_rows(), oracle.VECTORS["advantages"][name]
    values_K = oracle.column("values").numpy()
    found = estimate(Critic(gamma=gamma, gae_lambda=gae_lambda), rows, trained_tokens(rows), values_K)
    # verl divides by the number of tokens + 1e-8.
    np.testing.assert_allclose(found.advantages_K, oracle.flat(recorded["adv"]), atol=1e-9)
    np.testing.assert_allclose(found.returns_K, oracle.flat(recorded["returns"]), rtol=1e-9)


def test_the_value_loss_equals_verl() -> None:
    recorded = oracle.VECTORS["value_loss"]["clip0.2_token-mean"]
    returns_K = oracle.flat(oracle.VECTORS["advantages"]["gae(g1,l.95)"]["returns"])
    values_K = oracle.column("vpreds").requires_grad_()
    weights_K = torch.full_like(values_K, 1 / len(values_K))
    loss = value_loss(values_K, oracle.column("values"), returns_K, weights_K.detach(), clip=0.2)
    loss.backward()
    assert loss.item() == pytest.approx(0.13725909164684, abs=1e-9)
    np.testing.assert_allclose(values_K.grad, oracle.flat(recorded["grad"]), atol=1e-9)


def agent_forest(seed: int, rollout: str) -> tuple[Forest, dict[str, float]]:
    """Calls that fork, some of them untrainable, and what each earned, with the outcome at leaves."""
    random = np.random.default_rng(seed)
    calls = [call(f"{rollout}.0", [1, 2], random.integers(3, VOCABULARY, 2).tolist(), at=0)]
    ends = [[1, 2, *np.frombuffer(calls[0].sampled, "<i4").tolist()]]
    for number in range(1, 9):
        prompt = [*ends[random.integers(len(ends))], *random.integers(3, VOCABULARY, 2).tolist()]
        sampled = random.integers(3, VOCABULARY, random.integers(1, 4)).tolist()
        trainable = bool(random.random() < 0.7)
        calls.append(call(f"{rollout}.{number}", prompt, sampled, at=number, trainable=trainable))
        ends.append(prompt + sampled)
    forest, outcome = call_forest(calls), float(random.normal())
    rewards = {n.call.id: float(random.normal()) + (0.0 if n.children else outcome) for n in forest.nodes}
    return forest, rewards


def agent_rows(forest: Forest, rewards: dict[str, float], rollout: str) -> list[Sample]:
    rows = paths(forest, dict.fromkeys(rewards, 0.0), row_calls(forest, rewards))
    return [
        replace(
            sample(f"{rollout}:{row.branch}", row.token_ids.tolist(), row.mask.tolist()),
            calls=tuple(RowCall(c.id, c.parent, c.reward, c.share, c.begin, c.end) for c in row.calls),
        )
        for row in rows
    ]


def recursion(
    forest: Forest, rewards: dict[str, float], values: dict[tuple[str, int], float], gamma: float, mix: float
) -> dict[tuple[str, int], float]:
    """The advantage of each token by its definition, one call at a time and without rows."""
    found: dict[tuple[str, int], float] = {}

    def after(node: Node) -> tuple[float, float, float]:
        reward, value, advantage = rewards[node.call.id], 0.0, 0.0
        for child in node.children:
            more, child_value, child_advantage = (0.0, *token(child, 0)) if child.call.learnable else after(child)
            share = 1 / len(node.children)
            reward, value, advantage = (
                reward + share * more,
                value + share * child_value,
                advantage + share * child_advantage,
            )
        return reward, value, advantage

    def token(node: Node, number: int) -> tuple[float, float]:
        last = number + 1 == len(node.call.sampled) // 4
        reward, value, advantage = after(node) if last else (0.0, *token(node, number + 1))
        key = node.call.id, number
        found[key] = reward + gamma * value - values[key] + gamma * mix * advantage
        return values[key], found[key]

    def visit(node: Node) -> None:
        if node.call.learnable:
            token(node, 0)
        for child in node.children:
            visit(child)

    for root in forest.roots:
        visit(root)
    return found


def token_keys(rows: list[Sample]) -> Iterator[tuple[str, int]]:
    for row in rows:
        for one in row.calls:
            yield from ((one.id, number) for number in range(one.end - one.begin + 1))


@pytest.mark.parametrize("seed", range(40))
def test_gae_over_forks_equals_a_recursion_over_calls(seed: int) -> None:
    gamma, mix = (1.0, 0.95) if seed % 2 else (0.9, 0.8)
    trees = [agent_forest(100 * seed + i, f"run.{seed}.{i}") for i in range(3)]
    rows = [agent_rows(*tree, f"run.{seed}.{i}") for i, tree in enumerate(trees)]
    together = [row for of_rollout in rows for row in of_rollout]
    tokens = trained_tokens(together)
    values_K = np.random.default_rng(seed).normal(size=len(tokens))
    values = dict(zip(token_keys(together), values_K.tolist(), strict=True))
    found = estimate(Critic(gamma=gamma, gae_lambda=mix), together, tokens, values_K)

    expected: dict[tuple[str, int], float] = {}
    for tree in trees:
        expected |= recursion(*tree, values, gamma, mix)
    raw_K = np.array([expected[key] for key in token_keys(together)])
    np.testing.assert_allclose(found.returns_K, raw_K + values_K, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(
        found.advantages_K, (raw_K - raw_K.mean()) / np.sqrt(raw_K.var(ddof=1) + 1e-8), rtol=1e-9
    )


def test_a_value_per_call_discounts_calls_and_not_tokens() -> None:
    row = replace(
        sample("run.0.0", range(8), [0, 1, 1, 1, 0, 1, 1, 0]),
        calls=(RowCall("a", None, 0.25, 1.0, 1, 3), RowCall("b", "a", 1.0, 1.0, 5, 6)),
    )
    critic = Critic(per="call", gamma=0.5, gae_lambda=0.0)
    found = estimate(critic, [row], trained_tokens([row]), np.array([0.4, 9.0, 9.0, 0.6, 9.0]))
    # r + γV' - V: 0.25 + 0.5 · 0.6 - 0.4 = 0.15 and 1 - 0.6 = 0.4; the values of later tokens count nowhere.
    np.testing.assert_allclose(found.returns_K, [0.55, 0, 0, 1.0, 0])
    np.testing.assert_allclose(found.advantages_K, [-(0.5**0.5)] * 3 + [0.5**0.5] * 2, rtol=1e-5)
    np.testing.assert_allclose(found.weights_K, [0.5, 0, 0, 0.5, 0])


def test_lambda_0_redistributes_a_reward_by_the_change_of_the_value() -> None:
    # Calls of two, one and one tokens; the first earns 0.5 at once, the rollout 1 at its end.
    row = sample("run.0.0", [0] * 7, [0, 1, 1, 0, 1, 0, 1])
    calls = [RowCall("a", None, 0.5, 1.0, 1, 2), RowCall("b", "a", 0.0, 1.0, 4, 4), RowCall("c", "b", 1.0, 1.0, 6, 6)]
    rows, values_K = [replace(row, calls=tuple(calls))], np.array([0.2, 9.0, 0.6, 0.7])
    found = estimate(Critic(per="call", gae_lambda=0.0), rows, trained_tokens(rows), values_K)
    first = [0, 2, 3]
    # r + V(next call) - V(this call); they add up to the return less the first value.
    credit = (found.returns_K - values_K)[first]
    np.testing.assert_allclose(credit, [0.5 + 0.6 - 0.2, 0.7 - 0.6, 1.0 - 0.7])
    assert credit.sum() == pytest.approx(1.5 - 0.2)
    np.testing.assert_allclose(found.advantages_K[first], (credit - credit.mean()) / credit.std(ddof=1), rtol=1e-6)
    assert found.advantages_K[0] == found.advantages_K[1]


def test_tokens_without_a_call_and_calls_without_a_parent_are_refused() -> None:
    row = sample("run.0.0", [1, 2, 3], [0, 1, 1])
    with pytest.raises(ValueError, match="the call of every trained token"):
        estimate(Critic(), [row], trained_tokens([row]), np.zeros(2))
    orphan = one_call(row, 1.0, parent="x")
    with pytest.raises(ValueError, match="no row before it trains"):
        estimate(Critic(), [orphan], trained_tokens([orphan]), np.zeros(2))


def actor_critic(seed: int = 0, dtype: torch.dtype = torch.float64) -> Policy:
    policy = Policy(tiny_llama(seed, dtype), values=True)
    assert policy.value_head is not None
    torch.nn.init.normal_(policy.value_head.weight, std=0.3)
    return policy


def plain_values(policy: Policy, row: Sample) -> Tensor:
    assert policy.value_head is not None
    hidden = policy.model.base_model(input_ids=torch.from_numpy(row.token_ids).long()[None]).last_hidden_state[0]
    values: Tensor = policy.value_head(hidden[np.flatnonzero(row.mask) - 1])[:, 0]
    return values


def gradients(policy: Policy) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("seed", range(3))
def test_values_and_their_gradients_equal_those_of_one_call_per_row(seed: int) -> None:
    policy, critic = actor_critic(seed), Critic(coefficient=0.7)
    rows = [row for i in range(3) for row in agent_rows(*agent_forest(10 * seed + i, f"r.{i}.0"), f"r.{i}.0")]
    tokens = trained_tokens(rows)
    values_K = batch_outputs(policy, plan_batch(rows, tokens, 20), len(tokens), CPU).values_K
    plain = [plain_values(policy, row) for row in rows]
    np.testing.assert_allclose(values_K, torch.cat(plain).detach(), atol=1e-10)

    # Values of before that differ from the present ones: the clip acts.
    old_K = values_K + np.random.default_rng(seed).normal(size=len(tokens)) * 0.3
    found = estimate(critic, rows, tokens, old_K)
    algorithm = PpoClip(critic=critic)
    weights_K = weights_of(tokens, algorithm.weighting)
    trained = replace(tokens, advantages_K=found.advantages_K.astype(np.float32))
    computed = gradients_of(policy, Batch(rows, anchors=Anchors(estimates=found)), algorithm, 20)
    shared = gradients(policy)

    policy.zero_grad()
    logprobs_K = torch.cat([plain_logprobs(policy.model, row) for row in rows])
    advantages_K = torch.from_numpy(trained.advantages_K).double()
    ratio_K = (logprobs_K - torch.from_numpy(tokens.generator_logprobs_K)).exp()
    ceiling_K = torch.where(advantages_K < 0, -3 * advantages_K, torch.inf)
    policy_K = torch.maximum(-advantages_K * ratio_K, -advantages_K * ratio_K.clamp(0.8, 1.28)).minimum(ceiling_K)
    missed = value_loss(
        torch.cat(plain),
        torch.from_numpy(old_K),
        torch.from_numpy(found.returns_K),
        torch.from_numpy(found.weights_K),
        critic.value_clip,
    )
    loss = (policy_K * torch.from_numpy(weights_K)).sum() + 0.7 * missed
    loss.backward()
    assert computed.loss == pytest.approx(loss.item(), abs=1e-10)
    assert computed.value_loss == pytest.approx(missed.item(), abs=1e-10)
    for name, gradient in gradients(policy).items():
        assert torch.allclose(shared[name], gradient, atol=1e-9, rtol=1e-8), name


def config(**critic: object) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "n",
            "dataset": "d",
            "agent": {"command": ["x"]},
            "optimizer": {"learning_rate": 1e-2},
            "credit": {"baseline": {"type": "value"}},
            "algorithm": {"type": "ppo_clip", "critic": critic},
        }
    )


def test_values_are_clipped_at_those_of_the_steps_start_in_every_update() -> None:
    policy, plain = actor_critic(), actor_critic()
    document = config(value_clip=0.05, gae_lambda=0.8, learning_rate=0.05).model_dump()
    document["algorithm"] |= {"mini_batches": 2, "epochs": 2, "correction": {"type": "decoupled"}, "clip_high": 0.05}
    document["optimizer"]["max_grad_norm"] = 1e6
    document = RunConfig.model_validate(document)
    critic = document.algorithm.critic
    assert critic is not None
    ids = [f"run.{group}.{number}" for group in range(4) for number in range(2)]
    rows = [row for i, one in enumerate(ids) for row in agent_rows(*agent_forest(i, one), one)]
    learner = Learner(policy, make_optimizer(policy, document.optimizer, critic), CPU)
    metrics = optimizer_step(learner, rows, document)

    optimizer, tokens = make_optimizer(plain, document.optimizer, critic), trained_tokens(rows)
    for group, rate in zip(optimizer.param_groups, (1e-2, 0.05), strict=True):
        group["lr"] = rate
    old_values = [plain_values(plain, row).detach() for row in rows]
    old_logprobs = [plain_logprobs(plain.model, row).detach() for row in rows]
    found = estimate(critic, rows, tokens, torch.cat(old_values).numpy())
    # The head's outputs are in units of its first targets.
    targets_K = (found.returns_K - found.returns_K.mean()) / found.returns_K.std()
    advantages, returns = (
        torch.split(torch.from_numpy(column_K), [int(row.mask.sum()) for row in rows])
        for column_K in (found.advantages_K.astype(np.float32).astype(np.float64), targets_K)
    )
    value_losses, clipped = [], 0
    for part in mini_batches({row.group_id for row in rows}, 2, 2, seed=document.sampling.seed, step=0):
        chosen = [number for number, row in enumerate(rows) if row.group_id in part]
        of_part = trained_tokens([rows[number] for number in chosen])
        old_K, logprobs_K, adv_K, target_K = (
            torch.cat([columns[number] for number in chosen])
            for columns in (old_values, old_logprobs, advantages, returns)
        )
        values_K = torch.cat([plain_values(plain, rows[number]) for number in chosen])
        ratio_K = (torch.cat([plain_logprobs(plain.model, rows[number]) for number in chosen]) - logprobs_K).exp()
        importance_K = (logprobs_K - torch.from_numpy(of_part.generator_logprobs_K)).exp().clamp(max=2)
        ceiling_K = torch.where(adv_K < 0, -3 * adv_K, torch.inf)
        policy_K = torch.maximum(-adv_K * ratio_K, -adv_K * ratio_K.clamp(0.8, 1.05)).minimum(ceiling_K)
        weights_K = torch.from_numpy(weights_of(of_part, document.algorithm.weighting))
        missed = value_loss(values_K, old_K, target_K, torch.full_like(values_K, 1 / len(values_K)), 0.05)
        clipped += int(((values_K - old_K).abs() > 0.05).sum())
        value_losses.append(missed.item())
        optimizer.zero_grad()
        ((policy_K * importance_K * weights_K).sum() + 0.5 * missed).backward()
        optimizer.step()
    assert clipped > 0
    assert plain.value_head is not None
    plain.value_head.follow(found.returns_K)
    assert metrics["value_loss"] == pytest.approx(np.mean(value_losses), rel=1e-9)
    for name, weight in plain.state_dict().items():
        assert torch.allclose(policy.state_dict()[name], weight, rtol=0, atol=1e-7), name


def test_warm_up_leaves_every_weight_of_the_policy_as_it_is() -> None:
    policy = actor_critic(dtype=torch.float32)
    # λ 1: the targets are rewards alone, and those of both steps.
    document = config(warmup_steps=1, gae_lambda=1.0)
    optimizer = make_optimizer(policy, document.optimizer, document.algorithm.critic)
    learner, rows = Learner(policy, optimizer, CPU), agent_rows(*agent_forest(1, "r.0.0"), "r.0.0")
    before = {name: weight.clone() for name, weight in policy.state_dict().items()}
    metrics = optimizer_step(learner, rows, document)
    moved = {name for name, weight in policy.state_dict().items() if not torch.equal(weight, before[name])}
    assert moved == {"value_head.weight", "value_head.bias", "value_head.targets"}
    assert metrics["loss"] == pytest.approx(0.5 * metrics["value_loss"])
    assert metrics["value_loss"] > optimizer_step(learner, rows, document)["value_loss"]
    assert not torch.equal(policy.state_dict()["model.model.norm.weight"], before["model.model.norm.weight"])


def test_the_value_head_is_resumed_bit_for_bit_and_never_exported(tiny_model: Path, tmp_path: Path) -> None:
    document = config()
    straight = assemble_learner(tiny_model, document, make_accelerator("cpu", "float32"))
    rows = agent_rows(*agent_forest(1, "r.0.0"), "r.0.0")
    optimizer_step(straight, rows, document)
    export = export_version(straight, tiny_model, tmp_path / "versions" / "1")
    progress = Progress("run-a", 1, export.content_sha256)
    state = checkpoint_state(straight)
    save_checkpoint(state, progress, tmp_path / "c")
    expected = optimizer_step(straight, rows, document)

    place = make_accelerator("cpu", "float32")
    resumed = restore_learner(Load(tiny_model, document, (export.path, tmp_path / "c", progress)), place)
    assert optimizer_step(resumed, rows, document)["value_loss"] == expected["value_loss"]
    pairs = zip(straight.policy.state_dict().items(), resumed.policy.state_dict().values(), strict=True)
    assert [name for (name, one), other in pairs if not torch.equal(one, other)] == []
    assert resumed.policy.state_dict()["value_head.weight"].any()
    # A checkpoint of an older release, whose outputs were values.
    del state["value_head.targets"]
    save_checkpoint(state, progress, tmp_path / "old")
    older = restore_learner(Load(tiny_model, document, (export.path, tmp_path / "old", progress)), place)
    assert older.policy.state_dict()["value_head.targets"].tolist() == [0, 1, 1]
    assert not any(
        "value_head" in name
        for name in Policy(assemble_learner(export.path, document, place).policy.model).state_dict()
    )


def test_explained_variance() -> None:
    weights = np.array([0.5, 0.0, 0.5])
    perfect = Estimates(np.array([1.0, 7, 2]), np.zeros(3), np.array([1.0, 0, 2]), weights)
    constant = Estimates(np.array([1.5, 7, 1.5]), np.zeros(3), np.array([1.0, 0, 2]), weights)
    assert [one.metrics()["value_explained_variance"] for one in (perfect, constant)] == [1.0, 0.0]
    assert perfect.metrics()["value_mean"] == 1.5
    # Equal targets show nothing, and neither does a step without a unit.
    equal = Estimates(np.array([1.0, 7, 2]), np.zeros(3), np.array([2.0, 0, 2]), weights)
    assert equal.metrics() == {"value_mean": 1.5}
    assert Estimates(*np.zeros((4, 0))).metrics() == {}


def test_the_value_heads_rate_follows_the_schedule() -> None:
    policy = actor_critic(dtype=torch.float32)
    document = config(learning_rate=0.05)
    optimizer = make_optimizer(policy, Optimizer(learning_rate=0.01), document.algorithm.critic)
    learner, rows = Learner(policy, optimizer, CPU), agent_rows(*agent_forest(1, "r.0.0"), "r.0.0")
    warming = document.model_copy(update={"optimizer": Optimizer(learning_rate=0.01, warmup_steps=2)})
    assert optimizer_step(learner, rows, warming)["learning_rate"] == 0.005
    assert [group["lr"] for group in optimizer.param_groups] == [0.005, pytest.approx(0.025)]
