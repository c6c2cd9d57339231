// A plot that follows the width of its place and the system's colours.

import { useEffect, useRef } from "preact/hooks";
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";

export interface Plot {
  height: number;
  /** The name of x, with its unit. */
  axis: string;
  /** Steps between the marks of x; uPlot's own by default. */
  steps?: number[];
  /** x, ascending, and a column for each further series. null ends a line; undefined is no point of it. */
  columns: (number | null | undefined)[][];
  /** `colour` gives the value of a variable of the page's style. */
  lines: (colour: (name: string) => string) => Pick<uPlot.Options, "series" | "bands">;
}

/** Returns the place to draw in; nothing is drawn where the plot has no x. */
export function usePlot(plot: Plot) {
  const place = useRef<HTMLDivElement>(null);
  useEffect(() => {
    const element = place.current;
    if (!element || !plot.columns[0]?.length) return undefined;
    const dark = window.matchMedia("(prefers-color-scheme: dark)");
    let drawn = draw(element, plot);
    const redraw = () => {
      drawn.destroy();
      drawn = draw(element, plot);
    };
    const watch = new ResizeObserver(() => drawn.setSize({ width: element.clientWidth, height: plot.height }));
    watch.observe(element);
    dark.addEventListener("change", redraw);
    return () => {
      watch.disconnect();
      dark.removeEventListener("change", redraw);
      drawn.destroy();
    };
  }, [JSON.stringify(plot.columns), plot.axis]);
  return place;
}

/** The ends of y. Values that differ by rounding alone are one: uPlot would write marks between them for ever. */
function span(min: number, max: number): uPlot.Range.MinMax {
  const middle = (min + max) / 2;
  if (max - min > 1e-6 * Math.abs(middle)) return uPlot.rangeNum(min, max, 0.1, true);
  const room = 0.1 * Math.abs(middle) || 1;
  return [middle - room, middle + room];
}

/** The words at the marks of y, in steps of `step`. uPlot's own have three digits: small values would all be 0. */
function marks(_plot: uPlot, values: number[], _axis: number, _space: number, step: number): string[] {
  if (step >= 1e-3) return values.map((one) => one.toLocaleString());
  const isSmall = values.every((one) => Math.abs(one) < 0.01);
  return values.map((one) => (isSmall ? String(one && Number(one.toPrecision(3)).toExponential()) : one.toFixed(Math.ceil(-Math.log10(step)))));
}

function draw(element: HTMLElement, { height, axis, steps, columns, lines }: Plot): uPlot {
  const style = getComputedStyle(element);
  const colour = (name: string) => style.getPropertyValue(name).trim();
  const axes = { stroke: colour("--quiet"), grid: { stroke: colour("--line"), width: 1 }, ticks: { stroke: colour("--line"), width: 1 } };
  const options: uPlot.Options = {
    width: element.clientWidth,
    height,
    scales: { x: { time: false }, y: { range: (_plot, min, max) => span(min, max) } },
    legend: { show: false },
    axes: [{ ...axes, label: axis, labelSize: 20, ...(steps && { incrs: steps }) }, { ...axes, size: 56, values: marks }],
    ...lines(colour),
  };
  return new uPlot(options, columns as uPlot.AlignedData, element);
}
