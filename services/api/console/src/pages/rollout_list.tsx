// A run's rollouts: the API filters, sorts and pages; the page's address holds the filter.

import { useRef, useState } from "preact/hooks";
import { useChoice, type Choice } from "../address";
import { usePolled, type Cause, type Evaluation, type Page, type RolloutPage } from "../api";
import { AgentLine, Commands, Loaded, Problem, State, Table, Typed, link, number, shellWord } from "../parts";
import { safeLine } from "../safe_text";
import { Download } from "./rollout_download";

const SHOWN = 100;
const CAUSE_CHARACTERS = 60;
const TRAINING = "none";
const ALL = "all";

/** The fields of the address; an empty one filters nothing. */
const FIELDS = ["of", "state", "failed", "task", "step", "version", "agent", "reward_min", "reward_max", "role", "cause", "tool", "component", "component_min", "component_max", "text", "sort"] as const;
type Field = (typeof FIELDS)[number];
type Filter = Choice<Field>;

/** Bounds of a component mean nothing before it is named. */
const isAsked = (field: string, filter: Filter) => !field.startsWith("component_") || Boolean(filter.component);

function query(run: string, filter: Filter): URLSearchParams {
  const { of = TRAINING, ...others } = filter;
  const words = new URLSearchParams({ run, limit: String(SHOWN), count: "true" });
  if (of !== ALL) words.set("evaluation", of);
  for (const [field, value] of Object.entries(others)) if (value && isAsked(field, filter)) words.set(field, value);
  return words;
}

export function RolloutList({ run, evaluations }: { run: string; evaluations: Evaluation[] }) {
  const [filter, change] = useChoice(FIELDS);
  const { of = TRAINING } = filter;
  const counted = of === ALL ? "" : `?evaluation=${encodeURIComponent(of)}`;
  const causes = usePolled<Page<Cause>>(`v1/runs/${encodeURIComponent(run)}/causes${counted}`, undefined, ["rollouts"]);
  const asked = query(run, filter).toString();
  return (
    <>
      <Filters filter={filter} change={change} evaluations={evaluations} causes={causes.data?.items ?? []} />
      <Problem error={causes.error} />
      <Pages key={asked} asked={asked} run={run} filter={filter} />
    </>
  );
}

interface Filters {
  filter: Filter;
  change: (field: Field, value: string) => void;
  evaluations: Evaluation[];
  causes: Cause[];
}

function Filters({ filter, change, evaluations, causes }: Filters) {
  const select = (field: Field, label: string, options: [string, string][]) => (
    <span>
      <label for={field}>{label}</label>{" "}
      <select id={field} value={filter[field] ?? options[0]?.[0]} onChange={(event) => change(field, event.currentTarget.value)}>
        {options.map(([value, name]) => <option key={value} value={value}>{name}</option>)}
      </select>
    </span>
  );
  const input = (field: Field, label: string, attributes: object) => (
    <span>
      <label for={field}>{label}</label>{" "}
      <Typed id={field} value={filter[field] ?? ""} onTyped={(value) => change(field, value)} attributes={attributes} />
    </span>
  );
  const whole = { type: "number", min: 0, step: 1, class: "short" };
  const real = { type: "number", step: "any", class: "short" };
  return (
    <form class="filters" aria-label="Filter of rollouts" onSubmit={(event) => event.preventDefault()}>
      {select("of", "Of", [
        [TRAINING, "training"],
        ...evaluations.map((one): [string, string] => [one.id, `held-out tasks, version ${one.measured_version ?? "–"}`]),
        [ALL, "both"],
      ])}
      {select("state", "State", [["", "any"], ...["queued", "running", "grading", "finished", "excluded", "cancelled"].map((one): [string, string] => [one, one])])}
      {select("failed", "Failed", [["", "any"], ["true", "yes"], ["false", "no"]])}
      {select("cause", "Cause", [["", "any"], ...causesWith(causes, filter.cause)])}
      {input("task", "Task", whole)}
      {input("step", "Step", { ...whole, min: 1 })}
      {input("version", "Version", whole)}
      {input("reward_min", "Reward from", real)}
      {input("reward_max", "to", real)}
      {input("agent", "Agent", { type: "search", maxLength: 100 })}
      {input("role", "Role", { type: "search", maxLength: 200 })}
      {input("tool", "Tool", { type: "search", maxLength: 200 })}
      {input("component", "Component", { type: "search", maxLength: 100 })}
      {filter.component && input("component_min", "Value from", real)}
      {filter.component && input("component_max", "Value to", real)}
      {input("text", "Text", { type: "search", maxLength: 200 })}
      {select("sort", "Sort", [["", "newest"], ["oldest", "oldest"], ["highest", "highest reward"], ["lowest", "lowest reward"]])}
    </form>
  );
}

/** The chosen one is an option, too, where an address names it that nothing has. */
function causesWith(causes: Cause[], chosen: string | undefined): [string, string][] {
  const known = causes.map((one): [string, string] => [one.cause, `${safeLine(one.cause.slice(0, CAUSE_CHARACTERS))} (${one.rollouts.toLocaleString()})`]);
  return chosen && !causes.some((one) => one.cause === chosen) ? [...known, [chosen, safeLine(chosen.slice(0, CAUSE_CHARACTERS))]] : known;
}

/** One page at a time; the cursors of those before it lead back. The first page alone counts. */
function Pages({ asked, run, filter }: { asked: string; run: string; filter: Filter }) {
  const [cursors, setCursors] = useState<string[]>([]);
  const cursor = cursors[cursors.length - 1];
  const path = `v1/rollouts?${asked}${cursor ? `&cursor=${encodeURIComponent(cursor)}` : ""}`;
  // A search of texts reads them all: once is enough.
  const answer = usePolled<RolloutPage>(path, () => !filter.text, ["rollouts"]);
  const count = useRef<number | null>(null);
  count.current = answer.data?.total ?? count.current;
  return (
    <Loaded answer={answer}>
      {({ items, next_cursor }) =>
        items.length === 0 && cursors.length === 0 ? (
          <Nothing isFiltered={Object.keys(filter).length > 0} />
        ) : (
          <>
            <Table label="Rollouts" head={["Rollout", "Task", "Version", "State", "Reward", "Reason"]} numbers={["Task", "Version", "Reward"]}>
              {items.map((one) => (
                <tr key={one.id}>
                  <th scope="row"><a href={link("rollouts", one.id)}>{one.id}</a></th>
                  <td class="number">{one.task_number}</td>
                  <td class="number">{one.admitted_version}</td>
                  <td><State state={one.state} />{one.evaluation_id !== null && " held out"}{one.rerolls_of && " re-roll"}</td>
                  <td class="number">{number(one.reward)}</td>
                  <td class="reason"><AgentLine text={one.reason} /></td>
                </tr>
              ))}
            </Table>
            <p class="quiet" role="status">
              {`${cursors.length * SHOWN + 1} to ${cursors.length * SHOWN + items.length} of ${count.current?.toLocaleString() ?? "–"}`}
            </p>
            <p class="pages">
              <button type="button" disabled={cursors.length === 0} onClick={() => setCursors(cursors.slice(0, -1))}>Page before</button>
              <button type="button" disabled={!next_cursor} onClick={() => next_cursor && setCursors([...cursors, next_cursor])}>Next page</button>
            </p>
            <Download asked={asked} run={run} />
            <Commands commands={[command(run, filter)]} />
          </>
        )
      }
    </Loaded>
  );
}

function Nothing({ isFiltered }: { isFiltered: boolean }) {
  if (isFiltered) return <p>No rollout matches the filter.</p>;
  return (
    <>
      <p>No such rollout yet: they begin once an engine serves the model. See its state:</p>
      <Commands commands={["leyden status"]} />
    </>
  );
}

function command(run: string, filter: Filter): string {
  const { of = TRAINING, failed, ...others } = filter;
  const words = ["leyden rollout list --run", run];
  if (of !== ALL) words.push("--evaluation", of);
  if (failed) words.push(failed === "true" ? "--failed" : "--succeeded");
  for (const [field, value] of Object.entries(others)) if (value && isAsked(field, filter)) words.push(`--${field.replace("_", "-")}`, shellWord(value));
  return words.join(" ");
}
