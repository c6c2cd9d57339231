// What changed in a run, as the API streams it. Pages ask again at once for what changed, and otherwise seldom; where
// no stream comes through, such as behind a proxy that keeps it, they ask every three seconds.

import { useEffect } from "preact/hooks";

export type Part = "run" | "steps" | "evaluations" | "rollouts";
const CHANGED = "run-changed";
// The first event of a new page names all parts, which the page has just asked for: it comes to them a while later. Why:
// the overview of 10,000 rollouts asked everything twice at once.
const FIRST_MILLISECONDS = 2000;
let isStreaming = false;

/** Whether a stream tells of changes. */
export const hasStream = () => isStreaming;

/** Calls when one of the parts has changed, or the stream was cut. Returns the end of it. */
export function onChange(parts: readonly Part[], call: () => void): () => void {
  const onEvent = (event: Event) => {
    const changed = (event as CustomEvent<string[] | undefined>).detail;
    if (!changed || parts.some((part) => changed.includes(part))) call();
  };
  window.addEventListener(CHANGED, onEvent);
  return () => window.removeEventListener(CHANGED, onEvent);
}

/** Lets pages ask again for parts that this page has changed. */
export const tellChange = (parts: readonly Part[]) => window.dispatchEvent(new CustomEvent(CHANGED, { detail: parts }));

/** Listens to a run while its page is seen: browsers open six connections to an address, which all tabs share. */
export function useRunEvents(run: string): void {
  useEffect(() => {
    let stream: EventSource | undefined;
    let first: ReturnType<typeof setTimeout> | undefined;
    let isNew = true;
    function listen(): void {
      stream?.close();
      stream = undefined;
      isStreaming = false;
      if (document.hidden) return;
      stream = new EventSource(`v1/events?run=${encodeURIComponent(run)}`);
      stream.onmessage = ({ data }: MessageEvent<string>) => {
        isStreaming = true;
        const tell = () => window.dispatchEvent(new CustomEvent(CHANGED, { detail: JSON.parse(data) as string[] }));
        if (isNew) first = setTimeout(tell, FIRST_MILLISECONDS);
        else tell();
        isNew = false;
      };
      // The browser connects again by itself where that can help; the first event then says that the stream is back.
      stream.onerror = () => {
        if (!isStreaming) return;
        isStreaming = false;
        window.dispatchEvent(new CustomEvent(CHANGED));
      };
    }
    listen();
    document.addEventListener("visibilitychange", listen);
    return () => {
      document.removeEventListener("visibilitychange", listen);
      stream?.close();
      clearTimeout(first);
      isStreaming = false;
    };
  }, [run]);
}
