// The rollouts that wait for a person's grade, one at a time: a number and Enter grade it and show the next one.

import { useEffect, useRef, useState } from "preact/hooks";
import { mayWrite, newKey, request, usePolled, wordsOf, type Session, type WaitingPage, type WaitingRollout } from "../api";
import { NameOf } from "../named";
import { AgentLine, AgentText, Commands, Facts, Fold, Loaded, Problem, clock, link, time } from "../parts";

const SHOWN = 100;

export function RatePage({ run }: { run?: string }) {
  const [cursor, setCursor] = useState<string>();
  const filters = Object.entries({ run, cursor }).map(([name, value]) => (value ? `&${name}=${encodeURIComponent(value)}` : ""));
  const answer = usePolled<WaitingPage>(`v1/feedback?limit=${SHOWN}${filters.join("")}`);
  const session = usePolled<Session>("v1/session", () => false);
  /** Components of rollouts, as `keyOf` names them. */
  const [graded, setGraded] = useState<ReadonlySet<string>>(new Set());
  const [skipped, setSkipped] = useState<ReadonlySet<string>>(new Set());
  // Stays while a person reads and types, also where somebody else grades it or another attempt takes its place.
  const shown = useRef<WaitingRollout>(undefined);
  const isOpen = mayWrite(session.data) === true;
  const grade = (names: string[]) => setGraded((before) => new Set([...before, ...names]));
  const openOf = (one: WaitingRollout) => one.missing.filter(({ component }) => !graded.has(keyOf(one, component)));
  const isNext = (one: WaitingRollout) => openOf(one).length > 0 && !skipped.has(one.rollout_id);
  return (
    <>
      <h1>Rate {run ? <NameOf kind="runs" id={run} /> : "rollouts"}</h1>
      {session.data && !isOpen && (
        <>
          <p class="warning">This sign-in may read and nothing else. To grade, sign out and paste a token that may write:</p>
          <Commands commands={[`leyden token create ${session.data.name} --scope write --expires 30d`]} />
        </>
      )}
      <Problem error={session.error} />
      <Loaded answer={answer}>
        {({ items, total, next_cursor: next }) => {
          // The list is as old as the last answer; a rollout that waits for several people is graded once by each.
          const left = items.filter((one) => openOf(one).length > 0);
          const first = (shown.current = shown.current && isNext(shown.current) ? shown.current : items.find(isNext));
          // What this person graded or skipped may wait for others, at the beginning of the list.
          if (!first && next) return <p>You have seen these {items.length}. <button type="button" onClick={() => setCursor(next)}>Show the next ones</button></p>;
          if (!first) return <Nothing isAll={left.length === 0 && skipped.size === 0} onAgain={() => (setSkipped(new Set()), setCursor(undefined))} />;
          return (
            <>
              <p role="status">
                {total == null ? "More" : total.toLocaleString()} wait{answer.at && `, as of ${clock(answer.at)}`}
              </p>
              <One key={keyOf(first)} rollout={{ ...first, missing: openOf(first) }} isOpen={isOpen}
                awaited={items.find((one) => keyOf(one) === keyOf(first))?.missing.map((one) => one.component) ?? []}
                onGraded={(component) => grade([keyOf(first, component)])}
                onSkip={(isOver) => isOver ? grade(first.missing.map((one) => keyOf(first, one.component))) : setSkipped(new Set([...skipped, first.rollout_id]))} />
            </>
          );
        }}
      </Loaded>
      <Commands commands={[`leyden rollout waiting${run ? ` --run ${run}` : ""}`]} />
    </>
  );
}

const keyOf = ({ rollout_id: id, attempt }: WaitingRollout, component = "") => `${id} ${attempt} ${component}`;

function Nothing({ isAll, onAgain }: { isAll: boolean; onAgain: () => void }) {
  if (!isAll) return <p>You have skipped all that wait. <button type="button" onClick={onAgain}>Show them again</button></p>;
  return (
    <>
      <p>No rollout waits for your grade. A run asks for them by a component of its reward:</p>
      <Commands commands={["leyden run create run.json --set reward.components='[{\"name\": \"helpful\", \"from\": \"feedback\"}]'"]} />
    </>
  );
}

interface OneProperties {
  rollout: WaitingRollout;
  isOpen: boolean;
  /** Its components without enough grades in the newest list. */
  awaited: string[];
  onGraded: (component: string) => void;
  /** Args: isOver: nothing of it is awaited any more */
  onSkip: (isOver: boolean) => void;
}

function One({ rollout, isOpen, awaited, onGraded, onSkip }: OneProperties) {
  const [values, setValues] = useState<Record<string, string>>({});
  const [comment, setComment] = useState("");
  const [problem, setProblem] = useState("");
  const [isSending, setSending] = useState(false);
  const first = useRef<HTMLInputElement>(null);
  // A repeat after a lost answer must not grade twice; another number or comment is another grade.
  const keys = useRef<Record<string, string>>({});
  const parts = rollout.missing.length;
  useEffect(() => first.current?.focus(), [isOpen, parts]);
  const over = rollout.missing.map((one) => one.component).filter((one) => !awaited.includes(one));
  const skip = () => onSkip(over.length === parts);
  const given = rollout.missing.filter(({ component }) => awaited.includes(component) && (values[component] ?? "") !== "");
  async function send(event: Event): Promise<void> {
    event.preventDefault();
    if (given.length === 0) return;
    setSending(true);
    setProblem("");
    try {
      for (const { component } of given) {
        const key = (keys.current[component] ??= newKey());
        const body = { key, component, value: Number(values[component]), comment: comment || null };
        await request("POST", `v1/rollouts/${encodeURIComponent(rollout.rollout_id)}/feedback`, body);
        onGraded(component);
      }
      setComment("");
    } catch (error) {
      setProblem(wordsOf(error));
    }
    setSending(false);
  }
  return (
    <article aria-label={`Rollout ${rollout.rollout_id}`}>
      <h2><a href={link("rollouts", rollout.rollout_id)}>{rollout.rollout_id}</a></h2>
      <Facts
        facts={[
          ["Run", <a href={link("runs", rollout.run_id)}><AgentLine text={rollout.run_name} /></a>],
          ["Task", rollout.task_number],
          ["Waits since", time(rollout.since)],
          ["Graded without you", time(rollout.due_at)],
        ]}
      />
      <Fold title="Task" open>{() => <AgentText text={rollout.task} />}</Fold>
      <Fold title="Output" open>{() => rollout.output ? <AgentText text={rollout.output} /> : <p class="quiet">It printed nothing; its calls are on its page.</p>}</Fold>
      {problem && <p role="alert" class="problem"><AgentLine text={problem} /></p>}
      {over.length > 0 && <p role="alert" class="warning">It waits no more for <AgentLine text={over.join(", ")} />: somebody has graded it, its time is over, or its run was cancelled.</p>}
      <form class="filters" aria-label="Grade" onSubmit={(event) => void send(event)} onKeyDown={(event) => event.key === "Escape" && skip()}>
        {rollout.missing.map((one, place) => (
          <span key={one.component}>
            <label for={`value-${place}`}><AgentLine text={one.component} />{one.needed > 1 && ` (${one.given} of ${one.needed})`}</label>{" "}
            <input
              id={`value-${place}`}
              ref={place === 0 ? first : undefined}
              type="number"
              step="any"
              class="short"
              disabled={!isOpen}
              value={values[one.component] ?? ""}
              onInput={(event) => {
                delete keys.current[one.component];
                setValues({ ...values, [one.component]: event.currentTarget.value });
              }}
            />
          </span>
        ))}
        <span>
          <label for="comment">Comment</label>{" "}
          <input id="comment" maxLength={10_000} disabled={!isOpen} value={comment} onInput={(event) => {
            keys.current = {};
            setComment(event.currentTarget.value);
          }} />
        </span>
        <button type="submit" disabled={!isOpen || isSending || given.length === 0}>Grade (Enter)</button>
        <button type="button" onClick={skip}>Skip (Escape)</button>
      </form>
    </article>
  );
}
