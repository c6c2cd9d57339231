import { Alarms } from "../alarms";
import { bestVersion, usePolled, wholeEvaluations, type Evaluation, type Metrics, type Page, type Run } from "../api";
import { Chart, type Point } from "../chart";
import { useRunEvents } from "../live";
import { AgentLine, Commands, Facts, Loaded, State, Table, number, time } from "../parts";
import { RolloutList } from "./rollout_list";

const ENDED = new Set(["completed", "failed", "cancelled"]);

export function RunPage({ id }: { id: string }) {
  const path = `v1/runs/${encodeURIComponent(id)}`;
  useRunEvents(id);
  const run = usePolled<Run>(path, undefined, ["run", "steps", "rollouts"]);
  const metrics = usePolled<Metrics>(`${path}/metrics?names=reward_mean`, undefined, ["steps"]);
  const evaluations = usePolled<Page<Evaluation>>(`${path}/evaluations?limit=1000`, undefined, ["evaluations", "rollouts"]);
  return (
    <>
      <h1><AgentLine text={run.data?.name ?? id} /></h1>
      <Loaded answer={run}>{(data) => <Overview run={data} />}</Loaded>
      <h2>Score</h2>
      <div class="charts">
        <Loaded answer={metrics}>
          {(data) => <Chart title="Mean reward in training" axis="step" points={trained(data)} />}
        </Loaded>
        <Loaded answer={evaluations}>
          {(data) => <Chart title="Mean reward of held-out tasks, 95 % interval" axis="version" points={heldOut(data.items)} />}
        </Loaded>
      </div>
      <h2>Rollouts</h2>
      <RolloutList run={id} evaluations={evaluations.data?.items ?? []} />
    </>
  );
}

function trained(metrics: Metrics): Point[] {
  const points = metrics.series.find((one) => one.name === "reward_mean")?.points ?? [];
  return points.map(([x, , y]) => ({ x, y }));
}

function heldOut(evaluations: Evaluation[]): Point[] {
  return wholeEvaluations(evaluations).flatMap(({ measured_version: x, results: { reward } }) =>
    x === null || reward === null ? [] : [{ x, y: reward.mean, low: reward.low, high: reward.high }],
  );
}

function Overview({ run }: { run: Run }) {
  const { step, steps, policy_version, reward_mean, rollouts } = run.progress;
  const wish = ENDED.has(run.phase) || run.intent === "running" ? "" : ` (asked: ${run.intent})`;
  const counts = Object.entries(rollouts).map(([state, count]) => `${count} ${state}`);
  return (
    <>
      {run.reason && <p role="alert" class="problem"><AgentLine text={run.reason} /></p>}
      <Alarms alarms={run.alarms} />
      <Facts
        facts={[
          ["State", <><State state={run.phase} />{wish}</>],
          ["Step", <>{step} of {steps ?? "?"} {steps !== null && <progress value={step} max={steps} aria-label="Steps made" />}</>],
          ["Last reward", number(reward_mean)],
          ["Version", policy_version ?? "–"],
          ["Best version", `${bestVersion(run)}${run.best_version_reason ? `: ${run.best_version_reason}` : ""}`],
          ["Learning rate", String(run.config?.optimizer?.learning_rate ?? "–")],
          ...computation(run),
          ["Rollouts", counts.join(", ") || "none yet"],
          ["Started", time(run.started_at)],
          ["Ended", time(run.finished_at)],
        ]}
      />
      <Policies run={run} />
      <Calls run={run} />
      <Commands commands={commands(run)} />
    </>
  );
}

/** The settings that the document leaves to the device of the trainer, once it has resolved them. */
function computation({ computation: found }: Run): [string, string][] {
  if (!found) return [];
  const { type, weights } = found.correction as { type: string; weights?: string };
  const kernel = found.device === "cpu" ? [] : [`attention ${found.attention}`];
  const words = [
    found.precision, ...kernel, `versions in ${found.export_dtype}`,
    `correction ${type}${weights ? ` (${weights})` : ""}`, `on ${found.device}`,
  ];
  return [["Computes in", words.join(", ")]];
}

/** The further policies, which learn from the same groups. */
function Policies({ run }: { run: Run }) {
  const policies = Object.entries(run.policies ?? {});
  if (policies.length === 0) return null;
  return (
    <Table label="Policies" head={["Policy", "Step", "Version", "Best"]} numbers={["Step", "Version", "Best"]}>
      {policies.map(([name, one]) => (
        <tr key={name}>
          <th scope="row"><AgentLine text={name} /></th>
          <td class="number">{one.trains ? `${one.step} / ${one.steps ?? "?"}` : "frozen"}</td>
          <td class="number">{one.policy_version ?? "–"}</td>
          <td class="number">{bestVersion(one)}</td>
        </tr>
      ))}
    </Table>
  );
}

/** Counts of the model calls of credited groups: odd answers, reasons for which calls do not train, ends of tools. */
function Calls({ run: { calls } }: { run: Run }) {
  if (!calls?.calls) return null;
  const odd: [string, number][] = [["malformed", calls.malformed ?? 0], ["empty", calls.empty ?? 0], ["cut off", calls.cut ?? 0], ["beyond the context", calls.overflows ?? 0]];
  const untrained = Object.entries(calls.untrainable ?? {}).map(([reason, count]): [string, number] => [`do not train: ${reason}`, count]);
  const tools = Object.entries(calls.tools ?? {}).flatMap(([tool, statuses]) =>
    Object.entries(statuses).map(([status, count]): [string, number] => [`tool ${tool}: ${status}`, count]));
  const rows: [string, number][] = [["all", calls.calls], ...odd.filter(([, count]) => count > 0), ...untrained, ...tools];
  return (
    <Table label="Model calls" head={["Model calls", "Count"]} numbers={["Count"]}>
      {rows.map(([name, count]) => (
        <tr key={name}>
          <th scope="row"><AgentLine text={name} /></th>
          <td class="number">{count}</td>
        </tr>
      ))}
    </Table>
  );
}

/** `resume` of a run that has ended continues it with an amended document. */
function commands(run: Run): string[] {
  const follow = ENDED.has(run.phase) ? "show" : "watch";
  return [follow, ...run.allowed_actions].map((action) => `leyden run ${action} ${run.id}`);
}
