// The tokens of a call, coloured by one of their numbers; asked for by windows, so that no call is too long.

import { useState } from "preact/hooks";
import { usePolled, type CallToken, type CallTokens } from "./api";
import { AgentLine, Loaded, number, signed } from "./parts";

const WINDOW = 500;
const OVERLAYS = {
  probability: ["at least 0.9", "0.5 to 0.9", "0.1 to 0.5", "0.01 to 0.1", "below 0.01"],
  entropy: ["below 0.1", "0.1 to 0.5", "0.5 to 2", "at least 2", "not recorded"],
  gap: ["below 0.01", "0.01 to 0.1", "0.1 to 1", "at least 1", "not recorded"],
  advantage: ["none", "above 0", "below 0"],
  training: ["trains", "does not", "not decided"],
  version: [],
} as const;
type Overlay = keyof typeof OVERLAYS;
/** The colours of versions repeat, so that neighbours differ. */
const COLOURS = 4;

export function TokenOverlay({ rollout, call, mayTrain }: { rollout: string; call: string; mayTrain: boolean }) {
  const [start, setStart] = useState<number>();
  const [overlay, setOverlay] = useState<Overlay>("probability");
  const path = `v1/rollouts/${encodeURIComponent(rollout)}/calls/${encodeURIComponent(call)}/tokens?limit=${WINDOW}`;
  const answer = usePolled<CallTokens>(start === undefined ? path : `${path}&start=${start}`, ({ step }) => mayTrain && step === null);
  return (
    <Loaded answer={answer}>
      {(found) => (
        <>
          <p class="quiet">
            {found.prompt_tokens.toLocaleString()} tokens of the prompt, {found.completion_tokens.toLocaleString()} sampled.{" "}
            {found.reason ? <>None trains: <AgentLine text={found.reason} />.</> : `Trained in step ${found.step ?? "–, not yet"}.`}
          </p>
          {found.missing_parent && <p class="warning"><AgentLine text={found.missing_parent} /></p>}
          <Windows found={found} onStart={setStart} />
          <p>
            <label for={`overlay-${call}`}>Colour by</label>{" "}
            <select id={`overlay-${call}`} value={overlay} onChange={(event) => setOverlay(event.currentTarget.value as Overlay)}>
              {Object.keys(OVERLAYS).map((name) => <option key={name} value={name}>{name}</option>)}
            </select>{" "}
            {scale(overlay, found.tokens).map(([name, level]) => <span key={name} class={`token ${overlay}-${level}`}>{name}</span>)}
          </p>
          {overlay === "entropy" && <p class="quiet">In nats, by the trainer's weights at the beginning of the step: 0 where one token alone was likely, 2 where about seven were as likely as one another.</p>}
          {overlay === "gap" && <p class="quiet">The trainer's log-probability less the engine's. Where an older version than the trainer's sampled a token, the gap has what training changed since, too.</p>}
          <Tokens key={found.start} tokens={found.tokens} overlay={overlay} step={found.step} />
        </>
      )}
    </Loaded>
  );
}

function Windows({ found, onStart }: { found: CallTokens; onStart: (start: number) => void }) {
  const whole = found.prompt_tokens + found.completion_tokens;
  const end = Math.min(found.start + WINDOW, whole);
  return (
    <p class="pages">
      <button type="button" disabled={found.start === 0} onClick={() => onStart(0)}>From the prompt's begin</button>
      <button type="button" disabled={found.start === 0} onClick={() => onStart(Math.max(0, found.start - WINDOW))}>Tokens before</button>
      <button type="button" disabled={end >= whole} onClick={() => onStart(end)}>Next tokens</button>
      <button type="button" disabled={end >= whole} onClick={() => onStart(Math.max(0, whole - WINDOW))}>To the end</button>
      <span role="status" class="quiet">
        {found.tokens.length === 0 ? "No token here" : `${found.start + 1} to ${end} of ${whole.toLocaleString()}`}
      </span>
    </p>
  );
}

/** One of them is chosen, by a click or by the arrow keys; its numbers stand below. */
function Tokens({ tokens, overlay, step }: { tokens: CallToken[]; overlay: Overlay; step: number | null }) {
  const [chosen, choose] = useState(0);
  const token = tokens[chosen];
  function onKey(event: KeyboardEvent): void {
    const moves: Record<string, number> = { ArrowRight: 1, ArrowLeft: -1, Home: -tokens.length, End: tokens.length };
    const move = moves[event.key];
    if (move === undefined) return;
    event.preventDefault();
    choose(Math.min(tokens.length - 1, Math.max(0, chosen + move)));
  }
  function onClick(event: Event): void {
    const place = (event.target as HTMLElement).dataset.place;
    if (place !== undefined) choose(Number(place));
  }
  if (!token) return null;
  return (
    <>
      <div class="tokens" role="group" aria-label="Tokens: the arrow keys choose one" tabIndex={0} onKeyDown={onKey} onClick={onClick}>
        {tokens.map((one, place) => (
          <span key={one.position} data-place={place} class={`token ${overlay}-${level(one, overlay)}${place === chosen ? " chosen" : ""}${one.sampled ? "" : " context"}`}>
            <AgentLine text={one.text ?? `⟨${one.id}⟩`} />
          </span>
        ))}
      </div>
      <p role="status" class="quiet">{words(token, step)}</p>
    </>
  );
}

/** The trainer's log-probability less the engine's. */
function gapOf({ trainer_logprob, logprob }: CallToken): number | undefined {
  return trainer_logprob === null || trainer_logprob === undefined || logprob === null ? undefined : trainer_logprob - logprob;
}

function words(token: CallToken, step: number | null): string {
  const facts = [`token ${token.position + 1}`, `id ${token.id}`];
  if (!token.sampled) return [...facts, "of the prompt: does not train"].join(" · ");
  facts.push(`log-probability ${number(token.logprob, 4)}`, `version ${token.policy_version ?? "–"}`);
  const gap = gapOf(token);
  if (gap !== undefined) facts.push(`the trainer's ${number(token.trainer_logprob, 4)}, by version ${(step ?? 0) - 1}`, `gap ${signed(gap)}`);
  if (typeof token.trainer_entropy === "number") facts.push(`entropy ${number(token.trainer_entropy, 3)}`);
  if (token.trains) facts.push(`trains with advantage ${signed(token.advantage ?? 0)}`);
  else facts.push(token.trains === null ? "not decided whether it trains" : "does not train");
  return facts.join(" · ");
}

/** The words of the scale with their classes; of versions, those that are shown. */
function scale(overlay: Overlay, tokens: CallToken[]): [string, number | string][] {
  if (overlay !== "version") return OVERLAYS[overlay].map((name, place) => [name, place]);
  const versions = [...new Set(tokens.flatMap((one) => one.policy_version ?? []))].sort((one, other) => one - other);
  return versions.map((version) => [`version ${version}`, version % COLOURS]);
}

/** The place of a number's size among bounds, and the last one where it is not recorded. */
function places(value: number | null | undefined, bounds: number[]): number {
  return typeof value === "number" ? bounds.filter((bound) => Math.abs(value) >= bound).length : bounds.length + 1;
}

/** The class of the overlay; tokens of the prompt have the first one, and no version. */
function level(token: CallToken, overlay: Overlay): number | string {
  if (overlay === "version") return token.policy_version === null ? "none" : token.policy_version % COLOURS;
  if (overlay === "entropy") return places(token.trainer_entropy, [0.1, 0.5, 2]);
  if (overlay === "gap") return places(gapOf(token), [0.01, 0.1, 1]);
  if (overlay === "training") return token.trains === null ? 2 : token.trains ? 0 : 1;
  if (overlay === "advantage") return !token.advantage ? 0 : token.advantage > 0 ? 1 : 2;
  const probability = token.logprob === null ? 1 : Math.exp(token.logprob);
  return [0.9, 0.5, 0.1, 0.01].filter((bound) => probability < bound).length;
}
