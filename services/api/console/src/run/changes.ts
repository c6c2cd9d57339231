// The difference of two documents, as the API lays it over the first one.

export type Json = null | boolean | number | string | Json[] | { [name: string]: Json };
export type Document = { [name: string]: Json };

const isObject = (value: Json | undefined): value is Document => typeof value === "object" && value !== null && !Array.isArray(value);

/** Whether two values are the same, in any order of names. */
function isSame(one: Json | undefined, other: Json | undefined): boolean {
  if (Array.isArray(one) && Array.isArray(other)) return one.length === other.length && one.every((value, place) => isSame(value, other[place]));
  if (!isObject(one) || !isObject(other)) return one === other;
  return Object.keys({ ...one, ...other }).every((name) => isSame(one[name], other[name]));
}

/** Objects are merged, unless their `type` differs: the API then replaces them. A name that is gone becomes null. */
export function changesOf(before: Document, after: Document): Document {
  const changes: Document = {};
  for (const name of Object.keys({ ...before, ...after })) {
    const [was, is] = [before[name], after[name]];
    if (isSame(was, is)) continue;
    if (!isObject(was) || !isObject(is)) changes[name] = is ?? null;
    else changes[name] = was.type === is.type ? changesOf(was, is) : { type: null, ...is };
  }
  return changes;
}

/** Whether a path of the CLI's `--set` can have the name: it parts names at dots, and ends at the first `=`. */
export const isPlain = (name: string) => /^[^.=]+$/.test(name);

/** Each changed path with its new value as JSON, such as `optimizer.learning_rate=5e-7`: the CLI's `--set`. An object
 * with a name that no path can have is one value: the API merges it all the same. */
export function pathsOf(changes: Document, above = ""): string[] {
  return Object.entries(changes).flatMap(([name, value]) => {
    const path = `${above}${name}`;
    const names = isObject(value) ? Object.keys(value) : [];
    return names.length > 0 && names.every(isPlain) ? pathsOf(value as Document, `${path}.`) : [`${path}=${JSON.stringify(value)}`];
  });
}
