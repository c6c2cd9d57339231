import { Fragment, type ComponentChildren } from "preact";
import { useState } from "preact/hooks";
import { useChoice } from "../address";
import { AlarmNames } from "../alarms";
import { bestVersion, usePolled, type ApiError, type Page, type Run, type RunCurve, type RunPage } from "../api";
import { Paged } from "../paged";
import { AgentLine, Commands, Fold, Problem, Select, State, Table, duration, link, number, time } from "../parts";
import { safeLine } from "../safe_text";
import { Sparkline } from "../sparkline";
import { MOST_RUNS, compareLink } from "./compare";

const SHOWN = 100;
const FIELDS = ["phase", "sort"] as const;
const PHASES = ["pending", "running", "paused", "evaluating", "completed", "failed", "cancelled"];
const SORTS: [string, string][] = [
  ["", "newest"], ["oldest", "oldest"], ["highest", "highest reward"], ["lowest", "lowest reward"], ["most_steps", "most steps"],
  ["fewest_steps", "fewest steps"], ["phase", "state"],
];
/** Columns that can be hidden, as names; the others are the run and its box to compare it. */
const COLUMNS = ["State", "Step", "Time left", "Last reward", "Reward", "Held out", "Best version", "Alarms", "Agent", "Model", "Pool", "Created"] as const;
type Column = (typeof COLUMNS)[number];
const HIDDEN = "leyden-hidden-columns";

export function Runs() {
  const [chosen, setChosen] = useState<string[]>([]);
  const [filter, change] = useChoice(FIELDS);
  const [hidden, hide] = useHidden();
  const words = new URLSearchParams({ count: "true", ...filter });
  return (
    <>
      <h1>Runs</h1>
      <form class="filters" aria-label="Filter of runs" onSubmit={(event) => event.preventDefault()}>
        <Select id="phase" label="State" value={filter.phase ?? ""} options={[["", "any"], ...PHASES.map((one): [string, string] => [one, one])]} onChange={(value) => change("phase", value)} />
        <Select id="sort" label="Sort" value={filter.sort ?? ""} options={SORTS} onChange={(value) => change("sort", value)} />
      </form>
      <Columns hidden={hidden} hide={hide} />
      <Paged<Run, RunPage> path={`v1/runs?${words}`} limit={SHOWN} nothing={<Nothing isFiltered={Boolean(filter.phase)} />}>
        {({ items }) => <RunTable runs={items} hidden={hidden} chosen={chosen} setChosen={setChosen} />}
      </Paged>
    </>
  );
}

/** The hidden columns, which this browser keeps. */
function useHidden(): [Set<Column>, (column: Column, isHidden: boolean) => void] {
  const [hidden, setHidden] = useState(() => new Set((localStorage.getItem(HIDDEN) ?? "").split(",") as Column[]));
  function hide(column: Column, isHidden: boolean): void {
    const next = new Set(COLUMNS.filter((one) => (one === column ? isHidden : hidden.has(one))));
    localStorage.setItem(HIDDEN, [...next].join(","));
    setHidden(next);
  }
  return [hidden, hide];
}

function Columns({ hidden, hide }: { hidden: Set<Column>; hide: (column: Column, isHidden: boolean) => void }) {
  return (
    <Fold title="Columns">
      {() => (
        <fieldset class="chosen">
          <legend>Shown columns</legend>
          {COLUMNS.map((one) => (
            <label key={one}><input type="checkbox" checked={!hidden.has(one)} onChange={(event) => hide(one, !event.currentTarget.checked)} /> {one}</label>
          ))}
        </fieldset>
      )}
    </Fold>
  );
}

function Nothing({ isFiltered }: { isFiltered: boolean }) {
  if (isFiltered) return <p>No run matches the filter.</p>;
  return (
    <>
      <p>No run yet. Train the example, or your own agent:</p>
      <Commands commands={["make demo", "leyden train --tasks tasks.jsonl --reward exact -- python agent.py"]} />
    </>
  );
}

interface RunTableProperties {
  runs: Run[];
  hidden: Set<Column>;
  chosen: string[];
  setChosen: (chosen: string[]) => void;
}

function RunTable({ runs, hidden, chosen, setChosen }: RunTableProperties) {
  const { curves, error } = useCurves(runs);
  const shown = COLUMNS.filter((one) => !hidden.has(one));
  return (
    <>
      <p>
        {chosen.length > 1
          ? <a href={compareLink(chosen)}>Compare {chosen.length} runs</a>
          : <span class="quiet">Tick two runs or more to compare them.</span>}
      </p>
      <Problem error={error} />
      <Table label="Runs" head={["Run", ...shown, "Compare"]} numbers={["Step", "Time left", "Last reward"]}>
        {runs.map((run) => (
          <Row
            key={run.id}
            run={run}
            curve={curves.get(run.id)}
            shown={shown}
            isChosen={chosen.includes(run.id)}
            isFull={chosen.length === MOST_RUNS}
            choose={(isChosen) => setChosen(isChosen ? [...chosen, run.id] : chosen.filter((one) => one !== run.id))}
          />
        ))}
      </Table>
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

const CELLS: Record<Column, (run: Run, curve: RunCurve | undefined) => ComponentChildren> = {
  State: (run) => (
    <td>
      <State state={run.phase} />
      {run.config === null && run.reason && <p class="problem"><AgentLine text={run.reason} /></p>}
    </td>
  ),
  Step: (run) => <td class="number">{run.progress.step} / {run.progress.steps ?? "?"}</td>,
  "Time left": (run) => <td class="number">{run.progress.seconds_left == null ? "–" : duration(run.progress.seconds_left)}</td>,
  "Last reward": (run) => <td class="number">{number(run.progress.reward_mean)}</td>,
  Reward: (_, curve) => <td>{curve ? <Sparkline points={curve.points} heldOut={curve.held_out} /> : "…"}</td>,
  "Held out": (_, curve) => <td>{curve ? heldOut(curve) : "…"}</td>,
  "Best version": (_, curve) => <td title={curve?.best_version_reason ?? ""}>{curve ? best(curve) : "…"}</td>,
  Alarms: (run) => <td><AlarmNames run={run} /></td>,
  Agent: (run) => <td class="narrow"><AgentLine text={run.agent_names?.join(", ").slice(0, 80) || "–"} /></td>,
  Model: (run) => <td class="narrow" title={safeLine(run.model ?? "")}><AgentLine text={run.model?.split("/").pop() || "–"} /></td>,
  Pool: (run) => <td>{run.config?.pool ?? "–"}</td>,
  Created: (run) => <td>{time(run.created_at)}</td>,
};

interface RowProperties {
  run: Run;
  curve: RunCurve | undefined;
  shown: Column[];
  isChosen: boolean;
  isFull: boolean;
  choose: (isChosen: boolean) => void;
}

function Row({ run, curve, shown, isChosen, isFull, choose }: RowProperties) {
  return (
    <tr>
      <th scope="row">
        <a href={link("runs", run.id)}><AgentLine text={run.name} /></a>
      </th>
      {shown.map((one) => <Fragment key={one}>{CELLS[one](run, curve)}</Fragment>)}
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

/** The newest measured version's reward on held-out tasks. */
function heldOut({ held_out: measured = [] }: RunCurve): string {
  const last = measured[measured.length - 1];
  return last ? `${number(last[1])}, version ${last[0]}` : "not measured";
}

/** The best version with the reward by which it is the best. */
function best(curve: RunCurve): string {
  if (curve.best_reward === null) return String(bestVersion(curve));
  return `${bestVersion(curve)}: ${number(curve.best_reward)} ${curve.best_reward_of === "evaluations" ? "held out" : "in training"}`;
}
