// What may be asked of a run: the buttons that its state and the scope of the token allow, each with a confirmation.

import { useState } from "preact/hooks";
import { ApiError, create, mayWrite, request, usePolled, type Run, type Session } from "../api";
import { tellChange } from "../live";
import { Problem } from "../parts";
import { safeLine } from "../safe_text";
import { ContinueForm } from "./continue_form";

interface Action {
  title: string;
  /** What it does, for the confirmation. */
  does: (run: Run) => string;
  path: string;
  /** The body of what is made anew each time; a repeat of the others changes nothing. */
  makes?: (run: Run) => object;
}

const ACTIONS: Record<string, Action> = {
  pause: { title: "Pause", does: () => "Rollouts under way end, and no new ones begin.", path: "pause" },
  resume: { title: "Resume", does: () => "New rollouts begin.", path: "resume" },
  cancel: { title: "Cancel the run", does: () => "The run ends for good.", path: "cancel" },
  evaluate: {
    title: "Evaluate now",
    does: ({ progress: { policy_version: version } }) => `Version ${version ?? 0} is measured on the held-out tasks.`,
    path: "evaluations",
    makes: ({ progress: { policy_version: version } }) => ({ policy_version: version ?? 0 }),
  },
};

/** An ended run as a new one, by a form. */
const CONTINUE = "continue";

export function Actions({ run }: { run: Run }) {
  const session = usePolled<Session>("v1/session", () => false);
  const [asked, setAsked] = useState<string>();
  const [told, setTold] = useState("");
  const [problem, setProblem] = useState("");
  const [isBusy, setBusy] = useState(false);
  const offered = run.allowed_actions.filter((name) => (name === "evaluate" ? run.config?.evaluation : name in ACTIONS || name === CONTINUE));
  if (!mayWrite(session.data)) return <Problem error={session.error} />;
  const action = asked === undefined || !offered.includes(asked) ? undefined : ACTIONS[asked];
  async function act(chosen: Action): Promise<void> {
    setBusy(true);
    setProblem("");
    try {
      const path = `v1/runs/${encodeURIComponent(run.id)}/${chosen.path}`;
      await (chosen.makes ? create(path, chosen.makes(run)) : request("POST", path));
      setTold(`${chosen.title}: the platform has taken it.`);
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      setProblem(error.message);
    }
    setAsked(undefined);
    setBusy(false);
    tellChange(["run", "evaluations"]);
  }
  function ask(name: string): void {
    setAsked(name);
    setTold("");
    setProblem("");
  }
  return (
    <section aria-label="Actions">
      <p class="pages">
        {offered.map((name) => <button key={name} type="button" disabled={isBusy} aria-expanded={name === asked} onClick={() => ask(name)}>{ACTIONS[name]?.title ?? "Amend and resume"}</button>)}
      </p>
      {asked === CONTINUE && run.config && <ContinueForm run={run} onClose={() => setAsked(undefined)} />}
      {action && (
        <p class="warning">
          {action.does(run)}{" "}
          <button type="button" disabled={isBusy} onClick={() => void act(action)}>Yes, {action.title.toLowerCase()}</button>{" "}
          <button type="button" disabled={isBusy} onClick={() => setAsked(undefined)}>No</button>
        </p>
      )}
      {told && <p role="status">{told}</p>}
      {problem && <p role="alert" class="problem">{safeLine(problem)}</p>}
    </section>
  );
}
