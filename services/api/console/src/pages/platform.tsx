// The platform: which services are there, which engines serve what, and which work waits.

import { usePolled, type Health, type Page, type Platform, type Pool } from "../api";
import { Named } from "../named";
import { AgentLine, Commands, Facts, Loaded, Problem, State, Table, bytes, clock, time } from "../parts";
import { Tokens } from "../platform/tokens";

export function PlatformPage() {
  const platform = usePolled<Platform>("v1/platform");
  const health = usePolled<Health>("v1/health");
  const pools = usePolled<Page<Pool>>("v1/pools");
  return (
    <>
      <h1>Platform</h1>
      <Loaded answer={platform}>{(data) => <Overview platform={data} health={health.data} />}</Loaded>
      <Problem error={health.error} at={health.at} />
      <h2>Pools</h2>
      <Loaded answer={pools}>{({ items }) => <>{items.map((pool) => <PoolOf key={pool.name} pool={pool} />)}</>}</Loaded>
      <Tokens />
      <p class="quiet" role="status">{platform.at ? `as of ${clock(platform.at)}` : ""}</p>
      <Commands commands={["leyden status", "leyden pools"]} />
    </>
  );
}

function Overview({ platform, health }: { platform: Platform; health: Health | undefined }) {
  return (
    <>
      <Facts
        facts={[
          ["State", health ? <span class={`state ${health.status}`}>{health.status === "ok" ? "ok" : "no engine serves"}</span> : "unknown"],
          ["Rollouts that wait", platform.queued_rollouts.toLocaleString()],
          ["Attempts that run", platform.live_attempts.toLocaleString()],
          ["Grades that wait", platform.waiting_grades.toLocaleString()],
          ["Grades of people that wait", <a href="#/rate">{platform.waiting_feedback.toLocaleString()}</a>],
          ["Database", bytes(platform.database_bytes)],
          ["Weights of versions", bytes(platform.weights_bytes)],
          ["Schema", health ? (health.schema_revision ?? "none") : "unknown"],
        ]}
      />
      <h2>Disks</h2>
      <Table label="Disks" head={["Disk of", "Free", "In all", "Folder"]} numbers={["Free", "In all"]}>
        {platform.volumes?.map((one) => (
          <tr key={one.name}>
            <th scope="row">{DISKS[one.name]}{one.same_disk_as && ` (disk of ${DISKS[one.same_disk_as]})`}</th>
            <td class="number">{one.free_bytes == null ? "unknown" : bytes(one.free_bytes)}</td>
            <td class="number">{one.total_bytes == null ? "unknown" : bytes(one.total_bytes)}</td>
            <td class="reason"><AgentLine text={one.reason ?? one.path} /></td>
          </tr>
        ))}
      </Table>
      {platform.volumes?.filter((one) => one.nearly_full && !one.same_disk_as).map((one) => (
        <p key={one.name} class="warning">The disk of {[one, ...(platform.volumes ?? []).filter((other) => other.same_disk_as === one.name)].map(({ name }) => DISKS[name]).join(" and ")} is nearly full: remove runs (`leyden run delete`), keep fewer versions (training.keep_checkpoints), or give it room.</p>
      ))}
      <h2>Services</h2>
      <Table label="Services" head={["Service", "State", "Connections", "Last statement"]} numbers={["Connections"]}>
        {platform.services.map((one) => (
          <tr key={one.name}>
            <th scope="row">{one.name}</th>
            <td><span class={`state ${one.connections > 0 ? "ok" : "absent"}`}>{one.connections > 0 ? "connected" : "not connected"}</span></td>
            <td class="number">{one.connections}</td>
            <td>{one.active_at ? time(one.active_at) : "–"}</td>
          </tr>
        ))}
      </Table>
      <p class="quiet">Connections to the database tell that a process is there, not how many: a trainer has one while its run trains. `leyden status` asks the services themselves.</p>
    </>
  );
}

const DISKS = { versions: "versions and checkpoints", database: "the database" };

function PoolOf({ pool }: { pool: Pool }) {
  return (
    <section aria-label={`Pool ${pool.name}`}>
      <h3>Pool <AgentLine text={pool.name} /></h3>
      <Facts
        facts={[
          ["Model", <AgentLine text={pool.model_path ?? "that of the services' settings"} />],
          ...(pool.embeddings ? [["Purpose", "embeddings, for any number of runs"] as [string, string]] : []),
          ["Context", pool.context_length === null ? "as long as the model allows" : `${pool.context_length.toLocaleString()} tokens`],
          ["Runs", pool.run_ids.length ? <Runs ids={pool.run_ids} /> : "none"],
          ["Runs that wait", pool.waiting.length ? <Runs ids={pool.waiting} /> : "none"],
          ...(pool.adapters === null ? [] : [["Adapters", `${pool.run_ids.length} of ${pool.adapters}`] as [string, string]]),
        ]}
      />
      {pool.engines.length === 0 ? (
        <>
          <p>No engine of this pool has been seen. Ask why:</p>
          <Commands commands={["leyden doctor"]} />
        </>
      ) : (
        <Table label={`Engines of ${pool.name}`} head={["Engine", "State", "Run", "Version", "Last poll", "Detail"]} numbers={["Version"]}>
          {pool.engines.map((one) => (
            <tr key={one.url}>
              <th scope="row"><AgentLine text={one.url} /></th>
              <td><State state={one.state} /></td>
              <td>{one.run_id ? <><Runs ids={[one.run_id]} />{one.policy && <> <AgentLine text={one.policy} /></>}</> : "unknown"}</td>
              <td class="number">{one.policy_version ?? "unknown"}</td>
              <td>{time(one.updated_at)}</td>
              <td class="reason"><AgentLine text={one.detail} /></td>
            </tr>
          ))}
        </Table>
      )}
    </section>
  );
}

const Runs = ({ ids }: { ids: string[] }) => <>{ids.map((id, place) => <span key={id}>{place > 0 && ", "}<Named kind="runs" id={id} /></span>)}</>;
