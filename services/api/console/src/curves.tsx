// Curves of several runs in one chart, told apart by colour and dash.

import type uPlot from "uplot";
import { number } from "./parts";
import { usePlot } from "./plot";
import { safeLine } from "./safe_text";

const COLOURS = 4;
const DASHES = [[], [8, 4]];

export interface Curve {
  name: string;
  /** By x, ascending. */
  points: [number, number][];
}

export function Curves({ title, axis, curves }: { title: string; axis: string; curves: Curve[] }) {
  const places = [...new Set(curves.flatMap((one) => one.points.map(([x]) => x)))].sort((one, other) => one - other);
  const columns = curves.map((one) => {
    const values = new Map(one.points);
    // undefined: no point of this curve, which goes on.
    return places.map((x) => values.get(x));
  });
  const place = usePlot({
    height: 260,
    axis,
    columns: [places, ...columns],
    lines: (colour) => ({
      series: [
        {},
        ...curves.map((_one, index): uPlot.Series => {
          const stroke = colour(`--curve-${index % COLOURS}`);
          return { stroke, width: 2, dash: DASHES[Math.floor(index / COLOURS) % DASHES.length] ?? [], spanGaps: true, points: { show: true, size: 5, fill: stroke } };
        }),
      ],
    }),
  });
  return (
    <figure>
      <figcaption>{safeLine(title)}</figcaption>
      {places.length > 0 ? <div ref={place} class="chart" role="img" aria-label={`${safeLine(title)}: ${curves.map(words).join("; ")}`} /> : <p class="quiet">Nothing is measured yet.</p>}
      <ul class="legend">
        {curves.map((one, index) => (
          <li key={index}><span aria-hidden="true" class={`line colour-${index % COLOURS} dash-${Math.floor(index / COLOURS) % DASHES.length}`} /> {safeLine(one.name)}</li>
        ))}
      </ul>
    </figure>
  );
}

function words({ name, points }: Curve): string {
  const last = points[points.length - 1];
  return `${safeLine(name)} ${last ? `${number(last[1])} at ${last[0]}` : "not measured"}`;
}
