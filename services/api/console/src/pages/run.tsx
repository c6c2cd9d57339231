import type { ComponentChildren } from "preact";
import { useState } from "preact/hooks";
import { Alarms, EndedAlarms, alarmsOf } from "../alarms";
import { bestVersion, usePolled, type Answer, type Evaluation, type Metrics, type Page, type Run } from "../api";
import { heldOut } from "../curves";
import { useRunEvents } from "../live";
import { AgentLine, Commands, Facts, Loaded, Problem, Select, State, Table, duration, link, number, time } from "../parts";
import { Actions } from "../run/actions";
import { RunCharts } from "../run/charts";
import { RunDocument } from "../run/document";
import { Evaluations } from "../run/evaluations";
import { Logs, TrainerEnds } from "../run/logs";
import { safeLine } from "../safe_text";
import { RolloutList } from "./rollout_list";

const ENDED = new Set(["completed", "failed", "cancelled"]);

/** One part of a run's page: its overview, or the one that the address names. */
export function RunPage({ id, part }: { id: string; part: string | undefined }) {
  const path = `v1/runs/${encodeURIComponent(id)}`;
  useRunEvents(id);
  const run = usePolled<Run>(path, undefined, ["run", "steps", "rollouts"]);
  const answer = usePolled<Page<Evaluation>>(`${path}/evaluations?limit=1000`, undefined, ["evaluations", "rollouts"]);
  const evaluations = answer.data?.items;
  const [policy, setPolicy] = useState("");
  // Asked beside the run, which the charts need, too.
  const words = policy ? `?policy=${encodeURIComponent(policy)}` : "";
  const metrics = usePolled<Metrics>(part === undefined ? `${path}/metrics${words}` : undefined, undefined, ["steps"]);
  return (
    <>
      <h1><AgentLine text={run.data?.name ?? id} /></h1>
      {part !== "evaluations" && <Problem error={answer.error} at={answer.at} />}
      {part === "rollouts" && <RolloutList run={id} evaluations={evaluations ?? []} />}
      <Loaded answer={run}>
        {(data) => (
          <>
            {part === "evaluations" && <Loaded answer={answer}>{({ items }) => <Evaluations run={data} evaluations={items} />}</Loaded>}
            {part === "document" && <RunDocument run={data} />}
            {part === "logs" && <Logs run={data} />}
            {part === undefined && <Overview run={data} evaluations={evaluations} />}
            {part === undefined && <Charts run={data} metrics={metrics} policy={policy} setPolicy={setPolicy} evaluations={evaluations} />}
            {part === undefined && <Commands commands={commands(data)} />}
          </>
        )}
      </Loaded>
    </>
  );
}

interface ChartsProperties {
  run: Run;
  metrics: Answer<Metrics>;
  policy: string;
  setPolicy: (policy: string) => void;
  evaluations: Evaluation[] | undefined;
}

function Charts({ run, metrics, policy, setPolicy, evaluations }: ChartsProperties) {
  const training = Object.entries(run.policies ?? {}).filter(([, one]) => one.trains).map(([name]) => name);
  return (
    <>
      {training.length > 0 && (
        <Select id="policy" label="Charts of" value={policy} options={[["", "the run's own model"], ...training.map((name): [string, string] => [name, safeLine(name)])]} onChange={setPolicy} />
      )}
      <RunCharts key={policy} run={run} answer={metrics} evaluations={policy ? [] : evaluations} />
    </>
  );
}

function Overview({ run, evaluations }: { run: Run; evaluations: Evaluation[] | undefined }) {
  const { step, steps, policy_version, reward_mean, rollouts } = run.progress;
  const wish = ENDED.has(run.phase) || run.intent === "running" ? "" : ` (asked: ${run.intent})`;
  const counts = Object.entries(rollouts).map(([state, count]) => `${count} ${state}`);
  return (
    <>
      {run.reason && <p role="alert" class="problem"><AgentLine text={run.reason} /></p>}
      <Alarms alarms={alarmsOf(run)} />
      <EndedAlarms run={run.id} />
      <Actions run={run} />
      <Facts
        facts={[
          ["State", <><State state={run.phase} />{wish}</>],
          ["Step", <>{step} of {steps ?? "?"} {steps !== null && <progress value={step} max={steps} aria-label="Steps made" />}</>],
          ...health(run),
          ["Last reward", number(reward_mean)],
          ...heldOutFacts(evaluations),
          ["Version", policy_version ?? "–"],
          ["Best version", `${bestVersion(run)}${run.best_version_reason ? `: ${run.best_version_reason}` : ""}`],
          ["Learning rate", String(run.config?.optimizer?.learning_rate ?? "–")],
          ...computation(run),
          ["Rollouts", counts.join(", ") || "none yet"],
          ["Started", time(run.started_at)],
          ["Ended", time(run.finished_at)],
        ]}
      />
      <Agents run={run} />
      <Policies run={run} />
      {hasTrainerEnd(run) && <TrainerEnds run={run} />}
      <Calls run={run} />
    </>
  );
}

/** The means of the first and of the newest version that was measured on all held-out tasks. */
function heldOutFacts(evaluations: Evaluation[] | undefined): [string, string][] {
  const points = heldOut(evaluations ?? []);
  const [first, last] = [points[0], points[points.length - 1]];
  if (!first || !last) return [];
  const ends = first.x === last.x ? [first] : [first, last];
  return [["Held-out reward", ends.map(({ x, y }) => `${number(y)} at version ${x}`).join(", ")]];
}

/** How far the groups of the next step have come, and the time left. */
function health({ progress: { next_step: next, seconds_left: left } }: Run): [string, ComponentChildren][] {
  const facts: [string, ComponentChildren][] = [];
  if (next) {
    const counts = ([["ended", next.ended], ["graded", next.graded], ["credited", next.credited]] as const).map(([name, count]) => (
      <span key={name}>{count} {name} <progress value={count} max={next.rollouts} aria-label={`Rollouts ${name}`} />{" "}</span>
    ));
    facts.push([`Step ${next.number}, of ${next.rollouts} rollouts`, counts]);
    facts.push(["Time left", left == null ? "unknown" : `about ${duration(left)}`]);
  }
  return facts;
}

const hasTrainerEnd = (run: Run) => [run, ...Object.values(run.policies ?? {})].some((one) => one.last_trainer_end);

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

/** The agents of a run that has several, each with the last step that consumed rollouts of it. */
function Agents({ run }: { run: Run }) {
  const agents = Object.entries(run.agents ?? {});
  if (agents.length === 0) return null;
  return (
    <Table label="Agents" head={["Agent", "Last step", "Rollouts", "Mean reward"]} numbers={["Last step", "Rollouts", "Mean reward"]}>
      {agents.map(([name, one]) => (
        <tr key={name}>
          <th scope="row"><a href={`${link("runs", run.id)}/rollouts?${new URLSearchParams({ agent: name })}`}>{name}</a></th>
          <td class="number">{one.step ?? "–"}</td>
          <td class="number">{one.rollouts}</td>
          <td class="number">{number(one.reward_mean)}</td>
        </tr>
      ))}
    </Table>
  );
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

/** Counts of the model calls of credited groups: odd answers, and reasons for which calls do not train. */
function Calls({ run: { calls } }: { run: Run }) {
  if (!calls?.calls) return null;
  const odd: [string, number][] = [["malformed", calls.malformed ?? 0], ["empty", calls.empty ?? 0], ["cut off", calls.cut ?? 0], ["beyond the context", calls.overflows ?? 0]];
  const untrained = Object.entries(calls.untrainable ?? {}).map(([reason, count]): [string, number] => [`do not train: ${reason}`, count]);
  const rows: [string, number][] = [["all", calls.calls], ...odd.filter(([, count]) => count > 0), ...untrained];
  return (
    <>
      <Table label="Model calls" head={["Model calls", "Count"]} numbers={["Count"]}>
        {rows.map(([name, count]) => (
          <tr key={name}>
            <th scope="row"><AgentLine text={name} /></th>
            <td class="number">{count}</td>
          </tr>
        ))}
      </Table>
      <Tools tools={calls.tools ?? {}} />
    </>
  );
}

/** The ends of tool calls, the tool that fails most first; the share is that of the calls whose end is known. A plain
 * text (`bare`) is an end that is no known failure. */
function Tools({ tools }: { tools: Record<string, Record<string, number>> }) {
  const rows = Object.entries(tools).map(([name, statuses]) => {
    const { ok = 0, error = 0, bare = 0 } = statuses;
    const known = ok + error + bare;
    const count = Object.values(statuses).reduce((sum, one) => sum + one, 0);
    return { name, count, error, unknown: count - known, share: known > 0 ? error / known : undefined };
  });
  if (rows.length === 0) return <p class="quiet">Tools: none of these calls asked for one.</p>;
  return (
    <Table label="Tools" head={["Tools", "Calls", "Failed", "End unknown", "Failed share"]} numbers={["Calls", "Failed", "End unknown", "Failed share"]}>
      {rows.sort((one, other) => (other.share ?? -1) - (one.share ?? -1)).map((one) => (
        <tr key={one.name}>
          <th scope="row"><AgentLine text={one.name} /></th>
          <td class="number">{one.count}</td>
          <td class="number">{one.error}</td>
          <td class="number">{one.unknown}</td>
          <td class="number">{number(one.share)}</td>
        </tr>
      ))}
    </Table>
  );
}

/** `resume` of a run that has ended is its `continue`; `export` copies the best version, else the newest. */
function commands(run: Run): string[] {
  const follow = ENDED.has(run.phase) ? "show" : "watch";
  const version = run.best_version ?? run.progress.policy_version;
  const copy = version == null ? [] : [`leyden policy export ${run.id} --version ${version} --to ${run.id}-${version}`];
  return [...[follow, ...run.allowed_actions].map((action) => `leyden run ${action === "continue" ? "resume" : action} ${run.id}`), ...copy];
}
