// The reward of a run in the room of a word, for a row of a table.

import type { RunCurve } from "./api";
import { number } from "./parts";

const [WIDTH, HEIGHT, MARGIN] = [100, 22, 3];

/** The mean reward over steps, from its least to its largest; a step without one leaves a gap. */
export function Sparkline({ points }: { points: RunCurve["points"] }) {
  const known = points.flatMap(([step, reward]) => (reward === null ? [] : [{ step, reward }]));
  const [first, last] = [known[0], known[known.length - 1]];
  if (!first || !last) return <>none yet</>;
  const rewards = known.map(({ reward }) => reward);
  const [low, high] = [Math.min(...rewards), Math.max(...rewards)];
  const [start, end] = [points[0]?.[0] ?? 0, points[points.length - 1]?.[0] ?? 0];
  const x = (step: number) => MARGIN + (end > start ? (step - start) / (end - start) : 0.5) * (WIDTH - 2 * MARGIN);
  const y = (reward: number) => MARGIN + (high > low ? (high - reward) / (high - low) : 0.5) * (HEIGHT - 2 * MARGIN);
  const path = points.map(([step, reward], place) => (reward === null ? "" : `${(points[place - 1]?.[1] ?? null) === null ? "M" : "L"}${x(step).toFixed(1)} ${y(reward).toFixed(1)}`));
  const words = `Mean reward ${number(first.reward)} at step ${first.step}, ${number(last.reward)} at step ${last.step}, from ${number(low)} to ${number(high)}`;
  return (
    <svg role="img" aria-label={words} width={WIDTH} height={HEIGHT} class="sparkline">
      <path d={path.join("")} />
      <circle cx={x(last.step)} cy={y(last.reward)} r={2} />
    </svg>
  );
}
