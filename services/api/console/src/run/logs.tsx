// The output of a run's processes: ends of its trainers, and its attempts, the newest first.

import { useChoice } from "../address";
import { usePolled, type Rollout, type RolloutDetail, type Run } from "../api";
import { AttemptView } from "../attempt_view";
import { Paged } from "../paged";
import { AgentLine, AgentText, Commands, Fold, Loaded, Select, link, number, time } from "../parts";
import { safeLine } from "../safe_text";

const SHOWN = 25;
const FIELDS = ["attempts"] as const;
const WANTED: Record<string, string> = { ended: "state=finished", failed: "failed=true", running: "state=running" };

export function Logs({ run }: { run: Run }) {
  const [{ attempts = "ended" }, change] = useChoice(FIELDS);
  return (
    <>
      <h2>Trainer</h2>
      <TrainerEnds run={run} />
      <p class="quiet">A trainer that works prints into the log of its machine or pod:</p>
      <Commands commands={["leyden logs trainer"]} />
      <h2>Attempts</h2>
      <form class="filters" aria-label="Attempts" onSubmit={(event) => event.preventDefault()}>
        <Select id="attempts" label="Rollouts that" value={attempts} onChange={(value) => change("attempts", value)} options={[
          ["ended", "finished"], ["failed", "failed"], ["running", "run"],
        ]} />
      </form>
      <Paged<Rollout>
        path={`v1/rollouts?run=${encodeURIComponent(run.id)}&${WANTED[attempts] ?? WANTED.ended}`}
        limit={SHOWN}
        parts={["rollouts"]}
        nothing={<><p>No such attempt. See engines and queue:</p><Commands commands={["leyden status"]} /></>}
      >
        {({ items }) => (
          <ul class="logs" aria-label="Rollouts">
            {items.map((one) => (
              <li key={one.id}>
                <Fold title={safeLine([one.id, one.state, one.reason, one.reward === null ? "" : `reward ${number(one.reward)}`, time(one.finished_at)].filter(Boolean).join(" · "))}>
                  {() => <Output id={one.id} />}
                </Fold>
              </li>
            ))}
          </ul>
        )}
      </Paged>
    </>
  );
}

function Output({ id }: { id: string }) {
  const answer = usePolled<RolloutDetail>(`v1/rollouts/${encodeURIComponent(id)}`, (data) => data.finished_at === null);
  return (
    <Loaded answer={answer}>
      {({ attempts }) => (
        <>
          <p><a href={link("rollouts", id)}>Rollout {id}</a></p>
          {attempts.length === 0 && <p class="quiet">No attempt has begun.</p>}
          {attempts.map((one) => <AttemptView key={one.number} rollout={id} attempt={one} open={one.number === attempts.length} />)}
        </>
      )}
    </Loaded>
  );
}

/** The last end of each trainer that nobody planned, with the last lines that it printed. */
export function TrainerEnds({ run }: { run: Run }) {
  const trainers: [string, Pick<Run, "trainer_ends" | "last_trainer_end">][] = [["the trainer", run]];
  for (const [name, policy] of Object.entries(run.policies ?? {})) trainers.push([`the trainer of ${safeLine(name)}`, policy]);
  const ended = trainers.filter(([, { last_trainer_end: end }]) => end);
  if (ended.length === 0) return <p>No trainer of the run has ended without a plan.</p>;
  return (
    <>
      {ended.map(([name, { trainer_ends: count, last_trainer_end: end }]) => end && (
        <Fold key={name} title={`Unplanned ends of ${name}: ${count}, the last after step ${end.step} (${end.state})`}>
          {() => (
            <>
              <p><AgentLine text={end.reason} /> <span class="quiet">Start {end.attempt}, {time(end.created_at)}.</span></p>
              {end.output ? <AgentText text={end.output} /> : <p class="quiet">It printed nothing.</p>}
            </>
          )}
        </Fold>
      ))}
    </>
  );
}
