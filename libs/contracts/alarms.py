"""The table of alarms: each rule by which the platform judges a run, with its limit, its window and the remedy.

The store judges by these rules alone (`leyden.libs.store.alarms`). API, CLI, console, metrics, webhooks, the chart's
alerts and `docs/reference/alarms.md` read the same table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from leyden.libs.contracts.api.alarms import Severity
from leyden.libs.contracts.untrainable import CONTEXT_REMEDY


@dataclass(frozen=True)
class AlarmRule:
    """One rule of the table.

    Args: figure: the figure that is judged; limit: it raises the alarm beyond this; window: the newest so many of
        `unit` are judged; at_least: fewer of `unit` prove nothing; remedy: for people; an alarm may have a better one;
        lasts: it may stay when the run has ended, to show how the run was at its end
    """

    name: str
    severity: Severity
    meaning: str
    figure: str
    limit: float
    window: int
    unit: str
    at_least: int
    remedy: str
    lasts: bool = True


@dataclass(frozen=True)
class Finding:
    """A rule that holds now: why, and the figures by which it was judged.

    `subject`: the tool, component, field or phase.
    """

    name: str
    reason: str
    evidence: Mapping[str, float | str] = field(default_factory=dict)
    remedy: str = ""
    subject: str = ""


_RULES = (
    AlarmRule(
        "setting",
        "warning",
        "A setting of the document does not mean what it says.",
        "settings that `leyden run check` warns of",
        *(0, 1, "documents", 1),
        "cancel the run and continue it with the setting changed (`leyden run resume RUN --set FIELD=VALUE`)",
    ),
    AlarmRule(
        "stalled",
        "critical",
        "The run works and makes no step.",
        "seconds since the last step, in medians of the time between two steps",
        *(3, 20, "steps", 4),
        "see what is missing: `leyden status` for engines and queue, `leyden logs trainer` and `leyden logs runner`",
        lasts=False,
    ),
    AlarmRule(
        "no_progress",
        "warning",
        "Nothing of the run moves, in its first steps, later or in an evaluation: no engine serves it, its trainer does"
        " not start, or no runner takes its rollouts.",
        "seconds since an attempt ended or the run got a credit, a step, a version or its phase, while no attempt is at"
        " work or waits for its grade",
        *(900, 1, "runs", 1),
        "mend the cause that the reason names: `leyden status`, `leyden logs controller`, `trainer` or `runner`",
        lasts=False,
    ),
    AlarmRule(
        "phase_slow",
        "warning",
        "A phase of the next step (sample, grade, credit or train) is open for far longer than in earlier steps.",
        "seconds for which the phase is open, in medians of its longest part in earlier steps; at least 60",
        *(6, 20, "steps", 3),
        "see which service the phase waits for: `leyden status`, `leyden logs runner`, `grader`, `credit` or `trainer`",
        lasts=False,
    ),
    AlarmRule(
        "engines_stale",
        "warning",
        "An engine serves an older version of the weights, or none.",
        "seconds since the newest version, or since the engine served any, in medians of the time between two steps",
        *(3, 20, "steps", 4),
        "read the engine's cause with `leyden status`; an engine that cannot load weights needs a restart",
        lasts=False,
    ),
    AlarmRule(
        "engine_differs",
        "critical",
        "An engine was given a version of the weights and computes something else. It gets no calls.",
        "mean |trainer - engine| log-probability of a few fixed tokens, nats; less, where an engine made too little of"
        " an update",
        *(0.1, 1, "versions", 1),
        "restart the engine, and give it the trainer's precision without quantised weights or caches; where they must"
        " differ, raise training.max_logprob_gap",
        lasts=False,
    ),
    AlarmRule(
        "no_embeddings",
        "critical",
        "The run's pool of embeddings has no engine that embeds: attempts that ask for one end as infra_error.",
        "seconds for which no engine of the pool has embedded",
        *(60, 1, "pools", 1),
        "read each engine's cause with `leyden pools --json`, and start SGLang with --is-embedding at an address of the"
        " pool; or name a provider in the run's `embeddings`",
        lasts=False,
    ),
    AlarmRule(
        "disk_low",
        "warning",
        "A disk that services write to is nearly full: versions and checkpoints, or the database.",
        "free GiB below which the disk is nearly full; a disk that the controller's machine cannot see is not judged",
        *(5, 1, "runs", 1),
        "remove runs (`leyden run delete`, `leyden run prune`), keep fewer versions (training.keep_checkpoints), or"
        " give the disk room",
        lasts=False,
    ),
    AlarmRule(
        "nothing_trains",
        "critical",
        "The newest step had no token that can be trained.",
        "trainable tokens of the newest step",
        *(0, 1, "steps", 1),
        "look at the calls (`leyden rollout show`)",
    ),
    AlarmRule(
        "role_without_calls",
        "warning",
        "A role in `train` has no model call.",
        "calls of the role in the first steps",
        *(0, 2, "steps", 1),
        "mend the conditions of `roles` (`leyden run agents` shows names), or leave it out of `train`",
    ),
    AlarmRule(
        "agents_fail",
        "warning",
        "Agents fail again and again by one cause.",
        "share of the attempts that end by the most frequent cause",
        *(0.2, 100, "attempts", 4),
        "read the output of one with `leyden rollout show`, and mend the agent or its time-out",
    ),
    AlarmRule(
        "platform_fails",
        "warning",
        "The platform and not the agent ends attempts. They run again and never train.",
        "share of the attempts that end as infra_error",
        *(0.05, 100, "attempts", 4),
        "mend the cause: an image, a node, an engine or a setting of the runner",
    ),
    AlarmRule(
        "no_reward",
        "warning",
        "Agents succeed and give no reward.",
        "share of the attempts that succeed without a reward",
        *(0.5, 100, "attempts", 4),
        'end its output with a line such as {"reward": 1.0}, or name graders in `reward`',
    ),
    AlarmRule(
        "no_model_call",
        "warning",
        "Agents do not call the model.",
        "share of the attempts without a model call",
        *(0.5, 100, "attempts", 4),
        "does the agent use OPENAI_BASE_URL?",
    ),
    AlarmRule(
        "untrainable_calls",
        "warning",
        "Model calls do not train.",
        "share of the model calls that do not train",
        *(0.5, 100, "attempts", 4),
        "look at the calls (`leyden rollout show`)",
    ),
    AlarmRule(
        "calls_fail",
        "warning",
        "Model calls fail or are cut off by their clients.",
        "share of the model calls without a complete answer",
        *(0.05, 100, "attempts", 20),
        "look at the calls (`leyden rollout show`), at the agent's time-outs and at the engines (`leyden status`)",
    ),
    AlarmRule(
        "context_overflows",
        "warning",
        "Agents send messages beyond the model's context, and the gateway or the engine refuses them.",
        "share of the attempts with a refused call",
        *(0.1, 100, "attempts", 4),
        CONTEXT_REMEDY,
    ),
    AlarmRule(
        "tool_fails",
        "warning",
        "A tool fails in most calls.",
        "share of the tool's calls whose end is known that fail",
        *(0.5, 20, "steps", 4),
        "read one with `leyden rollout show`, or say by credit.air.failures what a failure of this tool is",
    ),
    AlarmRule(
        "tool_without_status",
        "warning",
        "A tool with an intermediate reward mostly returns texts that show neither a success nor a failure.",
        "share of the tool's calls whose end is known that return such a text",
        *(0.5, 20, "steps", 4),
        "say by credit.air.failures what a failure of this tool is (an empty list: none is), or send its spans",
    ),
    AlarmRule(
        "groups_without_variance",
        "warning",
        "The siblings of many groups earn the same reward, so that their advantages are zero.",
        "share of the groups whose rewards are all equal",
        *(0.5, 64, "groups", 16),
        "choose tasks that the policy solves sometimes, larger groups, or a reward with more than two values",
    ),
    AlarmRule(
        "reward_flat",
        "warning",
        "The reward of training does not rise.",
        "standard errors by which the newest steps earn more than the first ones",
        *(1, 20, "steps", 60),
        "compare rollouts of the first and the newest steps; try a higher learning rate, or easier tasks first",
    ),
    AlarmRule(
        "stale_groups",
        "warning",
        "The trainer refuses groups because they are older than the lag bound.",
        "share of the groups that are refused",
        *(0.1, 20, "steps", 4),
        "raise sampling.max_policy_lag, shorten the agents' time-out, or add runners and engines",
    ),
    AlarmRule(
        "groups_excluded",
        "warning",
        "Credit excludes groups, which train nothing and are sampled again.",
        "share of the groups that credit excluded",
        *(0.1, 20, "groups", 1),
        "read the cause; after CONTROLLER_GROUPS_WITHOUT_SUCCESS such groups in a row the run fails",
    ),
    AlarmRule(
        "answers_cut",
        "warning",
        "The limit of tokens cuts many answers off.",
        "share of the answers that max_tokens or the context cuts off",
        *(0.25, 5, "steps", 2),
        "raise the agent's max_tokens or the engine's context; where answers only grow longer, lower the learning rate",
    ),
    AlarmRule(
        "entropy_collapse",
        "warning",
        "The policy hardly varies its answers any more.",
        "entropy of the newest steps, as a share of the first ones'",
        *(0.2, 5, "steps", 10),
        "lower the learning rate, or continue from an earlier version with a KL penalty; fine where tasks are solved",
    ),
    AlarmRule(
        "kl_high",
        "warning",
        "The policy is far from its reference.",
        "mean KL from the reference in nats a token",
        *(1, 5, "steps", 5),
        "lower the learning rate, raise the KL coefficient, or continue from an earlier version",
    ),
    AlarmRule(
        "gradient_jump",
        "warning",
        "Gradients are far larger than before.",
        "median gradient norm of the newest steps, in medians of those before",
        *(10, 3, "steps", 13),
        "lower the learning rate or optimizer.max_grad_norm, and look for rewards of another scale",
    ),
    AlarmRule(
        "gap_near_limit",
        "warning",
        "Trainer and engine compute different log-probabilities for the same tokens and weights.",
        "mean gap of the newest steps, as a share of training.max_logprob_gap, above which the run fails",
        *(0.5, 3, "steps", 3),
        "give engine and trainer the same precision, and run the engine without quantised weights or caches",
    ),
    AlarmRule(
        "not_compared",
        "warning",
        "Trainer and engine were not compared.",
        "steps without a comparison",
        *(0, 20, "steps", 1),
        "read the cause in the trainer's log (`leyden logs trainer`)",
    ),
    AlarmRule(
        "component_rises_alone",
        "warning",
        "A component of the reward earns more while the whole reward falls.",
        "standard errors by which the component's part rises and by which the reward falls, the smaller of both",
        *(3, 40, "steps", 12),
        "compare rollouts of the first and the newest of these steps: the policy may collect this component in place of"
        " the task; lower its weight, or give it a gate",
    ),
    AlarmRule(
        "component_jump",
        "warning",
        "The mean of a component jumps from one step to the next.",
        "deviations of a change in the last 5 steps from the changes before it",
        *(4, 40, "steps", 21),
        "read rollouts of this step (`leyden rollout list`): a grader, its data or its model may have"
        " changed, or the policy found a way around it",
    ),
    AlarmRule(
        "judge_alone",
        "warning",
        "A judge's score rises while a metric beside it falls: a component of weight 0 that is no judge.",
        "standard errors by which the judge's score rises and by which the metric falls, the smaller of both",
        *(3, 40, "steps", 12),
        "read what the judge praises (`leyden rollout show`), mend its rubric, or give the metric a weight or a gate;"
        " fine where less of the metric is better",
    ),
    AlarmRule(
        "held_out_falls",
        "warning",
        "The reward on held-out tasks falls while that of training rises.",
        "standard errors over tasks by which the held-out reward falls from version to version",
        *(3, 5, "evaluations", 3),
        "stop here and take the best version (`leyden policy list RUN`); more tasks, fewer passes over them, a"
        " KL penalty or a lower learning rate keep the policy general",
    ),
    AlarmRule(
        "answers_grow",
        "warning",
        "Answers grow much longer as the reward rises.",
        "standard errors by which the trained tokens of a rollout rise and by which the reward rises, the smaller",
        *(3, 40, "steps", 12),
        "read long and short answers of one group: if length itself earns, add the grader `length` or"
        " credit.shaping.overlong; fine where long reasoning solves more",
    ),
    AlarmRule(
        "rollouts_shrink",
        "warning",
        "Rollouts have hardly any tokens or calls any more.",
        "mean of the newest 5 steps as a share of that of the first 10",
        *(0.2, 5, "steps", 15),
        "read one with `leyden rollout show`: does the policy give up early, or is a short answer right?",
    ),
    AlarmRule(
        "component_fails",
        "warning",
        "A component of the reward fails.",
        "share of the graded attempts for which it fails",
        *(0.02, 1000, "graded attempts", 1),
        "mend the grader; reward.missing decides what such attempts earn (`leyden reward test` tries it)",
    ),
    AlarmRule(
        "ungraded",
        "warning",
        "Attempts have no reward and were excluded.",
        "graded attempts without a total",
        *(0, 1000, "graded attempts", 1),
        "mend the component that fails, or let reward.missing give such attempts a value",
    ),
    AlarmRule(
        "grades_wait",
        "critical",
        "Attempts wait for their grades.",
        "seconds for which the oldest waits",
        *(60, 1, "attempts", 1),
        "does a grader run?",
        lasts=False,
    ),
    AlarmRule(
        "judge_budget",
        "critical",
        "The run's judges have used all tokens or money that they may, and attempts wait for their grades.",
        "tokens of the run's judges above `reward.judge_tokens`, or their cost above `reward.judge_cost`",
        *(0, 1, "runs", 1),
        "cancel the run, which gives the waiting attempts up, and continue it with more (`leyden run resume RUN --set"
        " reward.judge_tokens=N`, or `reward.judge_cost=N`)",
        lasts=False,
    ),
    AlarmRule(
        "failure_reward",
        "warning",
        "The document's reward for a failure is above what other attempts earn, so that crashes are worth learning.",
        "sampling.failure_reward above the smallest reward of the run so far",
        *(0, 1, "runs", 1),
        "cancel the run and continue it with sampling.failure_reward null (the smallest so far, at most 0)",
    ),
    AlarmRule(
        "trainer_ends",
        "warning",
        "The trainer ended by itself or was killed.",
        "ends of the trainer that were not planned",
        *(0, 20, "steps", 1),
        "mend the cause; for want of memory, give the trainer more or lower training.micro_batch_tokens",
    ),
    AlarmRule(
        "trainer_moved",
        "warning",
        "The trainer runs on another kind of device than the one that resolved its settings, and computes as before.",
        "moves to another kind of device",
        *(0, 1, "runs", 1),
        "to resolve the settings anew, continue the run as a new one (`leyden run resume`)",
    ),
    AlarmRule(
        "files_damaged",
        "warning",
        "The files of steps were damaged, and the trainer went back to an older checkpoint.",
        "steps found damaged",
        *(0, 1, "runs", 1),
        "check the storage of TRAINER_FOLDER",
    ),
    AlarmRule(
        "not_published",
        "warning",
        "The object store lacks versions that the run retains.",
        "newest steps whose version, or one before it, the store did not get",
        *(0, 1, "steps", 1),
        "mend the cause, which the trainer's log names (`versions not published`); the next step publishes what lacks,"
        " and after the run's end the controller does, within a minute of the store's return",
    ),
)

ALARM_RULES: Mapping[str, AlarmRule] = {rule.name: rule for rule in _RULES}
"""The rules by name, the most urgent kinds first."""
