// Curves in one chart: beside each other, told apart by colour and dash, or stacked; and their numbers as a table.

import type uPlot from "uplot";
import { wholeEvaluations, type Evaluation } from "./api";
import { Fold, Table, number } from "./parts";
import { usePlot } from "./plot";
import { safeLine } from "./safe_text";

const COLOURS = 8;
const DASHES = [[], [8, 4]];
/** Further curves have no colour and dash of their own. */
const MOST_CURVES = COLOURS * DASHES.length;
const MARKS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000];

export interface Point {
  x: number;
  y: number;
  low?: number | null;
  high?: number | null;
}

export interface Curve {
  name: string;
  /** By x, ascending. */
  points: Point[];
}

/** The means of whole evaluations by version, with their intervals. */
export const heldOut = (evaluations: Evaluation[]): Point[] =>
  wholeEvaluations(evaluations).flatMap(({ measured_version: x, results: { reward } }) =>
    x === null || reward === null ? [] : [{ x, y: reward.mean, low: reward.low, high: reward.high }],
  );

interface Curves {
  title: string;
  /** The name of x; steps and versions are whole and few. */
  axis: string;
  curves: Curve[];
  /** All x: a curve without a point at one has a gap there. Where they are left out it goes on. */
  places?: number[];
  /** Each curve on top of those before it. A part that is unknown leaves a gap in those above. */
  stacked?: boolean;
  /** Digits behind the point. */
  digits?: number;
}

export function Curves({ title, axis, curves: all, places: given, stacked = false, digits = 3 }: Curves) {
  const curves = all.slice(0, MOST_CURVES);
  const places = given ?? [...new Set(curves.flatMap((one) => one.points.map(({ x }) => x)))].sort((one, other) => one - other);
  const byPlace = curves.map((one) => new Map(one.points.map((point) => [point.x, point])));
  const drawn = byPlace.map((points) => places.map((x) => points.get(x)?.y ?? (given ? null : undefined)));
  const edges = stacked || curves.length !== 1 ? [] : (["low", "high"] as const).map((edge) => places.map((x) => byPlace[0]?.get(x)?.[edge] ?? null));
  const place = usePlot({
    height: 220,
    axis,
    steps: axis === "step" || axis === "version" ? MARKS : undefined,
    columns: [places, ...(stacked ? piled(drawn) : drawn), ...edges],
    lines: (colour) => lines(colour, curves.length, stacked, given === undefined, edges.length > 0),
  });
  const told = curves.length === 1 && curves[0] ? range(curves[0], axis, digits) : curves.map((one) => last(one, axis, digits)).join("; ");
  return (
    <figure>
      <figcaption>{safeLine(title)}</figcaption>
      {places.length > 0 ? <div ref={place} class="chart" role="img" aria-label={`${safeLine(title)}: ${told}`} /> : <p class="quiet">Nothing is measured yet.</p>}
      <ul class="legend">
        {curves.map((one, index) => (
          <li key={index}><span aria-hidden="true" class={`line colour-${index % COLOURS} dash-${Math.floor(index / COLOURS)}`} /> {last(one, axis, digits)}</li>
        ))}
      </ul>
      {all.length > MOST_CURVES && <p class="quiet">{all.length - MOST_CURVES} more have no line here; their numbers are below.</p>}
      {places.length > 0 && <Fold title="Numbers">{() => <Numbers title={title} axis={axis} curves={all} places={places} digits={digits} />}</Fold>}
    </figure>
  );
}

/** The sum of each curve and those before it. */
function piled(columns: (number | null | undefined)[][]): (number | null | undefined)[][] {
  const sums: (number | null | undefined)[][] = [];
  for (const column of columns) {
    const before = sums[sums.length - 1];
    sums.push(column.map((value, index) => {
      const below = before ? before[index] : 0;
      return value == null || below == null ? null : below + value;
    }));
  }
  return sums;
}

function lines(colour: (name: string) => string, count: number, stacked: boolean, spanGaps: boolean, hasInterval: boolean): Pick<uPlot.Options, "series" | "bands"> {
  const series = Array.from({ length: count }, (_one, index): uPlot.Series => {
    const stroke = colour(`--curve-${index % COLOURS}`);
    const fill = stacked && index === 0 ? `${stroke}55` : undefined;
    return { stroke, width: 2, fill, dash: DASHES[Math.floor(index / COLOURS)] ?? [], spanGaps, points: { show: true, size: 5, fill: stroke } };
  });
  const edge = { show: true, stroke: "transparent", points: { show: false } };
  const bands: uPlot.Band[] = stacked
    ? series.slice(1).map((one, index) => ({ series: [index + 2, index + 1], fill: `${String(one.stroke)}55` }))
    : hasInterval ? [{ series: [3, 2], fill: colour("--band") }] : [];
  return { series: [{}, ...series, ...(hasInterval ? [edge, edge] : [])], bands };
}

/** A small number has two digits of its own: a loss of 0.0001 is none of 0. */
const shown = (value: number, digits: number) =>
  value !== 0 && Math.abs(value) < 10 ** -digits ? value.toPrecision(2) : number(value, digits);

function range(curve: Curve, axis: string, digits: number): string {
  const first = curve.points[0];
  return first ? `${shown(first.y, digits)} at ${axis} ${first.x}, ${last({ ...curve, name: "" }, axis, digits).trim()}` : "not measured";
}

function last({ name, points }: Curve, axis: string, digits: number): string {
  const point = points[points.length - 1];
  return `${safeLine(name)} ${point ? `${shown(point.y, digits)} at ${axis} ${point.x}` : "not measured"}`;
}

function Numbers({ title, axis, curves, places, digits }: { title: string; axis: string; curves: Curve[]; places: number[]; digits: number }) {
  const names = curves.map((one) => safeLine(one.name));
  const byPlace = curves.map((one) => new Map(one.points.map((point) => [point.x, point])));
  return (
    <Table label={`${safeLine(title)}: numbers`} head={[axis, ...names]} numbers={[axis, ...names]}>
      {places.map((x) => (
        <tr key={x}>
          <th scope="row" class="number">{x}</th>
          {byPlace.map((points, index) => <td key={index} class="number">{written(points.get(x), digits)}</td>)}
        </tr>
      ))}
    </Table>
  );
}

function written(point: Point | undefined, digits: number): string {
  if (!point) return "–";
  const interval = point.low == null || point.high == null ? "" : ` (${shown(point.low, digits)} to ${shown(point.high, digits)})`;
  return shown(point.y, digits) + interval;
}
