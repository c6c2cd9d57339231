// The alarms of a run: the same rules, reasons and remedies that the CLI, the metrics and webhooks have.

import type { Alarm } from "./api";
import { AgentLine, Fold, time } from "./parts";

/** Each alarm that lasts, or lasted when the run ended: reason, since when, remedy, and the figures by which it was judged. */
export function Alarms({ alarms }: { alarms: Alarm[] | undefined }) {
  if (!alarms?.length) return null;
  return (
    <ul class="alarms" aria-label="Alarms">
      {alarms.map((one) => (
        <li key={one.number} class={one.severity === "critical" ? "problem" : "warning"}>
          <p>
            <strong>{one.name}</strong>
            {one.name === "setting" && <> <AgentLine text={one.subject} /></>}, {one.severity} since {time(one.since)}
          </p>
          <p><AgentLine text={one.reason} /></p>
          <p>Remedy: <AgentLine text={one.remedy} /></p>
          <Fold title="Evidence">{() => <Evidence figures={one.evidence ?? {}} />}</Fold>
        </li>
      ))}
    </ul>
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

/** The names of a run's alarms, for a row of a table. */
export function AlarmNames({ alarms }: { alarms: Alarm[] | undefined }) {
  const names = [...new Set(alarms?.map((one) => one.name))];
  return <>{names.join(", ") || "–"}</>;
}
