// A new grading of a stored rollout: tried first, then kept as its newest revision.

import { useState } from "preact/hooks";
import { GRADE_MILLISECONDS, create, request, wordsOf, type Graded, type Regrade, type RolloutDetail, type Run } from "../api";
import { AgentLine, FoldedText, Table, number } from "../parts";
import { safeLine } from "../safe_text";

type Work = "grades" | "regrades";

export function RegradeForm({ rollout, run, onChange }: { rollout: RolloutDetail; run: Run; onChange: () => void }) {
  const [words, setWords] = useState(() => JSON.stringify(run.config?.reward, null, 2));
  const [busy, setBusy] = useState<Work>();
  const [found, setFound] = useState<Graded>();
  const [told, setTold] = useState("");
  const [problem, setProblem] = useState("");
  async function send(work: Work): Promise<void> {
    setTold("");
    setProblem("");
    setFound(undefined);
    setBusy(work);
    try {
      const body = { reward: read(words) };
      const path = `v1/rollouts/${encodeURIComponent(rollout.id)}/${work}`;
      if (work === "grades") setFound(await request<Graded>("POST", path, body, undefined, { milliseconds: GRADE_MILLISECONDS }));
      else {
        const kept = await create<Regrade>(path, body, GRADE_MILLISECONDS);
        const isKnown = rollout.regrades?.some((one) => one.attempt === kept.attempt && one.revision === kept.revision);
        setTold(isKnown ? `Revision ${kept.revision} has the same components and total: nothing changed.` : `Kept as revision ${kept.revision}, total ${number(kept.total)}.`);
        onChange();
      }
    } catch (error) {
      setProblem(wordsOf(error));
    }
    setBusy(undefined);
  }
  return (
    <form class="question" aria-label="Grade again" onSubmit={(event) => event.preventDefault()}>
      <label for="reward">The section reward that grades it, at first the run's own</label>
      <textarea id="reward" rows={8} value={words} onInput={(event) => setWords(event.currentTarget.value)} />
      <p class="quiet">{rollout.evaluation_id === null ? "Credit keeps the reward that it had." : "The evaluation takes the newest total."} Judges are asked again, and may answer otherwise.</p>
      <p class="pages">
        <button type="button" disabled={busy !== undefined} onClick={() => void send("grades")}>Try it, and keep nothing</button>
        <button type="button" disabled={busy !== undefined} onClick={() => void send("regrades")}>Keep it as the newest grading</button>
      </p>
      {busy && <p role="status">Grading …; judges and code may take minutes.</p>}
      {told && <p role="status">{told}</p>}
      {problem && <p role="alert" class="problem">{safeLine(problem)}</p>}
      {found && <Trial found={found} />}
    </form>
  );
}

/** Raises an error with a sentence for people where the words are no JSON. */
function read(words: string): unknown {
  try {
    return JSON.parse(words);
  } catch (error) {
    throw new Error(`reward: this is no JSON (${wordsOf(error)})`);
  }
}

function Trial({ found }: { found: Graded }) {
  return (
    <>
      <p role="status">It would have {found.total === null ? <>no total: <AgentLine text={found.reason} /></> : `the total ${number(found.total)}`}.</p>
      <Table label="Trial" head={["Component", "State", "Value", "Adds", "Why"]} numbers={["Value", "Adds"]}>
        {found.components.map((one) => (
          <tr key={one.component}>
            <th scope="row"><AgentLine text={one.component} /></th>
            <td>{one.state.replace("_", " ")}</td>
            <td class="number">{number(one.value)}</td>
            <td class="number">{number(one.contribution)}</td>
            <td class="reason"><FoldedText text={one.explanation} /></td>
          </tr>
        ))}
      </Table>
    </>
  );
}
