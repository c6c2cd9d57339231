// A curve with an optional interval.

import { useEffect, useRef } from "preact/hooks";
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";
import { number } from "./parts";

const HEIGHT = 220;

export interface Point {
  x: number;
  y: number;
  low?: number | null;
  high?: number | null;
}

export function Chart({ title, axis, points }: { title: string; axis: string; points: Point[] }) {
  const place = useRef<HTMLDivElement>(null);
  const drawn = JSON.stringify(points);
  useEffect(() => {
    const element = place.current;
    if (!element || points.length === 0) return undefined;
    const dark = window.matchMedia("(prefers-color-scheme: dark)");
    let plot = draw(element, axis, points);
    const redraw = () => {
      plot.destroy();
      plot = draw(element, axis, points);
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

function draw(element: HTMLElement, axis: string, points: Point[]): uPlot {
  const style = getComputedStyle(element);
  const [ink, line, band, grid] = ["--quiet", "--accent", "--band", "--line"].map((name) => style.getPropertyValue(name).trim());
  const axes = { stroke: ink, grid: { stroke: grid, width: 1 }, ticks: { stroke: grid, width: 1 } };
  const edge = { show: true, stroke: "transparent", points: { show: false } };
  const options: uPlot.Options = {
    width: element.clientWidth,
    height: HEIGHT,
    scales: { x: { time: false } },
    legend: { show: false },
    axes: [{ ...axes, label: axis, labelSize: 20, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000] }, { ...axes, size: 56 }],
    series: [{}, { stroke: line, width: 2, points: { show: true, size: 6, fill: line } }, edge, edge],
    bands: [{ series: [3, 2], fill: band }],
  };
  const columns = [points.map((one) => one.x), ...(["y", "low", "high"] as const).map((name) => points.map((one) => one[name] ?? null))];
  return new uPlot(options, columns as uPlot.AlignedData, element);
}
