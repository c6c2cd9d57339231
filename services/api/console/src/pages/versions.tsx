// The versions of a run's weights: evaluations, the best one and why, where they come from, and their download.

import { useState } from "preact/hooks";
import { useChoice } from "../address";
import { bestVersion, request, usePolled, wholeEvaluations, wordsOf, type Evaluation, type Page, type PolicyVersion, type Run, type VersionFiles } from "../api";
import { useRunEvents } from "../live";
import { Paged } from "../paged";
import { NameOf, Named } from "../named";
import { AgentLine, Commands, Facts, Loaded, Problem, Table, bytes, link, number, shellWord, time } from "../parts";

const SHOWN = 100;
const FIELDS = ["policy", "kept"] as const;

export function VersionsPage({ run }: { run: string }) {
  useRunEvents(run);
  const path = `v1/runs/${encodeURIComponent(run)}`;
  const answer = usePolled<Run>(path, undefined, ["run", "steps"]);
  const evaluations = usePolled<Page<Evaluation>>(`${path}/evaluations?limit=1000`, undefined, ["evaluations", "rollouts"]);
  const [{ policy = "", kept = "" }, change] = useChoice(FIELDS);
  const whole = evaluations.data && wholeEvaluations(evaluations.data.items);
  const of = policy ? `?policy=${encodeURIComponent(policy)}` : "";
  const option = policy ? ` --policy ${shellWord(policy)}` : "";
  return (
    <>
      <h1>Versions of <NameOf kind="runs" id={run} /></h1>
      <Loaded answer={answer}>
        {(data) => (
          <>
            <PoliciesOf run={data} chosen={policy} />
            <Lineage run={data} policy={policy} />
          </>
        )}
      </Loaded>
      <Problem error={evaluations.error} at={evaluations.at} />
      <p><label><input type="checkbox" checked={kept !== ""} onChange={(event) => change("kept", event.currentTarget.checked ? "true" : "")} /> Only versions whose files are there</label></p>
      <Paged<PolicyVersion>
        path={`${path}/policies?${new URLSearchParams([...(policy ? [["policy", policy]] : []), ...(kept ? [["kept", "true"]] : [])])}`}
        limit={SHOWN}
        parts={["steps", "run"]}
        nothing={kept ? <p>No version has files here.</p> : <><p>No version yet: the trainer writes version 0, the base model, when it starts. See the run:</p><Commands commands={[`leyden run watch ${run}`]} /></>}
      >
        {({ items }) => (
            <Table label="Versions" head={["Version", "Files", "Step", "Held-out reward, 95 %", "Training reward", "State", "Made", "Size", "Digest"]} numbers={["Step", "Training reward", "Size"]}>
              {items.map((one) => (
                <tr key={one.version}>
                  <th scope="row">{one.version}{one.version === 0 && " (base)"}{isBest(answer.data, policy, one.version) && <strong> best</strong>}</th>
                  <td>{one.pruned_at ? <span class="quiet">none</span> : <Files path={`${path}/policies/${one.version}`} of={of} version={one.version} />}</td>
                  <td class="number">{one.version === 0 ? "–" : <a href={`${link("runs", run)}/rollouts?step=${one.version}`} aria-label={`Rollouts of step ${one.version}`}>{one.version}</a>}</td>
                  <td><Rewards evaluations={whole?.filter((each) => each.measured_version === one.version)} run={run} /></td>
                  <td class="number">{one.reward_mean == null ? <span class="quiet">none</span> : <a href={`${link("runs", run)}/rollouts?version=${one.version}`}>{number(one.reward_mean)}</a>}</td>
                  <td><VersionState version={one} /></td>
                  <td>{time(one.created_at)}</td>
                  <td class="number">{bytes(one.size_bytes)}</td>
                  <td><code>{one.content_sha256.slice(0, 12)}</code></td>
                </tr>
              ))}
            </Table>
        )}
      </Paged>
      <Commands commands={[`leyden policy list ${run}${option}${kept && " --kept"}`, `leyden policy export ${run}${option} --to FOLDER`]} />
    </>
  );
}

const isBest = (run: Run | undefined, policy: string, version: number) =>
  (policy ? run?.policies?.[policy]?.best_version : run?.best_version) === version;

/** Served by engines, kept on disk, or removed. */
function VersionState({ version: { engines, pruned_at } }: { version: PolicyVersion }) {
  if (engines) return <span class="state serving">served by {engines} {engines === 1 ? "engine" : "engines"}</span>;
  return pruned_at ? <span class="quiet">removed {time(pruned_at)}</span> : <span class="state">kept</span>;
}

/** The policies of a run that has several, each with its newest and best version; a link shows its versions below. */
function PoliciesOf({ run, chosen }: { run: Run; chosen: string }) {
  const further = Object.entries(run.policies ?? {});
  if (further.length === 0) return null;
  const { step, steps, policy_version } = run.progress;
  const own = { ...run, step, steps, policy_version, trains: true };
  return (
    <Table label="Policies" head={["Policy", "Step", "Newest version", "Best version", "Begins with", "On disk"]} numbers={["Step", "Newest version", "Best version", "On disk"]}>
      {[["", own] as const, ...further].map(([name, one]) => (
        <tr key={name}>
          <th scope="row"><a href={`${link("runs", run.id)}/versions${name && `?policy=${encodeURIComponent(name)}`}`} aria-current={name === chosen ? "true" : undefined}>{name ? <AgentLine text={name} /> : "the run's own model"}</a></th>
          <td class="number">{one.trains ? `${one.step} / ${one.steps ?? "?"}` : "frozen"}</td>
          <td class="number">{one.policy_version ?? "none yet"}</td>
          <td class="number">{bestVersion(one)}</td>
          <td>{one.parent ? <>version {one.parent.version} of <Named kind="runs" id={one.parent.run_id} part="/versions" /></> : "the base model"}</td>
          <td class="number">{one.weights_bytes == null ? "unknown" : bytes(one.weights_bytes)}</td>
        </tr>
      ))}
    </Table>
  );
}

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
