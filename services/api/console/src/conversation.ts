// A call gives what it adds to the conversation of its parent, an earlier call in the list.

import type { Call, Turn } from "./api";

/** The messages in the request of a call; undefined where an earlier call is not in the store. */
export function conversation(call: Call, calls: Call[]): Turn[] | undefined {
  const byId = new Map(calls.map((one) => [one.id, one]));
  const chain = [call];
  while (chain[0]?.parent_call_id) {
    const parent = byId.get(chain[0].parent_call_id);
    if (!parent) return undefined;
    chain.unshift(parent);
  }
  const turns: Turn[] = [];
  for (const one of chain) {
    if (!one.turns) return undefined;
    turns.length = Math.min(turns.length, one.shared_turns ?? 0);
    turns.push(...one.turns);
    if (one !== call && one.answer) turns.push(one.answer);
  }
  return turns;
}

/** The last message that the model was sent. */
export function lastTurn(call: Call, calls: Call[]): Turn | undefined {
  return call.turns?.length ? call.turns[call.turns.length - 1] : conversation(call, calls)?.pop();
}
