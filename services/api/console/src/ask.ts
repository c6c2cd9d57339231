// A question to the policy that engines serve, and its answer as it comes: server-sent events of a POST.

import { ApiError, problemOf } from "./api";

export interface Question {
  system: string;
  user: string;
  temperature: number;
  max_tokens: number;
  policy: string | null;
  /** The one that answers; null: the one that engines serve. */
  version: number | null;
  tools: unknown[];
  seed: number | null;
}

export interface SaidToken {
  text: string;
  logprob: number;
  version: number;
}

export interface Said {
  content: string;
  reasoning: string;
  tokens: SaidToken[];
  /** The names and arguments of tools that the answer calls. */
  tool_calls: { name: string; arguments: string }[];
  /** Once it is complete: stop, length or tool_calls. */
  finish_reason?: string;
}

export const NOTHING: Said = { content: "", reasoning: "", tokens: [], tool_calls: [] };

/** Tells of the answer so far, each time there is more of it. Raises ApiError with the sentence of the API or gateway. */
export async function ask(run: string, question: Question, signal: AbortSignal, onMore: (said: Said) => void): Promise<void> {
  const headers = { "content-type": "application/json" };
  const answer = await fetch(`v1/runs/${encodeURIComponent(run)}/playground`, { method: "POST", headers, body: JSON.stringify(question), signal });
  if (!answer.ok || !answer.body) throw await problemOf(answer);
  let [said, rest] = [NOTHING, ""];
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let piece = await reader.read(); !piece.done; piece = await reader.read()) {
    const blocks = (rest + piece.value).split("\n\n");
    rest = blocks.pop() ?? "";
    for (const block of blocks) {
      said = withEvent(said, block);
      onMore(said);
    }
  }
  if (said.finish_reason === undefined) throw new ApiError(0, "the answer ended before it was complete: ask again");
}

function withEvent(said: Said, block: string): Said {
  const [, name, data] = /^event: (.*)\ndata: (.*)$/.exec(block) ?? [];
  if (name === undefined || data === undefined) return said;
  const event = JSON.parse(data) as Said & { error: { message: string } };
  if (name === "error") throw new ApiError(0, event.error.message);
  if (name === "end") return { ...said, finish_reason: event.finish_reason, tool_calls: event.tool_calls };
  return { ...said, content: said.content + event.content, reasoning: said.reasoning + event.reasoning, tokens: [...said.tokens, ...event.tokens] };
}
