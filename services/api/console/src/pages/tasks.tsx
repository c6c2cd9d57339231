// The tasks of a run: which are solved, which are not, and how that changes from version to version.

import { useChoice } from "../address";
import { usePolled, type Evaluation, type Page, type RunTask, type RunTaskPage } from "../api";
import { useRunEvents } from "../live";
import { Paged } from "../paged";
import { NameOf } from "../named";
import { AgentLine, Commands, Problem, Select, Table, link, number, time } from "../parts";

const SHOWN = 100;
const FIELDS = ["of", "verdict", "sort"] as const;
const TRAINING = "none";
const ALL = "all";
const VERDICTS = ["solved", "mixed", "unsolved", "unknown"];

export function TasksPage({ run }: { run: string }) {
  useRunEvents(run);
  const path = `v1/runs/${encodeURIComponent(run)}`;
  const evaluations = usePolled<Page<Evaluation>>(`${path}/evaluations?limit=1000`, undefined, ["evaluations"]);
  const [{ of = TRAINING, verdict, sort }, change] = useChoice(FIELDS);
  const words = new URLSearchParams({ ...(of === ALL ? {} : { evaluation: of }), ...(verdict ? { verdict } : {}), ...(sort ? { sort } : {}) });
  const filters = [of === ALL ? "" : ` --evaluation ${of}`, verdict ? ` --verdict ${verdict}` : "", sort ? ` --sort ${sort}` : ""];
  return (
    <>
      <h1>Tasks of <NameOf kind="runs" id={run} /></h1>
      <form class="filters" aria-label="Filter of tasks" onSubmit={(event) => event.preventDefault()}>
        <Select id="of" label="Of" value={of} onChange={(value) => change("of", value)} options={[
          [TRAINING, "training"],
          ...(evaluations.data?.items ?? []).map((one): [string, string] => [one.id, `held-out tasks, version ${one.measured_version ?? "–"}`]),
          [ALL, "both"],
        ]} />
        <Select id="verdict" label="Verdict" value={verdict ?? ""} onChange={(value) => change("verdict", value)} options={[["", "any"], ...VERDICTS.map((one): [string, string] => [one, one])]} />
        <Select id="sort" label="Sort" value={sort ?? ""} onChange={(value) => change("sort", value)} options={[
          ["", "number"], ["lowest", "lowest reward"], ["highest", "highest reward"], ["attempts", "most attempts"], ["failure", "newest failure"],
        ]} />
      </form>
      <Problem error={evaluations.error} />
      <Paged<RunTask, RunTaskPage>
        path={`${path}/tasks?${words}`}
        limit={SHOWN}
        parts={["rollouts"]}
        nothing={verdict ? <p>No task has this verdict.</p> : <><p>No task has a rollout yet: they begin once an engine serves the model. See its state:</p><Commands commands={["leyden status"]} /></>}
      >
        {({ items, verdicts }) => (
          <>
            {verdicts && <p role="status">{VERDICTS.filter((one) => verdicts[one]).map((one) => `${verdicts[one]?.toLocaleString()} ${one}`).join(", ")}</p>}
            <Table label="Tasks" head={["Task", "Verdict", "Mean reward", "By version", "Rollouts", "Attempts", "Group", "Last failure"]} numbers={["Mean reward", "Rollouts", "Attempts"]}>
              {items.map((one) => <Row key={`${one.dataset_id} ${one.number}`} run={run} of={of} task={one} />)}
            </Table>
          </>
        )}
      </Paged>
      <p class="quiet">Solved: every rollout with a reward earned at least 1; unsolved: none did; unknown: none has a reward yet.</p>
      <Commands commands={[`leyden run tasks ${run}${filters.join("")}`]} />
    </>
  );
}

function Row({ run, of, task }: { run: string; of: string; task: RunTask }) {
  const verdict = task.verdict ?? "unknown";
  return (
    <tr>
      <th scope="row" class="reason">
        <a href={`${link("runs", run)}?${new URLSearchParams({ of, task: String(task.number) })}`}>{task.number}</a>{" "}
        <AgentLine text={task.text?.slice(0, 120)} />
      </th>
      <td><span class={`state ${verdict}`}>{verdict}</span></td>
      <td class="number">{number(task.reward_mean)}</td>
      <td><Strip task={task} /></td>
      <td class="number">{task.rollouts}</td>
      <td class="number">{task.attempts}</td>
      <td><a href={link("groups", task.group_id)} aria-label={`newest of ${task.groups} groups of task ${task.number}`}>newest of {task.groups}</a></td>
      <td class="reason">
        {task.last_failure && (
          <>
            <a href={link("rollouts", task.last_failure.rollout_id)}><AgentLine text={task.last_failure.reason ?? "failed"} /></a>{" "}
            <span class="quiet">{time(task.last_failure.finished_at)}</span>
          </>
        )}
      </td>
    </tr>
  );
}

const CELL = 8;
const HEIGHT = 20;
const CELLS = 60;

/** A bar for each version, the newest last: its height is the mean reward between the task's least and 1, or its largest. */
function Strip({ task }: { task: RunTask }) {
  const shown = task.versions.slice(-CELLS);
  const means = shown.flatMap((one) => (one.reward_mean === null ? [] : [one.reward_mean]));
  const [low, high] = [Math.min(0, ...means), Math.max(1, ...means)];
  const words = shown.map((one) => `version ${one.version}: ${one.reward_mean === null ? "unknown" : number(one.reward_mean)}`).join(", ");
  return (
    <svg role="img" aria-label={`Mean reward, ${words}`} width={shown.length * CELL} height={HEIGHT} class="strip">
      {shown.map((one, place) => {
        const height = one.reward_mean === null ? 0 : Math.max(2, ((one.reward_mean - low) / (high - low)) * HEIGHT);
        return one.reward_mean === null
          ? <rect key={one.version} class="missing" x={place * CELL + 0.5} y={0.5} width={CELL - 2} height={HEIGHT - 1} />
          : <rect key={one.version} x={place * CELL} y={HEIGHT - height} width={CELL - 1} height={height} />;
      })}
    </svg>
  );
}
