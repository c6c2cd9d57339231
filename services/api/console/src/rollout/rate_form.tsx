// A person's number for a rollout: feedback for a component of its reward, or a reward where the run names none.

import { useEffect, useRef, useState } from "preact/hooks";
import { newKey, request, wordsOf, type RolloutDetail, type Run } from "../api";
import { Select } from "../parts";
import { safeLine } from "../safe_text";

export function RateForm({ rollout, run, onChange }: { rollout: RolloutDetail; run: Run | undefined; onChange: () => void }) {
  const components = run?.config?.reward?.components.filter((one) => one.from === "feedback").map((one) => one.name);
  const [name, setName] = useState(components?.[0] ?? "person");
  const [value, setValue] = useState("");
  const [comment, setComment] = useState("");
  const [told, setTold] = useState("");
  const [problem, setProblem] = useState("");
  const [isBusy, setBusy] = useState(false);
  const first = useRef<HTMLInputElement>(null);
  // A repeat after a lost answer must not count twice.
  const key = useRef(newKey());
  useEffect(() => first.current?.focus(), []);
  async function send(event: Event): Promise<void> {
    event.preventDefault();
    setBusy(true);
    setTold("");
    setProblem("");
    const given = { key: key.current, value: Number(value), comment: comment || null };
    try {
      const [part, body] = components ? ["feedback", { ...given, component: name }] : ["rewards", { ...given, name }];
      await request("POST", `v1/rollouts/${encodeURIComponent(rollout.id)}/${part}`, body);
      key.current = newKey();
      setTold(`The platform has taken ${value} for ${name}.`);
      setValue("");
      setComment("");
      onChange();
    } catch (error) {
      setProblem(wordsOf(error));
    }
    setBusy(false);
  }
  // Another number is another rating.
  function change(to: (words: string) => void, words: string): void {
    key.current = newKey();
    to(words);
  }
  return (
    <form class="filters" aria-label="Rate" onSubmit={(event) => void send(event)}>
      {components ? (
        <Select id="rate-name" label="Component" value={name} options={components.map((one): [string, string] => [one, safeLine(one)])} onChange={(words) => change(setName, words)} />
      ) : (
        <span><label for="rate-name">Name</label> <input id="rate-name" required maxLength={200} value={name} onInput={(event) => change(setName, event.currentTarget.value)} /></span>
      )}
      <span><label for="rate-value">Value</label> <input id="rate-value" ref={first} type="number" step="any" required class="short" value={value} onInput={(event) => change(setValue, event.currentTarget.value)} /></span>
      <span><label for="rate-comment">Comment</label> <input id="rate-comment" maxLength={10_000} value={comment} onInput={(event) => change(setComment, event.currentTarget.value)} /></span>
      <button type="submit" disabled={isBusy || value === ""}>Give it</button>
      {isBusy && <span role="status">Sending …</span>}
      {told && <p role="status">{safeLine(told)}</p>}
      {problem && <p role="alert" class="problem">{safeLine(problem)}</p>}
    </form>
  );
}
