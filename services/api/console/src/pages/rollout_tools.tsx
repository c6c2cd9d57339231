// The tools that ran for a rollout: spans of its agent's telemetry, and what the gateway embedded for it.

import { usePolled, type Page, type RolloutDetail, type Span } from "../api";
import { AgentLine, AgentText, Fold, Loaded, State, Table, number } from "../parts";

const SHOWN = 1000;
const GATEWAY_SCOPE = "leyden.gateway";

export function Tools({ rollout, isLive }: { rollout: RolloutDetail; isLive: boolean }) {
  const attempt = rollout.attempt === null ? "" : `&attempt=${rollout.attempt}`;
  const spans = usePolled<Page<Span>>(`v1/rollouts/${encodeURIComponent(rollout.id)}/spans?kind=tool&limit=${SHOWN}${attempt}`, () => isLive);
  return (
    <Loaded answer={spans}>
      {({ items, next_cursor }) => (
        <>
          {items.length === 0 && <p>No tool has a span.</p>}
          {items.length > 0 && (
            <Table label="Tools" head={["Tool", "Status", "Seconds", "Details"]} numbers={["Seconds"]}>
              {items.map((span) => <Row key={`${span.trace_id} ${span.span_id}`} span={span} />)}
            </Table>
          )}
          {next_cursor && <p class="quiet">These are the first {SHOWN.toLocaleString()}; `leyden rollout show` shows all.</p>}
        </>
      )}
    </Loaded>
  );
}

function Row({ span }: { span: Span }) {
  return (
    <tr>
      <th scope="row"><AgentLine text={span.tool ?? span.name} /></th>
      <td><State state={span.status} /> <AgentLine text={span.error_type} /></td>
      <td class="number">{number((span.end_ns - span.start_ns) / 1e9)}</td>
      <td>{span.scope === GATEWAY_SCOPE && <Embedding facts={span.attributes} />}</td>
    </tr>
  );
}

function Embedding({ facts }: { facts: Record<string, unknown> }) {
  const texts = facts["leyden.embeddings.texts"] as string[];
  const inputs = facts["leyden.embeddings.inputs"] as number;
  const dimensions = facts["gen_ai.embeddings.dimension.count"] as number | undefined;
  const model = (facts["gen_ai.response.model"] ?? facts["gen_ai.request.model"]) as string | undefined;
  const words = [`${inputs} ${inputs === 1 ? "input" : "inputs"}`, dimensions && `${dimensions} dimensions`, model];
  return (
    <>
      <AgentLine text={words.filter(Boolean).join(" · ")} />
      {texts.length > 0 && (
        <Fold title={facts["leyden.truncated"] ? "Texts, cut" : "Texts"}>
          {() => texts.map((text, index) => <AgentText key={index} text={text} />)}
        </Fold>
      )}
    </>
  );
}
