// A curve with an optional interval.

import { number } from "./parts";
import { usePlot } from "./plot";

const STEPS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000];

export interface Point {
  x: number;
  y: number;
  low?: number | null;
  high?: number | null;
}

export function Chart({ title, axis, points }: { title: string; axis: string; points: Point[] }) {
  const place = usePlot({
    height: 220,
    axis,
    steps: STEPS,
    columns: [points.map((one) => one.x), ...(["y", "low", "high"] as const).map((name) => points.map((one) => one[name] ?? null))],
    lines: (colour) => {
      const line = colour("--accent");
      const edge = { show: true, stroke: "transparent", points: { show: false } };
      return {
        series: [{}, { stroke: line, width: 2, points: { show: true, size: 6, fill: line } }, edge, edge],
        bands: [{ series: [3, 2], fill: colour("--band") }],
      };
    },
  });
  const [first, last] = [points[0], points[points.length - 1]];
  return (
    <figure>
      <figcaption>{title}</figcaption>
      {first && last ? (
        <div
          ref={place}
          class="chart"
          role="img"
          aria-label={`${title}: ${number(first.y)} at ${axis} ${first.x}, ${number(last.y)} at ${axis} ${last.x}`}
        />
      ) : (
        <p class="quiet">Nothing is measured yet.</p>
      )}
    </figure>
  );
}
