// The calls and tools of the attempt that counts, as bars from its start.

import { useState } from "preact/hooks";
import { usePolled, type Call, type Page, type RolloutDetail, type Span } from "../api";
import { AgentLine, Loaded, Table, number } from "../parts";
import { callTree, type Bar } from "./call_tree";

const SPANS = 1000;
const SHOWN = 200;
const WIDTH = 1000;
const COLOURS = 8;

interface Properties {
  rollout: RolloutDetail;
  calls: Call[];
  /** Whether `calls` are all of them. */
  isWhole: boolean;
  isLive: boolean;
}

export function Timeline({ rollout, calls, isWhole, isLive }: Properties) {
  const number = rollout.attempt ?? rollout.attempts[rollout.attempts.length - 1]?.number;
  const asked = number === undefined ? undefined : `v1/rollouts/${encodeURIComponent(rollout.id)}/spans?limit=${SPANS}&attempt=${number}`;
  const spans = usePolled<Page<Span>>(asked, () => isLive);
  if (number === undefined) return <p>No attempt has begun.</p>;
  const started = rollout.attempts.find((one) => one.number === number)?.started_at;
  return (
    <Loaded answer={spans}>
      {({ items, next_cursor }) => {
        // The numbers of calls are those of the list below, which has every attempt.
        const bars = callTree(calls, items).filter((one) => one.place === undefined || calls[one.place - 1]?.attempt === number);
        if (bars.length === 0) return <p>No call and no tool has begun in it yet.</p>;
        return (
          <>
            <Bars bars={bars} begin={started ? Date.parse(started) : undefined} />
            {(!isWhole || next_cursor) && <p class="quiet">Later calls or spans are left out: `leyden rollout show` has them all.</p>}
          </>
        );
      }}
    </Loaded>
  );
}

function Bars({ bars, begin }: { bars: Bar[]; begin: number | undefined }) {
  const [isWhole, showWhole] = useState(false);
  // The clock of an agent may be behind the store's.
  const first = bars.reduce((least, one) => Math.min(least, one.start), begin ?? Infinity);
  const last = bars.reduce((most, one) => Math.max(most, one.end), first + 1);
  const names = [...new Set(bars.filter((one) => one.kind === "call").map((one) => one.name))];
  const shown = isWhole ? bars : bars.slice(0, SHOWN);
  return (
    <>
      <p class="quiet">{number((last - first) / 1000, 2)} s from the start of the attempt, or of what came first. A tool stands below the call that asked for it, a fork below the call it leaves; faded: failed, or never delivered.</p>
      <Table label="Time" head={["Call or tool", "From", "Seconds", "Time"]} numbers={["From", "Seconds"]}>
        {shown.map((one) => (
          <tr key={one.key}>
            <th scope="row" class="reason"><Name bar={one} /></th>
            <td class="number">{number((one.start - first) / 1000, 2)}</td>
            <td class="number">{number((one.end - one.start) / 1000, 2)}</td>
            <td>
              <svg class="bar" viewBox={`0 0 ${WIDTH} 10`} preserveAspectRatio="none" aria-hidden="true">
                <rect
                  class={`${one.kind === "tool" ? "of-tool" : `of-call-${names.indexOf(one.name) % COLOURS}`}${one.isDim ? " dim" : ""}`}
                  x={((one.start - first) / (last - first)) * WIDTH}
                  width={Math.max(4, ((one.end - one.start) / (last - first)) * WIDTH)}
                  height={10}
                />
              </svg>
            </td>
          </tr>
        ))}
      </Table>
      {shown.length < bars.length && <button type="button" onClick={() => showWhole(true)}>Show all {bars.length.toLocaleString()} bars</button>}
    </>
  );
}

function Name({ bar: { depth, place, name, status, isDim } }: { bar: Bar }) {
  const words = <>{"\u2003".repeat(depth)}{depth > 0 && "└ "}</>;
  const end = isDim && <> <AgentLine text={status} /></>;
  if (place === undefined) return <>{words}<AgentLine text={name} />{end}</>;
  return <>{words}<button type="button" onClick={() => showCall(place)}>Call {place}</button> <AgentLine text={name} />{end}</>;
}

/** Moves to a call in the list of calls. */
export function showCall(place: number): void {
  const article = document.getElementById(`call-${place}`);
  article?.scrollIntoView();
  article?.focus();
}
