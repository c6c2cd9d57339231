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
    changes[name] = isObject(was) && isObject(is) && was.type === is.type ? changesOf(was, is) : (is ?? null);
  }
  return changes;
}

/** Each changed path with its new value as JSON, such as `optimizer.learning_rate=5e-7`: the CLI's `--set`. */
export function pathsOf(changes: Document, above = ""): string[] {
  return Object.entries(changes).flatMap(([name, value]) => {
    const path = `${above}${name}`;
    return isObject(value) && Object.keys(value).length > 0 ? pathsOf(value, `${path}.`) : [`${path}=${JSON.stringify(value)}`];
  });
}
