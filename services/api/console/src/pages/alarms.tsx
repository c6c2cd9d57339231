// The alarms of all runs: active ones first, those that have ended too.

import { Alarms } from "../alarms";
import { useChoice } from "../address";
import { usePolled, type AlarmPage, type ListedAlarm } from "../api";
import { Paged } from "../paged";
import { Commands, Select, Typed, shellWord } from "../parts";

const SHOWN = 50;
const FIELDS = ["state", "name", "run"] as const;

export function AlarmsPage() {
  const [choice, change] = useChoice(FIELDS);
  const { name, ...others } = choice;
  // Counts by rule, whichever rule is chosen.
  const counted = usePolled<AlarmPage>(`v1/alarms?${new URLSearchParams({ ...others, limit: "1" })}`);
  const names = Object.entries(counted.data?.names ?? {});
  const known = name && !names.some(([one]) => one === name) ? [...names, [name, 0] as const] : names;
  const options = FIELDS.flatMap((field) => (choice[field] ? [` --${field} ${shellWord(choice[field] ?? "")}`] : []));
  return (
    <>
      <h1>Alarms</h1>
      <form class="filters" aria-label="Filter of alarms" onSubmit={(event) => event.preventDefault()}>
        <Select id="state" label="State" value={choice.state ?? ""} onChange={(value) => change("state", value)} options={[
          ["", "any"], ["active", "active"], ["lasted", "until its run's end"], ["ended", "ended"],
        ]} />
        <Select id="name" label="Rule" value={name ?? ""} onChange={(value) => change("name", value)} options={[
          ["", "any"], ...known.map(([one, count]): [string, string] => [one, `${one} (${count.toLocaleString()})`]),
        ]} />
        <span>
          <label for="run">Run</label>{" "}
          <Typed id="run" value={choice.run ?? ""} onTyped={(value) => change("run", value)} attributes={{ type: "search", maxLength: 200, placeholder: "id or name" }} />
        </span>
      </form>
      <Paged<ListedAlarm>
        path={`v1/alarms?${new URLSearchParams(choice)}`}
        limit={SHOWN}
        nothing={options.length > 0 ? <p>No alarm matches the filter.</p> : <p>No run has had an alarm: the controller judges each run every few seconds.</p>}
      >
        {({ items }) => <Alarms alarms={items} />}
      </Paged>
      <Commands commands={[`leyden alarms${options.join("")}`]} />
    </>
  );
}
