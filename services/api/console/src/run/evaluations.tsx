// The evaluations of a run, complete or not.

import type { Evaluation, Run } from "../api";
import { AgentLine, Commands, Table, number } from "../parts";

export function Evaluations({ run, evaluations }: { run: Run; evaluations: Evaluation[] }) {
  return (
    <>
      {evaluations.length === 0 ? <p>No evaluation: the document has none, and nobody has asked for one.</p> : (
        <Table label="Evaluations" head={["Number", "Version", "Dataset", "Rollouts", "Reward", "95 % interval", "Facts"]} numbers={["Number", "Version", "Reward"]}>
          {evaluations.map((one) => (
            <tr key={one.id}>
              <th scope="row" class="number">{one.number}</th>
              <td class="number">{one.measured_version ?? one.policy_version ?? "last"}</td>
              <td>{one.dataset_id}</td>
              <td>{states(one)}</td>
              <td class="number">{number(one.results.reward?.mean)}</td>
              <td>{interval(one.results.reward)}</td>
              <td class="reason"><AgentLine text={[...agents(one), facts(one)].filter(Boolean).join("; ")} /></td>
            </tr>
          ))}
        </Table>
      )}
      <Commands commands={[`leyden run show ${run.id}`, `leyden run evaluate ${run.id}`]} />
    </>
  );
}

function states({ results }: Evaluation): string {
  const counts = Object.entries(results.rollouts).map(([state, count]) => `${count} ${state}`).join(", ") || "none yet";
  return results.complete ? counts : `${counts}; not complete${results.pending ? `, ${results.pending} wait for a grade` : ""}`;
}

type Statistic = NonNullable<Evaluation["results"]["reward"]>;

const interval = (statistic: Statistic | null | undefined) =>
  statistic?.low == null || statistic.high == null ? "–" : `${number(statistic.low)} to ${number(statistic.high)}`;

/** The reward of each agent of a run that has several. */
const agents = ({ results }: Evaluation) =>
  Object.entries(results.agents ?? {}).map(([name, one]) => `agent ${name} ${number(one.mean)} (${interval(one)})`);

const facts = ({ results }: Evaluation) =>
  results.facts.map((one) => `${one.name} ${one.statistic ? number(one.statistic.mean) : Object.entries(one.counts ?? {}).map(([text, count]) => `${text}: ${count}`).join(", ")}`).join("; ");
