// Names of runs and datasets in place of their ids, each asked for once.

import { useEffect, useState } from "preact/hooks";
import { ApiError, POLL_MILLISECONDS, request, wordsOf } from "./api";
import { AgentLine, link } from "./parts";
import { safeLine } from "./safe_text";

type Kind = "runs" | "datasets";
const asked = new Map<string, Promise<string>>();

/** Raises ApiError where it cannot be read; then the next question asks again. */
function nameOf(path: string): Promise<string> {
  const known = asked.get(path);
  if (known) return known;
  const found = request<{ name: string }>("GET", path).then(({ name }) => name);
  asked.set(path, found);
  found.catch(() => asked.delete(path));
  return found;
}

/** The name, and the id while no name is known: a failure says so, and is asked again unless nothing has the id. */
export function NameOf({ kind, id }: { kind: Kind; id: string }) {
  const [name, setName] = useState<string>();
  const [failure, setFailure] = useState<ApiError>();
  useEffect(() => {
    let isShown = true;
    let timer: ReturnType<typeof setTimeout> | undefined;
    setName(undefined);
    setFailure(undefined);
    async function read(): Promise<void> {
      try {
        const found = document.hidden ? undefined : await nameOf(`v1/${kind}/${encodeURIComponent(id)}`);
        if (!isShown) return;
        setName(found);
        if (found !== undefined) return setFailure(undefined);
      } catch (error) {
        if (!isShown) return;
        const why = error instanceof ApiError ? error : new ApiError(0, wordsOf(error));
        setFailure(why);
        if (why.status === 404) return;
      }
      timer = setTimeout(() => void read(), POLL_MILLISECONDS);
    }
    void read();
    return () => {
      isShown = false;
      clearTimeout(timer);
    };
  }, [kind, id]);
  return (
    <>
      <AgentLine text={name ?? id} />
      {failure && <span class="quiet" title={safeLine(failure.message)}> ({failure.status === 404 ? "deleted" : "its name does not load"})</span>}
    </>
  );
}

/** A link with the name; the id is its title. Args: part: of the page */
export function Named({ kind, id, part = "" }: { kind: Kind; id: string; part?: string }) {
  return <a href={`${link(kind, id)}${part}`} title={id}><NameOf kind={kind} id={id} /></a>;
}
