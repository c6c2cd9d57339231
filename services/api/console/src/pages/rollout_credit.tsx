// From the reward of a rollout to the advantages of its calls: returns, the siblings' values, baselines.

import type { Call, Group, RolloutDetail, Run, RunConfig, Sibling } from "../api";
import { AgentLine, Table, link, number, signed } from "../parts";
import { showCall } from "../rollout/timeline";
import { isNear } from "./rollout_ledger";

type Credit = NonNullable<Call["credit"]>;
type Credited = Call & { credit: Credit };
type Rules = NonNullable<RunConfig["credit"]>;

interface Properties {
  rollout: RolloutDetail;
  run: Run | undefined;
  group: Group | undefined;
  calls: Call[];
  /** Whether `calls` are all of them. */
  isWhole: boolean;
}

export function CreditLedger({ rollout, run, group, calls, isWhole }: Properties) {
  const credited = calls.filter((one): one is Credited => one.credit !== null && (rollout.attempt === null || one.attempt === rollout.attempt));
  if (credited.length === 0) return <p>No call has credit: {why(rollout, group)}.</p>;
  const rules = run?.config?.credit;
  const place = (id: string) => calls.findIndex((one) => one.id === id) + 1;
  return (
    <>
      <Table label="Credit" head={["Call", "Intermediate", "Return", "Baseline", "Advantage", "Return from", "Intermediate from"]} numbers={["Intermediate", "Return", "Baseline", "Advantage"]}>
        {credited.map((call) => (
          <tr key={call.id}>
            <th scope="row"><button type="button" onClick={() => showCall(place(call.id))}>Call {place(call.id)}</button></th>
            <td class="number">{number(call.credit.intermediate_reward)}</td>
            <td class="number">{number(call.credit.return)}</td>
            <td class="number">{number(call.credit.baseline)}</td>
            <td class="number">{signed(call.credit.advantage)}{scale(call.credit)}</td>
            <td class="reason">{rules && returnFrom(rules, call, credited, isWhole, place)}</td>
            <td class="reason"><AgentLine text={onTheWay(call, rollout)} /></td>
          </tr>
        ))}
      </Table>
      <p class="quiet">
        Intermediate: what a call earned by itself, such as by its tools. Advantage: return − baseline; training makes a call above 0 more likely, one below 0 less.
      </p>
      {group && rules && <Values rollout={rollout} group={group} rules={rules} credited={credited} />}
    </>
  );
}

function why(rollout: RolloutDetail, group: Group | undefined): string {
  if (rollout.evaluation_id !== null) return "rollouts of evaluations train nothing";
  if (rollout.rerolls_of) return "it is a re-roll, which measures the value of a call and never trains";
  if (rollout.greedy) return "it is the greedy rollout, the baseline of its siblings";
  if (group?.verdict === "excluded") return `credit excluded its group (${group.reason ?? "no reason was given"})`;
  if (group?.awaits_credit || group?.state === "open") return "its group is not complete, or credit has not seen it yet";
  return "none of its calls counts";
}

/** What the difference of return and baseline was divided by. */
function scale({ return: whole, baseline, advantage }: Credit): string {
  const difference = whole - baseline;
  if (isNear(difference, advantage)) return "";
  return advantage === 0 ? ` (not ${signed(difference)}: the siblings teach nothing)` : ` (${signed(difference)} ÷ ${number(difference / advantage)})`;
}

/** The numbers whose sum by the credit rule is the return; "unknown" where they do not make it. */
function returnFrom(rules: Rules, call: Credited, calls: Credited[], isWhole: boolean, place: (id: string) => number): string {
  const rule = rules.rule;
  const { intermediate_reward: own, return: whole } = call.credit;
  const type = rule?.type ?? "discounted";
  const gamma = rule && "gamma" in rule && typeof rule.gamma === "number" ? rule.gamma : 1;
  const after = type === "temporal" ? calls.slice(calls.indexOf(call) + 1, calls.indexOf(call) + 2) : calls.filter((one) => one.credit.parent_call_id === call.id);
  if (!isWhole) return `${type}; this page has not all calls`;
  if (type === "discounted" || type === "temporal") {
    if (after.length === 0) return `${number(own)} intermediate + ${outcome(whole - own)}`;
    const mean = after.reduce((sum, one) => sum + one.credit.return, 0) / after.length;
    if (!isNear(own + gamma * mean, whole)) return `${type}, from unknown numbers`;
    return `${number(own)} intermediate + ${gamma} × ${number(mean)}, ${after.length > 1 ? "mean return of" : "return of"} call ${after.map((one) => place(one.id)).join(", ")}`;
  }
  if (type === "own") return `${number(own)} intermediate + ${outcome(whole - own)}`;
  if (type === "identical" || type === "equal_split") {
    const all = calls.reduce((sum, one) => sum + one.credit.intermediate_reward, 0);
    const parts = type === "identical" ? 1 : calls.length;
    return `${outcome(whole * parts - all)} + ${number(all)} intermediate of all calls${parts > 1 ? `, divided by ${parts}` : ""}`;
  }
  return `credit rule ${type}`;
}

const outcome = (value: number) => `${number(value)} of the reward`;

/** What a call earned by its tools, and what was given to it. */
function onTheWay(call: Credited, rollout: RolloutDetail): string {
  const tools = (call.credit.tools as { calls?: { tool: string; status: string }[] }).calls ?? [];
  const given = rollout.rewards.filter((one) => one.call_id === call.id);
  return [...tools.map((one) => `${one.tool} ${one.status}`), ...given.map((one) => `${one.name} ${signed(one.value)}`)].join(", ");
}

/** The values of the siblings, of which the baseline is made. */
function Values({ rollout, group, rules, credited }: { rollout: RolloutDetail; group: Group; rules: Rules; credited: Credited[] }) {
  const type = rules.baseline?.type ?? "mean";
  const per = rules.baseline?.per ?? "rollout";
  const counted = group.siblings.filter((one) => one.state === "finished" && !one.greedy);
  const values = new Map(counted.map((one) => [one.id, value(one)]));
  return (
    <>
      <p>
        Baseline <code>{type}</code> per {per}: {baseline(type, per, rollout, values, credited)}. A sibling's value is the mean return of its calls.
      </p>
      <Table label="Values of the siblings" head={["Sibling", "Earned", "Value"]} numbers={["Earned", "Value"]}>
        {counted.map((one) => (
          <tr key={one.id}>
            <th scope="row"><a href={link("rollouts", one.id)} aria-current={one.id === rollout.id ? "page" : undefined}>Sibling {one.sibling}</a></th>
            <td class="number">{number(one.reward)}</td>
            <td class="number">{values.get(one.id) === undefined ? "unknown" : number(values.get(one.id))}</td>
          </tr>
        ))}
      </Table>
    </>
  );
}

/** The mean return of a sibling's calls; unknown where it has none, or the group shows not all of them. */
function value(one: Sibling): number | undefined {
  const returns = one.calls.flatMap((call) => (call.credit ? [call.credit.return] : []));
  if (returns.length === 0 || one.calls.length < one.call_count) return undefined;
  return returns.reduce((sum, each) => sum + each, 0) / returns.length;
}

function baseline(type: string, per: string, rollout: RolloutDetail, values: Map<string, number | undefined>, credited: Credited[]): string {
  const stored = credited[0]?.credit.baseline;
  const others = [...values].filter(([id]) => type !== "leave_one_out" || id !== rollout.id).map(([, one]) => one);
  const isMean = per === "rollout" && ["mean", "mean_std", "leave_one_out"].includes(type);
  if (!isMean || stored === undefined) return per === "rollout" ? "made of the numbers below, or of the run's own" : `compared among calls of the same ${per}`;
  if (others.some((one) => one === undefined) || others.length === 0) return "unknown, because the value of a sibling is";
  const mean = others.reduce<number>((sum, one) => sum + (one ?? 0), 0) / others.length;
  return isNear(mean, stored) ? `${number(stored)}, the mean of ${type === "leave_one_out" ? "the others' values" : "the values below"}` : "unknown: the values below do not make it";
}
