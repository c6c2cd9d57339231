// The REST API as the page sees it. The build writes schema.d.ts from the OpenAPI document: a renamed field breaks it.

import { useEffect, useRef, useState } from "preact/hooks";
import type { components } from "../schema";
import { hasStream, onChange, type Part } from "./live";

type Schemas = components["schemas"];
export type Run = Schemas["Run"];
export type RunConfig = NonNullable<Run["config"]>;
export type RunPage = Schemas["RunPage"];
export type Alarm = Schemas["Alarm"];
export type ListedAlarm = Schemas["ListedAlarm"];
export type AlarmPage = Schemas["AlarmPage"];
export type Metrics = Schemas["Metrics"];
export type Evaluation = Schemas["Evaluation"];
export type Token = Schemas["Token"];
export type IssuedToken = Schemas["IssuedToken"];
export type Session = Schemas["Session"];
export type Transition = Schemas["Transition"];
export type Excerpt = Schemas["Excerpt"];
export type State = Schemas["State"];
export type Rollout = Schemas["Rollout"];
export type Cause = Schemas["Cause"];
export type RolloutPage = Schemas["RolloutPage"];
export type RewardComponent = Schemas["RewardComponent"];
export type RolloutDetail = Schemas["RolloutDetail"];
export type Feedback = Schemas["Feedback"];
export type Graded = Schemas["Graded"];
export type Regrade = Schemas["Regrade"];
export type Attempt = Schemas["Attempt"];
export type Call = Schemas["Call"];
export type Turn = Schemas["Turn"];
export type Span = Schemas["Span"];
export type CallToken = Schemas["CallToken"];
export type CallTokens = Schemas["CallTokens"];
export type Comparison = Schemas["Comparison"];
export type RunCurve = Schemas["RunCurve"];
export type TaskComparison = Schemas["TaskComparison"];
export type Group = Schemas["Group"];
export type GroupPolicy = Schemas["GroupPolicy"];
export type Sibling = Schemas["Sibling"];
export type SiblingCall = Schemas["SiblingCall"];
export type RunTask = Schemas["RunTask"];
export type RunTaskPage = Schemas["RunTaskPage"];
export type PolicyVersion = Schemas["PolicyVersion"];
export type VersionFiles = Schemas["VersionFiles"];
export type Duel = Schemas["Duel"];
export type Dataset = Schemas["Dataset"];
export type Task = Schemas["Task"];
export type Health = Schemas["Health"];
export type Platform = Schemas["Platform"];
export type Pool = Schemas["Pool"];
export type Engine = Schemas["Engine"];
export type WaitingPage = Schemas["WaitingPage"];
export type WaitingRollout = Schemas["WaitingRollout"];
export interface Page<Item> {
  items: Item[];
  next_cursor?: string | null;
  /** Count of the whole list, where the API counts. */
  total?: number | null;
}

/** The evaluations that measured a version on all tasks of the run's own evaluations and lost at most half of them, in the
 * order of versions: means of a part, or of other tasks, compare no versions. */
export const wholeEvaluations = (evaluations: Evaluation[]) =>
  evaluations
    .filter((one) => one.results.complete && !one.results.rollouts.cancelled)
    .filter((one) => one.dataset_id === evaluations[0]?.dataset_id && one.tasks >= evaluations[0].tasks)
    .filter((one) => 2 * one.results.counted_tasks >= one.tasks)
    .sort((one, other) => (one.measured_version ?? 0) - (other.measured_version ?? 0) || one.number - other.number);

/** The version that earned most; unknown where its evaluations cannot be compared, none yet before any reward. */
export const bestVersion = (made: Pick<Run, "best_version" | "best_version_reason">) =>
  made.best_version ?? (made.best_version_reason ? "unknown" : "none yet");

/** Whether rollouts of the group are open, or its credit is. */
export const isUndecided = (group: Group) => group.state === "open" || group.awaits_credit;

/** Whether a sign-in may change something; undefined while that is not known. */
export const mayWrite = (session: Session | undefined) => session?.scopes.some((scope) => scope === "write" || scope === "admin");

/** A key under which a repeat after a lost answer changes nothing. */
export const newKey = () => `console-${[...crypto.getRandomValues(new Uint8Array(8))].map((one) => one.toString(16).padStart(2, "0")).join("")}`;

/** The words of a failure. */
export const wordsOf = (error: unknown) => (error instanceof Error ? error.message : String(error));

/** The pages of a list to its end, with the digits of each number. Args: words: the parameters, without limit and cursor */
export async function* everyPage<Item>(path: string, words: URLSearchParams, signal: AbortSignal): AsyncGenerator<Item[]> {
  const asked = new URLSearchParams([...words, ["limit", "1000"]]);
  for (;;) {
    const { items, next_cursor } = await request<Page<Item>>("GET", `${path}?${asked}`, undefined, signal, { isExact: true });
    yield items;
    if (!next_cursor) return;
    asked.set("cursor", next_cursor);
  }
}

export const POLL_MILLISECONDS = 3000;
/** While a stream tells of changes. */
const STREAMED_MILLISECONDS = 30_000;
export const SIGNED_OUT = "signed-out";

export class ApiError extends Error {
  constructor(
    readonly status: number,
    detail: string,
  ) {
    super(detail);
  }
}

/** Longer than the API lets any statement of the database take. */
const ANSWER_MILLISECONDS = 60_000;
/** Longer than the API waits for graders. */
export const GRADE_MILLISECONDS = 660_000;

interface Manner {
  /** Under which a repeat changes nothing. */
  key?: string;
  /** The longest wait for an answer. */
  milliseconds?: number;
  /** Whole numbers that JavaScript would round are objects, which JSON.stringify alone writes: the digits of people's tasks, and nanoseconds. */
  isExact?: boolean;
}

const { rawJSON } = JSON as { rawJSON?: (digits: string) => unknown };

/** For JSON.parse; older browsers do not tell the digits, and round. */
const keepDigits = (_key: string, value: unknown, told?: { source: string }) =>
  told && rawJSON && Number.isInteger(value) && !Number.isSafeInteger(value) ? rawJSON(told.source) : value;

/** The answer's JSON. Raises ApiError with the problem's detail; status 0: nothing answered, or no whole JSON. */
export async function request<T>(method: string, path: string, body?: object, signal?: AbortSignal, { key, milliseconds = ANSWER_MILLISECONDS, isExact }: Manner = {}): Promise<T> {
  const headers = { ...(body && { "content-type": "application/json" }), ...(key && { "idempotency-key": key }) };
  const patience = new AbortController();
  const timer = setTimeout(() => patience.abort(new Error(`nothing for ${milliseconds / 1000} seconds`)), milliseconds);
  const signals = signal ? AbortSignal.any([signal, patience.signal]) : patience.signal;
  try {
    const answer = await fetch(path, { method, headers, body: body && JSON.stringify(body), signal: signals });
    if (!answer.ok) throw await problemOf(answer);
    learnClock(answer);
    if (isExact) return JSON.parse(await answer.text(), keepDigits) as T;
    return (answer.status === 204 ? undefined : await answer.json()) as T;
  } catch (error) {
    if (error instanceof ApiError) throw error;
    throw new ApiError(0, `the API does not answer (${error instanceof Error ? error.message : "no connection"})`);
  } finally {
    clearTimeout(timer);
  }
}

/** Keys of requests whose answers are to come or were lost. */
const unanswered = new Map<string, string>();

/** The answer to a POST that makes something. Where the answer to an equal one was lost, this is its repeat: nothing is made twice. */
export async function create<T>(path: string, body?: object, milliseconds?: number): Promise<T> {
  const asked = `${path} ${JSON.stringify(body)}`;
  const key = unanswered.get(asked) ?? newKey();
  unanswered.set(asked, key);
  try {
    const made = await request<T>("POST", path, body, undefined, { key, milliseconds });
    unanswered.delete(asked);
    return made;
  } catch (error) {
    // A proxy answers with 500 and above while the API goes on.
    if (error instanceof ApiError && error.status > 0 && error.status < 500) unanswered.delete(asked);
    throw error;
  }
}

/** Milliseconds that the API's clock is ahead of the browser's. */
let ahead = 0;

function learnClock(answer: Response): void {
  const told = Date.parse(answer.headers.get("date") ?? "");
  if (!Number.isNaN(told)) ahead = told - Date.now();
}

/** The present time by the API's clock, which the times in its answers are of; the browser's may be wrong. */
export const now = () => new Date(Date.now() + ahead);

/** The refusal that an answer is. */
export async function problemOf(answer: Response): Promise<ApiError> {
  const problem = (await answer.json().catch(() => ({}))) as { detail?: string };
  return new ApiError(answer.status, problem.detail ?? `the API answers ${answer.status}`);
}

export const signIn = (token: string, once: boolean) => request<unknown>("POST", "v1/session", { token, once });
export const isSignedIn = () => request("GET", "v1/session").then(() => true, () => false);
export const signOut = () => request<void>("DELETE", "v1/session");

export interface Answer<T> {
  data?: T;
  error?: ApiError;
  /** The time of the data, by the API's clock. */
  at?: Date;
  /** Asks at once, also where nothing was to be asked any more. */
  again?: () => void;
}

/**
 * The answer to a GET, asked again every three seconds while the page is visible and `isLive` says so, but not after a
 * 404; at once when the stream tells that one of the parts has changed, and then seldom otherwise unless the last
 * question failed. Without a path nothing is asked.
 */
export function usePolled<T>(path: string | undefined, isLive: (data: T) => boolean = () => true, parts: readonly Part[] = [], isExact = false): Answer<T> {
  const [answer, setAnswer] = useState<Answer<T>>({});
  const rule = useRef(isLive);
  rule.current = isLive;
  const again = useRef(() => {});
  useEffect(() => {
    setAnswer({});
    if (path === undefined) return;
    const asked = path;
    const stop = new AbortController();
    let timer: ReturnType<typeof setTimeout> | undefined;
    let [isAsking, isStale, isOver, isWanted, hasFailed] = [false, false, false, false, false];
    async function poll(): Promise<void> {
      if (!document.hidden) {
        [isAsking, isStale, isWanted] = [true, false, false];
        // The rule when the question was put: what the page learnt since may have changed the answer.
        const isStillLive = rule.current;
        try {
          const data = await request<T>("GET", asked, undefined, stop.signal, { isExact });
          if (stop.signal.aborted) return;
          setAnswer({ data, at: now() });
          hasFailed = false;
          isOver = !isStillLive(data);
        } catch (error) {
          if (stop.signal.aborted) return;
          if (!(error instanceof ApiError)) throw error;
          if (error.status === 401) window.dispatchEvent(new Event(SIGNED_OUT));
          setAnswer((before) => ({ ...before, error }));
          hasFailed = true;
          isOver = error.status === 404;
        } finally {
          isAsking = false;
        }
      }
      if (!isOver || isWanted) timer = setTimeout(() => void poll(), pause());
    }
    function pause(): number {
      if (isStale) return 0;
      return parts.length > 0 && hasStream() && !hasFailed && !document.hidden ? STREAMED_MILLISECONDS : POLL_MILLISECONDS;
    }
    function onNews(): void {
      isStale = true;
      if (isAsking || isOver) return;
      clearTimeout(timer);
      void poll();
    }
    again.current = () => {
      [isWanted, isOver] = [true, false];
      onNews();
    };
    void poll();
    const deafen = parts.length > 0 ? onChange(parts, onNews) : undefined;
    return () => {
      stop.abort();
      again.current = () => {};
      deafen?.();
      clearTimeout(timer);
    };
  }, [path]);
  return { ...answer, again: () => again.current() };
}
