// The Vercel AI SDK with a time-out that is too short, and a stream that it cuts off and asks for again.
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, streamText } from "ai";

const openai = createOpenAI({});
const model = process.argv.includes("chat") ? openai.chat("gpt-4.1") : openai("gpt-4.1");
const [question, followUp] = process.argv.slice(2, 4);
const messages = [{ role: "user", content: question }];

/** The SDK repeats no request that a signal ended: the agent asks again, as its authors advise. */
async function asked() {
  for (;;) {
    try {
      return (await generateText({ model, messages, abortSignal: AbortSignal.timeout(1000) })).text;
    } catch (error) {
      console.log(`asks again: ${error.name}`);
    }
  }
}

messages.push({ role: "assistant", content: await asked() }, { role: "user", content: followUp });
const stop = new AbortController();
try {
  const { textStream } = streamText({ model, messages, abortSignal: stop.signal, onError() {} });
  for await (const part of textStream) if (part) stop.abort();
} catch (error) {
  console.log(`cut off: ${error.name}`);
}
let text = "";
for await (const part of streamText({ model, messages }).textStream) text += part;
messages.push({ role: "assistant", content: text }, { role: "user", content: question });
console.log((await generateText({ model, messages })).text);
