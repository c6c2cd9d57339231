// The siblings of one task side by side: why did one earn more than another?

import type { ComponentChildren } from "preact";
import { useState } from "preact/hooks";
import { isUndecided, usePolled, type Call, type Group, type GroupPolicy, type Page, type Sibling, type SiblingCall, type Turn } from "../api";
import { lastTurn } from "../conversation";
import { Named } from "../named";
import { AgentLine, AgentText, Commands, Facts, Fold, Loaded, State, Table, link, number, signed, time } from "../parts";

const CALLS = 50;

export function GroupPage({ id }: { id: string }) {
  const group = usePolled<Group>(`v1/groups/${encodeURIComponent(id)}?calls=${CALLS}`, isUndecided, [], true);
  return (
    <>
      <h1>Group {id}</h1>
      <Loaded answer={group}>{(data) => <Siblings group={data} />}</Loaded>
    </>
  );
}

function Siblings({ group }: { group: Group }) {
  const best = [...group.siblings].sort((one, other) => (other.reward ?? -Infinity) - (one.reward ?? -Infinity) || one.sibling - other.sibling);
  return (
    <>
      {group.reason && <p role="alert" class="problem"><AgentLine text={group.reason} /></p>}
      {group.has_variance === false && !group.reason && <p class="warning">{whyNothing(group)}</p>}
      <Facts
        facts={[
          ["Run", <Named kind="runs" id={group.run_id} />],
          ["State", <><State state={group.state} /> {group.consumption ?? group.verdict ?? ""}</>],
          ["Task", <>{group.task_number} of <Named kind="datasets" id={group.dataset_id} /></>],
          ...(group.agent ? [["Agent", group.agent] satisfies [string, string]] : []),
          ["Version", group.admitted_version],
          ["Mean reward", number(group.reward_mean)],
          ["Deviation", number(group.reward_std)],
          ["Step", group.step ?? "–"],
          ...group.policies.map((one): [string, ComponentChildren] => [`Policy ${one.name}`, <AgentLine text={verdict(one)} />]),
          ["Created", time(group.created_at)],
        ]}
      />
      <Commands commands={[`leyden rollout group ${group.id}`]} />
      <Fold title="Task">{() => <AgentText text={JSON.stringify(group.task, null, 2)} />}</Fold>
      <h2>Siblings, the best first</h2>
      {best[0] && <SideBySide siblings={best} first={best[0]} />}
      <h2>From the first difference on</h2>
      {best.length > 1 ? <Difference siblings={best} /> : <p>This group has one rollout.</p>}
      <Rerolls group={group} />
    </>
  );
}

/** Rollouts that measure the value of a sibling's calls by going on from them again. */
function Rerolls({ group: { rerolls = [], siblings } }: { group: Group }) {
  if (rerolls.length === 0) return null;
  return (
    <>
      <h2>Re-rolls</h2>
      <p class="quiet">Each repeats the calls of a sibling from the record and samples on from one: the mean reward is the value of the state before that call. They never train.</p>
      <Table label="Re-rolls" head={["Rollout", "Repeats", "Samples from", "State", "Reward", "Reason"]} numbers={["Reward"]}>
        {rerolls.map((one) => (
          <tr key={one.id}>
            <th scope="row"><a href={link("rollouts", one.id)}>{one.id}</a></th>
            <td>{one.rerolls_of && <a href={link("rollouts", one.rerolls_of)}>Sibling {siblings.find((other) => other.id === one.rerolls_of)?.sibling ?? one.rerolls_of}</a>}</td>
            <td>call {(one.from_call ?? 0) + 1}</td>
            <td><State state={one.state} /></td>
            <td class="number">{number(one.reward)}</td>
            <td class="reason"><AgentLine text={one.reason} /></td>
          </tr>
        ))}
      </Table>
    </>
  );
}

/** Why a group with trainable calls has no advantage. */
const whyNothing = (group: Group) =>
  group.reward_std === 0
    ? "All siblings earned alike: every advantage is zero, and the group teaches nothing."
    : "Rewards differ, but no token that trains has an advantage: the calls that may train earned alike, or the rewards differ by less than credit.baseline.min_spread.";

/** The verdicts on the group for a further policy. */
const verdict = (one: GroupPolicy) =>
  [one.consumption ?? one.verdict ?? "no verdict yet", one.step == null ? "" : `step ${one.step}`, one.reason ?? ""].filter(Boolean).join(" · ");

/** A column for each sibling; a cell says where it does as the best one does. */
function SideBySide({ siblings, first }: { siblings: Sibling[]; first: Sibling }) {
  const names = [...new Set(siblings.flatMap((one) => one.components.map((component) => component.component)))];
  const places = [...Array(Math.max(...siblings.map((one) => one.calls.length))).keys()];
  return (
    <div class="table" role="region" aria-label="Siblings" tabIndex={0}>
      <table class="columns">
        <thead>
          <tr>
            <td />
            {siblings.map((one) => (
              <th key={one.id} scope="col"><a href={link("rollouts", one.id)}>Sibling {one.sibling}</a>{one.greedy && " (greedy)"}</th>
            ))}
          </tr>
        </thead>
        <tbody>
          <Row name="State" siblings={siblings}>{(one) => <><State state={one.state} /> <AgentLine text={one.reason} /></>}</Row>
          <Row name="Reward" siblings={siblings}>{(one) => <strong>{number(one.reward)}</strong>}</Row>
          {names.map((name) => <Row key={name} name={name} siblings={siblings}>{(one) => <Component sibling={one} name={name} />}</Row>)}
          <Row name="Advantage" siblings={siblings}>{(one) => <Advantage calls={one.calls} />}</Row>
          <Row name="Calls" siblings={siblings}>{(one) => `${one.call_count}, ${one.sampled_tokens.toLocaleString()} tokens`}</Row>
          {places.map((place) => (
            <Row key={place} name={`Call ${place + 1}`} siblings={siblings}>
              {(one) => <Cell call={one.calls[place]} best={one === first ? undefined : first.calls[place]} />}
            </Row>
          ))}
        </tbody>
      </table>
      {siblings.some((one) => one.calls.length < one.call_count) && <p class="quiet">These are the first {CALLS} calls of each.</p>}
    </div>
  );
}

function Row({ name, siblings, children }: { name: string; siblings: Sibling[]; children: (one: Sibling) => ComponentChildren }) {
  return (
    <tr>
      <th scope="row"><AgentLine text={name} /></th>
      {siblings.map((one) => <td key={one.id}>{children(one)}</td>)}
    </tr>
  );
}

function Component({ sibling, name }: { sibling: Sibling; name: string }) {
  const found = sibling.components.find((one) => one.component === name);
  if (!found) return <>–</>;
  if (found.value === null) return <>{found.state}</>;
  return <>{number(found.value)}{found.contribution != null && ` (adds ${signed(found.contribution)})`}</>;
}

/** One number where all calls have the same, else the least and the largest. */
function Advantage({ calls }: { calls: SiblingCall[] }) {
  const found = calls.flatMap((one) => (one.credit ? [one.credit.advantage] : []));
  if (found.length === 0) return <>–</>;
  const [low, high] = [Math.min(...found), Math.max(...found)];
  return <>{low === high ? signed(low) : `${signed(low)} to ${signed(high)}`}</>;
}

function Cell({ call, best }: { call: SiblingCall | undefined; best: SiblingCall | undefined }) {
  if (!call) return <>–</>;
  const likeness = best === undefined ? "" : best.answered === call.answered ? "as the best" : "differs";
  const facts = [
    likeness,
    `${call.completion_tokens} tokens`,
    call.credit ? signed(call.credit.advantage) : "",
    call.trainable ? "" : "does not train",
    call.finish_reason === "length" ? "cut" : "",
  ].filter(Boolean);
  return (
    <div class={likeness === "differs" ? "differs" : ""}>
      <p class="quiet">{facts.join(" · ")}</p>
      <AgentLine text={call.text} />
      {call.tools.length > 0 && <p class="role">calls <AgentLine text={call.tools.join(", ")} /></p>}
    </div>
  );
}

/** The index of the first call in which two siblings differ, and whether the question or the answer does. */
function firstDifference(one: Sibling, other: Sibling): { place: number; part: "question" | "answer" } | undefined {
  for (let place = 0; place < Math.max(one.calls.length, other.calls.length); place++) {
    const [left, right] = [one.calls[place], other.calls[place]];
    if (!left || !right || left.asked !== right.asked) return { place, part: "question" };
    if (left.answered !== right.answered) return { place, part: "answer" };
  }
  return undefined;
}

function Difference({ siblings }: { siblings: Sibling[] }) {
  const [left, setLeft] = useState(siblings[0]?.id ?? "");
  const [right, setRight] = useState(siblings[siblings.length - 1]?.id ?? "");
  const [one, other] = [left, right].map((id) => siblings.find((sibling) => sibling.id === id));
  if (!one || !other) return <p>Choose two siblings.</p>;
  const title = ({ sibling }: Sibling) => `Sibling ${sibling}`;
  return (
    <>
      <p>
        <Choice label="Sibling" value={left} siblings={siblings} onChange={setLeft} />{" "}
        <Choice label="beside" value={right} siblings={siblings} onChange={setRight} />
      </p>
      <Beside one={one} other={other} titles={[title(one), title(other)]} />
    </>
  );
}

/** The answers of two rollouts of a task, from the first call on in which they differ. */
export function Beside({ one, other, titles }: { one: Sibling; other: Sibling; titles: [string, string] }) {
  const found = firstDifference(one, other);
  return (
    <>
      <p role="status">
        {one === other || !found
          ? "Both did the same."
          : `${found.place === 0 ? "They differ from the first call on" : `Same until call ${found.place}`}: the ${found.part} of call ${found.place + 1} differs.`}
      </p>
      {found && one !== other && (
        <div class="beside">
          <Later key={one.id} sibling={one} title={titles[0]} from={found.place} />
          <Later key={other.id} sibling={other} title={titles[1]} from={found.place} />
        </div>
      )}
    </>
  );
}

function Choice({ label, value, siblings, onChange }: { label: string; value: string; siblings: Sibling[]; onChange: (id: string) => void }) {
  return (
    <>
      <label for={label}>{label}</label>{" "}
      <select id={label} value={value} onChange={(event) => onChange(event.currentTarget.value)}>
        {siblings.map((one) => <option key={one.id} value={one.id}>{one.sibling}, reward {number(one.reward)}</option>)}
      </select>
    </>
  );
}

/** The answers of a sibling from a call on, in full. */
function Later({ sibling, title, from }: { sibling: Sibling; title: string; from: number }) {
  const shown = sibling.shown_attempt;
  const attempt = shown == null ? "" : `&attempt=${shown}`;
  // What follows # is sent to no server: a further call asks again.
  const path = `v1/rollouts/${encodeURIComponent(sibling.id)}/calls?conversation=added&limit=${CALLS}${attempt}#${sibling.call_count}`;
  const answer = usePolled<Page<Call>>(path, () => false);
  return (
    <section aria-label={title}>
      <h3>{title}, reward {number(sibling.reward)}</h3>
      {sibling.attempt === null && shown != null && <p class="quiet">No attempt counts: these are the calls of attempt {shown}, the newest.</p>}
      <Loaded answer={answer}>
        {({ items }) => (
          <>
            {items.slice(from).map((call, index) => <Answer key={call.id} call={call} asked={lastTurn(call, items)} place={from + index + 1} />)}
            {items.length <= from && <p>It made no call {from + 1}.</p>}
          </>
        )}
      </Loaded>
    </section>
  );
}

function Answer({ call, asked, place }: { call: Call; asked?: Turn; place: number }) {
  return (
    <article aria-label={`Call ${place}`}>
      <h4>Call {place}</h4>
      {asked && <div class={`turn ${asked.role}`}><p class="role">{asked.role}</p><AgentText text={asked.content} /></div>}
      {call.answer ? (
        <div class="turn assistant">
          <p class="role">assistant</p>
          <AgentText text={call.answer.content} />
          {(call.answer.tool_calls ?? []).map((one, index) => (
            <div key={index}><p class="role">calls <AgentLine text={one.name} /></p><AgentText text={one.arguments} /></div>
          ))}
        </div>
      ) : <p class="quiet">No answer.</p>}
    </article>
  );
}
