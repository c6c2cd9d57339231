"""Runs every comparison on random shapes in float64; exit status 1 at the first difference.

Axes: B rows of T places each; K the places that the mask leaves.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parents[3] / ".cache" / "oracle"))

from leyden.libs.contracts.config import Critic, DecoupledCorrection, Distillation, Overlong, Weighting
from leyden.libs.contracts.samples import RowCall
from leyden.services.credit import baselines
from leyden.services.credit.shaping import overlong_reward
from leyden.services.trainer.loss import losses
from leyden.services.trainer.loss.corrections import importance_weights
from leyden.services.trainer.loss.critic import estimate, value_loss
from leyden.services.trainer.loss.distillation import teacher_advantages
from leyden.services.trainer.model.head import sampled_outputs
from leyden.services.trainer.rows.batch import to_go, trained_tokens, whitened
from leyden.services.trainer.rows.token_weights import token_weights
from tests.campaigns.oracle import references
from tests.unit.trainer.cases import sample

TOLERANCE = 1e-9
Result = dict[str, tuple[Tensor, Tensor]]


@dataclass
class Case:
    """One random batch. Columns are [B, T]; groups_B and rewards_B are the rows'."""

    mask: Tensor
    old: Tensor
    logprobs: Tensor
    generator: Tensor
    reference: Tensor
    advantages: Tensor
    groups_B: np.ndarray
    rewards_B: Tensor
    extreme: bool
    clips: tuple[float, float]

    @classmethod
    def random(cls, random: np.random.Generator) -> Case:
        """Ratios from nearly 1 to far beyond every clip; one case in ten goes beyond e^20 and below e^-20."""
        rows, width = int(random.integers(1, 9)), int(random.integers(1, 13))
        mask = random.random((rows, width)) < random.uniform(0.3, 1.0)
        mask[np.arange(rows), random.integers(0, width, rows)] = True
        extreme = bool(random.random() < 0.1)
        spread = 30.0 if extreme else float(random.choice([0.01, 0.1, 0.5, 1.5]))
        # A log-probability is at most 0, so a ratio beyond e^20 needs an old one below -20.
        old = -np.abs(random.normal(1.0, max(2.0, spread), (rows, width)))
        near = [np.minimum(old + random.normal(0.0, spread, old.shape), -1e-6) for _ in range(3)]
        groups_B = np.sort(random.integers(0, max(1, rows // 2), rows))
        columns = [torch.from_numpy(c) for c in (old, *near)]
        advantages = torch.from_numpy(random.normal(0, 1, (rows, 1)) * np.ones((1, width)))
        rewards_B = torch.from_numpy(random.choice([random.normal(0, 2, rows), random.integers(0, 3, rows) / 2.0]))
        clips = float(random.uniform(0.01, 0.5)), float(random.uniform(0.01, 0.9))
        return cls(torch.from_numpy(mask), *columns, advantages, groups_B, rewards_B, extreme, clips)

    @property
    def row_numbers(self) -> Tensor:
        return torch.nonzero(self.mask)[:, 0]

    def flat(self, column: Tensor) -> Tensor:
        return column[self.mask]

    def token_weights(self, weighting: Weighting) -> Tensor:
        rows_K = self.row_numbers.numpy()
        constant = self.mask.shape[1] if weighting == "rollout_sum_const" else None
        found = token_weights(weighting, rows_K, rows_K, self.groups_B[rows_K], sum_constant=constant)
        return torch.from_numpy(found)

    def verl_weights(self, weighting: Weighting) -> Tensor:
        weights_K = self.token_weights(weighting)
        return as_in_verl(weights_K, self.row_numbers) if weighting == "seq_mean_token_mean" else weights_K


def as_in_verl(weights_K: Tensor, units_K: Tensor) -> Tensor:
    """The weights of a mean over a unit's T tokens, which verl divides by T + 1e-8."""
    lengths_K = losses.row_sums(torch.ones_like(weights_K), units_K)
    return weights_K * lengths_K / (lengths_K + 1e-8)


Loss = Callable[[Case, Tensor], losses.TokenLoss]
VERL_MODES: dict[Weighting, str] = {
    "token_mean": "token-mean",
    "seq_mean_token_mean": "seq-mean-token-mean",
    "rollout_sum_const": "seq-mean-token-sum-norm",
}


def ours(case: Case, loss: Loss, weights_K: Tensor) -> tuple[Tensor, Tensor]:
    """The loss and its gradient, [K]."""
    logprobs_K = case.flat(case.logprobs).clone().requires_grad_()
    total = (loss(case, logprobs_K).losses_K * weights_K).sum()
    (gradient_K,) = torch.autograd.grad(total, logprobs_K)
    return total.detach(), gradient_K


def theirs(case: Case, loss: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    logprobs = case.logprobs.clone().requires_grad_()
    total = loss(logprobs)
    (gradient,) = torch.autograd.grad(total, logprobs)
    return total.detach(), case.flat(gradient)


def ppo(dual: float | None) -> Loss:
    return lambda case, logprobs_K: losses.ppo_clip(
        logprobs_K,
        case.flat(case.old),
        case.flat(case.advantages),
        clip_low=case.clips[0],
        clip_high=case.clips[1],
        dual_clip=dual,
    )


def gspo(case: Case, logprobs_K: Tensor) -> losses.TokenLoss:
    low, high = case.clips
    return losses.gspo(
        logprobs_K, case.flat(case.old), case.flat(case.advantages), case.row_numbers, clip_low=low, clip_high=high
    )


def cispo(low: float, high: float) -> Loss:
    return lambda case, logprobs_K: losses.cispo(
        logprobs_K, case.flat(case.old), case.flat(case.advantages), clip_low=low, clip_high=high
    )


def sapo(tau_negative: float) -> Loss:
    return lambda case, logprobs_K: losses.sapo(
        logprobs_K, case.flat(case.old), case.flat(case.advantages), tau_positive=1.0, tau_negative=tau_negative
    )


def reinforce(case: Case, logprobs_K: Tensor) -> losses.TokenLoss:
    return losses.reinforce(logprobs_K, case.flat(case.advantages))


def importance_sampling(case: Case, logprobs_K: Tensor) -> losses.TokenLoss:
    return losses.importance_sampling(logprobs_K, case.flat(case.old), case.flat(case.advantages))


def dppo_tv(case: Case, logprobs_K: Tensor) -> losses.TokenLoss:
    low, high = case.clips
    return losses.dppo_tv(
        logprobs_K, case.flat(case.old), case.flat(case.advantages), mask_low=low, mask_high=high, drift_coefficient=0.0
    )


def against_verl(case: Case) -> Result:
    """Losses in verl's aggregations, with and without importance weights."""
    low, high = case.clips
    clips = {"clip_ratio_low": low, "clip_ratio_high": high}
    weights = references.verl_weights(case.old - case.generator, case.mask.double(), "token", 2.0)
    found: Result = {}

    def compare(name: str, verl_name: str, loss: Loss, weighting: Weighting, **options: Any) -> None:
        def reference(logprobs: Tensor) -> Tensor:
            mask = case.mask.double()
            return references.verl_loss(verl_name, case.old, logprobs, case.advantages, mask, **options)

        options["mode"] = VERL_MODES[weighting]
        weights_K = case.verl_weights(weighting)
        if options.get("weights") is not None:
            weights_K = weights_K * correction(case, "tis_token", cap=2.0)
        mine, other = ours(case, loss, weights_K), theirs(case, reference)
        found[f"verl {name} {weighting}"] = mine[0], other[0]
        found[f"verl {name} {weighting} gradient"] = mine[1], other[1]

    for weighting in VERL_MODES:
        compare("ppo_clip", "vanilla", ppo(3.0), weighting, clip_ratio_c=3.0, **clips)
    compare("ppo_clip tis_token", "vanilla", ppo(3.0), "token_mean", clip_ratio_c=3.0, weights=weights, **clips)
    compare("cispo", "cispo", cispo(low, high), "token_mean", **clips)
    compare("cispo tis_token", "cispo", cispo(low, high), "token_mean", weights=weights, **clips)
    compare("sapo", "sapo", sapo(1.05), "seq_mean_token_mean")
    compare("reinforce", "gpg", reinforce, "token_mean")
    compare("gspo", "gspo", gspo, "token_mean", **clips)
    compare("gspo", "gspo", gspo, "seq_mean_token_mean", **clips)
    # verl has no such loss; its PPO with clips that no ratio reaches is this one.
    unclipped = {"clip_ratio_low": 1.0, "clip_ratio_high": 1e9, "clip_ratio_c": 1e9}
    compare("importance_sampling", "vanilla", importance_sampling, "token_mean", **unclipped)
    return found


def divergences(case: Case) -> Result:
    """DPPO-TV. verl's loss is the detached ratio times log π: over log π it has our value, and within the clamp its
    gradient is ours. A token beyond the clamp has no gradient here, and in verl that of the clamped ratio. verl has no
    drift penalty.
    """

    def verl(logprobs: Tensor, weights: Tensor | None = None) -> Tensor:
        low, high = case.clips
        options = {"weights": weights, "clip_ratio_low": low, "clip_ratio_high": high, "clip_ratio_c": 1e9}
        return references.verl_loss("dppo_tv", case.old, logprobs, case.advantages, case.mask.double(), **options)

    mine, other = ours(case, dppo_tv, case.token_weights("token_mean")), theirs(case, verl)
    within_K = case.flat((case.logprobs - case.old).abs() <= losses.LOG_RATIO_LIMIT)
    return {
        "verl dppo_tv": (mine[0], verl(case.logprobs, 1 / case.logprobs)),
        "verl dppo_tv gradient": (mine[1], other[1] * within_K),
    }


def units(case: Case) -> Result:
    """Weights of rollouts with several rows, and of groups. verl knows rows alone: here its row is all rows of a unit,
    one behind the other.
    """
    units_B = torch.from_numpy(np.unique(case.groups_B, return_inverse=True)[1])
    members_UB = units_B == torch.arange(int(units_B.max()) + 1)[:, None]
    mask = (members_UB[:, :, None] & case.mask).flatten(1).double()
    rows_K, units_K = case.row_numbers, units_B[case.row_numbers]
    low, high = case.clips

    def joined(column: Tensor) -> Tensor:
        return column.expand(len(members_UB), -1, -1).flatten(1)

    def weights(weighting: Weighting, rollouts_K: Tensor) -> Tensor:
        numbers = rows_K.numpy(), rollouts_K.numpy(), units_K.numpy()
        return torch.from_numpy(token_weights(weighting, *numbers, sum_constant=mask.shape[1]))

    found: Result = {}
    for name, mode, weights_K in (
        ("rollout_mean", "seq-mean-token-mean", as_in_verl(weights("rollout_mean", units_K), units_K)),
        ("prompt_mean", "seq-mean-token-mean", as_in_verl(weights("prompt_mean", rows_K), units_K)),
        ("rollout_sum_const", "seq-mean-token-sum-norm", weights("rollout_sum_const", units_K)),
    ):

        def verl(logprobs: Tensor, mode: str = mode) -> Tensor:
            columns = joined(case.old), joined(logprobs), joined(case.advantages), mask
            clips: dict[str, Any] = {"clip_ratio_low": low, "clip_ratio_high": high, "clip_ratio_c": 3.0}
            return references.verl_loss("vanilla", *columns, mode=mode, **clips)

        mine, other = ours(case, ppo(3.0), weights_K), theirs(case, verl)
        found[f"verl units {name}"], found[f"verl units {name} gradient"] = (mine[0], other[0]), (mine[1], other[1])
    return found


def correction(case: Case, kind: str, **bounds: float) -> Tensor:
    document = DecoupledCorrection.model_validate({"weights": kind, **bounds})
    return importance_weights(document, case.flat(case.old), case.flat(case.generator), case.row_numbers)


def corrections(case: Case) -> Result:
    """Importance weights. TRL's `sequence_mask` stands between its sampling and its loss: its formula is repeated.

    TRL has no clamp, so extreme products are left out. verl has: its IcePop over a row, whose floor no clamped product
    reaches, is the same mask.
    """
    mask, log_ratio = case.mask.double(), case.old - case.generator

    def verl(level: str, threshold: float | str) -> Tensor:
        return case.flat(references.verl_weights(log_ratio, mask, level, threshold))

    found = {
        "verl tis_token": (correction(case, "tis_token", cap=1.5), verl("token", 1.5)),
        "verl tis_seq": (correction(case, "tis_seq", cap=4.0), verl("sequence", 4.0)),
        "verl seq_mask": (correction(case, "seq_mask"), verl("sequence", "1e-9_3.0")),
        "verl icepop": (correction(case, "icepop", floor=0.5, cap=5.0), verl("token", "0.5_5.0")),
        # verl bounds the mean of -Δ: the band is the inverse one.
        "verl mis_geo": (
            correction(case, "mis_geo", floor=0.7, cap=1.9),
            case.flat(references.verl_mask(log_ratio, mask, "seq_mean_k1", f"{1 / 1.9!r}_{1 / 0.7!r}")),
        ),
    }
    if not case.extreme:
        products = (log_ratio * mask).sum(1, keepdim=True).exp()
        masked = products.masked_fill(products > 3.0, 0.0).expand_as(mask)
        found["trl seq_mask"] = correction(case, "seq_mask"), case.flat(masked)
    return found


def against_trl(case: Case) -> Result:
    """TRL's loss types; it has no clamp, so extreme ratios are left out."""
    if case.extreme:
        return {}
    low, high = case.clips
    found: Result = {}

    def compare(name: str, loss: Loss, weighting: Weighting, weights_K: Tensor | float = 1.0, **options: Any) -> None:
        def reference(logprobs: Tensor) -> Tensor:
            return references.trl_loss(case.old, logprobs, case.advantages, case.mask.double(), **options)

        mine = ours(case, loss, case.token_weights(weighting) * weights_K)
        other = theirs(case, reference)
        found[f"trl {name}"], found[f"trl {name} gradient"] = (mine[0], other[0]), (mine[1], other[1])

    clips = {"low": low, "high": high}
    compare("grpo", ppo(None), "seq_mean_token_mean", loss_type="grpo", **clips)
    compare("dapo", ppo(None), "token_mean", loss_type="dapo", **clips)
    compare("dr_grpo", ppo(None), "rollout_sum_const", loss_type="dr_grpo", **clips)
    compare("gspo", gspo, "seq_mean_token_mean", loss_type="grpo", level="sequence", **clips)
    compare("cispo", cispo(1.0, 4.0), "token_mean", loss_type="cispo", high=5.0)
    compare("sapo", sapo(1.0625), "seq_mean_token_mean", loss_type="sapo")
    weights = torch.exp(case.old - case.generator).clamp(max=2.0)
    compare(
        "dapo tis_token",
        ppo(None),
        "token_mean",
        correction(case, "tis_token"),
        loss_type="dapo",
        weights=weights,
        **clips,
    )
    return found


def fine_tuning(case: Case) -> Result:
    """TRL's supervised fine-tuning: demonstrations have the advantage 1."""
    taught = replace(case, advantages=torch.ones_like(case.advantages))
    mine = ours(taught, reinforce, case.token_weights("token_mean"))
    other = theirs(case, lambda logprobs: references.trl_sft_loss(logprobs, case.mask.double()))
    return {"trl sft": (mine[0], other[0]), "trl sft gradient": (mine[1], other[1])}


def distillation(case: Case) -> Result:
    """TRL's on-policy distillation: the advantages are the teacher's, here the columns of the reference."""
    teacher, own = case.flat(case.reference).numpy(), case.flat(case.old).numpy()
    judged_K = teacher_advantages(Distillation(model="/teacher"), np.zeros(len(own)), own, teacher)
    advantages = torch.zeros_like(case.advantages)
    advantages[case.mask] = torch.from_numpy(judged_K)
    mine = ours(replace(case, advantages=advantages), reinforce, case.token_weights("token_mean"))
    columns = case.old, case.reference, case.mask.double()
    other = theirs(case, lambda logprobs: references.trl_distillation_loss(logprobs, *columns))
    return {"trl distillation": (mine[0], other[0]), "trl distillation gradient": (mine[1], other[1])}


def estimators(case: Case) -> Result:
    """Advantages of groups of two and more: a group of one has advantage 0 here, and its reward in verl."""
    groups_B, counts_B = case.groups_B, np.bincount(case.groups_B)[case.groups_B]
    lengths_B, mask = case.mask.sum(1), case.mask.double()
    if (counts_B < 2).any():
        return {}
    last = torch.zeros_like(mask)
    last[torch.arange(len(groups_B)), case.mask.shape[1] - 1 - case.mask.flip(1).int().argmax(1)] = 1
    rewards = last * case.rewards_B[:, None]

    siblings = baselines.Siblings.of(
        case.rewards_B.numpy(),
        [str(row) for row in range(len(groups_B))],
        {},
        anchors_C=[str(group) for group in groups_B],
        lengths_C=lengths_B.tolist(),
    )

    def spread(found: baselines.Advantages) -> Tensor:
        return case.flat(torch.from_numpy(found.advantages_C)[:, None].expand_as(mask))

    def mine(kind: baselines.Kind) -> Tensor:
        return spread(baselines.advantages(kind, siblings))

    def verl(name: str, **options: Any) -> Tensor:
        return case.flat(references.verl_advantages(name, rewards.clone(), mask, groups_B, **options))

    greedy_B = torch.linspace(-1, 1, len(groups_B), dtype=torch.float64)[torch.from_numpy(groups_B)]
    remax = baselines.against({str(group): float(greedy_B[row]) for row, group in enumerate(groups_B)}, siblings)
    found = {
        "verl remax": (spread(remax), verl("remax", reward_baselines=greedy_B)),
        "verl grpo": (mine("mean_std"), verl("grpo")),
        "verl dr_grpo": (mine("mean"), verl("grpo", norm_adv_by_std_in_grpo=False)),
        "verl rloo": (mine("leave_one_out"), verl("rloo")),
        "verl opo": (mine("opo"), verl("opo")),
    }
    if float(mine("mean").std()) > 0.01:
        found["verl reinforce_pp_baseline"] = (
            torch.from_numpy(whitened(mine("mean").numpy())),
            verl("reinforce_plus_plus_baseline"),
        )
    return found


def penalties(case: Case) -> Result:
    """KL estimates in the loss, and in the reward of REINFORCE++."""
    found: Result = {}
    for kind in ("k1", "k2", "k3", "k3+"):

        def mine(case: Case, logprobs_K: Tensor, kind: Any = kind) -> losses.TokenLoss:
            estimates_K = losses.kl(kind, logprobs_K, case.flat(case.reference))
            return losses.TokenLoss(estimates_K, estimates_K > 0)

        def verl(logprobs: Tensor, kind: str = kind) -> Tensor:
            return case.flat(references.verl_kl(logprobs, case.reference, kind)).mean()

        own, other = ours(case, mine, case.token_weights("token_mean")), theirs(case, verl)
        found[f"verl {kind}"], found[f"verl {kind} gradient"] = (own[0], other[0]), (own[1], other[1])
    if case.mask.sum() > 1:
        rows_K, mask = case.row_numbers.numpy(), case.mask.double()
        rewards_K = -0.1 * losses.kl("k1", case.flat(case.old), case.flat(case.reference)).numpy()
        rewards_K[np.flatnonzero(np.diff(rows_K, append=-1))] += case.rewards_B.numpy()
        rewards = torch.zeros_like(mask)
        rewards[case.mask] = torch.from_numpy(rewards_K)
        verl_config = SimpleNamespace(gamma=0.9)
        expected = references.verl_advantages("reinforce_plus_plus", rewards, mask, None, config=verl_config)
        returns_K = to_go(rewards_K, rows_K, 0.9)
        if returns_K.std() > 0.01:
            found["verl reinforce_pp"] = torch.from_numpy(whitened(returns_K)), case.flat(expected)
    if not case.extreme:

        def penalised(case: Case, logprobs_K: Tensor) -> losses.TokenLoss:
            estimates_K = losses.kl("k3", logprobs_K, case.flat(case.reference))
            return losses.TokenLoss(ppo(None)(case, logprobs_K).losses_K + 0.04 * estimates_K, estimates_K > 0)

        def trl(logprobs: Tensor) -> Tensor:
            clips = {"low": case.clips[0], "high": case.clips[1]}
            mask, options = case.mask.double(), {"loss_type": "grpo", "beta": 0.04, "reference": case.reference}
            return references.trl_loss(case.old, logprobs, case.advantages, mask, **options, **clips)

        # TRL bounds no estimate.
        if float(losses.kl("k3", case.flat(case.logprobs), case.flat(case.reference)).max()) < losses.K3_LIMIT:
            own, other = ours(case, penalised, case.token_weights("seq_mean_token_mean")), theirs(case, trl)
            found["trl k3"], found["trl k3 gradient"] = (own[0], other[0]), (own[1], other[1])
    return found


def bonuses(case: Case) -> Result:
    """The entropy bonus and its gradient by the logits, which stand in for hidden states before a head of ones."""
    vocabulary, found = 7, Result()
    seed = torch.Generator().manual_seed(int(case.mask.sum()))
    logits = 3 * torch.randn(*case.mask.shape, vocabulary, generator=seed, dtype=torch.float64)
    head = torch.nn.Linear(vocabulary, vocabulary, bias=False, dtype=torch.float64)
    torch.nn.init.eye_(head.weight)
    for weighting, mode in VERL_MODES.items():
        own, other = (logits.clone().requires_grad_() for _ in range(2))
        numbers_K = torch.arange(int(case.mask.sum()))
        states = own[case.mask], torch.ones(len(numbers_K)), numbers_K, torch.zeros_like(numbers_K)
        entropies_K = sampled_outputs(head, *states, entropies=True)[1]
        assert entropies_K is not None
        mine = (entropies_K * case.verl_weights(weighting)).sum()
        verl = references.verl_entropy(other, case.mask.double(), mode)
        gradients = [torch.autograd.grad(total, at)[0] for total, at in ((mine, own), (verl, other))]
        found[f"verl entropy {mode}"] = mine.detach(), verl.detach()
        found[f"verl entropy {mode} gradient"] = gradients[0], gradients[1]
    return found


def critics(case: Case) -> Result:
    """GAE over rows that are cut into calls, each with a reward at its last token."""
    random = np.random.default_rng(int(case.mask.sum()))
    rewards, samples = torch.zeros_like(case.old), []
    for number, mask in enumerate(case.mask):
        places = torch.nonzero(mask)[:, 0].tolist()
        ends = sorted({*random.choice(places, random.integers(1, len(places) + 1)).tolist(), places[-1]})
        calls, parent = [], None
        for begin, end in zip([places[0], *(end + 1 for end in ends[:-1])], ends, strict=True):
            rewards[number, end] = random.normal()
            # A row begins with a token that nothing precedes.
            calls.append(RowCall(f"{number}.{end}", parent, float(rewards[number, end]), 1.0, begin + 1, end + 1))
            parent = calls[-1].id
        row = sample(f"run.0.{number}", [0] * (len(mask) + 1), [0, *mask.int().tolist()])
        samples.append(replace(row, calls=tuple(calls)))
    if case.mask.sum() < 2:
        return {}
    gamma, gae_lambda = float(random.uniform(0.5, 1)), float(random.uniform(0, 1))
    verl = references.verl_gae(rewards, case.generator, case.mask.double(), gamma, gae_lambda)
    critic = Critic(gamma=gamma, gae_lambda=gae_lambda)
    mine = estimate(critic, samples, trained_tokens(samples), case.flat(case.generator).numpy())
    columns = zip(("advantages", "returns"), (mine.advantages_K, mine.returns_K), verl, strict=True)
    return {f"verl gae {name}": (torch.from_numpy(own), case.flat(other)) for name, own, other in columns}


def value_losses(case: Case) -> Result:
    """The critic's loss and its gradient by the values, for which log-probabilities stand in."""
    found: Result = {}
    for name, clip in (("value_loss", None), ("value_loss clip", case.clips[1])):

        def mine(values: Tensor, clip: float | None = clip) -> Tensor:
            columns = case.flat(values), case.flat(case.old), case.flat(case.generator)
            return value_loss(*columns, case.token_weights("token_mean"), clip)

        def verl(values: Tensor, clip: float | None = clip) -> Tensor:
            return references.verl_value_loss(values, case.old, case.generator, case.mask.double(), clip or 1e9)

        own, other = theirs(case, mine), theirs(case, verl)
        found[f"verl {name}"], found[f"verl {name} gradient"] = (own[0], other[0]), (own[1], other[1])
    return found


def lengths(case: Case) -> Result:
    """The penalty for long answers, to beyond the most tokens."""
    random = np.random.default_rng(int(case.mask.sum()))
    max_tokens = int(random.integers(1, case.mask.shape[1] + 1))
    overlong = Overlong(max_tokens=max_tokens, buffer_tokens=int(random.integers(1, max_tokens + 1)))
    tokens_B = case.mask.sum(1).tolist()
    mine = torch.tensor([overlong_reward(tokens, overlong) for tokens in tokens_B], dtype=torch.float64)
    trl = references.trl_overlong(tokens_B, overlong.max_tokens, overlong.buffer_tokens)
    return {"trl overlong": (mine, torch.tensor(trl, dtype=torch.float64))}


def states(case: Case) -> Result:
    """GiGPO (arXiv 2505.10978) equations 3, 7 and 8: its two normalised groups are each verl's GRPO.

    Rollouts pass a state at most once: one that returns to it counts once here, and several times in the paper. A
    state of one rollout has advantage 0; verl gives it its return.
    """
    random = np.random.default_rng(int(case.mask.sum()))
    rollouts, calls, omega = int(random.integers(2, 7)), int(random.integers(1, 6)), float(random.uniform(0.1, 2))
    rewards_R_C = random.normal(0, 1, (rollouts, calls))
    returns_R_C = rewards_R_C.copy()
    for call in range(calls - 2, -1, -1):
        returns_R_C[:, call] += 0.95 * returns_R_C[:, call + 1]
    names = [str(rollout) for rollout in range(rollouts) for _ in range(calls)]
    # Call k is in one of two states of its own.
    states_C = np.array([f"{call}.{random.integers(2)}" for _ in range(rollouts) for call in range(calls)])
    siblings = baselines.Siblings.of(returns_R_C.reshape(-1), names, {}, anchors_C=states_C.tolist())
    totals = {str(rollout): float(total) for rollout, total in enumerate(rewards_R_C.sum(1))}
    alone_C = np.array([np.sum(states_C == state) == 1 for state in states_C])

    def verl(returns: np.ndarray, groups: np.ndarray, kind: str) -> Tensor:
        columns = torch.from_numpy(returns.reshape(-1, 1)), torch.ones(returns.size, 1, dtype=torch.float64)
        return references.verl_advantages("grpo", *columns, groups, norm_adv_by_std_in_grpo=kind == "mean_std")[:, 0]

    found: Result = {}
    kinds: tuple[baselines.Kind, ...] = ("mean", "mean_std")
    for kind in kinds:
        of_episodes = verl(rewards_R_C.sum(1), np.zeros(rollouts, int), kind).repeat_interleave(calls)
        of_states = verl(returns_R_C, states_C, kind).masked_fill(torch.from_numpy(alone_C), 0.0)
        mine = torch.from_numpy(baselines.gigpo(kind, siblings, totals, omega).advantages_C)
        found[f"verl grpo twice: gigpo {kind}"] = mine, of_episodes + omega * of_states
    return found


COMPARISONS = (
    *(against_verl, divergences, units, corrections, penalties, bonuses, against_trl, fine_tuning),
    *(distillation, estimators, states, critics, value_losses, lengths),
)


def main() -> int:
    """Compares on `--shapes` random shapes."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.oracle")
    parser.add_argument("--shapes", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    started, largest, counts = time.perf_counter(), dict[str, float](), dict[str, int]()
    for shape in range(arguments.shapes):
        case = Case.random(np.random.default_rng([arguments.seed, shape]))
        for comparison in COMPARISONS:
            for name, (mine, other) in comparison(case).items():
                difference = float(((mine - other).abs() / other.abs().clamp(min=1.0)).max()) if mine.numel() else 0.0
                counts[name] = counts.get(name, 0) + 1
                largest[name] = max(largest.get(name, 0.0), difference)
                if not difference <= TOLERANCE:
                    print(f"shape {shape}: {name} differs by {difference:.3g}: {mine} against {other}")
                    return 1
    for name, difference in sorted(largest.items()):
        print(f"{name:50} {counts[name]:6d} shapes, largest difference {difference:.1e}")
    print(f"{arguments.shapes} shapes in {time.perf_counter() - started:.0f} s, seed {arguments.seed}: all equal")
    return 0


if __name__ == "__main__":
    sys.exit(main())
