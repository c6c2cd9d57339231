import { useState } from "preact/hooks";
import { ApiError, signIn } from "../api";
import { Commands } from "../parts";

export function SignIn({ problem, onSignedIn }: { problem: string; onSignedIn: () => void }) {
  const [error, setError] = useState(problem);
  const [token, setToken] = useState("");
  async function submit(event: Event): Promise<void> {
    event.preventDefault();
    try {
      await signIn(token.trim(), false);
      onSignedIn();
    } catch (failure) {
      if (!(failure instanceof ApiError)) throw failure;
      setError(failure.message);
    }
  }
  return (
    <>
      <h1>Sign in</h1>
      {error && <p role="alert" class="problem">{error}</p>}
      <form onSubmit={(event) => void submit(event)}>
        <label for="token">Token</label>
        <input id="token" type="password" autocomplete="off" required value={token} onInput={(event) => setToken(event.currentTarget.value)} />
        <button type="submit">Sign in</button>
      </form>
      <p>A platform on your machine prints a link that signs in, and its token:</p>
      <Commands commands={["leyden up"]} />
      <p>For another platform, an administrator makes a token:</p>
      <Commands commands={["leyden token create NAME --scope read"]} />
    </>
  );
}
