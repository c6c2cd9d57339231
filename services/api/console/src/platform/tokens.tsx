// The bearer tokens of the API. A secret stands on the page once, until it is put away: no address and no storage of the
// browser has it.

import { useState } from "preact/hooks";
import { ApiError, create, now, request, usePolled, type IssuedToken, type Page, type Session, type Token } from "../api";
import { AgentLine, Commands, Loaded, Problem, Table, time } from "../parts";
import { safeLine } from "../safe_text";

const SCOPES = ["read", "write", "attempts", "admin"] as const;
const DAY_SECONDS = 86_400;

export function Tokens() {
  const session = usePolled<Session>("v1/session", () => false);
  if (!session.data) return <Problem error={session.error} />;
  return (
    <>
      <h2>Tokens</h2>
      {session.data.scopes.includes("admin") ? <Managed /> : (
        <>
          <p>To see and make tokens, sign in with one of scope admin.</p>
          <Commands commands={["leyden token list"]} />
        </>
      )}
    </>
  );
}

interface Question {
  token: Token;
  does: "rotate" | "revoke";
}

function Managed() {
  // What follows # is sent to no server: another one asks again.
  const [changes, setChanges] = useState(0);
  const tokens = usePolled<Page<Token>>(`v1/tokens#${changes}`);
  const [asked, setAsked] = useState<Question>();
  const [issued, setIssued] = useState<IssuedToken>();
  const [problem, setProblem] = useState("");
  const [isBusy, setBusy] = useState(false);
  async function change(path: string, body?: object): Promise<void> {
    setBusy(true);
    setProblem("");
    try {
      const made = body ? await create<IssuedToken>(path, body) : await request<undefined>("DELETE", path);
      if (made) setIssued(made);
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      setProblem(error.message);
    }
    setAsked(undefined);
    setBusy(false);
    setChanges((before) => before + 1);
  }
  function act({ token: { id }, does }: Question): Promise<void> {
    const path = `v1/tokens/${encodeURIComponent(id)}`;
    return does === "revoke" ? change(path) : change(`${path}/rotate`, {});
  }
  return (
    <section aria-label="Tokens of the API">
      {issued && <Secret issued={issued} onDone={() => setIssued(undefined)} />}
      {problem && <p role="alert" class="problem">{safeLine(problem)}</p>}
      <NewToken isBusy={isBusy || issued !== undefined} onMake={(body) => void change("v1/tokens", body)} />
      {asked && (
        <p class="warning" role="alert">
          {asked.does === "revoke" ? "Whoever has it is refused at the next request: " : "Its secret is refused from now on, and a new one is shown: "}
          <AgentLine text={asked.token.name} />.{" "}
          <button type="button" disabled={isBusy} onClick={() => void act(asked)}>Yes, {asked.does}</button>{" "}
          <button type="button" disabled={isBusy} onClick={() => setAsked(undefined)}>No</button>
        </p>
      )}
      <Loaded answer={tokens}>
        {({ items }) => items.length === 0 ? <p>No token yet, besides the first administrator's.</p> : <List tokens={items} isBusy={isBusy || issued !== undefined} onAsk={setAsked} />}
      </Loaded>
      <Commands commands={["leyden token list", "leyden token create NAME --scope read --expires 30d"]} />
    </section>
  );
}

function List({ tokens, isBusy, onAsk }: { tokens: Token[]; isBusy: boolean; onAsk: (question: Question) => void }) {
  return (
    <Table label="Tokens" head={["Name", "Scopes", "Created", "Expires", "Last change", "State", "Actions"]} numbers={[]}>
      {tokens.map((token) => {
        const state = stateOf(token);
        const button = (does: Question["does"], word: string) => (
          <button type="button" disabled={isBusy} aria-label={`${word} ${safeLine(token.name)}, ${token.id}`} onClick={() => onAsk({ token, does })}>{word}</button>
        );
        return (
          <tr key={token.id}>
            <th scope="row" class="reason"><AgentLine text={token.name} /></th>
            <td>{token.scopes.join(", ")}</td>
            <td>{time(token.created_at)}</td>
            <td>{token.expires_at ? time(token.expires_at) : "never"}</td>
            <td>{token.changed_at ? time(token.changed_at) : "none"}</td>
            <td>{state}</td>
            <td>{state === "valid" && <>{button("rotate", "Rotate")} {button("revoke", "Revoke")}</>}</td>
          </tr>
        );
      })}
    </Table>
  );
}

function stateOf({ revoked_at, expires_at }: Token): string {
  const isOver = (moment: string | null | undefined) => Boolean(moment) && Date.parse(moment ?? "") <= now().getTime();
  if (isOver(revoked_at)) return "revoked";
  if (isOver(expires_at)) return "expired";
  return revoked_at ? `ends ${time(revoked_at)}` : "valid";
}

function NewToken({ isBusy, onMake }: { isBusy: boolean; onMake: (body: object) => void }) {
  const [name, setName] = useState("");
  const [scopes, setScopes] = useState<string[]>(["read"]);
  const [days, setDays] = useState("30");
  function make(event: Event): void {
    event.preventDefault();
    onMake({ name, scopes, expires_seconds: days === "" ? null : Number(days) * DAY_SECONDS });
    setName("");
  }
  return (
    <form aria-label="New token" class="filters" onSubmit={make}>
      <span><label for="token-name">Name of the person or script</label> <input id="token-name" required maxLength={200} autocomplete="off" value={name} onInput={(event) => setName(event.currentTarget.value)} /></span>
      {SCOPES.map((scope) => (
        <label key={scope}>
          <input class="box" type="checkbox" checked={scopes.includes(scope)} onChange={(event) => setScopes(event.currentTarget.checked ? [...scopes, scope] : scopes.filter((one) => one !== scope))} /> {scope}
        </label>
      ))}
      <span><label for="token-days">Days (empty: no end)</label> <input id="token-days" class="short" type="number" min={1} max={3660} step={1} value={days} onInput={(event) => setDays(event.currentTarget.value)} /></span>
      <button type="submit" disabled={isBusy || name === "" || scopes.length === 0}>Make a token</button>
    </form>
  );
}

function Secret({ issued, onDone }: { issued: IssuedToken; onDone: () => void }) {
  return (
    <div class="warning" role="alert">
      <p>The secret of <AgentLine text={issued.name} />. It is shown here once, and stored nowhere:</p>
      <p>
        <code>{issued.token}</code>{" "}
        {navigator.clipboard && <button type="button" onClick={() => void navigator.clipboard.writeText(issued.token)}>Copy the secret</button>}{" "}
        <button type="button" onClick={onDone}>Put it away</button>
      </p>
    </div>
  );
}
