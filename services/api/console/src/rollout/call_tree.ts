// The calls and tools of an attempt as a tree: a tool below the call that asked for it, a call below the tool or the
// fork that it belongs to. Agents send spans: names repeat, parents are missing, and circles happen.

import type { Call, Span } from "../api";

export interface Bar {
  key: string;
  kind: "call" | "tool";
  name: string;
  status: string;
  /** Failed, aborted, or in no answer that counts. */
  isDim: boolean;
  /** Milliseconds since 1970. */
  start: number;
  end: number;
  depth: number;
  /** The number of a call in the list of calls. */
  place?: number;
}

type Node = Omit<Bar, "depth"> & { parent?: string };

const DEEPEST = 8;
const spanKey = (id: string) => `span ${id}`;
const callKey = (id: string) => `call ${id}`;

/** The bars in the order of the tree, siblings by their start. Args: spans: of all kinds */
export function callTree(calls: Call[], spans: Span[]): Bar[] {
  const nodes = [...callNodes(calls, spans), ...toolNodes(calls, spans)];
  const known = new Set(nodes.map((one) => one.key));
  const children = new Map<string, Node[]>();
  for (const one of [...nodes].sort((a, b) => a.start - b.start)) {
    const above = one.parent !== undefined && known.has(one.parent) ? one.parent : "";
    children.set(above, [...(children.get(above) ?? []), one]);
  }
  const bars = new Map<string, Bar>();
  function walk(above: string, depth: number): void {
    for (const { parent, ...one } of children.get(above) ?? []) {
      if (bars.has(one.key)) continue;
      bars.set(one.key, { ...one, depth: Math.min(depth, DEEPEST) });
      walk(one.key, depth + 1);
    }
  }
  walk("", 0);
  // Those of a circle have no way from the root.
  for (const { parent, ...one } of nodes) if (!bars.has(one.key)) bars.set(one.key, { ...one, depth: 0 });
  return [...bars.values()];
}

function callNodes(calls: Call[], spans: Span[]): Node[] {
  const above = new Map<string, string | undefined>();
  const byId = new Map(spans.map((one) => [one.span_id, one]));
  const models = spans.filter((one) => one.kind === "llm" && one.response_id);
  return calls.map((call, index) => {
    const from = call.parent_span_id ?? models.find((one) => one.response_id?.endsWith(call.request_id))?.parent_span_id;
    const tool = nearestTool(from, byId);
    const parent = call.parent_call_id ?? undefined;
    // A call that continues another one stands beside it; a fork stands below.
    const own = tool ? spanKey(tool) : parent && call.continuation === "fork" ? callKey(parent) : above.get(parent ?? "");
    above.set(call.id, own);
    const end = Date.parse(call.created_at);
    return {
      key: callKey(call.id),
      kind: "call",
      name: call.agent_name ?? call.role ?? "model",
      status: call.status,
      isDim: call.status !== "completed" || call.delivered === false,
      start: end - call.total_seconds * 1000,
      end,
      place: index + 1,
      parent: own,
    };
  });
}

function toolNodes(calls: Call[], spans: Span[]): Node[] {
  const byId = new Map(spans.map((one) => [one.span_id, one]));
  const asked = new Map(calls.flatMap((call) => (call.answer?.tool_calls ?? []).map((one) => [one.id, call.id] as const)));
  return spans.filter((one) => one.kind === "tool").map((span) => {
    const call = span.tool_call_id === null ? undefined : asked.get(span.tool_call_id);
    const tool = nearestTool(span.parent_span_id, byId);
    return {
      key: spanKey(span.span_id),
      kind: "tool",
      name: span.tool ?? span.name,
      status: span.status,
      isDim: span.status !== "ok",
      start: span.start_ns / 1e6,
      end: span.end_ns / 1e6,
      parent: call ? callKey(call) : tool && spanKey(tool),
    };
  });
}

/** The tool that a span lies in, or that it is. */
function nearestTool(id: string | null | undefined, byId: Map<string, Span>): string | undefined {
  const seen = new Set<string>();
  for (let span = byId.get(id ?? ""); span && !seen.has(span.span_id); span = byId.get(span.parent_span_id ?? "")) {
    if (span.kind === "tool") return span.span_id;
    seen.add(span.span_id);
  }
  return undefined;
}
