import type { ComponentChildren } from "preact";
import { useState } from "preact/hooks";
import { isUndecided, usePolled, type Answer, type Call, type Group, type Page, type RolloutDetail, type Run, type Turn } from "../api";
import { AttemptView } from "../attempt_view";
import { TokenOverlay } from "../token_overlay";
import { conversation } from "../conversation";
import { Named } from "../named";
import { AgentLine, AgentText, Commands, Facts, Fold, Loaded, Problem, State, link, number, signed, time } from "../parts";
import { RolloutActions } from "../rollout/actions";
import { SiblingKeys } from "../rollout/sibling_keys";
import { Timeline } from "../rollout/timeline";
import { Versions } from "../rollout/versions";
import { CreditLedger } from "./rollout_credit";
import { Ledger } from "./rollout_ledger";
import { Tools } from "./rollout_tools";

const LIVE = new Set(["queued", "running", "grading"]);
const CALLS = 50;

export function RolloutPage({ id }: { id: string }) {
  const path = `v1/rollouts/${encodeURIComponent(id)}`;
  const [shown, setShown] = useState(CALLS);
  const rollout = usePolled<RolloutDetail>(path, ({ state, reward }) => LIVE.has(state) || isOpen() || (state === "finished" && reward === null && !group.data?.verdict), [], true);
  const group: Answer<Group> = usePolled<Group>(rollout.data && `v1/groups/${encodeURIComponent(rollout.data.group_id)}?calls=${CALLS}`, isUndecided);
  const run = usePolled<Run>(rollout.data && `v1/runs/${encodeURIComponent(rollout.data.run_id)}`, () => false);
  // A finished rollout waits for its siblings, whose rewards decide its credit, and takes rewards until then.
  const isOpen = () => !group.data || isUndecided(group.data);
  const calls = usePolled<Page<Call>>(`${path}/calls?conversation=added&limit=${shown}`, isOpen);
  const mayTrain = !group.data || isUndecided(group.data) || (group.data.verdict === "credited" && !group.data.consumption);
  return (
    <>
      <h1>Rollout {id}</h1>
      <SiblingKeys id={id} group={group.data} />
      <Problem error={run.error} />
      <Loaded answer={rollout}>
        {(data) => (
          <Overview rollout={data} group={group} run={run} calls={calls}>
            <RolloutActions rollout={data} run={run} group={group.data} onChange={() => [rollout, group].forEach((one) => one.again?.())} />
          </Overview>
        )}
      </Loaded>
      <h2>Time</h2>
      <Loaded answer={rollout}>
        {(data) => <Loaded answer={calls}>{({ items, next_cursor }) => <Timeline rollout={data} calls={items} isWhole={!next_cursor} isLive={LIVE.has(data.state)} />}</Loaded>}
      </Loaded>
      <h2>Calls</h2>
      <Loaded answer={calls}>
        {({ items, next_cursor }) => (
          <>
            {items.length === 0 && <p>No model call yet: the agent has asked nothing.</p>}
            {items.map((call, index) => <CallView key={call.id} call={call} calls={items} place={index + 1} mayTrain={mayTrain} />)}
            {next_cursor && shown < 1000 && (
              <button type="button" onClick={() => setShown(1000)}>Show more calls</button>
            )}
            {next_cursor && shown === 1000 && <p class="quiet">These are the first 1,000; `leyden rollout show` shows all.</p>}
          </>
        )}
      </Loaded>
      <h2>Tools</h2>
      <Loaded answer={rollout}>{(data) => <Tools rollout={data} isLive={LIVE.has(data.state)} />}</Loaded>
    </>
  );
}

interface OfRollout {
  rollout: RolloutDetail;
  group: Answer<Group>;
  run: Answer<Run>;
  calls: Answer<Page<Call>>;
  /** Stands below the facts. */
  children: ComponentChildren;
}

function Overview({ rollout, group, run, calls, children }: OfRollout) {
  // Without the run's rules a sum is unknown; one that is asked for is not.
  const isKnown = run.data !== undefined || run.error !== undefined;
  return (
    <>
      {rollout.state === "excluded" && <p role="alert" class="problem"><AgentLine text={rollout.reason} /></p>}
      <Facts
        facts={[
          ["Run", <Named kind="runs" id={rollout.run_id} />],
          ["State", <><State state={rollout.state} /> <AgentLine text={rollout.reason} /></>],
          ["Reward", number(rollout.reward)],
          ["Task", <>{rollout.task_number} of <Named kind="datasets" id={rollout.dataset_id} /></>],
          ...(rollout.agent ? [["Agent", rollout.agent] satisfies [string, string]] : []),
          ...(rollout.rerolls_of ? [["Re-roll of", <><a href={link("rollouts", rollout.rerolls_of)}>{rollout.rerolls_of}</a>, from call {(rollout.from_call ?? 0) + 1}</>] satisfies [string, ComponentChildren]] : []),
          ["Version", rollout.admitted_version],
          ["Step", rollout.step ?? "–"],
          ["Created", time(rollout.created_at)],
        ]}
      />
      {children}
      <Commands commands={[`leyden rollout show ${rollout.id}`]} />
      <h2>Reward</h2>
      {isKnown ? <Ledger rollout={rollout} run={run.data} /> : <p role="status">Loading …</p>}
      <h2>Credit</h2>
      <Loaded answer={calls}>{({ items, next_cursor }) => <CreditLedger rollout={rollout} run={run.data} group={group.data} calls={items} isWhole={!next_cursor} />}</Loaded>
      <h2>Siblings</h2>
      <Siblings rollout={rollout} group={group} />
      <h2>The same task at other versions</h2>
      <Versions rollout={rollout} group={group.data} />
      <h2>Task and attempts</h2>
      <Fold title="Task">{() => <AgentText text={JSON.stringify(rollout.task, null, 2)} />}</Fold>
      {rollout.attempts.map((attempt) => <AttemptView key={attempt.number} rollout={rollout.id} attempt={attempt} />)}
    </>
  );
}

/** The rollouts of the same task whose rewards make the baseline. */
function Siblings({ rollout, group }: { rollout: RolloutDetail; group: Answer<Group> }) {
  return (
    <Loaded answer={group}>
      {({ siblings }) => (
        <>
        <p><a href={link("groups", rollout.group_id)}>Side by side</a></p>
        <ul class="siblings">
          {siblings.map((one) => (
            <li key={one.id}>
              <a href={link("rollouts", one.id)} aria-current={one.id === rollout.id ? "page" : undefined}>{one.sibling}</a>{" "}
              {one.reward === null ? one.state : number(one.reward)}
            </li>
          ))}
        </ul>
        </>
      )}
    </Loaded>
  );
}

function CallView({ call, calls, place, mayTrain }: { call: Call; calls: Call[]; place: number; mayTrain: boolean }) {
  const asked = (call.shared_turns ?? 0) + (call.turns?.length ?? 0);
  const versions = [...new Set(call.policy_versions)].join(", ");
  const facts = [
    call.agent_name ?? call.role ?? "",
    call.status,
    call.continuation ?? "",
    `${call.prompt_tokens} → ${call.completion_tokens} tokens`,
    versions && `version ${versions}`,
    `${number(call.total_seconds, 2)} s`,
  ].filter(Boolean);
  return (
    <article id={`call-${place}`} tabIndex={-1} aria-label={`Call ${place}`}>
      <h3>Call {place}</h3>
      <p class="quiet"><AgentLine text={facts.join(" · ")} /></p>
      <Credit call={call} />
      {!call.trainable && <p class="warning">Does not train: <AgentLine text={call.untrainable_reason} /></p>}
      {call.missing_parent && <p class="warning"><AgentLine text={call.missing_parent} /></p>}
      {call.turns && (
        <Fold title={`Request: ${asked} ${asked === 1 ? "message" : "messages"}`} open={place === 1}>
          {() => conversation(call, calls)?.map((turn, index) => <TurnView key={index} turn={turn} />) ?? <p class="warning">An earlier call is not in the store.</p>}
        </Fold>
      )}
      {call.answer ? <TurnView turn={call.answer} /> : <p class="quiet">No answer.</p>}
      <Fold title="Tokens">{() => <TokenOverlay rollout={call.rollout_id} call={call.id} mayTrain={mayTrain} />}</Fold>
    </article>
  );
}

function Credit({ call }: { call: Call }) {
  if (!call.credit) return <p class="quiet">No credit yet.</p>;
  const { intermediate_reward, return: whole, baseline, advantage } = call.credit;
  return (
    <p>
      return {number(whole)} (of it intermediate {number(intermediate_reward)}) − baseline {number(baseline)} = advantage{" "}
      <strong class={advantage < 0 ? "worse" : "better"}>{signed(advantage)}</strong>
    </p>
  );
}

function TurnView({ turn }: { turn: Turn }) {
  return (
    <div class={`turn ${turn.role}`}>
      <p class="role">{turn.role}{turn.is_error && " (error)"}</p>
      {turn.reasoning && <Fold title="Reasoning">{() => <AgentText text={turn.reasoning ?? ""} />}</Fold>}
      {turn.content && <AgentText text={turn.content} />}
      {(turn.tool_calls ?? []).map((one, index) => (
        <div key={index}>
          <p class="role">calls <AgentLine text={one.name} />{one.is_malformed && " (malformed)"}</p>
          <AgentText text={one.arguments} />
        </div>
      ))}
    </div>
  );
}
