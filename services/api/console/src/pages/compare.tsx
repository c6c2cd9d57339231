// Runs beside each other: what changed between them, and what came of it. The address holds their ids.

import type { ComponentChildren } from "preact";
import { useEffect, useState } from "preact/hooks";
import { bestVersion, usePolled, type Comparison, type Evaluation, type Page, type Run, type TaskComparison } from "../api";
import { Curves, heldOut, type Point } from "../curves";
import { Named } from "../named";
import { AgentLine, Commands, FoldedText, Loaded, State, Table, link, number, signed, time } from "../parts";
import { safeLine } from "../safe_text";

/** The places of steps on an axis, with its unit. */
const AXES = { step: "step", time: "seconds", "trained tokens": "trained tokens" } as const;
type Axis = keyof typeof AXES;
const TOKENS = "trained_tokens_total";
export const MOST_RUNS = 8;

/** The address of runs beside each other, the first one as the measure of the others. */
export const compareLink = (ids: string[]) => `#/compare${ids.length ? `?runs=${ids.map(encodeURIComponent).join(",")}` : ""}`;

function readRuns(): string[] {
  const words = new URLSearchParams(location.hash.split("?")[1] ?? "");
  return (words.get("runs") ?? "").split(",").filter(Boolean).slice(0, MOST_RUNS);
}

export function ComparePage() {
  const [ids, setIds] = useState(readRuns);
  const [metric, setMetric] = useState("reward_mean");
  useEffect(() => {
    const onMove = () => setIds(readRuns());
    window.addEventListener("hashchange", onMove);
    return () => window.removeEventListener("hashchange", onMove);
  }, []);
  function choose(next: string[]): void {
    history.replaceState(null, "", compareLink(next));
    setIds(readRuns());
  }
  return (
    <>
      <h1>Compare runs</h1>
      <Chosen ids={ids} choose={choose} />
      {ids.length > 1 ? <Beside key={ids.join()} ids={ids} metric={metric} setMetric={setMetric} /> : <p>Choose two runs or more.</p>}
    </>
  );
}

function Chosen({ ids, choose }: { ids: string[]; choose: (ids: string[]) => void }) {
  const answer = usePolled<Page<Run>>("v1/runs?limit=1000", () => false);
  return (
    <Loaded answer={answer}>
      {({ items }) => (
        <fieldset class="chosen">
          <legend>Runs, the first one is the measure of the others</legend>
          {items.map((run) => (
            <label key={run.id}>
              <input
                type="checkbox"
                checked={ids.includes(run.id)}
                disabled={!ids.includes(run.id) && ids.length === MOST_RUNS}
                onChange={(event) => choose(event.currentTarget.checked ? [...ids, run.id] : ids.filter((one) => one !== run.id))}
              />{" "}
              <AgentLine text={run.name} /> <span class="quiet">{run.id}</span>
            </label>
          ))}
          {items.length === 0 && <p>No run yet.</p>}
        </fieldset>
      )}
    </Loaded>
  );
}

function Beside({ ids, metric, setMetric }: { ids: string[]; metric: string; setMetric: (name: string) => void }) {
  const [axis, setAxis] = useState<Axis>("step");
  const words = new URLSearchParams([...ids.map((id) => ["run", id]), ...[...new Set([metric, "reward_mean", TOKENS])].map((name) => ["names", name])]);
  const answer = usePolled<Comparison>(`v1/comparison?${words}`, ({ runs }) => runs.some((run) => run.finished_at === null));
  return (
    <Loaded answer={answer}>
      {(found) => (
        <>
          <Commands commands={[`leyden run compare ${ids.join(" ")}`]} />
          <h2>Curves</h2>
          <p>
            <label for="metric">Series</label>{" "}
            <select id="metric" value={metric} onChange={(event) => setMetric(event.currentTarget.value)}>
              {[...new Set(["reward_mean", ...found.metrics.flatMap((one) => one.names)])].map((name) => <option key={name} value={name}>{name}</option>)}
            </select>{" "}
            <label for="axis">by</label>{" "}
            <select id="axis" value={axis} onChange={(event) => setAxis(event.currentTarget.value as Axis)}>
              {Object.keys(AXES).map((name) => <option key={name} value={name}>{name}</option>)}
            </select>
          </p>
          <div class="charts">
            <Curves title={metric} axis={AXES[axis]} curves={found.runs.map((run, index) => ({ name: run.name, points: series(found, index, metric, axis) }))} />
            <Curves
              title="Mean reward of held-out tasks"
              axis={axis === "step" ? "version" : AXES[axis]}
              curves={found.runs.map((run, index) => ({ name: run.name, points: measured(found, index, axis) }))}
            />
          </div>
          <h2>Figures</h2>
          <Figures found={found} />
          <h2>Held-out tasks, beside the first run</h2>
          <Tasks found={found} />
          <h2>Differences of the documents</h2>
          <Differences found={found} />
        </>
      )}
    </Loaded>
  );
}

const points = (found: Comparison, index: number, name: string) => found.metrics[index]?.series.find((one) => one.name === name)?.points ?? [];

/** The places of a run's steps on the axis; a step whose place is unknown has none. */
function places(found: Comparison, index: number, axis: Axis): Map<number, number> {
  if (axis === "trained tokens") return new Map(points(found, index, TOKENS).map(([step, , total]) => [step, total]));
  const every = found.metrics[index]?.series.flatMap((one) => one.points) ?? [];
  return new Map(every.map(([step, seconds]) => [step, axis === "time" ? Math.round(10 * seconds) / 10 : step]));
}

function series(found: Comparison, index: number, name: string, axis: Axis): Point[] {
  const place = places(found, index, axis);
  return points(found, index, name).flatMap(([step, , y]) => at(place.get(step), { x: step, y }));
}

/** Held-out rewards of a run: step n makes version n, and version 0 is there before the first one. */
function measured(found: Comparison, index: number, axis: Axis): Point[] {
  const place = places(found, index, axis);
  return heldOut(found.evaluations[index] ?? []).flatMap((one) => at(axis === "step" || one.x === 0 ? one.x : place.get(one.x), one));
}

const at = (x: number | undefined, point: Point): Point[] => (x === undefined ? [] : [{ ...point, x }]);

function Figures({ found }: { found: Comparison }) {
  const rows: [string, (run: Run, index: number) => ComponentChildren][] = [
    ["State", (run) => <State state={run.phase} />],
    ["Step", (run) => `${run.progress.step} of ${run.progress.steps ?? "?"}`],
    ["Last reward", (run) => number(run.progress.reward_mean)],
    ["Held-out reward", (_run, index) => number(lastHeldOut(found.evaluations[index] ?? []))],
    ["Best version", bestVersion],
    ["Dataset", (run) => <Named kind="datasets" id={run.dataset_id} />],
    ["Started", (run) => time(run.started_at)],
    ["Ended", (run) => time(run.finished_at)],
  ];
  return (
    <RunTable label="Figures" first="" runs={found.runs}>
      {rows.map(([name, cell]) => (
        <tr key={name}>
          <th scope="row">{name}</th>
          {found.runs.map((run, index) => <td key={index}>{cell(run, index)}</td>)}
        </tr>
      ))}
    </RunTable>
  );
}

const lastHeldOut = (evaluations: Evaluation[]) => heldOut(evaluations).pop()?.y;

function Tasks({ found }: { found: Comparison }) {
  const name = (one: TaskComparison) => found.runs.find((run) => run.id === one.run_id)?.name ?? one.run_id;
  if (found.tasks.length === 0) return <p>No further run was evaluated on a dataset of the first one.</p>;
  return (
    <>
    <Table label="Held-out tasks" head={["Run", "Dataset", "Won", "Lost", "Same", "Difference", "95 % interval"]} numbers={["Won", "Lost", "Same", "Difference"]}>
      {found.tasks.map((one) => (
        <tr key={one.run_id}>
          <th scope="row"><AgentLine text={name(one)} /></th>
          <td><Named kind="datasets" id={one.dataset_id} /></td>
          <td class="number">{one.won}</td>
          <td class="number">{one.lost}</td>
          <td class="number">{one.same}</td>
          <td class="number">{signed(one.difference)}</td>
          <td>{one.low === null || one.high === null ? "–" : `${signed(one.low)} to ${signed(one.high)}`}</td>
        </tr>
      ))}
    </Table>
    {found.tasks.filter((one) => one.changes.length > 0).map((one) => <Changes key={one.run_id} title={`Tasks that changed most: ${safeLine(name(one))}`} compared={one} />)}
    </>
  );
}

/** The tasks that rose and fell most, each with a rollout of both runs. */
function Changes({ title, compared: { changes, dataset_id } }: { title: string; compared: TaskComparison }) {
  return (
    <>
      <h3>{title}</h3>
      <Table label={title} head={["Task", "First run", "This run", "Change", "Text"]} numbers={["First run", "This run", "Change"]}>
        {changes.map((one) => (
          <tr key={one.number}>
            <th scope="row"><a href={link("datasets", dataset_id)}>{one.number}</a></th>
            {one.rewards.map((reward, place) => (
              <td key={place} class="number">
                {one.rollout_ids[place] ? <a href={link("rollouts", one.rollout_ids[place])} aria-label={`Rollout of task ${one.number} in ${place === 0 ? "the first run" : "this run"}, mean reward ${number(reward)}`}>{number(reward)}</a> : number(reward)}
              </td>
            ))}
            <td class={`number ${one.rewards[1] < one.rewards[0] ? "worse" : "better"}`}>{signed(one.rewards[1] - one.rewards[0])}</td>
            <td class="reason"><FoldedText text={one.text ?? "its dataset was deleted"} /></td>
          </tr>
        ))}
      </Table>
    </>
  );
}

function Differences({ found }: { found: Comparison }) {
  if (found.differences.length === 0) return <p>The documents are the same but for the names.</p>;
  return (
    <RunTable label="Differences" first="Field" runs={found.runs}>
      {found.differences.map((one) => (
        <tr key={one.path}>
          <th scope="row"><AgentLine text={one.path} /></th>
          {one.values.map((value, index) => <td key={index}>{value === null ? "–" : <AgentLine text={value} />}</td>)}
        </tr>
      ))}
    </RunTable>
  );
}

/** A column for each run. */
function RunTable({ label, first, runs, children }: { label: string; first: string; runs: Run[]; children: ComponentChildren }) {
  return (
    <div class="table" role="region" aria-label={label} tabIndex={0}>
      <table class="columns">
        <thead>
          <tr>
            {first ? <th scope="col">{first}</th> : <td />}
            {runs.map((run, index) => (
              <th key={index} scope="col"><a href={link("runs", run.id)}><AgentLine text={run.name} /></a></th>
            ))}
          </tr>
        </thead>
        <tbody>{children}</tbody>
      </table>
    </div>
  );
}
