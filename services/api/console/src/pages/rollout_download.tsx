// The rollouts of a filter as a file of JSON lines, read page by page.

import { useEffect, useRef, useState } from "preact/hooks";
import { request, type RolloutPage } from "../api";

const PAGE = "1000";

export function Download({ asked, run }: { asked: string; run: string }) {
  const [read, setRead] = useState<number>();
  const [problem, setProblem] = useState("");
  const stop = useRef<AbortController | undefined>(undefined);
  useEffect(() => () => stop.current?.abort(), []);
  async function download(): Promise<void> {
    stop.current = new AbortController();
    setProblem("");
    setRead(0);
    try {
      const lines = await allLines(asked, stop.current.signal, setRead);
      save(new Blob(lines, { type: "application/x-ndjson" }), `${run}-rollouts.jsonl`);
    } catch (error) {
      if (!stop.current.signal.aborted) setProblem(error instanceof Error ? error.message : String(error));
    }
    if (!stop.current.signal.aborted) setRead(undefined);
  }
  return (
    <p>
      <button type="button" disabled={read !== undefined} onClick={() => void download()}>Download all that pass the filter</button>{" "}
      {read !== undefined && <span role="status">{read.toLocaleString()} read …</span>}
      {problem && <span role="alert" class="problem">{problem}</span>}
    </p>
  );
}

/** One text for each page. */
async function allLines(asked: string, signal: AbortSignal, tell: (read: number) => void): Promise<string[]> {
  const words = new URLSearchParams(asked);
  words.set("limit", PAGE);
  words.delete("count");
  const pages: string[] = [];
  for (let read = 0; ; ) {
    const { items, next_cursor } = await request<RolloutPage>("GET", `v1/rollouts?${words}`, undefined, signal);
    pages.push(items.map((one) => `${JSON.stringify(one)}\n`).join(""));
    tell((read += items.length));
    if (!next_cursor) return pages;
    words.set("cursor", next_cursor);
  }
}

function save(file: Blob, name: string): void {
  const anchor = document.createElement("a");
  anchor.href = URL.createObjectURL(file);
  anchor.download = name;
  anchor.click();
  // The browser has begun to read it by then.
  setTimeout(() => URL.revokeObjectURL(anchor.href), 60_000);
}
