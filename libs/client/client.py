"""The REST API's client: methods return bodies of `leyden.libs.contracts.api`, and lists iterate over all pages."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from threading import Event
from types import TracebackType
from typing import Any, TypeVar
from urllib.parse import quote

from pydantic import BaseModel

from leyden.libs.client.attempts import WAIT_SECONDS, Attempt, Result, attempts_until, work
from leyden.libs.client.chains import Chains
from leyden.libs.client.changes import run_changes
from leyden.libs.client.errors import NotFound, Refused
from leyden.libs.client.export import Export
from leyden.libs.client.transport import Content, Parameters, Transport, file_chunks
from leyden.libs.client.weights import unpack_version, version_folder
from leyden.libs.contracts.api.alarms import ListedAlarm
from leyden.libs.contracts.api.body import Page
from leyden.libs.contracts.api.call_tokens import CallTokens
from leyden.libs.contracts.api.comparison import Comparison, RunCurve
from leyden.libs.contracts.api.datasets import Dataset, Task
from leyden.libs.contracts.api.duels import Duel, DuelPair, DuelRequest
from leyden.libs.contracts.api.groups import Group
from leyden.libs.contracts.api.platform import Engine, Health, Pool, Recipe
from leyden.libs.contracts.api.rollouts import (
    Call,
    Cause,
    Feedback,
    FeedbackRequest,
    Graded,
    GradeRequest,
    Regrade,
    Reward,
    RewardRequest,
    Rollout,
    RolloutDetail,
    Sample,
    Span,
    TrialRequest,
)
from leyden.libs.contracts.api.runs import (
    Evaluation,
    EvaluationRequest,
    Metrics,
    PolicyVersion,
    PrunedRun,
    ResumeRequest,
    Run,
    RunAgent,
    RunSort,
    Step,
    VersionFiles,
)
from leyden.libs.contracts.api.tasks import RunTask
from leyden.libs.contracts.api.tokens import ApiScope, AuditEntry, IssuedToken, RotateRequest, Token, TokenRequest
from leyden.libs.contracts.api.trajectory import Transition
from leyden.libs.contracts.api.waiting import Platform, WaitingRollout
from leyden.libs.contracts.config import Reward as RewardConfig
from leyden.libs.contracts.config import RunConfig
from leyden.libs.contracts.ids import new_id

Item = TypeVar("Item", bound=BaseModel)
PAGE = 200
CALL_PAGE = 100
FINE_TUNING = frozenset({"openai", "trl", "pairs"})
"""Forms of exports that train models."""
CURVES = 100
GRADE_SECONDS = 660.0
"""The longest wait for grades: longer than the API's own."""


class Client:
    """A client of one platform.

    Args: base_url: such as `http://127.0.0.1:8000`; patience_seconds: how long a request is retried while the API does
        not answer.
    """

    def __init__(
        self, base_url: str, token: str | None = None, *, timeout_seconds: float = 60.0, patience_seconds: float = 10.0
    ) -> None:
        self._http = Transport(base_url, token, timeout_seconds=timeout_seconds, patience_seconds=patience_seconds)

    def close(self) -> None:
        """Closes the connections."""
        self._http.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def health(self) -> Health:
        """Returns the state of database, schema, engines and queues."""
        return Health.model_validate_json(self._http.get("/v1/health"))

    def upload_dataset(self, name: str, rows: Path | bytes | Iterable[Mapping[str, Any]]) -> Dataset:
        """Uploads a JSONL or JSON file, its bytes, or objects; an equal dataset of this name is returned."""
        content: Content
        if isinstance(rows, Path):
            content = file_chunks(rows)
        else:
            content = rows if isinstance(rows, bytes) else "\n".join(map(json.dumps, rows)).encode()
        body = self._http.create(
            "/v1/datasets", content, parameters={"name": name}, content_type="application/x-ndjson"
        )
        return Dataset.model_validate_json(body)

    def dataset(self, id_or_name: str) -> Dataset:
        """Returns a dataset by its id or name."""
        return Dataset.model_validate_json(self._http.get(f"/v1/datasets/{_part(id_or_name)}"))

    def datasets(self, *, name: str | None = None) -> Iterator[Dataset]:
        """Lists datasets, newest first."""
        return self._pages("/v1/datasets", Dataset, {"name": name})

    def tasks(self, dataset: str) -> Iterator[Task]:
        """Lists the tasks of a dataset in the order of its upload."""
        return self._pages(f"/v1/datasets/{_part(dataset)}/tasks", Task)

    def delete_dataset(self, id_or_name: str) -> None:
        """Deletes a dataset that no run uses."""
        self._http.delete(f"/v1/datasets/{_part(id_or_name)}")

    def create_run(self, config: RunConfig | Mapping[str, Any], *, key: str | None = None) -> Run:
        """Creates a run; it starts when an engine is free.

        Args: key: an idempotency key: repeating it with the same configuration returns the first answer
        """
        document = config.model_dump(mode="json") if isinstance(config, RunConfig) else dict(config)
        return Run.model_validate_json(self._http.create("/v1/runs", json.dumps(document).encode(), key=key))

    def run(self, run_id: str) -> Run:
        """Returns a run by its id."""
        return Run.model_validate_json(self._http.get(f"/v1/runs/{_part(run_id)}"))

    def find_run(self, id_or_name: str) -> Run:
        """Returns a run by its id, or the newest of this name.

        Raises: NotFound
        """
        try:
            return self.run(id_or_name)
        except NotFound:
            newest = next(self.runs(name=id_or_name), None)
            if newest is None:
                raise NotFound(f"no run has the id or name {id_or_name!r}: list runs to find it") from None
            return newest

    def runs(
        self,
        *,
        name: str | None = None,
        phase: str | None = None,
        dataset: str | None = None,
        sort: RunSort | None = None,
    ) -> Iterator[Run]:
        """Lists runs, newest first.

        Args: dataset: id or name: those that train on it, or evaluate a version on it; sort: `highest` and `lowest`
            are by the last step's reward
        """
        return self._pages("/v1/runs", Run, {"name": name, "phase": phase, "dataset": dataset, "sort": sort})

    def pause_run(self, run_id: str) -> Run:
        """Pauses a run: it starts no new rollouts, and running ones finish."""
        return self._ask(run_id, "pause")

    def resume_run(self, run_id: str) -> Run:
        """Resumes a paused run."""
        return self._ask(run_id, "resume")

    def continue_run(self, run_id: str, request: ResumeRequest, *, key: str | None = None) -> Run:
        """Continues an ended run as a new one, with an amended document; its further policies continue with it."""
        # An older platform refuses fields that it does not know.
        content = request.model_dump_json(exclude_defaults=True).encode()
        body = self._http.create(f"/v1/runs/{_part(run_id)}/resume", content, key=key)
        return Run.model_validate_json(body)

    def cancel_run(self, run_id: str) -> Run:
        """Cancels a run; a cancelled run cannot be resumed."""
        return self._ask(run_id, "cancel")

    def prune_run(self, run_id: str) -> PrunedRun:
        """Deletes the calls, spans, credits and samples of an ended run; this cannot be undone."""
        return PrunedRun.model_validate_json(self._http.post(f"/v1/runs/{_part(run_id)}/prune"))

    def delete_run(self, run_id: str) -> None:
        """Deletes an ended run with its records, weights and checkpoints; the controller does it within seconds."""
        self._http.delete(f"/v1/runs/{_part(run_id)}")

    def _ask(self, run_id: str, action: str) -> Run:
        return Run.model_validate_json(self._http.post(f"/v1/runs/{_part(run_id)}/{action}"))

    def evaluate_run(
        self, run_id: str, request: EvaluationRequest | None = None, *, key: str | None = None
    ) -> Evaluation:
        """Starts an evaluation of a policy version on a dataset; omitted fields default to the run's `evaluation`."""
        content = (request or EvaluationRequest()).model_dump_json().encode()
        body = self._http.create(f"/v1/runs/{_part(run_id)}/evaluations", content, key=key)
        return Evaluation.model_validate_json(body)

    def evaluations(self, run_id: str) -> Iterator[Evaluation]:
        """Lists the evaluations of a run with their results so far."""
        return self._pages(f"/v1/runs/{_part(run_id)}/evaluations", Evaluation)

    def evaluation(self, run_id: str, number: int) -> Evaluation:
        """Returns an evaluation with its results so far."""
        return Evaluation.model_validate_json(self._http.get(f"/v1/runs/{_part(run_id)}/evaluations/{number}"))

    def steps(self, run_id: str, *, policy: str | None = None) -> Iterator[Step]:
        """Lists the optimiser steps, oldest first.

        Args: policy: a further policy of the run; None for the run's own model
        """
        return self._pages(f"/v1/runs/{_part(run_id)}/steps", Step, {"policy": policy})

    def metrics(self, run_id: str, names: Sequence[str] = (), *, policy: str | None = None) -> Metrics:
        """Returns time series over the steps; all of them when `names` is empty.

        Args: policy: see `steps`
        """
        parameters: Parameters = {"names": list(names), "policy": policy}
        return Metrics.model_validate_json(self._http.get(f"/v1/runs/{_part(run_id)}/metrics", parameters))

    def alarms(
        self, run: str | None = None, *, name: str | None = None, state: str | None = None
    ) -> Iterator[ListedAlarm]:
        """Lists the alarms of all runs, or of one with its further policies: active ones first, ended ones too.

        Args: run: id or name; name: a rule, such as `tool_fails`; state: active, lasted (until its run's end) or ended
        """
        return self._pages("/v1/alarms", ListedAlarm, {"run": run, "name": name, "state": state})

    def compare_runs(self, run_ids: Sequence[str], names: Sequence[str] = ()) -> Comparison:
        """Compares runs with the first one.

        Args: names: series wanted; `reward_mean` when left out
        """
        parameters: Parameters = {"run": list(run_ids), "names": list(names)}
        return Comparison.model_validate_json(self._http.get("/v1/comparison", parameters))

    def curves(self, run_ids: Sequence[str]) -> list[RunCurve]:
        """Returns the reward over steps and the best version of each run; 100 runs a request."""
        asked = [run_ids[start : start + CURVES] for start in range(0, len(run_ids), CURVES)]
        answers = [self._http.get("/v1/curves", {"run": list(some)}) for some in asked]
        return [one for answer in answers for one in Page[RunCurve].model_validate_json(answer).items]

    def changes(self, run_id: str) -> Generator[tuple[str, ...], None, None]:
        """Gives the names of what changed in a run, without an end: `run`, `steps`, `evaluations`, `rollouts`.

        All names come at first, and then each change once, also over a restart of the API. None are named after 10 s
        without a change, and while the API is away. All names come every second while no stream comes through.
        """
        return run_changes(self._http, run_id)

    def agents(self, run_id: str) -> Iterator[RunAgent]:
        """Lists the agents that called the model, in the order of their first call."""
        return self._pages(f"/v1/runs/{_part(run_id)}/agents", RunAgent)

    def run_tasks(
        self,
        run_id: str,
        *,
        evaluation: str | None = None,
        verdict: str | None = None,
        sort: str | None = None,
    ) -> Iterator[RunTask]:
        """Lists the tasks of a run with what its versions earned on them; `evaluation="none"` selects training.

        Args: verdict: solved, unsolved, mixed or unknown; sort: number, highest, lowest, attempts or failure
        """
        parameters: Parameters = {"evaluation": evaluation, "verdict": verdict, "sort": sort}
        return self._pages(f"/v1/runs/{_part(run_id)}/tasks", RunTask, parameters)

    def policies(self, run_id: str, *, policy: str | None = None, kept: bool | None = None) -> Iterator[PolicyVersion]:
        """Lists the policy versions, from 0.

        Args: policy: see `steps`; kept: those alone whose files are there, or were removed
        """
        parameters: Parameters = {"policy": policy, "kept": kept}
        return self._pages(f"/v1/runs/{_part(run_id)}/policies", PolicyVersion, parameters)

    def version_files(self, run_id: str, version: int, *, policy: str | None = None) -> VersionFiles:
        """Returns the files of a policy version, or the reason why the API cannot read them.

        Args: policy: see `steps`
        """
        path = f"/v1/runs/{_part(run_id)}/policies/{version}/files"
        return VersionFiles.model_validate_json(self._http.get(path, {"policy": policy}))

    def download_version(self, run_id: str, version: int, to: Path, *, policy: str | None = None) -> Path:
        """Downloads a policy version as a Hugging Face folder, which has its name once its weights are checked.

        Args: to: the folder to make; policy: see `steps`
        Raises: Refused: the folder exists, or the weights are damaged; Conflict: the API has no files of the version
        """
        found = self.version_files(run_id, version, policy=policy)
        path = f"/v1/runs/{_part(run_id)}/policies/{version}/weights"
        with version_folder(to, found.content_sha256) as made, self._http.stream(path, {"policy": policy}) as chunks:
            unpack_version(chunks, made)
        return to

    def samples(
        self,
        run_id: str,
        *,
        policy: str | None = None,
        rollout: str | None = None,
        step: int | None = None,
        tokens: bool = False,
    ) -> Iterator[Sample]:
        """Lists samples: the token sequences of the loss.

        Args: policy: see `steps`
        """
        parameters: Parameters = {"policy": policy, "rollout": rollout, "step": step, "tokens": tokens}
        return self._pages(f"/v1/runs/{_part(run_id)}/samples", Sample, parameters)

    def rollouts(
        self,
        *,
        run: str | None = None,
        group: str | None = None,
        evaluation: str | None = None,
        state: str | None = None,
        step: int | None = None,
        version: int | None = None,
        task: int | None = None,
        agent: str | None = None,
        failed: bool | None = None,
        reward_min: float | None = None,
        reward_max: float | None = None,
        text: str | None = None,
        cause: str | None = None,
        role: str | None = None,
        tool: str | None = None,
        component: str | None = None,
        component_min: float | None = None,
        component_max: float | None = None,
        sort: str | None = None,
    ) -> Iterator[Rollout]:
        """Lists rollouts, newest first; `evaluation="none"` selects training rollouts.

        Args: agent: the one of the run's `agents` that played them; text: a part of the reason, the output, the task or
            an answer; cause: one of `causes`; role, tool: of one of its calls; these need `run`; component: one that
            has a value, from `component_min` to `component_max`; sort: newest, oldest, highest or lowest
        """
        parameters: Parameters = {
            "run": run,
            "group": group,
            "evaluation": evaluation,
            "state": state,
            "step": step,
            "version": version,
            "task": task,
            "agent": agent,
            "failed": failed,
            "reward_min": reward_min,
            "reward_max": reward_max,
            "text": text,
            "cause": cause,
            "role": role,
            "tool": tool,
            "component": component,
            "component_min": component_min,
            "component_max": component_max,
            "sort": sort,
        }
        return self._pages("/v1/rollouts", Rollout, parameters)

    def causes(self, run_id: str, *, evaluation: str | None = None) -> list[Cause]:
        """Lists why rollouts of a run were excluded, failed or taught nothing, the most frequent first.

        Args: evaluation: id of one, or `none` for training rollouts alone
        """
        answer = self._http.get(f"/v1/runs/{_part(run_id)}/causes", {"evaluation": evaluation})
        return Page[Cause].model_validate_json(answer).items

    def export(
        self,
        run_id: str,
        form: str,
        *,
        evaluation: str | None = None,
        step: int | None = None,
        version: int | None = None,
        task: int | None = None,
        failed: bool | None = None,
        reward_min: float | None = None,
        reward_max: float | None = None,
        text: str | None = None,
        role: str | None = None,
        policy: str | None = None,
        max_per_task: int | None = None,
    ) -> Export:
        """Finished rollouts as rows of JSON for other tools; iterate over it, and read its `left_out` afterwards.

        Args: form: atif, openai, trl, pairs, or parquet, whose `write_parquet` writes a file; evaluation: id of one,
            `none` for training rollouts alone, which is the default of openai, trl and pairs for a run that trains, or
            `all`; role, policy:
            conversations of one role, or of the roles that a further policy answers; max_per_task: the best rollouts of
            a task, or the groups with the best ones for pairs; the others: see `rollouts`
        Raises: Refused: the format or the policy does not exist
        """
        run, roles = self.run(run_id), None if role is None else {role}
        if policy is not None:
            if run.config is None:
                raise Refused(f"run {run_id} tells no roles of a policy: {run.reason}")
            served = {one.name for one in run.config.roles if one.policy == policy}
            if not served:
                raise Refused(f"no role of the run has the policy {policy!r}: choose one of `roles` in its document")
            roles = served if roles is None else roles & served
        if evaluation is None and form in FINE_TUNING and (run.config is None or run.config.training.steps):
            # A model that is tuned on held-out tasks would be measured on what it has seen.
            evaluation = "none"
        rollouts = self.rollouts(
            run=run_id,
            evaluation=None if evaluation == "all" else evaluation,
            state="finished",
            step=step,
            version=version,
            task=task,
            failed=failed,
            reward_min=reward_min,
            reward_max=reward_max,
            text=text,
            sort="oldest" if max_per_task is None and form != "pairs" else "highest",
        )
        return Export(form, rollouts, self._counted_calls, roles=roles, per_task=max_per_task)

    def _counted_calls(self, rollout: Rollout) -> Iterator[Call]:
        """The calls of the attempt that counts, each with what it adds."""
        return iter(()) if rollout.attempt is None else self.calls(rollout.id, attempt=rollout.attempt, whole=False)

    def group(self, group_id: str, *, calls: int = 50) -> Group:
        """Returns a group: its siblings with the parts of their rewards, and the first calls of each."""
        return Group.model_validate_json(self._http.get(f"/v1/groups/{_part(group_id)}", {"calls": calls}))

    def rollout(self, rollout_id: str) -> RolloutDetail:
        """Returns a rollout with its task, attempts, outcomes and rewards."""
        return RolloutDetail.model_validate_json(self._http.get(f"/v1/rollouts/{_part(rollout_id)}"))

    def calls(
        self, rollout_id: str, *, attempt: int | None = None, prompt: bool = False, whole: bool = True
    ) -> Iterator[Call]:
        """Lists the model calls of a rollout with their tokens and credit.

        Args: prompt: whether the prompt's token ids are given too; whole: whether each call has its whole conversation,
            or what it adds to that of the call `parent_call_id`
        """
        parameters: Parameters = {"attempt": attempt, "prompt": prompt, "conversation": "added"}
        chains = Chains()
        for call in self._pages(f"/v1/rollouts/{_part(rollout_id)}/calls", Call, parameters, page=CALL_PAGE):
            added = chains.add(call)
            yield chains.whole(added) if whole else added

    def call_tokens(self, rollout_id: str, call_id: str, *, start: int | None = None, limit: int = 500) -> CallTokens:
        """Returns a window of a call's tokens, from the first sampled one when `start` is left out."""
        path = f"/v1/rollouts/{_part(rollout_id)}/calls/{_part(call_id)}/tokens"
        return CallTokens.model_validate_json(self._http.get(path, {"start": start, "limit": limit}))

    def trajectory(self, rollout_id: str) -> Iterator[Transition]:
        """Lists the transitions of the attempt that counts, or else of the newest one, by time."""
        return self._pages(f"/v1/rollouts/{_part(rollout_id)}/trajectory", Transition, {}, page=CALL_PAGE)

    def artifact(self, rollout_id: str, path: str, *, attempt: int | None = None) -> bytes:
        """Returns a file that an agent left. Args: attempt: None for the one that counts"""
        parts = "/".join(map(_part, path.split("/")))
        return self._http.get(f"/v1/rollouts/{_part(rollout_id)}/artifacts/{parts}", {"attempt": attempt})

    def spans(self, rollout_id: str, *, attempt: int | None = None, kind: str | None = None) -> Iterator[Span]:
        """Lists the spans of a rollout by start time."""
        parameters: Parameters = {"attempt": attempt, "kind": kind}
        return self._pages(f"/v1/rollouts/{_part(rollout_id)}/spans", Span, parameters)

    def give_reward(self, rollout_id: str, request: RewardRequest) -> Reward:
        """Adds a reward of a person or an outside system; the request's key makes it idempotent."""
        body = self._http.create(f"/v1/rollouts/{_part(rollout_id)}/rewards", request.model_dump_json().encode())
        return Reward.model_validate_json(body)

    def rate(
        self, rollout_id: str, component: str, value: float, *, comment: str | None = None, key: str | None = None
    ) -> Feedback:
        """Gives a value to a component of a rollout's reward that is `from: feedback`.

        Args: key: makes a later repeat harmless; a new one when left out
        """
        request = FeedbackRequest(key=key or new_id("rating"), component=component, value=value, comment=comment)
        body = self._http.create(f"/v1/rollouts/{_part(rollout_id)}/feedback", request.model_dump_json().encode())
        return Feedback.model_validate_json(body)

    def waiting(self, run_id: str | None = None) -> Iterator[WaitingRollout]:
        """Lists rollouts that wait for people's grades, of one run or of all; those that ended first come first."""
        return self._pages("/v1/feedback", WaitingRollout, {"run": run_id}, page=CALL_PAGE)

    def platform(self) -> Platform:
        """Returns the services as the database sees them, the work that waits, and disk space."""
        return Platform.model_validate_json(self._http.get("/v1/platform"))

    def grade(self, rollout_id: str, reward: RewardConfig, *, against: str | None = None) -> Graded:
        """Grades a stored rollout with these components, and stores nothing. Judges and code may take minutes.

        Args: against: another rollout of its task, with which each `relative_model` compares it: 1, 0, or 0.5 for a tie
        """
        request = TrialRequest(reward=reward, against=against)
        path = f"/v1/rollouts/{_part(rollout_id)}/grades"
        body = self._http.create(path, request.model_dump_json().encode(), timeout_seconds=GRADE_SECONDS)
        return Graded.model_validate_json(body)

    def add_duel(
        self, run_id: str, evaluation: str, against: str, reward: RewardConfig, pairs: Sequence[DuelPair]
    ) -> Duel:
        """Stores the judged pairs of two evaluations, and returns their win rates.

        Args: run_id: the run of `evaluation`
        """
        request = DuelRequest(evaluation=evaluation, against=against, reward=reward, pairs=list(pairs))
        body = self._http.create(f"/v1/runs/{_part(run_id)}/duels", request.model_dump_json().encode())
        return Duel.model_validate_json(body)

    def duels(self, run_id: str) -> Iterator[Duel]:
        """Lists the duels of a run's evaluations, newest first."""
        return self._pages(f"/v1/runs/{_part(run_id)}/duels", Duel)

    def regrade(self, rollout_id: str, reward: RewardConfig) -> Regrade:
        """Grades a rollout again with these components, as its newest revision; the same grades again change nothing.
        Judges and code may take minutes."""
        request = GradeRequest(reward=reward)
        path = f"/v1/rollouts/{_part(rollout_id)}/regrades"
        body = self._http.create(path, request.model_dump_json().encode(), timeout_seconds=GRADE_SECONDS)
        return Regrade.model_validate_json(body)

    def attempt(
        self,
        run_id: str,
        *,
        agent_name: str | None = None,
        worker: str = "client",
        wait_seconds: float | None = None,
    ) -> Attempt:
        """An attempt for an agent in this process: `with client.attempt(run.id) as attempt:`, or `async with`.

        Args: agent_name: the one of the run's `agents` that plays it, where it has several; worker: a name for people,
            shown as its owner; wait_seconds: for a task; None: while the run goes on
        """
        return Attempt(self._http, run_id, agent_name=agent_name, worker=worker, wait_seconds=wait_seconds)

    def attempts(self, run_id: str, *, agent_name: str | None = None, worker: str = "client") -> Iterator[Attempt]:
        """Attempts until the run has ended, each for a `with` of its own. Args: as those of `attempt`"""
        return attempts_until(self._next_attempt(run_id, agent_name, worker), Event())

    def work(
        self,
        run_id: str,
        agent: Callable[[Attempt], Result],
        *,
        agent_name: str | None = None,
        at_once: int = 1,
        worker: str = "client",
    ) -> int:
        """Runs a function as the agent of a run on task after task until the run has ended; returns their number.

        Args: agent: returns its reward, its answer as text, or fields (`output`, `reward`, `rewards`, `facts`); an
            exception is the agent's failure, and so is a result that the API refuses; agent_name, worker: as those of
            `attempt`; at_once: threads
        Raises: RewardRefused: the agent gives a reward, and the run takes none: every further task would end so
        """
        return work(self._next_attempt(run_id, agent_name, worker), agent, at_once)

    def _next_attempt(self, run_id: str, agent_name: str | None, worker: str) -> Callable[[], Attempt]:
        return partial(self.attempt, run_id, agent_name=agent_name, worker=worker, wait_seconds=WAIT_SECONDS)

    def pools(self) -> Iterator[Pool]:
        """Lists the pools that runs may name, with their engines and runs."""
        return self._all_of("/v1/pools", Pool)

    def recipes(self) -> Iterator[Recipe]:
        """Lists the recipes that a run's document may begin with."""
        return self._all_of("/v1/recipes", Recipe)

    def engines(self) -> Iterator[Engine]:
        """Lists engines with the weights that they served at the last poll."""
        return self._all_of("/v1/engines", Engine)

    def create_token(self, name: str, scopes: Sequence[ApiScope], *, expires_seconds: int | None = None) -> IssuedToken:
        """Creates a bearer token; only this answer contains its secret."""
        request = TokenRequest(name=name, scopes=list(scopes), expires_seconds=expires_seconds)
        # An older platform refuses fields that it does not know.
        content = request.model_dump_json(exclude_none=True).encode()
        return IssuedToken.model_validate_json(self._http.create("/v1/tokens", content))

    def rotate_token(self, token_id: str, *, grace_seconds: int = 0) -> IssuedToken:
        """Replaces a token by a new one with its name, scopes and life; the old one ends after the grace."""
        content = RotateRequest(grace_seconds=grace_seconds).model_dump_json().encode()
        return IssuedToken.model_validate_json(self._http.create(f"/v1/tokens/{_part(token_id)}/rotate", content))

    def audit(
        self, *, token: str | None = None, action: str | None = None, subject: str | None = None
    ) -> Iterator[AuditEntry]:
        """Lists the changes that bearer tokens asked for, newest first."""
        parameters: Parameters = {"token": token, "action": action, "subject": subject}
        return self._pages("/v1/audit", AuditEntry, parameters)

    def tokens(self) -> Iterator[Token]:
        """Lists tokens without their secrets."""
        return self._all_of("/v1/tokens", Token)

    def revoke_token(self, token_id: str) -> None:
        """Revokes a token."""
        self._http.delete(f"/v1/tokens/{_part(token_id)}")

    def _all_of(self, path: str, model: type[Item]) -> Iterator[Item]:
        """Lists all items of an endpoint without pages."""
        yield from Page[model].model_validate_json(self._http.get(path)).items  # type: ignore[valid-type]  # as below

    def _pages(
        self, path: str, model: type[Item], parameters: Parameters | None = None, *, page: int = PAGE
    ) -> Iterator[Item]:
        cursor: str | None = None
        while True:
            body = self._http.get(path, {**(parameters or {}), "cursor": cursor, "limit": page})
            found = Page[model].model_validate_json(body)  # type: ignore[valid-type]  # a class made at run time
            yield from found.items
            cursor = found.next_cursor
            if cursor is None:
                return


def _part(text: str) -> str:
    """Quotes one segment of a path."""
    return quote(text, safe="")
