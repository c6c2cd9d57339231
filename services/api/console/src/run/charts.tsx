// The six groups of charts of a run, always the same. A chart without a point is left out, and its group says why.

import type { Answer, Evaluation, Metrics, Run, RunConfig } from "../api";
import { Curves, heldOut, type Curve } from "../curves";
import { AgentLine, Facts, Loaded, Table, number } from "../parts";

interface Chart {
  title: string;
  /** Names of series with those of their curves; a star stands for the names that the run gave. */
  series: [string, string][];
  stacked?: boolean;
  digits?: number;
  /** Why it has no point, where that is the run's wish. */
  without?: (config: RunConfig) => string | undefined;
}

const GROUPS: Record<string, Chart[]> = {
  Score: [
    { title: "Mean reward in training", series: [["reward_mean", "reward"]] },
    { title: "Facts of the graders, mean", series: [["fact.*", "*"]], without: () => "no outcome has a fact" },
    { title: "Components of the reward, mean before the weight", series: [["component.*.mean", "*"]], without: withoutReward },
    { title: "Mean return by role", series: [["role.*.return_mean", "*"]], without: (config) => (config.roles?.length ? undefined : "the document has no roles") },
  ],
  Signal: [
    { title: "Groups with variance, share", series: [["groups_with_variance_share", "share"]] },
    { title: "Spread of rewards, standard deviation", series: [["reward_std", "all rollouts"], ["group_reward_std", "within groups"]] },
    { title: "Failures of graders, share of rollouts", series: [["component.*.failed_share", "*"]], without: withoutReward },
    { title: "Calls that do not train", series: [["untrainable_calls", "calls"]], digits: 0 },
  ],
  Stability: [
    { title: "Entropy of sampled tokens, nats", series: [["entropy", "entropy"]] },
    { title: "KL, nats a token", series: [["kl_reference", "to the reference"], ["kl_teacher", "to the teacher"]], without: (config) => (config.algorithm?.kl_coefficient ? undefined : "algorithm.kl_coefficient is 0") },
    { title: "Tokens whose ratio was clipped or masked, share", series: [["clipped_share", "clipped"], ["masked_share", "masked"]] },
    { title: "Effective sample size, share", series: [["effective_sample_share", "share"]] },
    { title: "Gap of trainer and engine, nats", series: [["logprob_gap_mean", "mean"], ["logprob_gap_max", "largest"]] },
    { title: "Gradient norm", series: [["gradient_norm", "policy"], ["value_gradient_norm", "critic"]] },
    { title: "Loss", series: [["loss", "policy"], ["value_loss", "critic"]] },
    { title: "Sampled tokens of an answer, mean", series: [["answer_tokens_mean", "tokens"]], digits: 1 },
    { title: "Calls of a rollout, mean", series: [["calls_per_rollout", "calls"]], digits: 2 },
    { title: "Answers that were cut off, share", series: [["cut_share", "share"]] },
    { title: "Failures of tools, share of calls", series: [["tool.*.failed_share", "*"]], without: () => "no call of a tool is known to have ended" },
  ],
  Freshness: [
    { title: "Lag of trained tokens, versions", series: [["policy_lag_mean", "mean"], ["policy_lag_max", "largest"]] },
    { title: "Trained tokens by the lag of their sample's oldest", series: [["lag.*.tokens", "lag *"]], stacked: true, digits: 0 },
    { title: "Groups refused as stale before the step", series: [["groups_stale", "groups"]], digits: 0 },
  ],
  Speed: [
    {
      title: "A rollout's way to its step, mean seconds",
      series: [
        ["queue_seconds", "queue"], ["sample_seconds", "sample"], ["grade_seconds", "grade"], ["siblings_seconds", "wait for siblings"],
        ["credit_seconds", "credit"], ["ready_seconds", "wait for the trainer"], ["step_seconds", "train"],
      ],
      stacked: true,
    },
    {
      title: "A step, seconds",
      series: [
        ["wait_seconds", "wait for rollouts"], ["load_seconds", "load"], ["gradients_seconds", "gradients"],
        ["optimizer_seconds", "optimizer"], ["export_seconds", "export"],
      ],
      stacked: true,
    },
    { title: "Pause of an engine for the step's weights, seconds", series: [["swap_seconds_mean", "mean"], ["swap_seconds_max", "longest"]] },
    { title: "Rollouts that wait for their first attempt, at the step's end", series: [["queued_rollouts", "rollouts"]], digits: 0 },
    { title: "Tokens a second", series: [["sampled_tokens_per_second", "sampled"], ["trained_tokens_per_second", "trained, within the step"]], digits: 1 },
    { title: "Prompt tokens in the engines' cache, share", series: [["cached_share", "share"]] },
  ],
  Cost: [
    { title: "Tokens of the step's rollouts", series: [["prompt_tokens", "prompt"], ["cached_tokens", "of it cached"], ["sampled_tokens", "sampled"]], digits: 0 },
    { title: "Components that judges graded", series: [["judged_components", "components"]], digits: 0, without: (config) => (hasJudge(config) ? undefined : "no component of the reward is a judge") },
  ],
};

function withoutReward(config: RunConfig): string | undefined {
  return config.reward ? undefined : "the document has no reward.components";
}

const hasJudge = ({ reward }: RunConfig) => (reward?.components ?? []).some((one) => ["score_model", "relative_model"].includes(one.grader?.type ?? ""));

export function RunCharts({ run, answer, evaluations }: { run: Run; answer: Answer<Metrics>; evaluations: Evaluation[] | undefined }) {
  return (
    <Loaded answer={answer}>
      {({ series }) => {
        const steps = [...new Set(series.flatMap((one) => one.points.map(([step]) => step)))].sort((one, other) => one - other);
        return (
          <>
            {Object.entries(GROUPS).map(([name, charts]) => {
              const drawn = charts.map((chart) => ({ ...chart, curves: curves(chart, series) }));
              const held = name === "Score" ? heldOut(evaluations ?? []) : [];
              return (
                <section key={name} aria-label={name}>
                  <h2>{name}</h2>
                  <div class="charts">
                    {drawn.filter((one) => one.curves.length > 0).map((one) => (
                      <Curves key={one.title} title={one.title} axis="step" curves={one.curves} places={steps} stacked={one.stacked} digits={one.digits} />
                    ))}
                    {held.length > 0 && <Curves title="Mean reward of held-out tasks, 95 % interval" axis="version" curves={[{ name: "reward", points: held }]} />}
                  </div>
                  {name === "Signal" && <Excluded run={run} />}
                  {name === "Cost" && <Judges run={run} />}
                  <Missing run={run} steps={steps.length} charts={drawn.filter((one) => one.curves.length === 0)} heldOut={name !== "Score" || held.length > 0} isLoaded={evaluations !== undefined} />
                </section>
              );
            })}
          </>
        );
      }}
    </Loaded>
  );
}

/** The curves of a chart that have a point. */
function curves(chart: Chart, series: Metrics["series"]): Curve[] {
  return chart.series.flatMap(([pattern, label]) => {
    const [head = "", tail] = pattern.split("*");
    return series.flatMap(({ name, points }): Curve[] => {
      const isIt = tail === undefined ? name === pattern : name.startsWith(head) && name.endsWith(tail) && name.length > head.length + tail.length;
      if (!isIt || points.length === 0) return [];
      const given = name.slice(head.length, name.length - (tail?.length ?? 0));
      return [{ name: label.replace("*", () => given), points: points.map(([x, , y]) => ({ x, y })) }];
    });
  });
}

/** One sentence about the charts that are not there. */
function Missing({ run, steps, charts, heldOut: isHeldOut, isLoaded }: { run: Run; steps: number; charts: Chart[]; heldOut: boolean; isLoaded: boolean }) {
  const names = charts.map((one) => ({ title: one.title, why: run.config ? one.without?.(run.config) : undefined }));
  if (!isHeldOut) names.push({ title: "Held-out tasks", why: run.config && !run.config.evaluation ? "the document has no evaluation" : !isLoaded ? "its evaluations are not loaded" : "no version is measured on all of them yet" });
  if (names.length === 0) return null;
  if (steps === 0 && charts.length > 0) return <p class="quiet">Nothing to draw: the run is {run.phase} and has made no step.</p>;
  const told = names.map(({ title, why }) => (why ? `${title} (${why})` : title)).join("; ");
  return <p class="quiet">Not measured: {told}.{run.pruned && " The run is pruned: its calls and samples are gone."}</p>;
}

/** Rollouts that left their groups. */
function Excluded({ run }: { run: Run }) {
  const reasons = Object.entries(run.excluded ?? {});
  if (reasons.length === 0) return <p class="quiet">No training rollout was excluded.</p>;
  return (
    <Table label="Excluded rollouts" head={["Excluded rollouts, by cause", "Count"]} numbers={["Count"]}>
      {reasons.map(([reason, count]) => (
        <tr key={reason}>
          <th scope="row" class="reason"><AgentLine text={reason || "no reason was given"} /></th>
          <td class="number">{count}</td>
        </tr>
      ))}
    </Table>
  );
}

/** What the judges of the whole run used; the part of providers without a price is no cost that is known. */
function Judges({ run: { config, judge_tokens: tokens, judge_cost: cost, judge_unpriced_tokens: unpriced } }: { run: Run }) {
  if (!config || !hasJudge(config)) return null;
  const bound = (most: number | null | undefined) => (most == null ? "" : `, at most ${most}`);
  const priced = cost == null ? "unknown: no provider has a price" : `${number(cost, 4)}${unpriced ? ` and ${unpriced} tokens without a price` : ""}`;
  return (
    <Facts
      facts={[
        ["Tokens of judges", `${tokens ?? "none counted yet"}${bound(config.reward?.judge_tokens)}`],
        ["Cost of judges, in the prices' currency", `${tokens == null ? "none counted yet" : priced}${bound(config.reward?.judge_cost)}`],
      ]}
    />
  );
}
