// Keys of the rollout's page: the arrows lead to the siblings before and after, with Shift to versions.

import { useEffect, useRef } from "preact/hooks";
import type { Group } from "../api";
import { Fold, link } from "../parts";

/** What has arrow keys of its own: fields, tokens, and tables that scroll. */
const OWNERS = "input, select, textarea, [role=group], [role=region]";

/** Calls by the arrows, with or without Shift; where one leads nowhere, its key keeps its own meaning. */
export function useArrows(isShift: boolean, before: (() => void) | undefined, after: (() => void) | undefined): void {
  const ways = useRef({ before, after });
  ways.current = { before, after };
  useEffect(() => {
    function onKey(event: KeyboardEvent): void {
      if (event.altKey || event.ctrlKey || event.metaKey || event.shiftKey !== isShift || event.defaultPrevented) return;
      const go = event.key === "ArrowLeft" ? ways.current.before : event.key === "ArrowRight" ? ways.current.after : undefined;
      if (!go || (event.target instanceof Element && event.target.closest(OWNERS))) return;
      event.preventDefault();
      go();
    }
    window.addEventListener("keydown", onKey);
    return () => window.removeEventListener("keydown", onKey);
  }, [isShift]);
}

export function SiblingKeys({ id, group }: { id: string; group: Group | undefined }) {
  const siblings = [...(group?.siblings ?? [])].sort((one, other) => one.sibling - other.sibling);
  const place = siblings.findIndex((one) => one.id === id);
  const [before, after] = place < 0 ? [] : [siblings[place - 1]?.id, siblings[place + 1]?.id];
  const go = (to: string | undefined) => (to === undefined ? undefined : () => void (location.hash = link("rollouts", to)));
  useArrows(false, go(before), go(after));
  return (
    <>
      <p class="pages">
        {before && <a href={link("rollouts", before)}>← Sibling before</a>}
        {after && <a href={link("rollouts", after)}>Sibling after →</a>}
      </p>
      <Fold title="Keys">
        {() => (
          <dl>
            <div><dt><kbd>←</kbd></dt><dd>the sibling before</dd></div>
            <div><dt><kbd>→</kbd></dt><dd>the sibling after</dd></div>
            <div><dt><kbd>Shift</kbd> <kbd>←</kbd> <kbd>→</kbd></dt><dd>the same task at an earlier or a later version, beside this rollout</dd></div>
            <div><dt><kbd>←</kbd> <kbd>→</kbd> <kbd>Home</kbd> <kbd>End</kbd> in tokens</dt><dd>choose one token</dd></div>
          </dl>
        )}
      </Fold>
    </>
  );
}
