// What may be asked of a rollout: a person's rating, a new grading, its export, and its question once more.

import type { ComponentChildren } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { everyPage, mayWrite, request, usePolled, wordsOf, type Answer, type Call, type Group, type RolloutDetail, type Run, type Session, type Span } from "../api";
import { save } from "../pages/rollout_download";
import { Commands, Problem, link } from "../parts";
import { safeLine } from "../safe_text";
import { RateForm } from "./rate_form";
import { RegradeForm } from "./regrade_form";

interface OfRollout {
  rollout: RolloutDetail;
  run: Answer<Run>;
  group: Group | undefined;
  /** Shows what an action changed. */
  onChange: () => void;
}

type Form = "rate" | "grade";

export function RolloutActions({ rollout, run: { data: run, error }, group, onChange }: OfRollout) {
  const session = usePolled<Session>("v1/session", () => false);
  const [form, setForm] = useState<Form>();
  const isOpen = mayWrite(session.data);
  const needs = isOpen === false ? "it needs a token with scope write" : undefined;
  const reasons: Record<Form, string | undefined> = { rate: needs ?? whyNoRating(rollout, run, group), grade: needs ?? whyNoGrading(rollout, run) };
  const again = needs ?? (rollout.attempts.length === 0 ? "it has asked nothing yet" : undefined);
  const toggle = (name: Form) => (
    <button type="button" disabled={!isOpen || reasons[name] !== undefined} aria-expanded={form === name} onClick={() => setForm(form === name ? undefined : name)}>{TITLES[name]}</button>
  );
  return (
    <section aria-label="Actions">
      <Problem error={session.error} />
      <div class="pages">
        {toggle("rate")}
        {toggle("grade")}
        <Export rollout={rollout} />
        {isOpen && !again && <a href={`${link("runs", rollout.run_id)}/playground?rollout=${encodeURIComponent(rollout.id)}`}>Ask its first question again</a>}
      </div>
      {session.data && (run || error) && <Reasons reasons={[[TITLES.rate, reasons.rate], [TITLES.grade, reasons.grade], ["Ask its first question again", again]]} />}
      {needs && session.data && <Commands commands={[`leyden token create ${session.data.name} --scope write --expires 30d`]} />}
      {isOpen && form === "rate" && !reasons.rate && <RateForm rollout={rollout} run={run} onChange={onChange} />}
      {isOpen && form === "grade" && !reasons.grade && run && <RegradeForm rollout={rollout} run={run} onChange={onChange} />}
    </section>
  );
}

const TITLES: Record<Form, string> = { rate: "Rate", grade: "Grade again" };

/** Why buttons are disabled, those of one reason together. */
function Reasons({ reasons }: { reasons: [string, string | undefined][] }): ComponentChildren {
  const found = [...new Set(reasons.map(([, why]) => why).filter(Boolean))];
  if (found.length === 0) return null;
  return (
    <ul class="quiet">
      {found.map((why) => <li key={why}>{reasons.filter(([, one]) => one === why).map(([title]) => title).join(", ")}: {safeLine(why ?? "")}.</li>)}
    </ul>
  );
}

const ENDED = new Set(["excluded", "cancelled"]);

/** Why a rating would count nowhere; the API has the last word. */
function whyNoRating(rollout: RolloutDetail, run: Run | undefined, group: Group | undefined): string | undefined {
  if (ENDED.has(rollout.state)) return `it is ${rollout.state}, so a rating counts nowhere`;
  if (!run) return "its run is not known";
  if (run.intent === "cancelled") return "its run is cancelled, so a rating counts nowhere";
  const rules = run.config?.reward;
  if (!rules) return rollout.evaluation_id === null && group?.verdict ? "its group was credited before: ratings come while a sibling is open" : undefined;
  if (!rules.components.some((one) => one.from === "feedback")) return "its run names its rewards, and none of reward.components is from: feedback";
  return rollout.components?.length ? "it is graded, and reward.wait says for how long ratings are awaited; a new grading is open" : undefined;
}

function whyNoGrading(rollout: RolloutDetail, run: Run | undefined): string | undefined {
  if (!run) return "its run is not known";
  if (!run.config?.reward) return "its run has no reward.components, so that nothing graded it";
  return rollout.components?.length ? undefined : "its first grading is not there yet";
}

/** The rollout with its calls and spans as one file of JSON. */
function Export({ rollout }: { rollout: RolloutDetail }) {
  const [read, setRead] = useState<string>();
  const [problem, setProblem] = useState("");
  const stop = useRef<AbortController | undefined>(undefined);
  useEffect(() => () => stop.current?.abort(), []);
  async function write(): Promise<void> {
    const { signal } = (stop.current = new AbortController());
    setProblem("");
    setRead("0 calls");
    try {
      const path = `v1/rollouts/${encodeURIComponent(rollout.id)}`;
      const whole = await request<RolloutDetail>("GET", path, undefined, signal, { isExact: true });
      const calls: Call[] = [];
      for await (const page of everyPage<Call>(`${path}/calls`, new URLSearchParams({ conversation: "added", prompt: "true" }), signal)) setRead(`${calls.push(...page)} calls`);
      const spans: Span[] = [];
      for await (const page of everyPage<Span>(`${path}/spans`, new URLSearchParams(), signal)) setRead(`${calls.length} calls, ${spans.push(...page)} spans`);
      save(new Blob([JSON.stringify({ rollout: whole, calls, spans }, null, 1)], { type: "application/json" }), `${rollout.id}.json`);
    } catch (error) {
      if (!signal.aborted) setProblem(wordsOf(error));
    }
    if (!signal.aborted) setRead(undefined);
  }
  return (
    <>
      <button type="button" disabled={read !== undefined} onClick={() => void write()}>Export as JSON</button>
      {read !== undefined && <span role="status">{read} read …</span>}
      {problem && <span role="alert" class="problem">{safeLine(problem)}</span>}
    </>
  );
}
