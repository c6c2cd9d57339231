// A question to the policy that a run's engines serve, answered by one version or two side by side. Nothing of it is
// recorded, and nothing trains.

import { useEffect, useRef, useState } from "preact/hooks";
import { useChoice } from "../address";
import { ApiError, mayWrite, usePolled, wordsOf, type Call, type Engine, type Page, type Run, type Session } from "../api";
import { ask, NOTHING, type Said, type SaidToken } from "../ask";
import { AgentLine, AgentText, Commands, Fold, Loaded, Problem, Select, link, number } from "../parts";
import { safeLine } from "../safe_text";
import { save } from "./rollout_download";

const MOST_TOKENS = 2048;
const BOUNDS = [0.9, 0.5, 0.1, 0.01];
const ENDS: Record<string, string> = { stop: "It ended by itself.", length: "It reached the limit of tokens.", tool_calls: "It calls tools, which nobody runs here." };

export function PlaygroundPage({ run: id }: { run: string }) {
  const session = usePolled<Session>("v1/session", () => false);
  const run = usePolled<Run>(`v1/runs/${encodeURIComponent(id)}`);
  const engines = usePolled<Page<Engine>>("v1/engines");
  const mayAsk = mayWrite(session.data);
  const [{ rollout }] = useChoice(["rollout"]);
  const first = usePolled<Page<Call>>(rollout && `v1/rollouts/${encodeURIComponent(rollout)}/calls?limit=1`, () => false);
  return (
    <>
      <h1>Playground: <AgentLine text={run.data?.name ?? id} /></h1>
      <p class="quiet">One question to the weights that engines serve now. It is no rollout: nothing is recorded, and nothing trains.</p>
      <p>{served(engines.data?.items ?? [], id)}</p>
      <Problem error={engines.error} />
      <Problem error={run.error} />
      <Loaded answer={session}>{() => null}</Loaded>
      {session.data && !mayAsk && (
        <>
          <p class="warning">Questions take time of engines: they need a token with scope write. Make one and sign in with it.</p>
          <Commands commands={["leyden token create NAME --scope write"]} />
        </>
      )}
      {rollout && <p>The first question of <a href={link("rollouts", rollout)}>rollout {rollout}</a> is below: its system message, its last message of a user, its tools.</p>}
      {mayAsk && (!rollout ? <Questions run={id} policies={Object.keys(run.data?.policies ?? {})} /> : (
        <Loaded answer={first}>{({ items }) => <Questions run={id} policies={Object.keys(run.data?.policies ?? {})} call={items[0]} />}</Loaded>
      ))}
    </>
  );
}

/** Engines that runs share say nothing of a run's adapter. */
function served(engines: Engine[], run: string): string {
  const found = engines.filter((one) => one.run_id === run);
  if (found.length === 0) return "The answer says which version it is of.";
  const versions = found.map((one) => `version ${one.policy_version ?? "–"}${one.policy ? ` of ${safeLine(one.policy)}` : ""}`);
  return `Engines serve ${[...new Set(versions)].sort().join(", ")} now.`;
}

interface Asked {
  /** The version of the answer; empty: the served one. */
  version: string;
  said: Said;
  problem: string;
}

/** Words of a field as a number; null where it is empty. */
const whole = (words: string) => (words === "" ? null : Number(words));

/** The last text of a role in the request of a call. */
const lastOf = (call: Call | undefined, role: string) => call?.turns?.filter((one) => one.role === role).pop()?.content ?? "";

function Questions({ run, policies, call }: { run: string; policies: string[]; call?: Call }) {
  const [system, setSystem] = useState(() => lastOf(call, "system"));
  const [user, setUser] = useState(() => lastOf(call, "user"));
  const [tools, setTools] = useState(() => (call?.tools?.length ? JSON.stringify(call.tools) : ""));
  const [temperature, setTemperature] = useState(call?.temperature ?? 1);
  const [tokens, setTokens] = useState(512);
  const [seed, setSeed] = useState("");
  const [versions, setVersions] = useState(["", ""]);
  const [policy, setPolicy] = useState("");
  const [asked, setAsked] = useState<Asked[]>([]);
  const [problem, setProblem] = useState("");
  const asking = useRef<AbortController | null>(null);
  const [isBusy, setBusy] = useState(false);
  useEffect(() => () => asking.current?.abort(), []);
  /** One after the other: a token has one question at a time. */
  async function send(event: Event): Promise<void> {
    event.preventDefault();
    const offered = readTools(tools);
    setProblem(typeof offered === "string" ? offered : "");
    if (typeof offered === "string") return;
    const stop = (asking.current = new AbortController());
    // A second version makes two answers, an empty one none.
    const wanted = versions[1] === "" ? versions.slice(0, 1) : versions;
    const answers = wanted.map((version): Asked => ({ version, said: NOTHING, problem: "" }));
    const show = (place: number, change: Partial<Asked>) => {
      Object.assign(answers[place] ?? {}, change);
      setAsked([...answers]);
    };
    setAsked([...answers]);
    setBusy(true);
    for (const [place, version] of wanted.entries()) {
      if (stop.signal.aborted) break;
      const question = { system, user, temperature, max_tokens: tokens, policy: policy || null, version: whole(version), tools: offered, seed: whole(seed) };
      try {
        await ask(run, question, stop.signal, (said) => show(place, { said }));
      } catch (error) {
        const why = error instanceof ApiError ? error.message : `the answer broke off (${error instanceof Error ? error.message : "no connection"}): ask again`;
        show(place, { problem: stop.signal.aborted ? "You stopped it." : why });
      }
    }
    setBusy(false);
  }
  const short = (id: string, label: string, value: string, onInput: (value: string) => void) => (
    <>
      <label for={id}>{label}</label>
      <input id={id} class="short" type="number" min={0} max={2 ** 31 - 1} step={1} value={value} onInput={(event) => onInput(event.currentTarget.value)} />
    </>
  );
  return (
    <>
      <form class="question" aria-label="Question" onSubmit={(event) => void send(event)}>
        <label for="system">System message</label>
        <textarea id="system" rows={2} maxLength={32_000} value={system} onInput={(event) => setSystem(event.currentTarget.value)} />
        <label for="user">Message</label>
        <textarea id="user" rows={4} required maxLength={32_000} value={user} onInput={(event) => setUser(event.currentTarget.value)} />
        <label for="tools">Tools, a JSON list as in chat completions; nobody runs them</label>
        <textarea id="tools" rows={2} maxLength={64_000} value={tools} onInput={(event) => setTools(event.currentTarget.value)} />
        <p class="pages">
          <label for="temperature">Temperature</label>
          <input id="temperature" class="short" type="number" min={0} max={2} step="any" value={temperature} onInput={(event) => setTemperature(Number(event.currentTarget.value))} />
          <label for="tokens">Tokens at most</label>
          <input id="tokens" class="short" type="number" min={1} max={MOST_TOKENS} value={tokens} onInput={(event) => setTokens(Number(event.currentTarget.value))} />
          {short("seed", "Seed", seed, setSeed)}
          {short("version", "Version", versions[0] ?? "", (value) => setVersions([value, versions[1] ?? ""]))}
          {short("beside", "Beside version", versions[1] ?? "", (value) => setVersions([versions[0] ?? "", value]))}
          {policies.length > 0 && (
            <Select id="policy" label="Policy" value={policy} options={[["", "the run's own model"], ...policies.map((name): [string, string] => [name, safeLine(name)])]} onChange={setPolicy} />
          )}
          <button type="submit" disabled={isBusy || user === ""}>Ask</button>
          <button type="button" disabled={!isBusy} onClick={() => asking.current?.abort()}>Stop</button>
          <button type="button" disabled={user === "" || typeof readTools(tools) === "string"} onClick={() => saveTask(system, user, readTools(tools))}>Save for a dataset</button>
        </p>
      </form>
      {problem && <p role="alert" class="problem">{safeLine(problem)}</p>}
      <div class="beside">
        {asked.map((one, place) => (
          <section key={place} aria-label={`${place === 0 ? "Answer" : "Second answer"}${one.version && ` of version ${one.version}`}`}>
            {asked.length > 1 && <h2>{one.version === "" ? "The served version" : `Version ${one.version}`}</h2>}
            {one.problem ? <p role="alert" class="problem">{safeLine(one.problem)}</p> : <Answer said={one.said} isBusy={isBusy} />}
          </section>
        ))}
      </div>
    </>
  );
}

/** The tools of a field, or the sentence that says what is wrong with it. */
function readTools(words: string): unknown[] | string {
  if (words.trim() === "") return [];
  try {
    const read: unknown = JSON.parse(words);
    return Array.isArray(read) ? read : "Tools: write a list, as in chat completions.";
  } catch (error) {
    return `Tools: this is no JSON (${wordsOf(error)}).`;
  }
}

/** A row for `leyden dataset upload`. */
function saveTask(system: string, user: string, tools: unknown[] | string): void {
  const messages = [...(system ? [{ role: "system", content: system }] : []), { role: "user", content: user }];
  const row = { messages, ...(tools.length > 0 ? { tools } : {}) };
  save(new Blob([`${JSON.stringify(row)}\n`], { type: "application/x-ndjson" }), "task.jsonl");
}

function Answer({ said, isBusy }: { said: Said; isBusy: boolean }) {
  const versions = [...new Set(said.tokens.map((one) => one.version))];
  const by = versions.length > 0 ? `${versions.map((one) => `Version ${one}`).join(", then ")}, ${said.tokens.length} tokens.` : "";
  return (
    <>
      <p role="status">{isBusy && said.finish_reason === undefined ? "Answering …" : `${by} ${ENDS[said.finish_reason ?? ""] ?? ""}`}</p>
      {said.reasoning && <Fold title="Reasoning" open>{() => <AgentText text={said.reasoning} />}</Fold>}
      {said.content && <div class="turn assistant"><AgentText text={said.content} /></div>}
      {said.tool_calls.map((call, place) => <AgentText key={place} text={`${call.name} ${call.arguments}`} />)}
      {said.finish_reason && said.tokens.length > 0 && <Fold title="Tokens by probability">{() => <Tokens tokens={said.tokens} />}</Fold>}
    </>
  );
}

function Tokens({ tokens }: { tokens: SaidToken[] }) {
  return (
    <div class="tokens" role="group" aria-label="Tokens" tabIndex={0}>
      {tokens.map((one, place) => (
        <span key={place} class={`token probability-${BOUNDS.filter((bound) => Math.exp(one.logprob) < bound).length}`} title={`log-probability ${number(one.logprob, 4)}, version ${one.version}`}>
          <AgentLine text={one.text} />
        </span>
      ))}
    </div>
  );
}
