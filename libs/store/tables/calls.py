"""The calls of agents to the model, token by token, and the spans of their telemetry."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    ForeignKey,
    Index,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.orm import Mapped, mapped_column

from leyden.libs.contracts.states import (
    CallStatus,
    SpanStatus,
)
from leyden.libs.store.tables.base import Base, Json, created, one_of

CALLED_TOOLS = """jsonb_path_query_array(answer, '$."tool_calls"[*]."name"'::jsonpath)"""
"""SQL over `model_calls`: the names of the tools that an answer calls, as their index has them."""
SPAN_TOOL = '"left"(tool, 200)'
"""SQL over `spans`: the beginning of a tool's name, as their index has it; an index holds no text of any length."""


class ModelCall(Base):
    """Writer: gateway. One choice of one request to the model, as sampled; durable before its last byte leaves.
    Partitioned by run.

    A request for n choices writes n rows that share `request_id`. A row that names a parent call stores only what it
    adds to it.
    """

    __tablename__ = "model_calls"
    run_id: Mapped[str] = mapped_column(primary_key=True, comment="Partition key.")
    id: Mapped[str] = mapped_column(primary_key=True, comment="c and 24 hex digits.")
    rollout_id: Mapped[str] = mapped_column(comment="From the path that the agent called.")
    attempt: Mapped[int] = mapped_column(comment="From the path that the agent called.")
    request_id: Mapped[str] = mapped_column(comment="The id of the request's first choice.")
    choice: Mapped[int] = mapped_column(comment="Index among the choices of the request.")
    sequence: Mapped[int] = mapped_column(
        BigInteger, comment="Arrival in nanoseconds since the epoch: orders the calls of an attempt."
    )
    status: Mapped[str] = mapped_column(
        comment="completed, aborted (the client hung up), failed, or refused (the request is at fault)."
    )
    trainable: Mapped[bool] = mapped_column(Boolean, comment="True when the loss may see its tokens.")
    untrainable_reason: Mapped[str | None] = mapped_column(
        comment="The parameters that a trainer cannot reproduce, or how the call ended."
    )
    masks_forced: Mapped[bool] = mapped_column(
        Boolean,
        server_default="false",
        comment="True when a grammar constrained the answer and tokens that it left no choice do not train.",
    )
    request_sha256: Mapped[bytes] = mapped_column(
        comment="Digest of the body; the gateway recognises the retry of an SDK by it."
    )
    dialect: Mapped[str] = mapped_column(comment="The wire format that the agent spoke.")
    request: Mapped[Json] = mapped_column(
        comment="The parameters of the request: its body without conversation and tools."
    )
    parent_call_id: Mapped[str | None] = mapped_column(
        comment="An earlier call of the same attempt whose beginning this row shares; null where the row is complete."
    )
    shared_turns: Mapped[int] = mapped_column(
        server_default="0",
        comment="The conversation begins with this many turns of the parent: its turns, then its answer.",
    )
    shared_tokens: Mapped[int] = mapped_column(
        server_default="0",
        comment="The prompt begins with this many tokens of the parent: its prompt, then its sampled tokens.",
    )
    turns: Mapped[list[Json]] = mapped_column(
        JSONB,
        comment="The turns of the conversation after the shared ones:"
        " [{role, content, name, tool_calls, tool_call_id}].",
    )
    # JSONB would reorder the members, and a chat template writes them in the order that the agent sent.
    tools: Mapped[list[Json] | None] = mapped_column(
        JSON(none_as_null=True),
        comment="The tools of the request, members in the order sent; null where the row has the tools of its parent.",
    )
    answer: Mapped[Json | None] = mapped_column(
        JSONB(none_as_null=True), comment="The assistant's turn; null where the call failed or was aborted."
    )
    prompt_ids: Mapped[bytes] = mapped_column(
        comment="int32[prompt_tokens - shared_tokens]: the tokens of the prompt after the shared ones."
    )
    sampled_ids: Mapped[bytes] = mapped_column(comment="int32[completion_tokens]")
    written_ids: Mapped[bytes | None] = mapped_column(
        comment="int32: the answer of another provider, in the tokens of the run's own model as its template writes it;"
        " null where an engine sampled, or the template cannot."
    )
    generator_logprobs: Mapped[bytes] = mapped_column(
        comment="float32[completion_tokens], natural log, temperature-scaled, before top-k and top-p."
    )
    policy_versions: Mapped[bytes] = mapped_column(
        comment="int32[completion_tokens]: the version that sampled each token."
    )
    # Deferred: megabytes that only a trainer reads.
    routed_experts: Mapped[bytes | None] = mapped_column(
        deferred=True,
        deferred_raiseload=True,
        comment="The experts that the engine chose for each token from the last shared one on, but not for the last one"
        " sampled: position of the first uint32, n = layers * experts of a token uint32, bytes of a number uint8, then"
        " uint8 or uint16[tokens, n], whose largest number is an expert not named; null: not recorded.",
    )
    prompt_tokens: Mapped[int] = mapped_column(comment="Length of the complete prompt, shared tokens included.")
    completion_tokens: Mapped[int] = mapped_column(comment="Length of sampled_ids.")
    cached_tokens: Mapped[int] = mapped_column(
        comment="Tokens of the prompt that the engine found in its prefix cache."
    )
    min_policy_version: Mapped[int | None] = mapped_column(comment="Over its tokens; null without any.")
    max_policy_version: Mapped[int | None] = mapped_column(comment="Over its tokens; null without any.")
    temperature: Mapped[float] = mapped_column(comment="The effective one.")
    asked: Mapped[Json | None] = mapped_column(
        JSONB(none_as_null=True),
        comment="Sampling parameters as the agent asked, where the run's override replaced them; null: none.",
    )
    finish_reason: Mapped[str | None] = mapped_column(
        comment="stop, length or tool_calls; of a refused call the code of its error, as context_length_exceeded."
    )
    trace_id: Mapped[str | None] = mapped_column(comment="Hex, from the traceparent header.")
    parent_span_id: Mapped[str | None] = mapped_column(comment="Hex, from the traceparent header.")
    agent: Mapped[str | None] = mapped_column(
        comment="16 hex digits: fingerprint of the system prompt, the names of the tools and the header x-agent-name."
    )
    agent_name: Mapped[str | None] = mapped_column(
        comment="From the header x-agent-name, a system message or the assistant's last answer that was sent back, or"
        " of an earlier call with this fingerprint; else null."
    )
    role: Mapped[str | None] = mapped_column(comment="The role of the run's document that the call has; null: none.")
    continuation: Mapped[str | None] = mapped_column(
        comment="extend (its prompt begins with the tokens of an earlier call), fork (it holds an answer whose tokens"
        " it could not reuse, or that was rewritten) or fresh."
    )
    queued_seconds: Mapped[float] = mapped_column(comment="Arrival to the engine's acceptance, holds included.")
    first_token_seconds: Mapped[float | None] = mapped_column(comment="Arrival to the first token.")
    total_seconds: Mapped[float] = mapped_column(comment="Arrival to the last token.")
    created_at: Mapped[datetime] = created()
    __table_args__ = (
        one_of("status", CallStatus),
        Index("ix_model_calls_rollout", "rollout_id", "attempt", "sequence"),
        Index("ix_model_calls_role", "role", "rollout_id", "attempt", postgresql_where="role IS NOT NULL"),
        Index(
            "ix_model_calls_tools",
            text(CALLED_TOOLS),
            postgresql_using="gin",
            postgresql_with={"fastupdate": "off"},
        ),
        {"postgresql_partition_by": "LIST (run_id)"},
    )


class Delivery(Base):
    """Writer: gateway. The wait of one request to the model and the fate of its answer. The row of a request that waits
    is written while it waits; a repeat changes nothing. Pruning deletes a run's rows.
    """

    __tablename__ = "deliveries"
    run_id: Mapped[str] = mapped_column(primary_key=True, comment="The run of the rollout.")
    request_id: Mapped[str] = mapped_column(primary_key=True, comment="The id of the request's first choice.")
    rollout_id: Mapped[str] = mapped_column(comment="From the path that the agent called.")
    attempt: Mapped[int] = mapped_column(comment="From the path that the agent called.")
    gateway: Mapped[str] = mapped_column(comment="The gateway process that has the request.")
    sequence: Mapped[int] = mapped_column(
        BigInteger, comment="Arrival in nanoseconds since the epoch, as in model_calls."
    )
    request_sha256: Mapped[bytes] = mapped_column(comment="Digest of the body, as in model_calls.")
    waited_seconds: Mapped[float | None] = mapped_column(
        comment="How long its client waited for the platform, the time of sampling left out; null while it waits."
    )
    seconds: Mapped[float | None] = mapped_column(
        comment="Arrival to the last byte, or to the moment at which the client left; null while it waits."
    )
    delivered: Mapped[bool | None] = mapped_column(
        Boolean,
        comment="Whether the last byte of an answer went to a client that was still connected; null while that is"
        " unknown.",
    )
    created_at: Mapped[datetime] = created()
    __table_args__ = (Index(None, "rollout_id", "attempt"),)


class AgentObject(Base):
    """Writer: gateway. One object that the agent of an attempt stores by the Responses API: a conversation, an item of
    one, or the mark of a deleted response. A repeat changes nothing. Pruning deletes a run's rows.
    """

    __tablename__ = "agent_objects"
    run_id: Mapped[str] = mapped_column(primary_key=True, comment="The run of the rollout.")
    rollout_id: Mapped[str] = mapped_column(primary_key=True, comment="From the path that the agent called.")
    attempt: Mapped[int] = mapped_column(primary_key=True, comment="From the path that the agent called.")
    owner_id: Mapped[str] = mapped_column(primary_key=True, comment="The conversation of an item; else its own id.")
    id: Mapped[str] = mapped_column(primary_key=True, comment="The id that the agent sees.")
    position: Mapped[int] = mapped_column(BigInteger, comment="Grows with each item of its owner, and orders them.")
    document: Mapped[Json | None] = mapped_column(
        JSON(none_as_null=True), comment="As the agent sees it; null once deleted."
    )


class Span(Base):
    """Writer: collector and gateway. One OpenTelemetry span; a re-sent one changes nothing. The gateway writes those of
    embeddings. Partitioned by run.
    """

    __tablename__ = "spans"
    run_id: Mapped[str] = mapped_column(primary_key=True, comment="Partition key.")
    rollout_id: Mapped[str] = mapped_column(primary_key=True, comment="From the path that the agent called.")
    attempt: Mapped[int] = mapped_column(primary_key=True, comment="From the path that the agent called.")
    trace_id: Mapped[str] = mapped_column(primary_key=True, comment="Hex.")
    span_id: Mapped[str] = mapped_column(primary_key=True, comment="Hex.")
    parent_span_id: Mapped[str | None] = mapped_column(comment="Hex; null for a root.")
    name: Mapped[str] = mapped_column(comment="The name that the instrumentation gave it.")
    kind: Mapped[str] = mapped_column(comment="llm, tool, agent, reward or other.")
    tool: Mapped[str | None] = mapped_column(comment="Name of the tool, for kind tool.")
    status: Mapped[str] = mapped_column(comment="ok, error or unset.")
    error_type: Mapped[str | None] = mapped_column(comment="Class of the error; null without one.")
    tool_call_id: Mapped[str | None] = mapped_column(
        comment="The id of the tool call in the model's answer; null for a span without one."
    )
    response_id: Mapped[str | None] = mapped_column(
        comment="The model answer with the tool call: joins the span to its call."
    )
    start_ns: Mapped[int] = mapped_column(
        BigInteger, comment="Nanoseconds since the epoch, by the clock of the agent or the gateway."
    )
    end_ns: Mapped[int] = mapped_column(
        BigInteger, comment="Nanoseconds since the epoch, by the clock of the agent or the gateway."
    )
    scope: Mapped[str | None] = mapped_column(comment="Instrumentation scope.")
    attributes: Mapped[Json] = mapped_column(comment="Attributes as sent; long values are cut.")
    created_at: Mapped[datetime] = created()
    __table_args__ = (
        one_of("status", SpanStatus),
        Index("ix_spans_tool", text(SPAN_TOOL), postgresql_where="tool IS NOT NULL"),
        {"postgresql_partition_by": "LIST (run_id)"},
    )


class AgentName(Base):
    """Writer: credit. The name that an agent's calls or spans have shown, which all of its calls in the run have from
    then on. The first one stays."""

    __tablename__ = "agent_names"
    run_id: Mapped[str] = mapped_column(ForeignKey("runs.id"), primary_key=True, comment="The run.")
    agent: Mapped[str] = mapped_column(primary_key=True, comment="The fingerprint, as in model_calls.")
    name: Mapped[str] = mapped_column(comment="The agent's name.")
