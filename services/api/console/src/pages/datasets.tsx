// Datasets: the tasks of agents, and the runs that use them.

import { usePolled, type Dataset, type Run, type Task } from "../api";
import { Paged } from "../paged";
import { AgentLine, AgentText, Commands, Facts, Fold, Loaded, State, Table, link, number, time } from "../parts";
import { safeLine } from "../safe_text";

const DATASETS = 50;
const RUNS = 20;
/** A task may have a MiB. */
const TASKS = 25;

export function Datasets() {
  return (
    <>
      <h1>Datasets</h1>
      <Paged<Dataset>
        path="v1/datasets"
        limit={DATASETS}
        nothing={<><p>No dataset yet. Upload a file with a JSON object per line:</p><Commands commands={["leyden dataset upload tasks.jsonl"]} /></>}
      >
        {({ items }) => (
          <Table label="Datasets" head={["Dataset", "Tasks", "Digest", "Created"]} numbers={["Tasks"]}>
            {items.map((one) => (
              <tr key={one.id}>
                <th scope="row"><a href={link("datasets", one.id)}><AgentLine text={one.name} /></a></th>
                <td class="number">{one.task_count.toLocaleString()}</td>
                <td><code>{one.content_sha256.slice(0, 12)}</code></td>
                <td>{time(one.created_at)}</td>
              </tr>
            ))}
          </Table>
        )}
      </Paged>
      <Commands commands={["leyden dataset list"]} />
    </>
  );
}

export function DatasetPage({ id }: { id: string }) {
  const path = `v1/datasets/${encodeURIComponent(id)}`;
  // Datasets never change.
  const dataset = usePolled<Dataset>(path, () => false);
  return (
    <>
      <h1>Dataset <AgentLine text={dataset.data?.name ?? id} /></h1>
      <Loaded answer={dataset}>
        {(data) => (
          <>
            <Facts facts={[["Id", data.id], ["Tasks", data.task_count.toLocaleString()], ["Digest", <code>{data.content_sha256}</code>], ["Created", time(data.created_at)]]} />
            <h2>Runs that use it</h2>
            <Paged<Run>
              path={`v1/runs?dataset=${encodeURIComponent(data.id)}`}
              limit={RUNS}
              nothing={<><p>No run uses it yet. Write a document that names it, and create one:</p><Commands commands={["leyden run create run.json"]} /></>}
            >
              {({ items }) => (
                <Table label="Runs" head={["Run", "State", "Uses it for", "Step", "Last reward", "Created"]} numbers={["Step", "Last reward"]}>
                  {items.map((run) => (
                    <tr key={run.id}>
                      <th scope="row"><a href={link("runs", run.id)}><AgentLine text={run.name} /></a></th>
                      <td><State state={run.phase} /></td>
                      <td>{run.dataset_id === data.id ? "training" : "evaluation"} (<a href={`${link("runs", run.id)}/tasks?of=all`}>tasks of {run.id}</a>)</td>
                      <td class="number">{run.progress.step} / {run.progress.steps}</td>
                      <td class="number">{number(run.progress.reward_mean)}</td>
                      <td>{time(run.created_at)}</td>
                    </tr>
                  ))}
                </Table>
              )}
            </Paged>
            <h2>Tasks</h2>
            <Paged<Task> path={`${path}/tasks`} limit={TASKS} isExact isLive={() => false} nothing={<p>The dataset has no task.</p>}>
              {({ items }) => items.map((task) => <TaskRow key={task.number} task={task} />)}
            </Paged>
            <Commands commands={[`leyden dataset show ${data.id}`, `leyden run list --dataset ${data.id}`]} />
          </>
        )}
      </Loaded>
    </>
  );
}

const TITLE = 100;

function TaskRow({ task }: { task: Task }) {
  const title = JSON.stringify(task.payload).slice(0, TITLE);
  return (
    <Fold title={safeLine(`${task.number}: ${title}`)}>{() => <AgentText text={JSON.stringify(task.payload, null, 2)} />}</Fold>
  );
}
