// OpenAI Agents SDK: the Responses API, or with the argument `chat` chat completions; the second run is streamed.
import { Agent, run, setOpenAIAPI, tool } from "@openai/agents";
import { z } from "zod";

if (process.argv.includes("chat")) setOpenAIAPI("chat_completions");

const parameters = z.object({ city: z.string() });
const getWeather = tool({
  name: "get_weather",
  description: "The weather in a city.",
  parameters,
  execute: async ({ city }) => {
    if (city === "Atlantis") throw new Error(`city not found: ${city}`);
    return "light rain";
  },
});
const getTime = tool({
  name: "get_time",
  description: "The time in a city.",
  parameters,
  execute: async () => "12:30",
});

const agent = new Agent({
  name: "Assistant",
  instructions: "You are a helpful assistant.",
  tools: [getWeather, getTime],
});
const [question, followUp] = process.argv.slice(2, 4);
const first = await run(agent, question);
console.log(first.finalOutput);
const second = await run(agent, [...first.history, { role: "user", content: followUp }], { stream: true });
await second.completed;
console.log(second.finalOutput);
