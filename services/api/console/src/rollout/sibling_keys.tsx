// Keys of the rollout's page: the arrows lead to the siblings before and after.

import { useEffect } from "preact/hooks";
import type { Group } from "../api";
import { Fold, link } from "../parts";

/** What has arrow keys of its own: fields, tokens, and tables that scroll. */
const OWNERS = "input, select, textarea, [role=group], [role=region]";

export function SiblingKeys({ id, group }: { id: string; group: Group | undefined }) {
  const siblings = [...(group?.siblings ?? [])].sort((one, other) => one.sibling - other.sibling);
  const place = siblings.findIndex((one) => one.id === id);
  const [before, after] = place < 0 ? [] : [siblings[place - 1]?.id, siblings[place + 1]?.id];
  useEffect(() => {
    function onKey(event: KeyboardEvent): void {
      if (event.altKey || event.ctrlKey || event.metaKey || event.shiftKey || event.defaultPrevented) return;
      const to = event.key === "ArrowLeft" ? before : event.key === "ArrowRight" ? after : undefined;
      if (to === undefined || (event.target instanceof Element && event.target.closest(OWNERS))) return;
      event.preventDefault();
      location.hash = link("rollouts", to);
    }
    window.addEventListener("keydown", onKey);
    return () => window.removeEventListener("keydown", onKey);
  }, [before, after]);
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
            <div><dt><kbd>←</kbd> <kbd>→</kbd> <kbd>Home</kbd> <kbd>End</kbd> in tokens</dt><dd>choose one token</dd></div>
          </dl>
        )}
      </Fold>
    </>
  );
}
