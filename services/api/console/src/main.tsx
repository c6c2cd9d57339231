// The console: pages by the address's fragment, which browsers never send to a server.

import { render } from "preact";
import { useEffect, useState } from "preact/hooks";
import { AlarmsLink } from "./alarms";
import { ApiError, SIGNED_OUT, isSignedIn, signIn, signOut } from "./api";
import { AlarmsPage } from "./pages/alarms";
import { ComparePage } from "./pages/compare";
import { DatasetPage, Datasets } from "./pages/datasets";
import { GroupPage } from "./pages/group";
import { PlaygroundPage } from "./pages/playground";
import { PlatformPage } from "./pages/platform";
import { RatePage } from "./pages/rate";
import { RolloutPage } from "./pages/rollout";
import { RunPage } from "./pages/run";
import { Runs } from "./pages/runs";
import { SignIn } from "./pages/sign_in";
import { TasksPage } from "./pages/tasks";
import { VersionsPage } from "./pages/versions";
import { link } from "./parts";
import { TrajectoryPage } from "./rollout/trajectory";
import "./style.css";

/** `#sign-in=TOKEN&to=/runs/ID`: the token leaves the address at once, and works once. */
async function signInByLink(): Promise<string> {
  const words = new URLSearchParams(location.hash.slice(1));
  const token = words.get("sign-in");
  if (token === null) return "";
  history.replaceState(null, "", `#${words.get("to") ?? "/"}`);
  try {
    await signIn(token, true);
    return "";
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    // The link may be the one that signed this browser in.
    if (await isSignedIn()) return "";
    if (error.status === 0 || error.status >= 500) return `Open the link again later, or paste a token: ${error.message}`;
    return `The link has signed in before or is too old: ${error.message}`;
  }
}

function Page({ address }: { address: string }) {
  const [, kind, id, part] = (address.split("?")[0] ?? "").replace(/^#/, "").split("/");
  // A filter without a part is one of rollouts.
  if (kind === "runs" && id) return <PageOfRun key={id} id={decodeURIComponent(id)} part={part ?? (address.includes("?") ? "rollouts" : undefined)} />;
  if (kind === "rollouts" && id) return <PageOfRollout key={id} id={decodeURIComponent(id)} part={part} />;
  if (kind === "groups" && id) return <GroupPage key={id} id={decodeURIComponent(id)} />;
  if (kind === "datasets") return id ? <DatasetPage key={id} id={decodeURIComponent(id)} /> : <Datasets />;
  if (kind === "alarms") return <AlarmsPage />;
  if (kind === "platform") return <PlatformPage />;
  if (kind === "rate") return <RatePage />;
  if (kind === "compare") return <ComparePage />;
  return <Runs />;
}

const PARTS_OF_RUN = {
  rollouts: "Rollouts", tasks: "Tasks", versions: "Versions", evaluations: "Evaluations", document: "Document", logs: "Logs", rate: "Rate",
  playground: "Playground",
};

function PageOfRollout({ id, part }: { id: string; part: string | undefined }) {
  const isTrajectory = part === "trajectory";
  return (
    <>
      <nav aria-label="Rollout">
        <a href={link("rollouts", id)} aria-current={isTrajectory ? undefined : "page"}>Overview</a>
        <a href={`${link("rollouts", id)}/trajectory`} aria-current={isTrajectory ? "page" : undefined}>Trajectory</a>
      </nav>
      {isTrajectory ? <TrajectoryPage id={id} /> : <RolloutPage id={id} />}
    </>
  );
}

function PageOfRun({ id, part }: { id: string; part: string | undefined }) {
  return (
    <>
      <nav aria-label="Run">
        <a href={link("runs", id)} aria-current={part ? undefined : "page"}>Overview</a>
        {Object.entries(PARTS_OF_RUN).map(([name, title]) => (
          <a key={name} href={`${link("runs", id)}/${name}`} aria-current={part === name ? "page" : undefined}>{title}</a>
        ))}
      </nav>
      <PartOfRun id={id} part={part} />
    </>
  );
}

function PartOfRun({ id, part }: { id: string; part: string | undefined }) {
  if (part === "tasks") return <TasksPage run={id} />;
  if (part === "versions") return <VersionsPage run={id} />;
  if (part === "rate") return <RatePage run={id} />;
  if (part === "playground") return <PlaygroundPage run={id} />;
  return <RunPage key={id} id={id} part={part} />;
}

/** Tabs of one platform share its cookie, so that each signs in and out with the others. */
const tabs = new BroadcastChannel(`session ${location.pathname}`);

function App({ problem }: { problem: string }) {
  const [address, setAddress] = useState(location.hash);
  const [isSignedIn, setSignedIn] = useState(problem === "");
  const [failure, setFailure] = useState("");
  function tell(isIn: boolean): void {
    setSignedIn(isIn);
    tabs.postMessage(isIn);
  }
  async function leave(): Promise<void> {
    try {
      await signOut();
      setFailure("");
      tell(false);
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      setFailure(`You are still signed in: ${error.message}. Sign out again.`);
    }
  }
  useEffect(() => {
    const onMove = () => setAddress(location.hash);
    const onSignedOut = () => setSignedIn(false);
    window.addEventListener("hashchange", onMove);
    window.addEventListener(SIGNED_OUT, onSignedOut);
    tabs.onmessage = ({ data }: MessageEvent<boolean>) => setSignedIn(data);
    // The address may have changed since the first rendering.
    onMove();
    return () => {
      window.removeEventListener("hashchange", onMove);
      window.removeEventListener(SIGNED_OUT, onSignedOut);
    };
  }, []);
  return (
    <>
      <header>
        <a href="#/">Leyden</a>
        {isSignedIn && (
          <nav aria-label="Main">
            <a href="#/">Runs</a>
            <AlarmsLink />
            <a href="#/compare">Compare</a>
            <a href="#/datasets">Datasets</a>
            <a href="#/rate">Rate</a>
            <a href="#/platform">Platform</a>
            <button type="button" onClick={() => void leave()}>Sign out</button>
          </nav>
        )}
      </header>
      <main>
        {failure && <p role="alert" class="problem">{failure}</p>}
        {isSignedIn ? <Page address={address} /> : <SignIn problem={problem} onSignedIn={() => tell(true)} />}
      </main>
    </>
  );
}

const place = document.getElementById("page");
if (place) void signInByLink().then((problem) => render(<App problem={problem} />, place));
