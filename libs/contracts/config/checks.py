"""Contradictions between the parts of a run. Every check raises ValueError with the fields and the remedy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from leyden.libs.contracts.config.agents import Agent, GroupAgent, NamedAgent
from leyden.libs.contracts.config.algorithms import Algorithm, Sft
from leyden.libs.contracts.config.credit import Baseline, Credit, DiscountedCredit
from leyden.libs.contracts.config.evaluation import MAX_PLANNED_EVALUATIONS, EvaluationPlan
from leyden.libs.contracts.config.graders import RelativeModel
from leyden.libs.contracts.config.policies import Policy, Role
from leyden.libs.contracts.config.reward import Reward
from leyden.libs.contracts.config.runners import OF_REWARDS, KubernetesRunner, RunnerConfig
from leyden.libs.contracts.config.sampling import Sampling
from leyden.libs.contracts.config.training import EarlyStopping, Optimizer, Training


def check_critic(algorithm: Algorithm, credit: Credit, sampling: Sampling) -> None:
    """A critic replaces the baseline and all that acts on its advantages."""
    baseline = credit.baseline
    if algorithm.critic is None:
        if baseline.type == "value":
            raise ValueError(
                "credit.baseline.type 'value' needs the values of a critic: set algorithm.critic, even to {}"
            )
        return
    if baseline.type != "value":
        raise ValueError(
            f"algorithm.critic computes advantages itself, but credit.baseline.type is {baseline.type!r}: write"
            " 'value', or remove the critic"
        )
    # The default had γ 0.95 before, which stored documents name.
    if baseline.per != "rollout" or credit.rule not in {DiscountedCredit(), DiscountedCredit(gamma=0.95)}:
        raise ValueError(
            "credit.rule and credit.baseline.per do not act with algorithm.critic, which takes the calls' rewards:"
            " remove them, and set algorithm.critic.gamma and gae_lambda"
        )
    if sampling.replay is not None and sampling.replay.priority == "advantage":
        raise ValueError(
            "sampling.replay.priority 'advantage' needs advantages before training, and algorithm.critic computes"
            " them in training: write 'freshness' or 'solve_rate'"
        )
    if baseline.whiten or sampling.refill_zero_variance:
        raise ValueError(
            "algorithm.critic whitens advantages itself and trains groups without variance: remove"
            " credit.baseline.whiten and sampling.refill_zero_variance"
        )


def check_demonstrations(
    algorithm: Algorithm, sampling: Sampling, training: Training, baseline: Baseline, policies: Mapping[str, Policy]
) -> None:
    """Demonstrations have no advantages and no policy that sampled them, and train the run's own model alone."""
    if any(isinstance(policy.algorithm, Sft) for policy in policies.values()):
        raise ValueError("policies: algorithm.type 'sft' trains a run's own model: write it into a run of its own")
    if not isinstance(algorithm, Sft):
        return
    acting = {
        "algorithm.critic": algorithm.critic is not None,
        "algorithm.distillation": algorithm.distillation is not None,
        "algorithm.kl_in": algorithm.kl_in != "loss",
        "sampling.replay": sampling.replay is not None,
        "sampling.curriculum": sampling.curriculum is not None,
        "sampling.refill_zero_variance": sampling.refill_zero_variance > 0,
        "credit.baseline.whiten": baseline.whiten,
        "training.routing_replay": training.routing_replay,
        "a trained policy of policies": any(policy.trains for policy in policies.values()),
    }
    if given := [name for name, is_given in acting.items() if is_given]:
        raise ValueError(
            f"{', '.join(given)} cannot act with algorithm.type 'sft', which trains stored rollouts: remove it"
        )


def check_distillation(algorithm: Algorithm, sampling: Sampling, baseline: Baseline) -> None:
    """A teacher's advantages have a zero of their own, where policy and teacher agree, and every group has some."""
    if algorithm.distillation is None:
        return
    acting = {
        "algorithm.critic": algorithm.critic is not None,
        "credit.baseline.whiten": baseline.whiten,
        "sampling.refill_zero_variance": sampling.refill_zero_variance > 0,
    }
    if given := [name for name, is_given in acting.items() if is_given]:
        raise ValueError(f"{', '.join(given)} cannot act beside the advantages of algorithm.distillation: remove it")


def check_moving_average(baseline: Baseline, sampling: Sampling, agents: Sequence[NamedAgent]) -> None:
    """A moving average needs no siblings, and compares the groups of one agent."""
    if baseline.type == "ema" and len(agents) > 1:
        raise ValueError(
            "credit.baseline.type 'ema' compares the groups of all agents with each other: write 'mean', which compares"
            " the siblings of one, or a run for each agent"
        )
    if baseline.type == "ema" and sampling.min_siblings > 1:
        raise ValueError(
            f"sampling.min_siblings {sampling.min_siblings} excludes groups that credit.baseline 'ema' can"
            " use: write min_siblings 1"
        )


def check_rerolls(credit: Credit, sampling: Sampling, reward: Reward | None) -> None:
    """Re-rolls are compared with the siblings of their rollout, and rewarded by themselves."""
    if credit.baseline.type != "monte_carlo":
        return
    if sampling.min_siblings < 2:
        raise ValueError(
            "credit.baseline.type 'monte_carlo' takes the other siblings' mean as the value of a rollout's start: write"
            " sampling.min_siblings 2 or more"
        )
    for one in reward.components if reward else ():
        if one.source == "feedback" or isinstance(one.grader, RelativeModel):
            raise ValueError(
                f"reward.components: {one.name!r} is given by people or compares siblings, so that nobody rewards a"
                " re-roll of credit.baseline 'monte_carlo' alone: write another grader, or another baseline"
            )


def check_schedule(optimizer: Optimizer, steps: int) -> None:
    """The learning rate has steps to fall."""
    warmup = optimizer.warmup_steps
    if optimizer.schedule != "constant" and 0 < steps <= warmup:
        raise ValueError(
            f"optimizer.warmup_steps {warmup} leaves none of training.steps {steps} to schedule"
            f" {optimizer.schedule!r}: lower it, or write schedule 'constant'"
        )


def check_refills(sampling: Sampling, algorithm: Algorithm, baseline: Baseline) -> None:
    """Refills replace groups that nothing trains."""
    if not sampling.refill_zero_variance:
        return
    for name in ("kl_coefficient", "entropy_coefficient"):
        if getattr(algorithm, name) > 0:
            raise ValueError(
                f"sampling.refill_zero_variance replaces groups that algorithm.{name} above 0 trains: remove one"
                " of them"
            )
    if baseline.whiten:
        raise ValueError(
            "sampling.refill_zero_variance replaces groups that credit.baseline.whiten trains: remove one of them"
        )


def check_narrow_band(algorithm: Algorithm, sampling: Sampling) -> None:
    """The default band of `mis_geo` has room for the newest version alone."""
    correction, lag = algorithm.decoupled, sampling.max_policy_lag
    if correction is not None and correction.weights == "mis_geo" and lag > 0 and correction.cap is None:
        raise ValueError(
            "algorithm.correction.weights 'mis_geo' drops rows of older versions with its default band: write"
            " sampling.max_policy_lag 0, or set algorithm.correction.cap and floor"
        )


def check_stopping(stopping: EarlyStopping | None, plan: EvaluationPlan | None) -> None:
    """The metric that stops a run has values during training."""
    if stopping is not None and stopping.metric == "evaluation_reward" and (plan is None or plan.every is None):
        raise ValueError(
            "training.early_stopping.metric 'evaluation_reward' needs evaluations during training: set"
            " evaluation.every, or write metric 'train_reward'"
        )


def check_number_of_evaluations(plan: EvaluationPlan | None, steps: int) -> None:
    """A run plans at most `MAX_PLANNED_EVALUATIONS`."""
    every = None if plan is None else plan.every
    if every is not None and steps // every > MAX_PLANNED_EVALUATIONS:
        raise ValueError(
            f"evaluation.every {every} makes {steps // every} evaluations in training.steps {steps}: write at least"
            f" {-(-steps // MAX_PLANNED_EVALUATIONS)}"
        )


def check_roles(roles: Sequence[Role], train: Sequence[str] | None, baseline: Baseline) -> None:
    """Roles have one name each, every one can have calls, and `train` names some of them."""
    names = [role.name for role in roles]
    double = sorted({name for name in names if names.count(name) > 1})
    if double:
        raise ValueError(f"roles: {double} name two roles each: write one role, or two names")
    shadowing = next((role.name for role in roles[:-1] if not role.has_conditions), None)
    if shadowing is not None:
        raise ValueError(f"roles: {shadowing!r} has no condition and takes every call: write it last")
    unknown = [name for name in train or () if name not in names]
    if unknown:
        raise ValueError(f"train: {unknown} are none of the roles {names}: add them to roles")
    if train == []:
        raise ValueError("train: no role trains: name one, or write training.steps 0 for evaluations alone")
    if baseline.per == "role" and not roles:
        raise ValueError("credit.baseline.per 'role' compares the calls of one role: add roles, or write 'rollout'")


def check_policies(
    policies: Mapping[str, Policy], roles: Sequence[Role], train: Sequence[str] | None, steps: int
) -> None:
    """Roles name every policy, the roles of `train` have policies that train, and each that trains has calls."""
    named = {role.policy for role in roles if role.policy is not None}
    if unknown := sorted(named - policies.keys()):
        raise ValueError(f"roles: {unknown} are none of the policies {sorted(policies)}: add them to policies")
    if unused := sorted(policies.keys() - named):
        raise ValueError(f"policies: no role names {unused}: set roles[].policy, or remove them")
    frozen = [role.name for role in roles if role.policy and not policies[role.policy].trains]
    if still := [name for name in train or () if name in frozen]:
        raise ValueError(f"train: the policy of {still} does not train: remove them from train")
    if not policies or steps == 0:
        return
    trained = {role.policy for role in roles if train is None or role.name in train}
    # Without `train`, calls that no role describes train the run's own model: a last role without conditions has them.
    has_own = None in trained or (train is None and roles[-1].has_conditions)
    if not has_own:
        raise ValueError(
            "policies: no call trains the run's own model: give a role without a policy its calls, or make a trained"
            " policy the run's own model and this one a policy with frozen true; training.steps 0 only records calls"
        )
    if idle := sorted(name for name, policy in policies.items() if policy.trains and name not in trained):
        raise ValueError(f"train: no role of the policies {idle} trains: add one to train, or set their frozen to true")


def check_agents(agent: Agent | None, agents: Sequence[NamedAgent], runner: RunnerConfig) -> None:
    """A run has one agent, or several with a name each; all of them are rewarded in the same way."""
    if agent is not None and agents:
        raise ValueError("agent and agents: a run has one or the other: write the agent into agents, with a name")
    if agent is None and not agents:
        raise ValueError("agent: the run has none: write its command, or several agents with names into agents")
    names = [one.name for one in agents]
    if double := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"agents: {double} name two agents each: write another name")
    if len({one.hosted_tools for one in agents}) > 1:
        raise ValueError("agents: hosted_tools is the same for all agents of a run: write one value into each")
    for number, one in enumerate(agents):
        for field in OF_REWARDS:
            if getattr(one.runner, field) != getattr(runner, field):
                raise ValueError(
                    f"agents.{number}.runner.{field} differs from runner.{field}, which all agents of a run share:"
                    " write it into runner alone"
                )


def check_agents_files(one: GroupAgent) -> None:
    """The image of a pod holds the agent's files."""
    if one.runner.type == "kubernetes" and one.agent.directory is not None:
        raise ValueError(
            f"{one.path}.directory is a folder of a runner's machine, and runner.type 'kubernetes' has none: "
            f"put the files into {one.runner_path}.image"
        )
    if one.runner.type == "kubernetes" and one.agent.artifacts:
        raise ValueError(
            f"{one.path}.artifacts are files of a runner's machine, and the pods of runner.type 'kubernetes' keep none:"
            " let the agent print them, or use runner.type 'process' or 'container'"
        )


def check_mini_batches(algorithm: Algorithm, sampling: Sampling) -> None:
    """Every mini-batch has a group."""
    if algorithm.mini_batches > sampling.groups_per_step:
        raise ValueError(
            f"algorithm.mini_batches {algorithm.mini_batches} exceeds sampling.groups_per_step"
            f" {sampling.groups_per_step}: a mini-batch has at least one group"
        )


def check_task_file(one: GroupAgent) -> None:
    """The task's file has a place where the runner's backend can write it."""
    name = one.agent.task_file
    if name is None:
        return
    if one.runner.type == "kubernetes" and (not name.startswith("/") or ".." in name.split("/")):
        raise ValueError(f"{one.path}.task_file: write an absolute path of the pod, such as /app/input.json")
    if isinstance(one.runner, KubernetesRunner) and one.runner.attempts_per_pod > 1:
        raise ValueError(
            f"{one.path}.task_file: attempts of a shared pod have one path in common: read LEYDEN_TASK_FILE instead, or"
            " set runner.attempts_per_pod to 1"
        )
    if one.runner.type in {"process", "container"} and ("/" in name or name in {".", ".."}):
        raise ValueError(f"{one.path}.task_file: write a name in the agent's working folder, such as input.json")


def check_reward(reward: Reward | None, runner: RunnerConfig) -> None:
    """Components say whether the agent rewards itself; the runner's older fields may not contradict them."""
    if reward is None:
        return
    if runner.grant_reward:
        raise ValueError(
            "runner.grant_reward lets the agent post rewards, and no component of reward.components takes them: remove"
            " grant_reward, or reward"
        )
    if runner.stdout_reward != reward.has_agents_line:
        raise ValueError(
            f"runner.stdout_reward {str(runner.stdout_reward).lower()} contradicts reward.components, which decide"
            f" whether the agent's reward line counts: remove it, or write {str(reward.has_agents_line).lower()}"
        )
