import { useState } from "preact/hooks";
import { AlarmNames } from "../alarms";
import { bestVersion, usePolled, type ApiError, type Page, type Run, type RunCurve } from "../api";
import { AgentLine, Commands, Loaded, State, Table, duration, link, number, time } from "../parts";
import { safeLine } from "../safe_text";
import { Sparkline } from "../sparkline";
import { MOST_RUNS, compareLink } from "./compare";

const SHOWN = 100;
const HEAD = ["Run", "State", "Step", "Time left", "Last reward", "Reward", "Best version", "Alarms", "Agent", "Model", "Pool", "Created", "Compare"];

export function Runs() {
  const [chosen, setChosen] = useState<string[]>([]);
  const answer = usePolled<Page<Run>>(`v1/runs?limit=${SHOWN}`);
  const { curves, error } = useCurves(answer.data?.items ?? []);
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
              {error && <p role="alert" class="problem">{safeLine(error.message)}</p>}
              <Table label="Runs" head={HEAD} numbers={["Step", "Time left", "Last reward"]}>
                {items.map((run) => (
                  <Row
                    key={run.id}
                    run={run}
                    curve={curves.get(run.id)}
                    isChosen={chosen.includes(run.id)}
                    isFull={chosen.length === MOST_RUNS}
                    choose={(isChosen) => setChosen(isChosen ? [...chosen, run.id] : chosen.filter((one) => one !== run.id))}
                  />
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

/** The curves of runs by id: those of runs that have ended are asked for once. */
function useCurves(runs: Run[]): { curves: Map<string, RunCurve>; error: ApiError | undefined } {
  const path = (shown: Run[]) => (shown.length ? `v1/curves?${new URLSearchParams(shown.map((run) => ["run", run.id]))}` : undefined);
  const going = usePolled<Page<RunCurve>>(path(runs.filter((run) => run.finished_at === null)));
  const ended = usePolled<Page<RunCurve>>(path(runs.filter((run) => run.finished_at !== null)), () => false);
  const curves = new Map([going, ended].flatMap(({ data }) => (data?.items ?? []).map((one): [string, RunCurve] => [one.run_id, one])));
  return { curves, error: going.error ?? ended.error };
}

interface RowProperties {
  run: Run;
  curve: RunCurve | undefined;
  isChosen: boolean;
  isFull: boolean;
  choose: (isChosen: boolean) => void;
}

function Row({ run, curve, isChosen, isFull, choose }: RowProperties) {
  return (
    <tr>
      <th scope="row">
        <a href={link("runs", run.id)}><AgentLine text={run.name} /></a>
      </th>
      <td>
        <State state={run.phase} />
        {run.config === null && run.reason && <p class="problem"><AgentLine text={run.reason} /></p>}
      </td>
      <td class="number">{run.progress.step} / {run.progress.steps ?? "?"}</td>
      <td class="number">{run.progress.seconds_left == null ? "–" : duration(run.progress.seconds_left)}</td>
      <td class="number">{number(run.progress.reward_mean)}</td>
      <td>{curve ? <Sparkline points={curve.points} /> : "…"}</td>
      <td title={curve?.best_version_reason ?? ""}>{curve ? best(curve) : "…"}</td>
      <td><AlarmNames run={run} /></td>
      <td class="narrow"><AgentLine text={run.agent_names?.join(", ").slice(0, 80) || "–"} /></td>
      <td class="narrow" title={safeLine(run.model ?? "")}><AgentLine text={run.model?.split("/").pop() || "–"} /></td>
      <td>{run.config?.pool ?? "–"}</td>
      <td>{time(run.created_at)}</td>
      <td>
        <input
          type="checkbox"
          aria-label={`Compare ${safeLine(run.name)} ${run.id}`}
          checked={isChosen}
          disabled={!isChosen && isFull}
          onChange={(event) => choose(event.currentTarget.checked)}
        />
      </td>
    </tr>
  );
}

/** The best version with the reward by which it is the best. */
function best(curve: RunCurve): string {
  if (curve.best_reward === null) return String(bestVersion(curve));
  return `${bestVersion(curve)}: ${number(curve.best_reward)} ${curve.best_reward_of === "evaluations" ? "held out" : "in training"}`;
}
