// An ended run goes on as a new one: a version to begin with, steps, and the document to amend.

import { useEffect, useRef, useState } from "preact/hooks";
import { create, wordsOf, type Run } from "../api";
import { AgentLine, Commands, link, shellWord } from "../parts";
import { safeLine } from "../safe_text";
import { changesOf, isPlain, pathsOf, type Document } from "./changes";

export function ContinueForm({ run, onClose }: { run: Run; onClose: () => void }) {
  const newest = run.progress.policy_version ?? 0;
  const [before] = useState(() => documentOf(run));
  const [version, setVersion] = useState(String(newest));
  const [steps, setSteps] = useState(String(Math.max(0, (run.progress.steps ?? 0) - newest) || ""));
  const policies = Object.entries(run.policies ?? {});
  const [versions, setVersions] = useState<Record<string, string>>({});
  const [words, setWords] = useState(() => JSON.stringify(before, null, 2));
  const [problem, setProblem] = useState("");
  const [made, setMade] = useState<Run>();
  const [isBusy, setBusy] = useState(false);
  const first = useRef<HTMLInputElement>(null);
  const next = useRef<HTMLAnchorElement>(null);
  useEffect(() => first.current?.focus(), []);
  useEffect(() => next.current?.focus(), [made]);
  const changes = readChanges(before, words);
  async function send(event: Event): Promise<void> {
    event.preventDefault();
    if (typeof changes === "string") return;
    const asked = {
      from_version: Number(version),
      policy_versions: Object.fromEntries(chosenOf(versions).map(([name, one]) => [name, Number(one)])),
      changes: { ...changes, training: { ...(changes.training as Document), steps: Number(steps) } },
    };
    setBusy(true);
    setProblem("");
    try {
      setMade(await create<Run>(`v1/runs/${encodeURIComponent(run.id)}/resume`, asked));
    } catch (error) {
      setProblem(wordsOf(error));
    }
    setBusy(false);
  }
  if (made) {
    return (
      <p role="status">
        Run <a ref={next} href={link("runs", made.id)}><AgentLine text={made.name} /> ({made.id})</a> goes on from version {made.parent?.version ?? version}.
      </p>
    );
  }
  return (
    <form class="question" aria-label="Continue as a new run" onSubmit={(event) => void send(event)}>
      <p class="pages">
        <label for="from-version">Begin with version</label>
        <input id="from-version" ref={first} class="short" type="number" min={0} max={2 ** 31 - 1} step={1} required value={version} onInput={(event) => setVersion(event.currentTarget.value)} />
        <span class="quiet">the newest is {newest}{run.best_version != null && `, the best ${run.best_version}`}: <a href={`${link("runs", run.id)}/versions`}>all versions</a></span>
        <label for="steps">Further steps</label>
        <input id="steps" class="short" type="number" min={0} max={2 ** 31 - 1} step={1} required value={steps} onInput={(event) => setSteps(event.currentTarget.value)} />
      </p>
      {policies.map(([name, one], place) => (
        <p key={name} class="pages">
          <label for={`policy-${place}`}>Begin policy <AgentLine text={name} /> with version</label>
          <input id={`policy-${place}`} class="short" type="number" min={0} max={2 ** 31 - 1} step={1} value={versions[name] ?? ""} onInput={(event) => setVersions({ ...versions, [name]: event.currentTarget.value })} />
          <span class="quiet">
            its newest is {one.policy_version ?? 0}: <a href={`${link("runs", run.id)}/versions?${new URLSearchParams({ policy: name })}`}>all versions</a>.
            Left empty: the number above, or the newest where that has no files
          </span>
        </p>
      ))}
      <label for="document">Document of the new run; amend its fields here (model and LoRA stay as they are). A line taken out of a map drops its key</label>
      <textarea id="document" class="document" rows={16} spellcheck={false} value={words} onInput={(event) => setWords(event.currentTarget.value)} />
      {typeof changes === "string" ? <p role="alert" class="problem">{safeLine(changes)}</p> : <Commands commands={[command(run, version, steps, versions, changes)]} />}
      <p class="pages">
        <button type="submit" disabled={isBusy || typeof changes === "string"}>Begin the new run</button>
        <button type="button" disabled={isBusy} onClick={onClose}>Close</button>
        {isBusy && <span role="status">Sending …</span>}
      </p>
      {problem && <p role="alert" class="problem">{safeLine(problem)}</p>}
    </form>
  );
}

/** The run's document without the number of steps, which has a field of its own. */
function documentOf({ config }: Run): Document {
  const document = JSON.parse(JSON.stringify(config)) as Document;
  delete (document.training as Document).steps;
  return document;
}

/** What the words change, or the sentence that says what is wrong with them. */
function readChanges(before: Document, words: string): Document | string {
  let after: unknown;
  try {
    after = JSON.parse(words);
  } catch (error) {
    return `The document is no JSON (${wordsOf(error)}).`;
  }
  if (typeof after !== "object" || after === null || Array.isArray(after)) return "The document is no JSON object: write {…}.";
  const changes = changesOf(before, after as Document);
  const unknown = Object.keys(changes).find((name) => !isPlain(name));
  if (unknown !== undefined) return `No document has a field ${JSON.stringify(unknown)}: take it out.`;
  const { training } = changes;
  if (training === null || (training !== undefined && typeof training !== "object")) return "training: leave the object as it was.";
  return training && "steps" in training ? "training.steps: write them into the field above." : changes;
}

/** The policies with a version of their own to begin with. */
const chosenOf = (versions: Record<string, string>) => Object.entries(versions).filter(([, version]) => version !== "");

const command = (run: Run, version: string, steps: string, versions: Record<string, string>, changes: Document) =>
  [
    "leyden run resume",
    run.id,
    ...(version === "" ? [] : [`--from-version ${Number(version)}`]),
    ...chosenOf(versions).map(([name, one]) => `--policy-version ${shellWord(`${name}=${Number(one)}`)}`),
    // The option takes no 0, the document does: a run that is evaluated alone.
    ...(steps === "" ? [] : [Number(steps) === 0 ? "--set training.steps=0" : `--steps ${Number(steps)}`]),
    ...pathsOf(changes).map((one) => `--set ${shellWord(one)}`),
  ].join(" ");
