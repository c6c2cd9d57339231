// Curves of several runs in one chart, told apart by colour and dash.

import { useEffect, useRef } from "preact/hooks";
import uPlot from "uplot";
import { number } from "./parts";
import { safeLine } from "./safe_text";

const HEIGHT = 260;
const COLOURS = 4;
const DASHES = [[], [8, 4]];

export interface Curve {
  name: string;
  /** By x, ascending. */
  points: [number, number][];
}

export function Curves({ title, axis, curves }: { title: string; axis: string; curves: Curve[] }) {
  const place = useRef<HTMLDivElement>(null);
  const drawn = JSON.stringify(curves);
  const measured = curves.some((one) => one.points.length > 0);
  useEffect(() => {
    const element = place.current;
    if (!element || !measured) return undefined;
    const dark = window.matchMedia("(prefers-color-scheme: dark)");
    let plot = draw(element, axis, curves);
    const redraw = () => {
      plot.destroy();
      plot = draw(element, axis, curves);
    };
    const watch = new ResizeObserver(() => plot.setSize({ width: element.clientWidth, height: HEIGHT }));
    watch.observe(element);
    dark.addEventListener("change", redraw);
    return () => {
      watch.disconnect();
      dark.removeEventListener("change", redraw);
      plot.destroy();
    };
  }, [drawn, axis]);
  return (
    <figure>
      <figcaption>{safeLine(title)}</figcaption>
      {measured ? <div ref={place} class="chart" role="img" aria-label={`${safeLine(title)}: ${curves.map(words).join("; ")}`} /> : <p class="quiet">Nothing is measured yet.</p>}
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

function draw(element: HTMLElement, axis: string, curves: Curve[]): uPlot {
  const style = getComputedStyle(element);
  const colour = (name: string) => style.getPropertyValue(name).trim();
  const axes = { stroke: colour("--quiet"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line"), width: 1 } };
  const places = [...new Set(curves.flatMap((one) => one.points.map(([x]) => x)))].sort((one, other) => one - other);
  const columns = curves.map((one) => {
    const values = new Map(one.points);
    // undefined: no point of this curve, which goes on.
    return places.map((x) => values.get(x));
  });
  const options: uPlot.Options = {
    width: element.clientWidth,
    height: HEIGHT,
    scales: { x: { time: false } },
    legend: { show: false },
    axes: [{ ...axes, label: axis, labelSize: 20 }, { ...axes, size: 56 }],
    series: [
      {},
      ...curves.map((_one, index): uPlot.Series => {
        const stroke = colour(`--curve-${index % COLOURS}`);
        return { stroke, width: 2, dash: DASHES[Math.floor(index / COLOURS) % DASHES.length] ?? [], spanGaps: true, points: { show: true, size: 5, fill: stroke } };
      }),
    ],
  };
  return new uPlot(options, [places, ...columns] as uPlot.AlignedData, element);
}
