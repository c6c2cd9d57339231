// Small parts of every page. Texts of agents become text nodes, never markup.

import type { ComponentChildren } from "preact";
import { useEffect, useState } from "preact/hooks";
import type { Answer } from "./api";
import { safeLine, safeText } from "./safe_text";

const SHOWN_CHARACTERS = 4000;
const TYPING_MILLISECONDS = 300;

export const number = (value: number | null | undefined, digits = 3) =>
  value === null || value === undefined ? "–" : value.toFixed(digits);

export const signed = (value: number) => `${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(3)}`;

const UNITS = ["bytes", "KiB", "MiB", "GiB", "TiB"];

export function bytes(value: number): string {
  const power = Math.min(UNITS.length - 1, Math.floor(Math.log2(Math.max(1, value)) / 10));
  return power === 0 ? `${value} bytes` : `${(value / 1024 ** power).toFixed(1)} ${UNITS[power]}`;
}

const CLOCK = { hour: "numeric", minute: "numeric", second: "numeric", timeZoneName: "short" } as const;
const WHOLE_TIME = new Intl.DateTimeFormat(undefined, { year: "numeric", month: "numeric", day: "numeric", ...CLOCK });
const CLOCK_TIME = new Intl.DateTimeFormat(undefined, CLOCK);

/** A time with the reader's time zone. */
export const time = (value: string | null | undefined) => (value ? WHOLE_TIME.format(new Date(value)) : "–");

/** A time of day with the reader's time zone. */
export const clock = (at: Date) => CLOCK_TIME.format(at);

/** A time in one unit. */
export function duration(seconds: number): string {
  const [size, unit] = ([[86_400, "d"], [3600, "h"], [60, "min"]] as const).find(([least]) => seconds >= least) ?? [1, "s"];
  return `${(seconds / size).toFixed(0)} ${unit}`;
}

export const link = (kind: "runs" | "groups" | "rollouts" | "datasets", id: string) => `#/${kind}/${encodeURIComponent(id)}`;

/** A text of an agent, cut where it is long: a million characters would take the browser seconds. */
export function AgentText({ text }: { text: string }) {
  const [isWhole, showWhole] = useState(false);
  const shown = isWhole ? text : text.slice(0, SHOWN_CHARACTERS);
  return (
    <>
      <pre class="text">{safeText(shown)}</pre>
      {shown.length < text.length && (
        <button type="button" onClick={() => showWhole(true)}>
          Show all {text.length.toLocaleString()} characters
        </button>
      )}
    </>
  );
}

/** One line of an agent's text. */
export function AgentLine({ text }: { text: string | null | undefined }) {
  return <>{safeLine((text ?? "").slice(0, 300))}{(text ?? "").length > 300 && "…"}</>;
}

/** Builds its content only when it is opened. */
export function Fold({ title, children, open = false }: { title: string; children: () => ComponentChildren; open?: boolean }) {
  const [isOpen, setOpen] = useState(open);
  return (
    <details open={isOpen} onToggle={(event) => setOpen(event.currentTarget.open)}>
      <summary>{title}</summary>
      {isOpen && children()}
    </details>
  );
}

const LINE_CHARACTERS = 160;

/** An agent's text on one line, and folded where that is too short for it. */
export function FoldedText({ text }: { text: string }) {
  if (text.length <= LINE_CHARACTERS && !text.includes("\n")) return <AgentLine text={text} />;
  return <Fold title={`${safeLine(text.slice(0, LINE_CHARACTERS / 2))} …`}>{() => <AgentText text={text} />}</Fold>;
}

export function Facts({ facts }: { facts: [string, ComponentChildren][] }) {
  return (
    <dl>
      {facts.map(([name, value]) => (
        <div key={name}>
          <dt>{name}</dt>
          <dd>{value}</dd>
        </div>
      ))}
    </dl>
  );
}

interface SelectProperties {
  id: string;
  label: string;
  value: string;
  options: [string, string][];
  onChange: (value: string) => void;
}

export function Select({ id, label, value, options, onChange }: SelectProperties) {
  return (
    <span>
      <label for={id}>{label}</label>{" "}
      <select id={id} value={value} onChange={(event) => onChange(event.currentTarget.value)}>
        {options.map(([option, name]) => <option key={option} value={option}>{name}</option>)}
      </select>
    </span>
  );
}

interface TypedProperties {
  id: string;
  value: string;
  onTyped: (value: string) => void;
  attributes: object;
}

/** An input that reports once nobody types any more. */
export function Typed({ id, value, onTyped, attributes }: TypedProperties) {
  const [typed, setTyped] = useState(value);
  useEffect(() => setTyped(value), [value]);
  useEffect(() => {
    if (typed === value) return undefined;
    const timer = setTimeout(() => onTyped(typed), TYPING_MILLISECONDS);
    return () => clearTimeout(timer);
  }, [typed]);
  return <input id={id} value={typed} onInput={(event) => setTyped(event.currentTarget.value)} {...attributes} />;
}

interface TableProperties {
  label: string;
  head: string[];
  /** The columns of numbers, which stand to the right. */
  numbers: string[];
  children: ComponentChildren;
}

/** A table that scrolls by itself on a narrow screen. */
export function Table({ label, head, numbers, children }: TableProperties) {
  return (
    <div class="table" role="region" aria-label={label} tabIndex={0}>
      <table>
        <thead>
          <tr>{head.map((name) => <th key={name} scope="col" class={numbers.includes(name) ? "number" : ""}>{name}</th>)}</tr>
        </thead>
        <tbody>{children}</tbody>
      </table>
    </div>
  );
}

/** A word that a shell reads as it stands. */
export const shellWord = (value: string) => (/^[\w.:+-]+$/.test(value) ? value : `'${value.replace(/'/g, `'\\''`)}'`);

/** Commands to copy. */
export function Commands({ commands }: { commands: string[] }) {
  return (
    <ul class="commands">
      {commands.map((command) => (
        <li key={command}>
          <code>{command}</code>
          {/* Browsers give the clipboard to pages by TLS or on this machine alone. */}
          {navigator.clipboard && (
            <button type="button" aria-label={`Copy ${command}`} onClick={() => void navigator.clipboard.writeText(command)}>
              Copy
            </button>
          )}
        </li>
      ))}
    </ul>
  );
}

export function State({ state }: { state: string }) {
  return <span class={`state ${state}`}>{state}</span>;
}

/** The failure of a question that is asked again, and where to look; nothing without one. Args: at: the time of older data */
export function Problem({ error, at }: Pick<Answer<unknown>, "error" | "at">) {
  if (!error) return null;
  return (
    <p role="alert" class="problem">
      {safeLine(error.message)}
      {at && ` – shown as of ${clock(at)}`}
      {error.status === 404 ? <>. <a href="#/">All runs</a></> : <>. This page asks again by itself; <code>leyden status</code> says what is down.</>}
    </p>
  );
}

/** The data once they are there, their age, and the last error. */
export function Loaded<T>({ answer, children }: { answer: Answer<T>; children: (data: T) => ComponentChildren }) {
  const { data, error, at } = answer;
  return (
    <>
      <Problem error={error} at={at} />
      {data === undefined ? !error && <p role="status">Loading …</p> : children(data)}
    </>
  );
}
