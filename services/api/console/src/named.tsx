// Names of runs and datasets in place of their ids, each asked for once.

import { useEffect, useState } from "preact/hooks";
import { request } from "./api";
import { AgentLine, link } from "./parts";

type Kind = "runs" | "datasets";
const asked = new Map<string, Promise<string | undefined>>();

/** Undefined where it cannot be read; then the next page asks again. */
function nameOf(path: string): Promise<string | undefined> {
  const known = asked.get(path);
  if (known) return known;
  const found = request<{ name: string }>("GET", path).then(
    ({ name }) => name,
    () => void asked.delete(path),
  );
  asked.set(path, found as Promise<string | undefined>);
  return found as Promise<string | undefined>;
}

/** The name, and the id while no name is known. */
export function NameOf({ kind, id }: { kind: Kind; id: string }) {
  const [name, setName] = useState<string>();
  useEffect(() => {
    let isShown = true;
    setName(undefined);
    void nameOf(`v1/${kind}/${encodeURIComponent(id)}`).then((found) => isShown && setName(found));
    return () => {
      isShown = false;
    };
  }, [kind, id]);
  return <AgentLine text={name ?? id} />;
}

/** A link with the name; the id is its title. Args: part: of the page */
export function Named({ kind, id, part = "" }: { kind: Kind; id: string; part?: string }) {
  return <a href={`${link(kind, id)}${part}`} title={id}><NameOf kind={kind} id={id} /></a>;
}
