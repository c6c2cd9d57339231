// The reward of a rollout as a sum: components, gates, clip, and what was given besides; and every grading of it.

import type { Feedback, RewardComponent, RolloutDetail, Run, RunConfig } from "../api";
import { AgentLine, Fold, FoldedText, Table, number, signed, time } from "../parts";

type Section = NonNullable<RunConfig["reward"]>;

interface Row {
  name: string;
  source: string;
  /** The grader's or the people's own number, where the value is made of it. */
  raw: string;
  value: string;
  weight: string;
  adds: string;
  why: string;
  /** Values that people and programs gave to it. */
  given: Feedback[];
}

/** A sum with its rows; `value` is undefined where one of its parts is unknown. */
interface Sum {
  rows: Row[];
  value: number | undefined;
}

/** Numbers that look the same on the page. */
export const isNear = (one: number, other: number) => Math.abs(one - other) < 0.0005 * Math.max(1, Math.abs(one));

const row = (name: string, more: Partial<Row>): Row => ({ name, source: "", raw: "", value: "", weight: "", adds: "", why: "", given: [], ...more });

export function Ledger({ rollout, run }: { rollout: RolloutDetail; run: Run | undefined }) {
  const attempt = rollout.attempt ?? Math.max(0, ...(rollout.components ?? []).map((one) => one.attempt));
  const gradings = revisions(rollout, attempt);
  const counted = rollout.evaluation_id === null ? gradings[0] : gradings[gradings.length - 1];
  const sum = counted ? graded(counted, section(rollout, run, attempt, counted), rollout) : own(rollout);
  const given = rewardsGiven(rollout);
  const rows = [...sum.rows, ...given.rows, ...uncounted(rollout, counted ?? [])];
  if (rows.length === 0) return <p>Nobody has given a reward yet.</p>;
  const whole = sum.value === undefined || given.value === undefined ? undefined : sum.value + given.value;
  const others = gradings.filter((one) => one !== counted);
  return (
    <>
      <Rows label="Reward" rows={rows} last="reward" total={rollout.reward} sum={whole} />
      {rollout.reward !== null && whole !== undefined && !isNear(whole, rollout.reward) && (
        <p class="warning">These parts add up to {number(whole)}, and the reward is {number(rollout.reward)}: where the rest comes from is unknown.</p>
      )}
      {others.length > 0 && <p>{rollout.evaluation_id === null ? "It was graded again later. Credit keeps the first grading." : "It was graded again. The newest grading counts."}</p>}
      {others.map((components) => <Revision key={components[0]?.revision} rollout={rollout} run={run} attempt={attempt} components={components} />)}
    </>
  );
}

function Revision({ rollout, run, attempt, components }: { rollout: RolloutDetail; run: Run | undefined; attempt: number; components: RewardComponent[] }) {
  const number_ = components[0]?.revision ?? 1;
  const regrade = rollout.regrades?.find((one) => one.attempt === attempt && one.revision === number_);
  const found = graded(components, section(rollout, run, attempt, components), rollout);
  const who = regrade ? `, asked for by ${regrade.given_by}, ${time(regrade.created_at)}` : "";
  return (
    <Fold title={`Revision ${number_}${who}: total ${number(regrade?.total ?? found.value)}`}>
      {() => <Rows label={`Revision ${number_}`} rows={found.rows} last={`total of revision ${number_}`} total={regrade?.total ?? found.value ?? null} sum={found.value} />}
    </Fold>
  );
}

function Rows({ label, rows, last, total, sum }: { label: string; rows: Row[]; last: string; total: number | null; sum: number | undefined }) {
  return (
    <Table label={label} head={["Part", "From", "Raw", "Value", "Weight", "Adds", "Why"]} numbers={["Raw", "Value", "Weight", "Adds"]}>
      {rows.map((one, index) => (
        <tr key={index}>
          <th scope="row"><AgentLine text={one.name} /></th>
          <td><AgentLine text={one.source} /></td>
          <td class="number"><AgentLine text={one.raw} /></td>
          <td class="number">{one.value}</td>
          <td class="number">{one.weight}</td>
          <td class="number">{one.adds}</td>
          <td class="reason">
            <FoldedText text={one.why} />
            {one.given.length > 0 && <Given given={one.given} />}
          </td>
        </tr>
      ))}
      <tr class="total">
        <th scope="row">{last}</th>
        <td colSpan={4} />
        <td class="number">{total === null ? "unknown" : number(total)}</td>
        <td class="reason">{sum === undefined && "A part of the sum is unknown."}</td>
      </tr>
    </Table>
  );
}

/** Each value with its giver and comment. */
function Given({ given }: { given: Feedback[] }) {
  return (
    <ul class="given">
      {given.map((one) => (
        <li key={one.key}>
          {number(one.value)} by <AgentLine text={one.given_by ?? "the agent's telemetry"} />, {time(one.created_at)}{one.comment && <>: <FoldedText text={one.comment} /></>}
        </li>
      ))}
    </ul>
  );
}

/** The components of the counted attempt by revision, ascending. */
function revisions(rollout: RolloutDetail, attempt: number): RewardComponent[][] {
  const all = [...(rollout.earlier_components ?? []), ...(rollout.components ?? [])].filter((one) => one.attempt === attempt);
  const numbers = [...new Set(all.map((one) => one.revision))].sort((one, other) => one - other);
  return numbers.map((revision) => all.filter((one) => one.revision === revision));
}

/** The section `reward` that graded them; undefined while the run is not known. */
function section(rollout: RolloutDetail, run: Run | undefined, attempt: number, components: RewardComponent[]): Section | undefined {
  const regrade = rollout.regrades?.find((one) => one.attempt === attempt && one.revision === components[0]?.revision);
  return regrade ? (regrade.reward as unknown as Section) : (run?.config?.reward ?? undefined);
}

/** Components, then gates, then clip, as `libs/grading/total.py` has it. */
function graded(components: RewardComponent[], rules: Section | undefined, rollout: RolloutDetail): Sum {
  const rows = components.map((one) => component(one, rules, rollout.feedback ?? []));
  const isUnknown = (one: RewardComponent) => one.contribution == null && one.weight !== 0 && one.state === "scored";
  if (!rules || components.some(isUnknown)) return { rows, value: undefined };
  const parts = components.filter((one) => one.contribution != null);
  if (parts.length === 0) return { rows, value: undefined };
  let value = parts.reduce((sum, one) => sum + (one.contribution ?? 0), 0);
  const gates = rules.components.filter((one) => one.gate != null);
  if (gates.length > 0 || rules.clip) rows.push(row("sum of components", { adds: number(value) }));
  for (const { name, gate } of gates) {
    const found = components.find((one) => one.component === name);
    const passed = found?.value ?? (found?.state === "failed" ? 0 : undefined);
    const isClosed = passed !== undefined && gate != null && passed < gate.at_least;
    if (isClosed) value = Math.min(0, value);
    rows.push(row(`gate ${name}`, { value: passed === undefined ? "open" : number(passed), adds: number(value), why: isClosed ? `below ${gate.at_least}: closed, so that the total is at most 0` : `at least ${gate?.at_least}: open` }));
  }
  if (rules.clip) {
    const [smallest = value, largest = value] = rules.clip;
    value = Math.min(Math.max(value, smallest), largest);
    rows.push(row("clip", { adds: number(value), why: `between ${smallest} and ${largest}` }));
  }
  return { rows, value };
}

function component(one: RewardComponent, rules: Section | undefined, feedback: Feedback[]): Row {
  const given = feedback.filter((other) => isFor(other, one));
  const plain = one.weight * (one.value ?? 0);
  const factor = one.contribution != null && plain !== 0 && !isNear(one.contribution, plain) ? ` × ${number(one.contribution / plain)}` : "";
  const raw = rawOf(one, rules, given);
  return row(one.component, {
    source: one.source,
    raw,
    given,
    value: one.value === null ? one.state.replace("_", " ") : number(one.value),
    weight: `${one.weight}${factor}`,
    adds: one.contribution != null ? signed(one.contribution) : one.weight === 0 ? "–" : one.state === "scored" ? "unknown" : "nothing",
    why: [one.extracted === null || raw ? "" : `answer ${JSON.stringify(one.extracted)}`, one.explanation].filter(Boolean).join("; "),
  });
}

const isFor = (given: Feedback, one: RewardComponent) => given.attempt === one.attempt && given.component === one.component;

/** The number before the value: scores of a judge with their range, values of people; empty where a grader gives the value itself. */
function rawOf({ component: name, source, extracted }: RewardComponent, rules: Section | undefined, given: Feedback[]): string {
  const rule = rules?.components.find((one) => one.name === name);
  if (given.length > 0) return `${given.map((one) => one.value).join(", ")}${given.length > 1 && rule ? ` (${rule.combine ?? "mean"})` : ""}`;
  if (source === "numeric") return extracted ?? "";
  if (source !== "score_model" || extracted === null) return "";
  const [low, high] = (rule?.grader?.type === "score_model" && rule.grader.range) || [];
  return low === undefined ? extracted : `${extracted} of ${low} to ${high}`;
}

/** Feedback that no shown component has: it waits for the grading, or its attempt does not count. */
function uncounted(rollout: RolloutDetail, components: RewardComponent[]): Row[] {
  const left = (rollout.feedback ?? []).filter((one) => !components.some((other) => isFor(one, other)));
  return [...new Set(left.map((one) => one.component))].map((name) => {
    const given = left.filter((one) => one.component === name);
    return row(name, { source: "feedback", raw: given.map((one) => one.value).join(", "), adds: "–", why: components.length > 0 ? "its attempt does not count" : "waits for the grading", given });
  });
}

/** The agent's own reward, or the number that its failure has. */
function own(rollout: RolloutDetail): Sum {
  const outcome = rollout.attempts.find((one) => one.number === rollout.attempt)?.outcome;
  if (outcome?.reward != null) {
    return { rows: [row("outcome", { source: "agent", value: number(outcome.reward), weight: "1", adds: signed(outcome.reward), why: outcome.detail ?? "" })], value: outcome.reward };
  }
  if (!outcome || outcome.kind === "succeeded") return { rows: [], value: 0 };
  const rest = rollout.reward === null ? undefined : rollout.reward - (rewardsGiven(rollout).value ?? 0);
  return { rows: [row("failure", { source: "platform", adds: rest === undefined ? "unknown" : signed(rest), why: `${outcome.kind}: what failures of the agent earn` })], value: rest };
}

function rewardsGiven(rollout: RolloutDetail): Sum {
  const counts = (attempt: number | null) => attempt === null || attempt === rollout.attempt;
  return {
    rows: rollout.rewards.map((one) => row(one.name, {
      source: one.given_by ?? one.source,
      value: number(one.value),
      weight: "1",
      adds: counts(one.attempt) ? signed(one.value) : "–",
      why: [one.call_id ? `call ${one.call_id}` : "", counts(one.attempt) ? "" : `attempt ${one.attempt} does not count`, one.comment ?? ""].filter(Boolean).join("; "),
    })),
    value: rollout.rewards.filter((one) => counts(one.attempt)).reduce((sum, one) => sum + one.value, 0),
  };
}
