// Alarms: the same rules, reasons and remedies that the CLI, the metrics and webhooks have.

import { usePolled, type Alarm, type AlarmPage, type ListedAlarm, type Run } from "./api";
import { Paged } from "./paged";
import { AgentLine, Fold, State, link, time } from "./parts";

const ENDED_AT_ONCE = 20;

/** An alarm of a run's page, or of the list of all runs. */
type Shown = Alarm & Partial<Pick<ListedAlarm, "policy" | "run_name" | "run_finished_at" | "state">>;

/** The alarms of a run and of its further policies that last, or lasted when it ended. */
export const alarmsOf = (run: Run): Shown[] => [
  ...(run.alarms ?? []),
  ...Object.entries(run.policies ?? {}).flatMap(([policy, one]) => (one.alarms ?? []).map((alarm) => ({ ...alarm, policy }))),
];

/** Each alarm with reason, since when, until when, remedy, and the figures by which it was judged; with its run where it names that. */
export function Alarms({ alarms, label = "Alarms" }: { alarms: Shown[]; label?: string }) {
  if (alarms.length === 0) return null;
  return (
    <ul class="alarms" aria-label={label}>
      {alarms.map((one) => (
        <li key={`${one.run_id} ${one.policy ?? ""} ${one.number}`} class={kind(one)}>
          <p>
            <strong>{one.name}</strong>
            {one.name === "setting" && <> <AgentLine text={one.subject} /></>}, {one.severity} since {time(one.since)}{end(one)}
          </p>
          <Whose alarm={one} />
          <p><AgentLine text={one.reason} /></p>
          <p>Remedy: <AgentLine text={one.remedy} /></p>
          <Fold title="Evidence">{() => <Evidence figures={one.evidence ?? {}} />}</Fold>
        </li>
      ))}
    </ul>
  );
}

function kind(alarm: Shown): string {
  if (alarm.ended_at || alarm.state === "lasted") return "over";
  return alarm.severity === "critical" ? "problem" : "warning";
}

function end(alarm: Shown): string {
  if (alarm.ended_at) return ` until ${time(alarm.ended_at)}`;
  return alarm.state === "lasted" ? ` until the run's end at ${time(alarm.run_finished_at)}` : "";
}

function Whose({ alarm: { run_id, run_name, policy, state } }: { alarm: Shown }) {
  if (!run_name && !policy) return null;
  return (
    <p>
      {state && <><State state={state} />{" "}</>}
      {run_name && <a href={link("runs", run_id)}><AgentLine text={run_name} /></a>}
      {policy && <> policy <AgentLine text={policy} /></>}
    </p>
  );
}

function Evidence({ figures }: { figures: NonNullable<Alarm["evidence"]> }) {
  return (
    <ul>
      {Object.entries(figures).map(([name, value]) => (
        <li key={name}>{name}: <AgentLine text={String(value)} /></li>
      ))}
    </ul>
  );
}

/** The alarms of a run that have ended, once it is opened. */
export function EndedAlarms({ run }: { run: string }) {
  return (
    <Fold title="Ended alarms">
      {() => (
        <Paged<ListedAlarm> path={`v1/alarms?${new URLSearchParams({ run, state: "ended" })}`} limit={ENDED_AT_ONCE} nothing={<p>No alarm of this run has ended.</p>}>
          {({ items }) => <Alarms alarms={items.map(({ run_name: _, state: __, ...one }) => one)} label="Ended alarms" />}
        </Paged>
      )}
    </Fold>
  );
}

/** The names of a run's alarms, for a row of a table. */
export function AlarmNames({ run }: { run: Run }) {
  const names = [...new Set(alarmsOf(run).map((one) => one.name))];
  return <>{names.join(", ") || "–"}</>;
}

/** The link to the page of all alarms, with the count of those that are active; without one while it is unknown. */
export function AlarmsLink() {
  const { data } = usePolled<AlarmPage>("v1/alarms?state=active&limit=1", undefined, ["run"]);
  const count = data?.names && Object.values(data.names).reduce((sum, one) => sum + one, 0);
  return <a href="#/alarms">Alarms{count == null ? "" : ` (${count.toLocaleString()})`}</a>;
}
