// The versions of a run's weights: evaluations, the best one and why, where they come from, and their download.

import { useState } from "preact/hooks";
import { useChoice } from "../address";
import { bestVersion, request, usePolled, wholeEvaluations, wordsOf, type Evaluation, type Page, type PolicyVersion, type Run, type VersionFiles } from "../api";
import { useRunEvents } from "../live";
import { Paged } from "../paged";
import { NameOf, Named } from "../named";
import { AgentLine, Commands, Facts, Loaded, Problem, Select, Table, bytes, link, number, time } from "../parts";

const SHOWN = 100;
const FIELDS = ["policy"] as const;

export function VersionsPage({ run }: { run: string }) {
  useRunEvents(run);
  const path = `v1/runs/${encodeURIComponent(run)}`;
  const answer = usePolled<Run>(path, undefined, ["run", "steps"]);
  const evaluations = usePolled<Page<Evaluation>>(`${path}/evaluations?limit=1000`, undefined, ["evaluations", "rollouts"]);
  const [{ policy = "" }, change] = useChoice(FIELDS);
  const whole = evaluations.data && wholeEvaluations(evaluations.data.items);
  const of = policy ? `?policy=${encodeURIComponent(policy)}` : "";
  const option = policy ? ` --policy ${policy}` : "";
  return (
    <>
      <h1>Versions of <NameOf kind="runs" id={run} /></h1>
      <Loaded answer={answer}>
        {(data) => (
          <>
            {Object.keys(data.policies ?? {}).length > 0 && (
              <form class="filters" aria-label="Policy" onSubmit={(event) => event.preventDefault()}>
                <Select id="policy" label="Policy" value={policy} onChange={(value) => change("policy", value)} options={[
                  ["", "the run's own model"], ...Object.keys(data.policies ?? {}).map((name): [string, string] => [name, name]),
                ]} />
              </form>
            )}
            <Lineage run={data} policy={policy} />
          </>
        )}
      </Loaded>
      <Problem error={evaluations.error} at={evaluations.at} />
      <Paged<PolicyVersion>
        path={`${path}/policies${of}`}
        limit={SHOWN}
        parts={["steps", "run"]}
        nothing={<><p>No version yet: the trainer writes version 0, the base model, when it starts. See the run:</p><Commands commands={[`leyden run watch ${run}`]} /></>}
      >
        {({ items }) => (
            <Table label="Versions" head={["Version", "Held-out reward, 95 %", "Made", "Size", "Digest", "Files"]} numbers={["Size"]}>
              {items.map((one) => (
                <tr key={one.version}>
                  <th scope="row">{one.version}{one.version === 0 && " (base)"}{isBest(answer.data, policy, one.version) && <strong> best</strong>}</th>
                  <td><Rewards evaluations={whole?.filter((each) => each.measured_version === one.version)} run={run} /></td>
                  <td>{time(one.created_at)}</td>
                  <td class="number">{bytes(one.size_bytes)}</td>
                  <td><code>{one.content_sha256.slice(0, 12)}</code></td>
                  <td class="reason">{one.pruned_at ? <span class="quiet">removed {time(one.pruned_at)}</span> : <Files path={`${path}/policies/${one.version}`} of={of} version={one.version} />}</td>
                </tr>
              ))}
            </Table>
        )}
      </Paged>
      <Commands commands={[`leyden policy list ${run}${option}`, `leyden policy export ${run}${option} --to FOLDER`]} />
    </>
  );
}

const isBest = (run: Run | undefined, policy: string, version: number) =>
  (policy ? run?.policies?.[policy]?.best_version : run?.best_version) === version;

function Lineage({ run, policy }: { run: Run; policy: string }) {
  const made = policy ? run.policies?.[policy] : run;
  if (!made) return <p>The run has no policy <AgentLine text={policy} /> with versions of its own.</p>;
  const model = policy ? run.config?.policies?.[policy]?.model : run.config?.model;
  return (
    <Facts
      facts={[
        ["Best version", `${bestVersion(made)}${made.best_version_reason ? `: ${made.best_version_reason}` : ""}`],
        ["Begins with", made.parent ? <>version {made.parent.version} of <Named kind="runs" id={made.parent.run_id} part="/versions" /></> : "the base model"],
        ["Base model", <AgentLine text={model ?? (run.config ? `that of pool ${run.config.pool}` : "unknown: the document does not parse")} />],
        ["On disk", made.weights_bytes == null ? "unknown" : bytes(made.weights_bytes)],
      ]}
    />
  );
}

/** The whole evaluations of a version, each with its interval. */
function Rewards({ evaluations, run }: { evaluations: Evaluation[] | undefined; run: string }) {
  if (!evaluations) return <span class="quiet">not loaded</span>;
  if (evaluations.length === 0) return <span class="quiet">not measured</span>;
  return (
    <>
      {evaluations.map(({ id, results: { reward } }, place) => (
        <span key={id}>
          {place > 0 && ", "}
          <a href={`${link("runs", run)}/tasks?of=${encodeURIComponent(id)}`}>
            {reward ? `${number(reward.mean)}${reward.low != null && reward.high != null ? ` [${number(reward.low)}, ${number(reward.high)}]` : ""}` : "no reward"}
          </a>
        </span>
      ))}
    </>
  );
}

/** The files on demand: the API says whether its machine can read them. */
function Files({ path, of, version }: { path: string; of: string; version: number }) {
  const [found, setFound] = useState<VersionFiles>();
  const [problem, setProblem] = useState("");
  async function ask(): Promise<void> {
    setProblem("");
    try {
      setFound(await request<VersionFiles>("GET", `${path}/files${of}`));
    } catch (error) {
      setProblem(wordsOf(error));
    }
  }
  if (!found) {
    return (
      <>
        <button type="button" aria-label={`Files of version ${version}`} onClick={() => void ask()}>Files</button>
        {problem && <span role="alert" class="problem"> <AgentLine text={problem} />: ask again</span>}
      </>
    );
  }
  if (!found.files) return <AgentLine text={found.reason} />;
  const size = found.files.reduce((sum, one) => sum + one.size_bytes, 0);
  return (
    <>
      <a href={`${path}/weights${of}`} download>Download version {version}</a> ({found.files.length} files, {bytes(size)})
    </>
  );
}
