// Filters and sorts in the page's address, so that it can be sent to a colleague.

import { useEffect, useState } from "preact/hooks";

export type Choice<Field extends string> = Partial<Record<Field, string>>;

function read<Field extends string>(fields: readonly Field[]): Choice<Field> {
  const words = new URLSearchParams(location.hash.split("?")[1] ?? "");
  return Object.fromEntries(fields.flatMap((field) => (words.get(field) ? [[field, words.get(field)]] : []))) as Choice<Field>;
}

/** The fields of the address, and a function that changes one; an empty one stands for its default. */
export function useChoice<Field extends string>(fields: readonly Field[]): [Choice<Field>, (field: Field, value: string) => void] {
  const [choice, setChoice] = useState(() => read(fields));
  useEffect(() => {
    const onMove = () => setChoice(read(fields));
    window.addEventListener("hashchange", onMove);
    return () => window.removeEventListener("hashchange", onMove);
  }, []);
  function change(field: Field, value: string): void {
    const next = { ...read(fields), [field]: value };
    const words = new URLSearchParams(fields.flatMap((name): [string, string][] => (next[name] ? [[name, next[name] ?? ""]] : [])));
    history.replaceState(null, "", `${location.hash.split("?")[0] || "#/"}${words.size ? `?${words}` : ""}`);
    setChoice(read(fields));
  }
  return [choice, change];
}
