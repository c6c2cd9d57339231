import { useState } from "preact/hooks";
import { AlarmNames } from "../alarms";
import { usePolled, type Page, type Run } from "../api";
import { AgentLine, Commands, Loaded, State, Table, link, number, time } from "../parts";
import { safeLine } from "../safe_text";
import { MOST_RUNS, compareLink } from "./compare";

const SHOWN = 100;

export function Runs() {
  const [chosen, setChosen] = useState<string[]>([]);
  const answer = usePolled<Page<Run>>(`v1/runs?limit=${SHOWN}`);
  return (
    <>
      <h1>Runs</h1>
      <Loaded answer={answer}>
        {({ items, next_cursor }) =>
          items.length === 0 ? (
            <>
              <p>No run yet. Train the example, or your own agent:</p>
              <Commands commands={["make demo", "leyden train --tasks tasks.jsonl --reward exact -- python agent.py"]} />
            </>
          ) : (
            <>
              <p>
                {chosen.length > 1
                  ? <a href={compareLink(chosen)}>Compare {chosen.length} runs</a>
                  : <span class="quiet">Tick two runs or more to compare them.</span>}
              </p>
              <Table label="Runs" head={["Run", "State", "Step", "Last reward", "Alarms", "Created", "Compare"]} numbers={["Step", "Last reward"]}>
                {items.map((run) => (
                  <tr key={run.id}>
                    <th scope="row">
                      <a href={link("runs", run.id)}><AgentLine text={run.name} /></a>
                    </th>
                    <td>
                      <State state={run.phase} />
                      {run.config === null && run.reason && <p class="problem"><AgentLine text={run.reason} /></p>}
                    </td>
                    <td class="number">{run.progress.step} / {run.progress.steps ?? "?"}</td>
                    <td class="number">{number(run.progress.reward_mean)}</td>
                    <td><AlarmNames alarms={run.alarms} /></td>
                    <td>{time(run.created_at)}</td>
                    <td>
                      <input
                        type="checkbox"
                        aria-label={`Compare ${safeLine(run.name)} ${run.id}`}
                        checked={chosen.includes(run.id)}
                        disabled={!chosen.includes(run.id) && chosen.length === MOST_RUNS}
                        onChange={(event) => setChosen(event.currentTarget.checked ? [...chosen, run.id] : chosen.filter((one) => one !== run.id))}
                      />
                    </td>
                  </tr>
                ))}
              </Table>
              {next_cursor && <p class="quiet">These are the newest {SHOWN}; `leyden run list` shows all.</p>}
            </>
          )
        }
      </Loaded>
    </>
  );
}
