// One question to the policy that a run's engines serve now. Nothing of it is recorded, and nothing trains.

import { useEffect, useRef, useState } from "preact/hooks";
import { ApiError, usePolled, type Engine, type Page, type Run, type Session } from "../api";
import { ask, NOTHING, type Said, type SaidToken } from "../ask";
import { AgentLine, AgentText, Commands, Fold, Select, number } from "../parts";
import { safeLine } from "../safe_text";

const MOST_TOKENS = 2048;
const BOUNDS = [0.9, 0.5, 0.1, 0.01];
const ENDS: Record<string, string> = { stop: "It ended by itself.", length: "It reached the limit of tokens.", tool_calls: "It calls tools, which nobody runs here." };

export function PlaygroundPage({ run: id }: { run: string }) {
  const session = usePolled<Session>("v1/session", () => false);
  const run = usePolled<Run>(`v1/runs/${encodeURIComponent(id)}`);
  const engines = usePolled<Page<Engine>>("v1/engines");
  const mayAsk = session.data?.scopes.some((scope) => scope === "write" || scope === "admin");
  return (
    <>
      <h1>Playground: <AgentLine text={run.data?.name ?? id} /></h1>
      <p class="quiet">One question to the weights that engines serve now. It is no rollout: nothing is recorded, and nothing trains.</p>
      <p>{served(engines.data?.items ?? [], id)}</p>
      {session.data && !mayAsk && (
        <>
          <p class="warning">Questions take time of engines: they need a token with scope write. Make one and sign in with it.</p>
          <Commands commands={["leyden token create NAME --scope write"]} />
        </>
      )}
      {mayAsk && <Questions run={id} policies={Object.keys(run.data?.policies ?? {})} />}
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

function Questions({ run, policies }: { run: string; policies: string[] }) {
  const [system, setSystem] = useState("");
  const [user, setUser] = useState("");
  const [temperature, setTemperature] = useState(1);
  const [tokens, setTokens] = useState(512);
  const [policy, setPolicy] = useState("");
  const [said, setSaid] = useState<Said>();
  const [problem, setProblem] = useState("");
  const asking = useRef<AbortController | null>(null);
  const [isBusy, setBusy] = useState(false);
  useEffect(() => () => asking.current?.abort(), []);
  async function send(event: Event): Promise<void> {
    event.preventDefault();
    const stop = (asking.current = new AbortController());
    setSaid(NOTHING);
    setProblem("");
    setBusy(true);
    try {
      await ask(run, { system, user, temperature, max_tokens: tokens, policy: policy || null }, stop.signal, setSaid);
    } catch (error) {
      const why = error instanceof ApiError ? error.message : `the answer broke off (${error instanceof Error ? error.message : "no connection"}): ask again`;
      setProblem(stop.signal.aborted ? "You stopped it." : why);
    }
    setBusy(false);
  }
  return (
    <>
      <form class="question" aria-label="Question" onSubmit={(event) => void send(event)}>
        <label for="system">System message</label>
        <textarea id="system" rows={2} maxLength={32_000} value={system} onInput={(event) => setSystem(event.currentTarget.value)} />
        <label for="user">Message</label>
        <textarea id="user" rows={4} required maxLength={32_000} value={user} onInput={(event) => setUser(event.currentTarget.value)} />
        <p class="pages">
          <label for="temperature">Temperature</label>
          <input id="temperature" class="short" type="number" min={0} max={2} step="any" value={temperature} onInput={(event) => setTemperature(Number(event.currentTarget.value))} />
          <label for="tokens">Tokens at most</label>
          <input id="tokens" class="short" type="number" min={1} max={MOST_TOKENS} value={tokens} onInput={(event) => setTokens(Number(event.currentTarget.value))} />
          {policies.length > 0 && (
            <Select id="policy" label="Policy" value={policy} options={[["", "the run's own model"], ...policies.map((name): [string, string] => [name, safeLine(name)])]} onChange={setPolicy} />
          )}
          <button type="submit" disabled={isBusy || user === ""}>Ask</button>
          <button type="button" disabled={!isBusy} onClick={() => asking.current?.abort()}>Stop</button>
        </p>
      </form>
      {problem && <p role="alert" class="problem">{safeLine(problem)}</p>}
      {said && <Answer said={said} isBusy={isBusy} />}
    </>
  );
}

function Answer({ said, isBusy }: { said: Said; isBusy: boolean }) {
  const versions = [...new Set(said.tokens.map((one) => one.version))];
  const by = versions.length > 0 ? `${versions.map((one) => `Version ${one}`).join(", then ")}, ${said.tokens.length} tokens.` : "";
  return (
    <section aria-label="Answer">
      <p role="status">{isBusy ? "Answering …" : `${by} ${ENDS[said.finish_reason ?? ""] ?? ""}`}</p>
      {said.reasoning && <Fold title="Reasoning" open>{() => <AgentText text={said.reasoning} />}</Fold>}
      {said.content && <div class="turn assistant"><AgentText text={said.content} /></div>}
      {said.tool_calls.map((call, place) => <AgentText key={place} text={`${call.name} ${call.arguments}`} />)}
      {said.finish_reason && said.tokens.length > 0 && <Fold title="Tokens by probability">{() => <Tokens tokens={said.tokens} />}</Fold>}
    </section>
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
