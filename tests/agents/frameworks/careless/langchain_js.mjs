// LangChain.js with a time-out that is too short, and a stream that it cuts off and asks for again.
import { ChatOpenAI } from "@langchain/openai";

const [question, followUp] = process.argv.slice(2, 4);
const messages = [{ role: "user", content: question }];
const model = new ChatOpenAI({ model: "gpt-4.1", timeout: 1000, maxRetries: 6 });
const first = await model.invoke(messages);
messages.push({ role: "assistant", content: first.text }, { role: "user", content: followUp });

const patient = new ChatOpenAI({ model: "gpt-4.1" });
const stop = new AbortController();
try {
  for await (const chunk of await patient.stream(messages, { signal: stop.signal })) if (chunk.text) stop.abort();
} catch (error) {
  console.log(`cut off: ${error.name}`);
}
let text = "";
for await (const chunk of await patient.stream(messages)) text += chunk.text;
messages.push({ role: "assistant", content: text }, { role: "user", content: question });
console.log((await patient.invoke(messages)).text);
