"""Every table of the first release."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.dialects import postgresql

revision = "20261121_0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "api_tokens",
        sa.Column("id", sa.Text(), nullable=False, comment="token-<random>; never secret."),
        sa.Column("name", sa.Text(), nullable=False, comment="What people call it."),
        sa.Column("token_sha256", sa.LargeBinary(), nullable=False, comment="The token itself is shown once."),
        sa.Column("scopes", sa.ARRAY(sa.Text()), nullable=False, comment="Subset of admin, write, read."),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
            comment="When the row was written (transaction time).",
        ),
        sa.Column(
            "revoked_at",
            sa.DateTime(timezone=True),
            nullable=True,
            comment="From then on it is refused; null while it is valid.",
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_api_tokens")),
        sa.UniqueConstraint("token_sha256", name=op.f("uq_api_tokens_token_sha256")),
        comment="Writer: api. A bearer token of the REST API; only its hash is kept.",
    )
    op.create_table(
        "credits",
        sa.Column("run_id", sa.Text(), nullable=False, comment="Partition key."),
        sa.Column("call_id", sa.Text(), nullable=False, comment="The model call."),
        sa.Column("rollout_id", sa.Text(), nullable=False, comment="Rollout of the call."),
        sa.Column(
            "parent_call_id", sa.Text(), nullable=True, comment="The call whose tokens this call's prompt begins with."
        ),
        sa.Column("depth", sa.Integer(), nullable=False, comment="Calls before it on its path."),
        sa.Column(
            "state_key", sa.Text(), nullable=False, comment="History of tools and statuses so far: GiGPO's anchor."
        ),
        sa.Column(
            "tools",
            postgresql.JSONB(astext_type=sa.Text()),
            nullable=False,
            comment="{calls: [{tool, status, source}]} that this call asked for.",
        ),
        sa.Column("intermediate_reward", sa.Double(), nullable=False, comment="AIR and explicit rewards of this call."),
        sa.Column("return", sa.Double(), nullable=False, comment="What the credit rule gives the call."),
        sa.Column("baseline", sa.Double(), nullable=False, comment="What was subtracted from the return."),
        sa.Column(
            "advantage",
            sa.Double(),
            nullable=False,
            comment="Return minus baseline, scaled where the baseline says so.",
        ),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
            comment="When the row was written (transaction time).",
        ),
        sa.PrimaryKeyConstraint("run_id", "call_id", name=op.f("pk_credits")),
        comment="Writer: credit. The credit of one model call, part by part. Partitioned by run.",
        postgresql_partition_by="LIST (run_id)",
    )
    op.create_index("ix_credits_rollout", "credits", ["rollout_id"], unique=False)
    op.create_table(
        "datasets",
        sa.Column("id", sa.Text(), nullable=False, comment="dataset-<random>."),
        sa.Column("name", sa.Text(), nullable=False, comment="Chosen by whoever uploaded it."),
        sa.Column(
            "content_sha256",
            sa.Text(),
            nullable=False,
            comment="Over the row hashes in order; an equal upload under the same name is a repeat.",
        ),
        sa.Column("task_count", sa.Integer(), nullable=False, comment="Number of its tasks."),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
            comment="When the row was written (transaction time).",
        ),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_datasets")),
        sa.UniqueConstraint("name", name=op.f("uq_datasets_name")),
        comment="Writer: api. A named, immutable list of tasks; the row exists only once every task is stored.",
    )
    op.create_table(
        "engines",
        sa.Column("url", sa.Text(), nullable=False, comment="Where it listens; its name."),
        sa.Column("run_id", sa.Text(), nullable=True, comment="Run whose weights it serves; null before the first."),
        sa.Column("policy_version", sa.Integer(), nullable=True, comment="Version it reported; null before the first."),
        sa.Column("state", sa.Text(), nullable=False, comment="serving, updating or unreachable."),
        sa.Column("detail", sa.Text(), nullable=True, comment="Cause, for people."),
        sa.Column(
            "updated_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
            comment="When it was last seen.",
        ),
        sa.CheckConstraint("state IN ('serving', 'updating', 'unreachable')", name=op.f("ck_engines_state_known")),
        sa.PrimaryKeyConstraint("url", name=op.f("pk_engines")),
        comment="Writer: controller. What an engine was last seen serving.",
    )
    op.create_table(
        "idempotency_keys",
        sa.Column("token_id", sa.Text(), nullable=False, comment="Who asked: keys of different tokens never meet."),
        sa.Column("key", sa.Text(), nullable=False, comment="The Idempotency-Key header."),
        sa.Column(
            "request_sha256",
            sa.LargeBinary(),
            nullable=False,
            comment="Of method, path and body: the key with another request is refused.",
        ),
        sa.Column("status_code", sa.Integer(), nullable=False, comment="Of the answer that the first request got."),
        sa.Column(
            "body",
            postgresql.JSONB(astext_type=sa.Text()),
            nullable=False,
            comment="The answer that the first request got.",
        ),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
            comment="When the row was written (transaction time).",
        ),
        sa.PrimaryKeyConstraint("token_id", "key", name=op.f("pk_idempotency_keys")),
        comment="Writer: api. The answer to a create request, kept so that a repeat gets the same and makes no second row.",
    )
    op.create_table(
        "model_calls",
        sa.Column("run_id", sa.Text(), nullable=False, comment="Partition key."),
        sa.Column(
            "id", sa.Text(), nullable=False, comment="c + 24 hex; the id in the answer is chatcmpl-<request_id>."
        ),
        sa.Column("rollout_id", sa.Text(), nullable=False, comment="From the path that the agent called."),
        sa.Column("attempt", sa.Integer(), nullable=False, comment="From the path that the agent called."),
        sa.Column("request_id", sa.Text(), nullable=False, comment="The id of the request's first choice."),
        sa.Column("choice", sa.Integer(), nullable=False, comment="Index among n choices."),
        sa.Column(
            "sequence",
            sa.BigInteger(),
            nullable=False,
            comment="Nanoseconds since the epoch at arrival: orders the calls of an attempt.",
        ),
        sa.Column("status", sa.Text(), nullable=False, comment="completed, aborted (the client hung up) or failed."),
        sa.Column("trainable", sa.Boolean(), nullable=False, comment="Whether its tokens may enter the loss."),
        sa.Column(
            "untrainable_reason",
            sa.Text(),
            nullable=True,
            comment="Parameters a trainer cannot reproduce, or how the call ended.",
        ),
        sa.Column(
            "request_sha256",
            sa.LargeBinary(),
            nullable=False,
            comment="Digest of the body: with a retry count it identifies an SDK's repeat.",
        ),
        sa.Column(
            "request",
            postgresql.JSONB(astext_type=sa.Text()),
            nullable=False,
            comment="The body without messages and tools: sampling parameters as sent.",
        ),
        sa.Column(
            "messages", postgresql.JSONB(astext_type=sa.Text()), nullable=False, comment="{messages, tools} as sent."
        ),
        sa.Column(
            "response",
            postgresql.JSONB(astext_type=sa.Text()),
            nullable=True,
            comment="The choice's message as answered; null when failed before one.",
        ),
        sa.Column("prompt_ids", sa.LargeBinary(), nullable=False, comment="int32[prompt_tokens]"),
        sa.Column("sampled_ids", sa.LargeBinary(), nullable=False, comment="int32[completion_tokens]"),
        sa.Column(
            "generator_logprobs",
            sa.LargeBinary(),
            nullable=False,
            comment="float32[completion_tokens], natural log, temperature-scaled, before top-k and top-p.",
        ),
        sa.Column(
            "policy_versions",
            sa.LargeBinary(),
            nullable=False,
            comment="int32[completion_tokens]: the version that sampled each token.",
        ),
        sa.Column("prompt_tokens", sa.Integer(), nullable=False, comment="Length of prompt_ids."),
        sa.Column("completion_tokens", sa.Integer(), nullable=False, comment="Length of sampled_ids."),
        sa.Column(
            "cached_tokens",
            sa.Integer(),
            nullable=False,
            comment="Of the prompt, served from the engine's prefix cache.",
        ),
        sa.Column("min_policy_version", sa.Integer(), nullable=True, comment="Over its tokens; null without any."),
        sa.Column("max_policy_version", sa.Integer(), nullable=True, comment="Over its tokens; null without any."),
        sa.Column("temperature", sa.Double(), nullable=False, comment="Effective."),
        sa.Column(
            "finish_reason", sa.Text(), nullable=True, comment="stop, length, tool_calls or abort; null when it failed."
        ),
        sa.Column("trace_id", sa.Text(), nullable=True, comment="From traceparent, hex."),
        sa.Column("parent_span_id", sa.Text(), nullable=True, comment="From traceparent, hex."),
        sa.Column(
            "queued_seconds", sa.Double(), nullable=False, comment="Arrival to the engine's acceptance, holds included."
        ),
        sa.Column("first_token_seconds", sa.Double(), nullable=True, comment="Arrival to the first token."),
        sa.Column("total_seconds", sa.Double(), nullable=False, comment="Arrival to the last token."),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
            comment="When the row was written (transaction time).",
        ),
        sa.CheckConstraint("status IN ('completed', 'aborted', 'failed')", name=op.f("ck_model_calls_status_known")),
        sa.PrimaryKeyConstraint("run_id", "id", name=op.f("pk_model_calls")),
        comment="Writer: gateway. One request to the model, as sampled; durable before its last byte leaves. Partitioned by run. One row per choice: a request with n > 1 writes n rows that share `request_id`.",
        postgresql_partition_by="LIST (run_id)",
    )
    op.create_index("ix_model_calls_rollout", "model_calls", ["rollout_id", "attempt", "sequence"], unique=False)
    op.create_table(
        "outcomes",
        sa.Column("rollout_id", sa.Text(), nullable=False, comment="Rollout of the attempt."),
        sa.Column("attempt", sa.Integer(), nullable=False, comment="Number of the attempt."),
        sa.Column("run_id", sa.Text(), nullable=False, comment="Run of the rollout."),
        sa.Column(
            "kind",
            sa.Text(),
            nullable=False,
            comment="succeeded, agent_error, timeout, infra_error or cancelled; infra_error never carries a reward.",
        ),
        sa.Column("reward", sa.Double(), nullable=True, comment="From the last JSON line; null where none was given."),
        sa.Column(
            "facts",
            postgresql.JSONB(astext_type=sa.Text()),
            nullable=False,
            comment="The whole last JSON line: what the agent's grader reports beside the reward.",
        ),
        sa.Column("exit_code", sa.Integer(), nullable=True, comment="Negative: killed by that signal."),
        sa.Column("detail", sa.Text(), nullable=True, comment="Cause, for people."),
        sa.Column("stdout_tail", sa.Text(), nullable=False, comment="The end of what the agent printed."),
        sa.Column("stderr_tail", sa.Text(), nullable=False, comment="The end of what the agent printed."),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
            comment="When the row was written (transaction time).",
        ),
        sa.CheckConstraint(
            "kind IN ('succeeded', 'agent_error', 'timeout', 'infra_error', 'cancelled')",
            name=op.f("ck_outcomes_kind_known"),
        ),
        sa.CheckConstraint("reward > '-Infinity' AND reward < 'Infinity'", name=op.f("ck_outcomes_reward_finite")),
        sa.PrimaryKeyConstraint("rollout_id", "attempt", name=op.f("pk_outcomes")),
        comment="Writer: runner, in the transaction that settles the attempt.",
    )
    op.create_index(op.f("ix_outcomes_run_id_created_at"), "outcomes", ["run_id", "created_at"], unique=False)
    op.create_table(
        "rewards",
        sa.Column("rollout_id", sa.Text(), nullable=False, comment="From the path that the agent called."),
        sa.Column("attempt", sa.Integer(), nullable=False, comment="From the path that the agent called."),
        sa.Column("key", sa.Text(), nullable=False, comment="Sender's key, or trace:span:position for telemetry."),
        sa.Column("run_id", sa.Text(), nullable=False, comment="Run of the rollout."),
        sa.Column("source", sa.Text(), nullable=False, comment="door or telemetry."),
        sa.Column("name", sa.Text(), nullable=False, comment="What is rewarded."),
        sa.Column("value", sa.Double(), nullable=False, comment="Finite."),
        sa.Column(
            "response_id", sa.Text(), nullable=True, comment="The model answer it is for; null for the whole rollout."
        ),
        sa.Column(
            "tool_call_id",
            sa.Text(),
            nullable=True,
            comment="The tool call it is for; null for a whole call or rollout.",
        ),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
            comment="When the row was written (transaction time).",
        ),
        sa.CheckConstraint("value > '-Infinity' AND value < 'Infinity'", name=op.f("ck_rewards_value_finite")),
        sa.PrimaryKeyConstraint("rollout_id", "attempt", "key", name=op.f("pk_rewards")),
        comment="Writer: collector. A reward that the attempt's telemetry or its reward door gave. A repeat changes nothing.",
    )
    op.create_table(
        "samples",
        sa.Column("run_id", sa.Text(), nullable=False, comment="Partition key."),
        sa.Column("id", sa.Text(), nullable=False, comment="<rollout>:<branch>"),
        sa.Column("group_id", sa.Text(), nullable=False, comment="Group of the rollout."),
        sa.Column("rollout_id", sa.Text(), nullable=False, comment="Rollout of the path."),
        sa.Column(
            "branch", sa.Integer(), nullable=False, comment="Index of the leaf among the rollout's paths, from 0."
        ),
        sa.Column("length", sa.Integer(), nullable=False, comment="T"),
        sa.Column("trained_tokens", sa.Integer(), nullable=False, comment="Tokens with mask 1."),
        sa.Column("token_ids", sa.LargeBinary(), nullable=False, comment="int32[T]"),
        sa.Column(
            "mask",
            sa.LargeBinary(),
            nullable=False,
            comment="uint8[T]: 1 where the policy sampled the token and this row trains it.",
        ),
        sa.Column("generator_logprobs", sa.LargeBinary(), nullable=False, comment="float32[T]; 0 where mask is 0."),
        sa.Column("advantages", sa.LargeBinary(), nullable=False, comment="float32[T]; 0 where mask is 0."),
        sa.Column("temperatures", sa.LargeBinary(), nullable=False, comment="float32[T]; 1 where mask is 0."),
        sa.Column("policy_versions", sa.LargeBinary(), nullable=False, comment="int32[T]; -1 where mask is 0."),
        sa.Column(
            "min_policy_version",
            sa.Integer(),
            nullable=False,
            comment="Over its trained tokens: what its lag is measured by.",
        ),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
            comment="When the row was written (transaction time).",
        ),
        sa.PrimaryKeyConstraint("run_id", "id", name=op.f("pk_samples")),
        comment="Writer: credit. One root-to-leaf path of a rollout's call forest, ready for the loss. Partitioned by run. Every sampled token of a rollout has mask 1 in exactly one row.",
        postgresql_partition_by="LIST (run_id)",
    )
    op.create_index("ix_samples_group", "samples", ["group_id"], unique=False)
    op.create_table(
        "spans",
        sa.Column("run_id", sa.Text(), nullable=False, comment="Partition key."),
        sa.Column("rollout_id", sa.Text(), nullable=False, comment="From the path that the agent called."),
        sa.Column("attempt", sa.Integer(), nullable=False, comment="From the path that the agent called."),
        sa.Column("trace_id", sa.Text(), nullable=False, comment="Hex."),
        sa.Column("span_id", sa.Text(), nullable=False, comment="Hex."),
        sa.Column("parent_span_id", sa.Text(), nullable=True, comment="Hex; null for a root."),
        sa.Column("name", sa.Text(), nullable=False, comment="As the agent's instrumentation named it."),
        sa.Column("kind", sa.Text(), nullable=False, comment="llm, tool, agent, reward or other."),
        sa.Column("tool", sa.Text(), nullable=True, comment="Name of the tool, for kind tool."),
        sa.Column("status", sa.Text(), nullable=False, comment="ok, error or unset."),
        sa.Column("error_type", sa.Text(), nullable=True, comment="Class of the error; null without one."),
        sa.Column(
            "tool_call_id",
            sa.Text(),
            nullable=True,
            comment="The call's id as the model's answer gave it; null where the span tells none.",
        ),
        sa.Column(
            "response_id",
            sa.Text(),
            nullable=True,
            comment="The model answer that asked for it: joins the span to its call.",
        ),
        sa.Column(
            "start_ns", sa.BigInteger(), nullable=False, comment="Nanoseconds since the epoch, by the agent's clock."
        ),
        sa.Column(
            "end_ns", sa.BigInteger(), nullable=False, comment="Nanoseconds since the epoch, by the agent's clock."
        ),
        sa.Column("scope", sa.Text(), nullable=True, comment="Instrumentation scope."),
        sa.Column(
            "attributes", postgresql.JSONB(astext_type=sa.Text()), nullable=False, comment="As sent, long values cut."
        ),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
            comment="When the row was written (transaction time).",
        ),
        sa.CheckConstraint("status IN ('ok', 'error', 'unset')", name=op.f("ck_spans_status_known")),
        sa.PrimaryKeyConstraint("run_id", "rollout_id", "attempt", "trace_id", "span_id", name=op.f("pk_spans")),
        comment="Writer: collector. One OpenTelemetry span; a re-sent one changes nothing. Partitioned by run.",
        postgresql_partition_by="LIST (run_id)",
    )
    op.create_table(
        "state_transitions",
        sa.Column("entity", sa.Text(), nullable=False, comment="run, group, rollout or attempt."),
        sa.Column("from_state", sa.Text(), nullable=False, comment="A state the entity may leave."),
        sa.Column("to_state", sa.Text(), nullable=False, comment="A state that may follow it."),
        sa.PrimaryKeyConstraint("entity", "from_state", "to_state", name=op.f("pk_state_transitions")),
        comment="Writer: migrations. Which state may follow which (libs.contracts.states); triggers refuse every other change.",
    )
    op.create_table(
        "step_samples",
        sa.Column("run_id", sa.Text(), nullable=False, comment="Run of the step."),
        sa.Column("sample_id", sa.Text(), nullable=False, comment="Id of the row in samples."),
        sa.Column("step", sa.Integer(), nullable=False, comment="Number of the step."),
        sa.PrimaryKeyConstraint("run_id", "sample_id", name=op.f("pk_step_samples")),
        comment="Writer: trainer. A sample that a step's loss saw: the primary key is the promise of exactly once.",
    )
    op.create_index(op.f("ix_step_samples_run_id_step"), "step_samples", ["run_id", "step"], unique=False)
    op.create_table(
        "runs",
        sa.Column("id", sa.Text(), nullable=False, comment="run-<random>; groups, rollouts and samples begin with it."),
        sa.Column("name", sa.Text(), nullable=False, comment="Chosen by whoever made it."),
        sa.Column(
            "config",
            postgresql.JSONB(astext_type=sa.Text()),
            nullable=False,
            comment="libs.contracts.config.RunConfig.",
        ),
        sa.Column("dataset_id", sa.Text(), nullable=False, comment="Its training tasks."),
        sa.Column(
            "intent",
            sa.Text(),
            nullable=False,
            comment="running, paused or cancelled: what the controller works towards.",
        ),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
            comment="When the row was written (transaction time).",
        ),
        sa.CheckConstraint("intent IN ('running', 'paused', 'cancelled')", name=op.f("ck_runs_intent_known")),
        sa.ForeignKeyConstraint(["dataset_id"], ["datasets.id"], name=op.f("fk_runs_dataset_id_datasets")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_runs")),
        comment="Writer: api. What people want: the document of a training job and whether it should be running.",
    )
    op.create_index(op.f("ix_runs_created_at_id"), "runs", ["created_at", "id"], unique=False)
    op.create_table(
        "tasks",
        sa.Column("dataset_id", sa.Text(), nullable=False, comment="Dataset it belongs to."),
        sa.Column("number", sa.Integer(), nullable=False, comment="Position in the upload, from 0."),
        sa.Column("row_sha256", sa.LargeBinary(), nullable=False, comment="Digest of the row as uploaded."),
        sa.Column(
            "payload",
            postgresql.JSONB(astext_type=sa.Text()),
            nullable=False,
            comment="The row as uploaded; what the agent finds in LEYDEN_TASK.",
        ),
        sa.ForeignKeyConstraint(
            ["dataset_id"], ["datasets.id"], name=op.f("fk_tasks_dataset_id_datasets"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("dataset_id", "number", name=op.f("pk_tasks")),
        comment="Writer: api. One row of a dataset.",
    )
    op.create_table(
        "evaluations",
        sa.Column("id", sa.Text(), nullable=False, comment="<run>.e<number>"),
        sa.Column("run_id", sa.Text(), nullable=False, comment="Run whose policy is measured."),
        sa.Column("number", sa.Integer(), nullable=False, comment="From 1 within the run."),
        sa.Column("dataset_id", sa.Text(), nullable=False, comment="Held-out tasks."),
        sa.Column(
            "policy_version", sa.Integer(), nullable=True, comment="Null: the last version, once training has ended."
        ),
        sa.Column("rollouts_per_task", sa.Integer(), nullable=False, comment="Siblings per task."),
        sa.Column("max_tasks", sa.Integer(), nullable=True, comment="Only the first so many tasks; null for all."),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
            comment="When the row was written (transaction time).",
        ),
        sa.ForeignKeyConstraint(["dataset_id"], ["datasets.id"], name=op.f("fk_evaluations_dataset_id_datasets")),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_evaluations_run_id_runs")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_evaluations")),
        sa.UniqueConstraint("run_id", "number", name=op.f("uq_evaluations_run_id_number")),
        comment="Writer: api. A wish to measure one policy version on a dataset; its groups are made by controller.",
    )
    op.create_table(
        "policy_versions",
        sa.Column("run_id", sa.Text(), nullable=False, comment="Run that made it."),
        sa.Column("version", sa.Integer(), nullable=False, comment="0 is the base model."),
        sa.Column("path", sa.Text(), nullable=False, comment="Hugging Face folder, as trainer and engines see it."),
        sa.Column("content_sha256", sa.Text(), nullable=False, comment="Over the weight files."),
        sa.Column("size_bytes", sa.BigInteger(), nullable=False, comment="Sum over its weight files."),
        sa.Column(
            "pruned_at",
            sa.DateTime(timezone=True),
            nullable=True,
            comment="When the files were removed by the keep policy.",
        ),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
            comment="When the row was written (transaction time).",
        ),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_policy_versions_run_id_runs")),
        sa.PrimaryKeyConstraint("run_id", "version", name=op.f("pk_policy_versions")),
        comment="Writer: trainer. Weights that can be served; versions of a run have no gaps.",
    )
    op.create_table(
        "run_status",
        sa.Column("run_id", sa.Text(), nullable=False, comment="The run."),
        sa.Column(
            "phase",
            sa.Text(),
            nullable=False,
            comment="pending → cancelled, evaluating, failed, paused, running; running → cancelled, completed, evaluating, failed, paused; paused → cancelled, evaluating, failed, running; evaluating → cancelled, completed, failed, paused, running; completed → evaluating; failed → cancelled, running; cancelled → nothing",
        ),
        sa.Column("reason", sa.Text(), nullable=True, comment="Why it failed or waits, for people."),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=True, comment="First time it ran."),
        sa.Column(
            "finished_at",
            sa.DateTime(timezone=True),
            nullable=True,
            comment="When it completed, failed or was cancelled.",
        ),
        sa.Column(
            "updated_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
            comment="When the phase last changed.",
        ),
        sa.CheckConstraint(
            "phase IN ('pending', 'running', 'paused', 'evaluating', 'completed', 'failed', 'cancelled')",
            name=op.f("ck_run_status_phase_known"),
        ),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_run_status_run_id_runs")),
        sa.PrimaryKeyConstraint("run_id", name=op.f("pk_run_status")),
        comment="Writer: controller. Where a run is.",
    )
    op.create_table(
        "steps",
        sa.Column("run_id", sa.Text(), nullable=False, comment="Run that is trained."),
        sa.Column(
            "number", sa.Integer(), nullable=False, comment="From 1; makes the policy version of the same number."
        ),
        sa.Column(
            "metrics",
            postgresql.JSONB(astext_type=sa.Text()),
            nullable=False,
            comment="Name to number: loss, gradient norm, kl, gaps, tokens, seconds per phase.",
        ),
        sa.Column(
            "checkpoint", sa.Text(), nullable=False, comment="Folder of optimiser state, RNG and high-water mark."
        ),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False, comment="When its samples were loaded."),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
            comment="When the row was written (transaction time).",
        ),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_steps_run_id_runs")),
        sa.PrimaryKeyConstraint("run_id", "number", name=op.f("pk_steps")),
        comment="Writer: trainer. One optimiser step, in one transaction with what it consumed and the version it made.",
    )
    op.create_table(
        "groups",
        sa.Column("id", sa.Text(), nullable=False, comment="<run or evaluation>.<number>"),
        sa.Column("run_id", sa.Text(), nullable=False, comment="Run it is sampled for."),
        sa.Column("evaluation_id", sa.Text(), nullable=True, comment="Null for training."),
        sa.Column("number", sa.Integer(), nullable=False, comment="From 0 within the run or the evaluation."),
        sa.Column("dataset_id", sa.Text(), nullable=False, comment="Dataset of its task."),
        sa.Column("task_number", sa.Integer(), nullable=False, comment="Its task within the dataset."),
        sa.Column("size", sa.Integer(), nullable=False, comment="Siblings."),
        sa.Column(
            "admitted_version",
            sa.Integer(),
            nullable=False,
            comment="Policy version that engines served when the group was admitted.",
        ),
        sa.Column(
            "state",
            sa.Text(),
            nullable=False,
            comment="open → cancelled, complete; complete → nothing; cancelled → nothing",
        ),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
            comment="When the row was written (transaction time).",
        ),
        sa.Column(
            "finished_at", sa.DateTime(timezone=True), nullable=True, comment="When it became complete or cancelled."
        ),
        sa.CheckConstraint("state IN ('open', 'complete', 'cancelled')", name=op.f("ck_groups_state_known")),
        sa.ForeignKeyConstraint(
            ["evaluation_id"], ["evaluations.id"], name=op.f("fk_groups_evaluation_id_evaluations")
        ),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_groups_run_id_runs")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_groups")),
        sa.UniqueConstraint(
            "run_id",
            "evaluation_id",
            "number",
            name=op.f("uq_groups_run_id_evaluation_id_number"),
            postgresql_nulls_not_distinct=True,
        ),
        comment="Writer: controller. The siblings sampled for one task: the unit of a baseline.",
    )
    op.create_index(op.f("ix_groups_run_id_created_at"), "groups", ["run_id", "created_at"], unique=False)
    op.create_index("ix_groups_run_open", "groups", ["run_id"], unique=False, postgresql_where="state = 'open'")
    op.create_table(
        "group_credits",
        sa.Column("group_id", sa.Text(), nullable=False, comment="The complete group."),
        sa.Column("run_id", sa.Text(), nullable=False, comment="Run of the group."),
        sa.Column("verdict", sa.Text(), nullable=False, comment="credited, or excluded and its task sampled again."),
        sa.Column("reason", sa.Text(), nullable=True, comment="Why a group was excluded."),
        sa.Column(
            "credit_version",
            sa.Integer(),
            nullable=False,
            comment="Grows when the credit code changes what it computes.",
        ),
        sa.Column(
            "counted_siblings", sa.Integer(), nullable=False, comment="Finished siblings, whose rewards were compared."
        ),
        sa.Column(
            "has_variance",
            sa.Boolean(),
            nullable=False,
            comment="False: every advantage is zero and nothing can be learned.",
        ),
        sa.Column(
            "min_policy_version",
            sa.Integer(),
            nullable=True,
            comment="Over the trained tokens of its samples; null without samples.",
        ),
        sa.Column("reward_mean", sa.Double(), nullable=True, comment="Over counted siblings."),
        sa.Column("reward_std", sa.Double(), nullable=True, comment="Over counted siblings, unbiased."),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
            comment="When the row was written (transaction time).",
        ),
        sa.CheckConstraint("verdict IN ('credited', 'excluded')", name=op.f("ck_group_credits_verdict_known")),
        sa.ForeignKeyConstraint(["group_id"], ["groups.id"], name=op.f("fk_group_credits_group_id_groups")),
        sa.PrimaryKeyConstraint("group_id", name=op.f("pk_group_credits")),
        comment="Writer: credit. What became of a complete training group; its samples are written in the same transaction.",
    )
    op.create_index(op.f("ix_group_credits_run_id_created_at"), "group_credits", ["run_id", "created_at"], unique=False)
    op.create_table(
        "rollouts",
        sa.Column("id", sa.Text(), nullable=False, comment="<group>.<sibling>"),
        sa.Column("run_id", sa.Text(), nullable=False, comment="Run it is sampled for."),
        sa.Column("group_id", sa.Text(), nullable=False, comment="Its group."),
        sa.Column("sibling", sa.Integer(), nullable=False, comment="From 0 within the group."),
        sa.Column(
            "state",
            sa.Text(),
            nullable=False,
            comment="queued → cancelled, excluded, finished; finished → nothing; excluded → nothing; cancelled → nothing",
        ),
        sa.Column(
            "attempt", sa.Integer(), nullable=True, comment="The attempt whose outcome counts; null until finished."
        ),
        sa.Column("reward", sa.Double(), nullable=True, comment="The outcome's reward; null unless finished."),
        sa.Column("reason", sa.Text(), nullable=True, comment="Outcome kind, or why it was excluded or cancelled."),
        sa.Column("trace_parent", sa.Text(), nullable=True, comment="W3C trace context of the admission."),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
            comment="When the row was written (transaction time).",
        ),
        sa.Column(
            "finished_at",
            sa.DateTime(timezone=True),
            nullable=True,
            comment="When it became finished, excluded or cancelled.",
        ),
        sa.CheckConstraint(
            "state IN ('queued', 'finished', 'excluded', 'cancelled')", name=op.f("ck_rollouts_state_known")
        ),
        sa.ForeignKeyConstraint(["group_id"], ["groups.id"], name=op.f("fk_rollouts_group_id_groups")),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_rollouts_run_id_runs")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_rollouts")),
        sa.UniqueConstraint("group_id", "sibling", name=op.f("uq_rollouts_group_id_sibling")),
        comment="Writer: controller. One sibling; its executions are attempts.",
    )
    op.create_index(
        "ix_rollouts_queued", "rollouts", ["run_id", "created_at"], unique=False, postgresql_where="state = 'queued'"
    )
    op.create_index(op.f("ix_rollouts_run_id_created_at_id"), "rollouts", ["run_id", "created_at", "id"], unique=False)
    op.create_table(
        "step_groups",
        sa.Column("group_id", sa.Text(), nullable=False, comment="The credited group."),
        sa.Column("run_id", sa.Text(), nullable=False, comment="Run of the group."),
        sa.Column("step", sa.Integer(), nullable=True, comment="Null for a group refused as stale."),
        sa.Column(
            "verdict",
            sa.Text(),
            nullable=False,
            comment="trained, no_variance (counted, nothing to learn) or stale (refused).",
        ),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
            comment="When the row was written (transaction time).",
        ),
        sa.CheckConstraint("verdict IN ('trained', 'no_variance', 'stale')", name=op.f("ck_step_groups_verdict_known")),
        sa.ForeignKeyConstraint(["group_id"], ["groups.id"], name=op.f("fk_step_groups_group_id_groups")),
        sa.PrimaryKeyConstraint("group_id", name=op.f("pk_step_groups")),
        comment="Writer: trainer. What became of a credited group: at most one verdict, in the step's transaction.",
    )
    op.create_index(op.f("ix_step_groups_run_id_step"), "step_groups", ["run_id", "step"], unique=False)
    op.create_table(
        "attempts",
        sa.Column("rollout_id", sa.Text(), nullable=False, comment="Rollout that is executed."),
        sa.Column("number", sa.Integer(), nullable=False, comment="From 1."),
        sa.Column("run_id", sa.Text(), nullable=False, comment="Run of the rollout."),
        sa.Column(
            "state",
            sa.Text(),
            nullable=False,
            comment="leased → expired, running, settled; running → expired, settled; settled → nothing; expired → nothing",
        ),
        sa.Column("lease_id", sa.Text(), nullable=False, comment="Fence: settling and heartbeats must name it."),
        sa.Column("owner", sa.Text(), nullable=False, comment="Runner process that holds the lease."),
        sa.Column(
            "lease_expires_at",
            sa.DateTime(timezone=True),
            nullable=False,
            comment="Pushed on by heartbeats; afterwards the attempt may be expired.",
        ),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
            comment="When the row was written (transaction time).",
        ),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=True, comment="When the agent was started."),
        sa.Column("finished_at", sa.DateTime(timezone=True), nullable=True, comment="When it was settled or expired."),
        sa.CheckConstraint(
            "state IN ('leased', 'running', 'settled', 'expired')", name=op.f("ck_attempts_state_known")
        ),
        sa.ForeignKeyConstraint(["rollout_id"], ["rollouts.id"], name=op.f("fk_attempts_rollout_id_rollouts")),
        sa.PrimaryKeyConstraint("rollout_id", "number", name=op.f("pk_attempts")),
        sa.UniqueConstraint("lease_id", name=op.f("uq_attempts_lease_id")),
        comment="Writer: runner, through libs/queue. One execution of a rollout, which is also its lease, fenced by `lease_id`.",
    )
    op.create_index(
        "ix_attempts_expiry",
        "attempts",
        ["lease_expires_at"],
        unique=False,
        postgresql_where="state IN ('leased', 'running')",
    )
    op.create_index(
        "uq_attempts_live", "attempts", ["rollout_id"], unique=True, postgresql_where="state IN ('leased', 'running')"
    )
    op.create_table(
        "external_rewards",
        sa.Column("rollout_id", sa.Text(), nullable=False, comment="Rollout it is for."),
        sa.Column("key", sa.Text(), nullable=False, comment="Idempotency key given by the sender."),
        sa.Column("name", sa.Text(), nullable=False, comment="What is rewarded."),
        sa.Column("value", sa.Double(), nullable=False, comment="Finite."),
        sa.Column("call_id", sa.Text(), nullable=True, comment="The model call it is for; null for the whole rollout."),
        sa.Column("comment", sa.Text(), nullable=True, comment="Words of whoever gave it."),
        sa.Column(
            "created_at",
            sa.DateTime(timezone=True),
            server_default=sa.text("now()"),
            nullable=False,
            comment="When the row was written (transaction time).",
        ),
        sa.CheckConstraint("value > '-Infinity' AND value < 'Infinity'", name=op.f("ck_external_rewards_value_finite")),
        sa.ForeignKeyConstraint(["rollout_id"], ["rollouts.id"], name=op.f("fk_external_rewards_rollout_id_rollouts")),
        sa.PrimaryKeyConstraint("rollout_id", "key", name=op.f("pk_external_rewards")),
        comment="Writer: api. A reward given by a person or an outside system. A repeat with the same key changes nothing.",
    )


def downgrade() -> None:
    op.drop_table("external_rewards")
    op.drop_index("uq_attempts_live", table_name="attempts", postgresql_where="state IN ('leased', 'running')")
    op.drop_index("ix_attempts_expiry", table_name="attempts", postgresql_where="state IN ('leased', 'running')")
    op.drop_table("attempts")
    op.drop_index(op.f("ix_step_groups_run_id_step"), table_name="step_groups")
    op.drop_table("step_groups")
    op.drop_index(op.f("ix_rollouts_run_id_created_at_id"), table_name="rollouts")
    op.drop_index("ix_rollouts_queued", table_name="rollouts", postgresql_where="state = 'queued'")
    op.drop_table("rollouts")
    op.drop_index(op.f("ix_group_credits_run_id_created_at"), table_name="group_credits")
    op.drop_table("group_credits")
    op.drop_index("ix_groups_run_open", table_name="groups", postgresql_where="state = 'open'")
    op.drop_index(op.f("ix_groups_run_id_created_at"), table_name="groups")
    op.drop_table("groups")
    op.drop_table("steps")
    op.drop_table("run_status")
    op.drop_table("policy_versions")
    op.drop_table("evaluations")
    op.drop_table("tasks")
    op.drop_index(op.f("ix_runs_created_at_id"), table_name="runs")
    op.drop_table("runs")
    op.drop_index(op.f("ix_step_samples_run_id_step"), table_name="step_samples")
    op.drop_table("step_samples")
    op.drop_table("state_transitions")
    op.drop_table("spans")
    op.drop_index("ix_samples_group", table_name="samples")
    op.drop_table("samples")
    op.drop_table("rewards")
    op.drop_index(op.f("ix_outcomes_run_id_created_at"), table_name="outcomes")
    op.drop_table("outcomes")
    op.drop_index("ix_model_calls_rollout", table_name="model_calls")
    op.drop_table("model_calls")
    op.drop_table("idempotency_keys")
    op.drop_table("engines")
    op.drop_table("datasets")
    op.drop_index("ix_credits_rollout", table_name="credits")
    op.drop_table("credits")
    op.drop_table("api_tokens")
