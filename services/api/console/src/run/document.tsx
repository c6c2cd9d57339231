// The document of a run, and what it changes in that of the run which it continues.

import { usePolled, type Comparison, type Run } from "../api";
import { Named } from "../named";
import { AgentLine, AgentText, Loaded, Table } from "../parts";

export function RunDocument({ run }: { run: Run }) {
  return (
    <>
      {run.parent && <Changes run={run} parent={run.parent} />}
      <h2>Document</h2>
      {run.config ? <AgentText text={JSON.stringify(run.config, null, 2)} /> : <p role="alert" class="problem"><AgentLine text={run.reason} /></p>}
    </>
  );
}

function Changes({ run, parent }: { run: Run; parent: NonNullable<Run["parent"]> }) {
  const words = new URLSearchParams([["run", parent.run_id], ["run", run.id]]);
  const answer = usePolled<Comparison>(`v1/comparison?${words}`, () => false);
  return (
    <>
      <h2>Changes</h2>
      <p>It continues version {parent.version} of run <Named kind="runs" id={parent.run_id} />.</p>
      <Loaded answer={answer}>
        {({ differences }) => differences.length === 0 ? <p>The documents are the same but for the names.</p> : (
          <Table label="Changes" head={["Field", "There", "Here"]} numbers={[]}>
            {differences.map((one) => (
              <tr key={one.path}>
                <th scope="row"><AgentLine text={one.path} /></th>
                {one.values.map((value, index) => <td key={index} class="reason">{value === null ? "–" : <AgentLine text={value} />}</td>)}
              </tr>
            ))}
          </Table>
        )}
      </Loaded>
    </>
  );
}
