import { AlarmNames } from "../alarms";
import { usePolled, type Page, type Run } from "../api";
import { AgentLine, Commands, Loaded, State, Table, link, number, time } from "../parts";

const SHOWN = 100;

export function Runs() {
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
              <Table label="Runs" head={["Run", "State", "Step", "Last reward", "Alarms", "Created"]} numbers={["Step", "Last reward"]}>
                {items.map((run) => (
                  <tr key={run.id}>
                    <th scope="row">
                      <a href={link("runs", run.id)}><AgentLine text={run.name} /></a>
                    </th>
                    <td><State state={run.phase} /></td>
                    <td class="number">{run.progress.step} / {run.progress.steps}</td>
                    <td class="number">{number(run.progress.reward_mean)}</td>
                    <td><AlarmNames alarms={run.alarms} /></td>
                    <td>{time(run.created_at)}</td>
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
