// An attempt of a rollout: how it ended, what it printed, and the files that it left.

import type { Attempt } from "./api";
import { AgentLine, AgentText, Facts, Fold, bytes, time } from "./parts";

export function AttemptView({ rollout, attempt, open = false }: { rollout: string; attempt: Attempt; open?: boolean }) {
  const outcome = attempt.outcome;
  return (
    <Fold title={`Attempt ${attempt.number}: ${outcome?.kind ?? attempt.state}`} open={open}>
      {() => (
        <>
          <Facts facts={[["Started", time(attempt.started_at)], ["Ended", time(attempt.finished_at)], ["Exit status", outcome?.exit_code ?? "–"]]} />
          {outcome?.detail && <AgentText text={outcome.detail} />}
          {outcome?.stdout_tail && <><h3>Output</h3><AgentText text={outcome.stdout_tail} /></>}
          {outcome?.stderr_tail && <><h3>Errors</h3><AgentText text={outcome.stderr_tail} /></>}
          {outcome && !outcome.stdout_tail && !outcome.stderr_tail && <p class="quiet">It printed nothing.</p>}
          <Files rollout={rollout} attempt={attempt} />
        </>
      )}
    </Fold>
  );
}

/** The files that `agent.artifacts` keeps, as downloads. */
function Files({ rollout, attempt: { number, outcome } }: { rollout: string; attempt: Attempt }) {
  const [files, left] = [outcome?.artifacts ?? [], outcome?.artifacts_left_out ?? 0];
  if (files.length + left === 0) return null;
  return (
    <>
      <h3>Files</h3>
      <ul>
        {files.map((one) => (
          <li key={one.path}>
            <a href={`v1/rollouts/${encodeURIComponent(rollout)}/artifacts/${one.path.split("/").map(encodeURIComponent).join("/")}?attempt=${number}`} download>
              <AgentLine text={one.path} />
            </a>{" "}
            {bytes(one.size_bytes)}{one.stored_bytes < one.size_bytes && `, cut after ${bytes(one.stored_bytes)}`}
          </li>
        ))}
      </ul>
      {left > 0 && <p class="quiet">{left} more were not kept: too many, a link, or not readable.</p>}
    </>
  );
}
