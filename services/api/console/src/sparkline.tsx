// The reward of a run in the room of a word, for a row of a table.

import type { RunCurve } from "./api";
import { number } from "./parts";

const [WIDTH, HEIGHT, MARGIN] = [100, 22, 3];

type Point = { at: number; reward: number };

/** The mean reward over steps, and dashed the held-out reward over versions, on one axis and one scale; a step without
 * a reward leaves a gap. */
export function Sparkline({ points, heldOut }: { points: RunCurve["points"]; heldOut: RunCurve["held_out"] }) {
  const known = points.flatMap(([at, reward]): Point[] => (reward === null ? [] : [{ at, reward }]));
  const measured = (heldOut ?? []).map(([at, reward]): Point => ({ at, reward }));
  const all = [...known, ...measured];
  if (all.length === 0) return <>none yet</>;
  const rewards = all.map(({ reward }) => reward);
  const [low, high] = [Math.min(...rewards), Math.max(...rewards)];
  const places = [...points.map(([step]) => step), ...measured.map(({ at }) => at)];
  const [start, end] = [Math.min(...places), Math.max(...places)];
  const x = (at: number) => (MARGIN + (end > start ? (at - start) / (end - start) : 0.5) * (WIDTH - 2 * MARGIN)).toFixed(1);
  const y = (reward: number) => (MARGIN + (high > low ? (high - reward) / (high - low) : 0.5) * (HEIGHT - 2 * MARGIN)).toFixed(1);
  const path = points.map(([step, reward], place) => (reward === null ? "" : `${(points[place - 1]?.[1] ?? null) === null ? "M" : "L"}${x(step)} ${y(reward)}`));
  const words = [...ends("Mean reward", "step", known), ...ends("Held out", "version", measured), `from ${number(low)} to ${number(high)}`];
  return (
    <svg role="img" aria-label={words.join(", ")} width={WIDTH} height={HEIGHT} class="sparkline">
      <path d={path.join("")} />
      <path class="held-out" d={measured.map(({ at, reward }, place) => `${place ? "L" : "M"}${x(at)} ${y(reward)}`).join("")} />
      {[known, measured].map((line) => line.slice(-1).map(({ at, reward }) => <circle cx={x(at)} cy={y(reward)} r={2} class={line === measured ? "held-out" : ""} />))}
    </svg>
  );
}

/** The first and the last reward of a line in words. */
function ends(title: string, unit: string, line: Point[]): string[] {
  const [first, last] = [line[0], line[line.length - 1]];
  return first && last ? [`${title} ${number(first.reward)} at ${unit} ${first.at}`, `${number(last.reward)} at ${unit} ${last.at}`] : [];
}
