// The rollouts of a filter as a file of JSON lines or of CSV, read page by page.

import { useEffect, useRef, useState } from "preact/hooks";
import { everyPage, wordsOf, type Rollout } from "../api";

export function Download({ asked, run }: { asked: string; run: string }) {
  const [read, setRead] = useState<number>();
  const [problem, setProblem] = useState("");
  const stop = useRef<AbortController | undefined>(undefined);
  useEffect(() => () => stop.current?.abort(), []);
  async function download(form: Form): Promise<void> {
    stop.current = new AbortController();
    setProblem("");
    setRead(0);
    try {
      const { head, line, type, suffix } = FORMS[form];
      const lines = await allLines(asked, line, stop.current.signal, setRead);
      save(new Blob([head, ...lines], { type }), `${run}-rollouts.${suffix}`);
    } catch (error) {
      if (!stop.current.signal.aborted) setProblem(wordsOf(error));
    }
    if (!stop.current.signal.aborted) setRead(undefined);
  }
  return (
    <p>
      <button type="button" disabled={read !== undefined} onClick={() => void download("jsonl")}>Download all that pass the filter</button>{" "}
      <button type="button" disabled={read !== undefined} onClick={() => void download("csv")}>Download as CSV</button>{" "}
      {read !== undefined && <span role="status">{read.toLocaleString()} read …</span>}
      {problem && <span role="alert" class="problem">{problem}</span>}
    </p>
  );
}

const COLUMNS = [
  "id", "run_id", "group_id", "evaluation_id", "sibling", "greedy", "rerolls_of", "from_call", "dataset_id", "task_number", "agent", "admitted_version", "step",
  "state", "attempt", "reward", "reason", "created_at", "finished_at",
] as const satisfies readonly (keyof Rollout)[];

/** A cell of CSV. A spreadsheet would run a text that begins like a formula. */
function cell(value: string | number | boolean | null | undefined): string {
  if (value === null || value === undefined) return "";
  if (typeof value !== "string") return String(value);
  const text = /^[=+\-@\t\r]/.test(value) ? `'${value}` : value;
  return /[",\r\n]/.test(text) ? `"${text.replace(/"/g, '""')}"` : text;
}

const FORMS = {
  jsonl: { head: "", line: (one: Rollout) => `${JSON.stringify(one)}\n`, type: "application/x-ndjson", suffix: "jsonl" },
  csv: {
    head: `${COLUMNS.join(",")}\r\n`,
    line: (one: Rollout) => `${COLUMNS.map((name) => cell(one[name])).join(",")}\r\n`,
    type: "text/csv",
    suffix: "csv",
  },
};
type Form = keyof typeof FORMS;

/** One text for each page. */
async function allLines(asked: string, line: (one: Rollout) => string, signal: AbortSignal, tell: (read: number) => void): Promise<string[]> {
  const words = new URLSearchParams(asked);
  for (const name of ["limit", "count"]) words.delete(name);
  const pages: string[] = [];
  let read = 0;
  for await (const items of everyPage<Rollout>("v1/rollouts", words, signal)) {
    pages.push(items.map(line).join(""));
    tell((read += items.length));
  }
  return pages;
}

export function save(file: Blob, name: string): void {
  const anchor = document.createElement("a");
  anchor.href = URL.createObjectURL(file);
  anchor.download = name;
  anchor.click();
  // The browser has begun to read it by then.
  setTimeout(() => URL.revokeObjectURL(anchor.href), 60_000);
}
