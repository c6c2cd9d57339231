// A rollout as transitions: state, action, reward and next state of each call and tool.

import { useState } from "preact/hooks";
import { request, usePolled, type Excerpt, type Page, type RolloutDetail, type State as Variables, type Transition } from "../api";
import { Paged } from "../paged";
import { AgentLine, AgentText, Commands, Fold, State, Table, clock, link, number, signed } from "../parts";
import { safeLine } from "../safe_text";

const SHOWN = 50;
/** A longer text is folded. */
const OPEN_CHARACTERS = 300;
const LIVE = new Set(["queued", "running", "grading"]);

export function TrajectoryPage({ id }: { id: string }) {
  const path = `v1/rollouts/${encodeURIComponent(id)}`;
  const isLive = ({ state, reward }: RolloutDetail) => LIVE.has(state) || reward === null;
  const rollout = usePolled<RolloutDetail>(path, isLive);
  return (
    <>
      <h1>Trajectory of {id}</h1>
      <p class="quiet">
        The calls and tools of the attempt that counts, or else of the newest one, by time. The reward of a step is what its call earned
        by itself, such as by its tools (<code>credit.air</code>): 0 where the run rewards whole rollouts alone.
      </p>
      {rollout.data && <p>Reward of the <a href={link("rollouts", id)}>whole rollout</a>: <strong>{number(rollout.data.reward)}</strong></p>}
      <Paged<Transition>
        path={`${path}/trajectory`}
        limit={SHOWN}
        isLive={() => !rollout.data || isLive(rollout.data)}
        nothing={<><p>No call and no tool yet. See the rollout's attempts:</p><Commands commands={[`leyden rollout show ${id}`]} /></>}
      >
        {({ items }, first) => items.map((one, index) => <TransitionView key={first + index} step={one} place={first + index + 1} />)}
      </Paged>
      <Commands commands={[`leyden rollout trajectory ${id}`]} />
    </>
  );
}

function TransitionView({ step, place }: { step: Transition; place: number }) {
  const time = clock(new Date(step.started_ns / 1e6));
  const isCall = step.type === "llm";
  return (
    <article aria-label={`Transition ${place}`}>
      <h2>{place}: {isCall ? "model" : "tool"} <AgentLine text={step.component} /></h2>
      <p class="quiet"><State state={step.status} /> {time}</p>
      <Fold title={`State: ${Object.keys(step.state.variables).length} variables`}>{() => <VariablesTable state={step.state} place={place} />}</Fold>
      <Text title={isCall ? "Messages added" : "Arguments"} text={step.input} />
      <Text title={isCall ? "Action" : "Result"} text={step.output} />
      {(step.input?.cut || step.output?.cut) && <Whole path={step.whole} place={place} />}
      <Reward step={step} />
      <NextState step={step} />
    </article>
  );
}

function Reward({ step: { type, reward } }: { step: Transition }) {
  if (reward === null) return <p class="quiet">Reward of this step: {type === "tool" ? "that of the call that asked" : "unknown until credit has computed the group"}</p>;
  return <p>Reward of this step: <strong class={reward < 0 ? "worse" : reward > 0 ? "better" : ""}>{signed(reward)}</strong></p>;
}

function NextState({ step: { state, next_state: next } }: { step: Transition }) {
  if (next === null) return <p class="quiet">No next state: this is the last step so far.</p>;
  const changed = Object.entries(next.variables).filter(([name, value]) => !isSame(state.variables[name], value));
  if (changed.length === 0) return <p class="quiet">Next state: as before.</p>;
  return (
    <>
      <p>Next state:</p>
      <ul>
        {changed.map(([name, value]) => <li key={name}><AgentLine text={name} /> = <code><AgentLine text={value.text} /></code>{length(value)}</li>)}
      </ul>
    </>
  );
}

const isSame = (one: Excerpt | undefined, other: Excerpt) => one?.text === other.text && one.characters === other.characters;

const length = ({ cut, characters }: Excerpt) => (cut ? ` (${characters.toLocaleString()} characters)` : "");

function VariablesTable({ state, place }: { state: Variables; place: number }) {
  return (
    <>
      <Table label={`State of transition ${place}`} head={["Variable", "Value"]} numbers={[]}>
        {Object.entries(state.variables).map(([name, value]) => (
          <tr key={name}>
            <th scope="row" class="narrow"><AgentLine text={name} /></th>
            <td class="reason"><AgentLine text={value.text} />{length(value)}</td>
          </tr>
        ))}
      </Table>
      {state.left_out && <p class="quiet">More variables are left out.</p>}
    </>
  );
}

/** A text with its title; a long one is folded below its first words. */
function Text({ title, text }: { title: string; text: Excerpt | null }) {
  if (text === null) return <p class="quiet">{title}: none</p>;
  const words = text.cut ? `${title}, the first ${text.text.length.toLocaleString()} of ${text.characters.toLocaleString()} characters` : title;
  if (text.text.length > OPEN_CHARACTERS) return <Fold title={`${words}: ${safeLine(text.text.slice(0, 80))}…`}>{() => <AgentText text={text.text} />}</Fold>;
  return <><p class="role">{words}</p><AgentText text={text.text} /></>;
}

/** All of a call or span, which the API gives on demand. */
function Whole({ path, place }: { path: string; place: number }) {
  const [found, setFound] = useState("");
  const [problem, setProblem] = useState("");
  async function ask(): Promise<void> {
    setProblem("");
    try {
      const { items } = await request<Page<object>>("GET", path.slice(1));
      setFound(JSON.stringify(items[0], null, 2));
    } catch (error) {
      setProblem(error instanceof Error ? error.message : String(error));
    }
  }
  if (found) return <AgentText text={found} />;
  return (
    <>
      <button type="button" aria-label={`Load all of transition ${place}`} onClick={() => void ask()}>Load all of it</button>
      {problem && <p role="alert" class="problem"><AgentLine text={problem} /></p>}
    </>
  );
}
