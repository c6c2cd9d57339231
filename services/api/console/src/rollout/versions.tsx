// The same task at every version that the run has played it, and one of those rollouts beside this one.

import { useState } from "preact/hooks";
import { usePolled, type Group, type Rollout, type RolloutPage } from "../api";
import { Beside } from "../pages/group";
import { Loaded, Select, Table, link, number } from "../parts";
import { useArrows } from "./sibling_keys";

const MOST = 1000;
const LINKS = 8;

export function Versions({ rollout, group }: { rollout: Rollout; group: Group | undefined }) {
  const words = new URLSearchParams({ run: rollout.run_id, task: String(rollout.task_number), limit: String(MOST) });
  const answer = usePolled<RolloutPage>(`v1/rollouts?${words}`, () => false);
  return (
    <Loaded answer={answer}>
      {({ items, next_cursor }) => (
        <>
          <Found rollout={rollout} group={group} rollouts={items.filter((one) => isComparable(one, rollout))} />
          {next_cursor && <p class="quiet">These are of the newest {MOST.toLocaleString()} rollouts; earlier ones are left out.</p>}
        </>
      )}
    </Loaded>
  );
}

/** Numbers of tasks are those of a dataset; agents of a run play one task each in their own way. */
const isComparable = (one: Rollout, other: Rollout) =>
  one.dataset_id === other.dataset_id && (one.agent ?? null) === (other.agent ?? null) && !one.rerolls_of;

function Found({ rollout, group, rollouts }: { rollout: Rollout; group: Group | undefined; rollouts: Rollout[] }) {
  const [chosen, choose] = useState("");
  const others = rollouts
    .filter((one) => one.admitted_version !== rollout.admitted_version)
    .sort((one, other) => one.admitted_version - other.admitted_version || one.created_at.localeCompare(other.created_at) || one.sibling - other.sibling);
  const versions = [...new Set([...rollouts, rollout].map((one) => one.admitted_version))].sort((one, other) => one - other);
  const at = others.find((one) => one.id === chosen);
  const place = versions.indexOf((at ?? rollout).admitted_version);
  // From the rollout on show, the nearest version that is not its own.
  const step = (by: number): (() => void) | undefined => {
    const next = versions[versions[place + by] === rollout.admitted_version ? place + 2 * by : place + by];
    const found = others.find((one) => one.admitted_version === next);
    return found && (() => choose(found.id));
  };
  const [before, after] = [step(-1), step(1)];
  useArrows(true, before, after);
  if (others.length === 0) return <p>No other version has played this task yet.</p>;
  return (
    <>
      <Table label="Versions on this task" head={["Version", "Rollouts", "Mean reward", "Each"]} numbers={["Version", "Rollouts", "Mean reward"]}>
        {versions.map((version) => <Version key={version} version={version} rollout={rollout} rollouts={rollouts.filter((one) => one.admitted_version === version)} />)}
      </Table>
      <p class="pages">
        <button type="button" disabled={!before} onClick={before}>Earlier version</button>
        <button type="button" disabled={!after} onClick={after}>Later version</button>
        <Select id="beside" label="Beside this one" value={chosen} options={[["", "nothing"], ...others.map((one): [string, string] => [one.id, words(one)])]} onChange={choose} />
      </p>
      {at && <Pair key={at.id} rollout={rollout} group={group} other={at} />}
    </>
  );
}

const words = (one: Rollout) => `version ${one.admitted_version}, reward ${number(one.reward)}${one.evaluation_id === null ? "" : ", held out"}, ${one.id}`;

function Version({ version, rollout, rollouts }: { version: number; rollout: Rollout; rollouts: Rollout[] }) {
  const rewards = rollouts.flatMap((one) => one.reward ?? []);
  return (
    <tr aria-current={version === rollout.admitted_version ? "true" : undefined}>
      <th scope="row" class="number">{version}</th>
      <td class="number">{rollouts.length}</td>
      <td class="number">{rewards.length === 0 ? "–" : number(rewards.reduce((sum, one) => sum + one, 0) / rewards.length)}</td>
      <td class="reason">
        {rollouts.slice(0, LINKS).map((one) => (
          <span key={one.id}><a href={link("rollouts", one.id)} aria-label={`Rollout ${one.id}, reward ${number(one.reward)}`}>{number(one.reward)}</a> </span>
        ))}
        {rollouts.length > LINKS && `and ${rollouts.length - LINKS} more`}
      </td>
    </tr>
  );
}

/** Both from the first call on in which they differ. */
function Pair({ rollout, group, other }: { rollout: Rollout; group: Group | undefined; other: Rollout }) {
  const answer = usePolled<Group>(`v1/groups/${encodeURIComponent(other.group_id)}?calls=50`, () => false);
  const own = group?.siblings.find((one) => one.id === rollout.id);
  if (!own) return <p>{group ? "A re-roll has no place beside others." : "Its group is not known yet."}</p>;
  return (
    <Loaded answer={answer}>
      {({ siblings }) => {
        const found = siblings.find((one) => one.id === other.id);
        return (
          <>
            <p><a href={link("rollouts", other.id)}>Rollout {other.id}</a>, version {other.admitted_version}, reward {number(other.reward)}</p>
            {found && <Beside one={own} other={found} titles={[`Version ${rollout.admitted_version}`, `Version ${other.admitted_version}`]} />}
          </>
        );
      }}
    </Loaded>
  );
}
