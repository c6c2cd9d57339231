// The evaluations of a run, complete or not.

import type { Duel, Evaluation, Run } from "../api";
import { Paged } from "../paged";
import { Named } from "../named";
import { AgentLine, Commands, Table, link, number, time } from "../parts";

const DUELS = 25;

export function Evaluations({ run, evaluations }: { run: Run; evaluations: Evaluation[] }) {
  return (
    <>
      {evaluations.length === 0 ? <p>No evaluation: the document has none, and nobody has asked for one.</p> : (
        <Table label="Evaluations" head={["Number", "Version", "Dataset", "Rollouts", "Reward", "95 % interval", "Facts"]} numbers={["Number", "Version", "Reward"]}>
          {evaluations.map((one) => (
            <tr key={one.id}>
              <th scope="row" class="number">{one.number}</th>
              <td class="number">{one.measured_version ?? one.policy_version ?? "last"}</td>
              <td><Named kind="datasets" id={one.dataset_id} /></td>
              <td>{states(one)}</td>
              <td class="number">{number(one.results.reward?.mean)}</td>
              <td>{interval(one.results.reward)}</td>
              <td class="reason"><AgentLine text={[...agents(one), facts(one)].filter(Boolean).join("; ")} /></td>
            </tr>
          ))}
        </Table>
      )}
      <Commands commands={[`leyden run show ${run.id}`, `leyden run evaluate ${run.id}${run.config?.evaluation ? "" : " --dataset NAME"}`]} />
      <Duels run={run} />
    </>
  );
}

/** Win rates of evaluations by judges that compared their answers in pairs. */
function Duels({ run }: { run: Run }) {
  const command = `leyden reward duel run.json --evaluation ${run.id}.e2 --against ${run.id}.e1`;
  return (
    <>
      <h2>Duels</h2>
      <Paged<Duel>
        path={`v1/runs/${encodeURIComponent(run.id)}/duels`}
        limit={DUELS}
        parts={["evaluations"]}
        nothing={<><p>No duel: a judge that compares answers in pairs gives the win rate of one evaluation over another.</p><Commands commands={[command]} /></>}
      >
        {({ items }) => (
          <Table label="Duels" head={["Evaluation", "Against", "Judge", "Win rate", "95 % interval", "Won", "Same", "Lost", "Not compared", "By", "Time"]} numbers={["Win rate", "Won", "Same", "Lost", "Not compared"]}>
            {items.flatMap((one) => one.rates.map((rate) => (
              <tr key={`${one.number} ${rate.component}`}>
                <th scope="row">{one.evaluation_id}, version {one.version ?? "–"}</th>
                <td>{one.against_run_id ? <a href={`${link("runs", one.against_run_id)}/evaluations`}>{one.against_id}, version {one.against_version ?? "–"}</a> : `${one.against_id}, deleted`}</td>
                <td><AgentLine text={rate.component} /></td>
                <td class="number">{number(rate.rate?.mean)}</td>
                <td>{interval(rate.rate)}</td>
                <td class="number">{rate.wins}</td>
                <td class="number">{rate.ties}</td>
                <td class="number">{rate.losses}</td>
                <td class="number">{rate.lost}</td>
                <td><AgentLine text={one.given_by} /></td>
                <td>{time(one.created_at)}</td>
              </tr>
            )))}
          </Table>
        )}
      </Paged>
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
