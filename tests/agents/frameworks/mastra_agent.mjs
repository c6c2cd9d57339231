// Mastra's agent: a model's name speaks the Responses API, the AI SDK's model chat completions; the second is streamed.
import { openai } from "@ai-sdk/openai";
import { Agent } from "@mastra/core/agent";
import { createTool } from "@mastra/core/tools";
import { z } from "zod";

const inputSchema = z.object({ city: z.string() });
const get_weather = createTool({
  id: "get_weather",
  description: "The weather in a city.",
  inputSchema,
  execute: async ({ city }) => {
    if (city === "Atlantis") throw new Error(`city not found: ${city}`);
    return "light rain";
  },
});
const get_time = createTool({
  id: "get_time",
  description: "The time in a city.",
  inputSchema,
  execute: async () => "12:30",
});
const agent = new Agent({
  id: "assistant",
  name: "assistant",
  instructions: "You are a helpful assistant.",
  model: process.argv.includes("chat") ? openai.chat("gpt-4.1") : "openai/gpt-4.1",
  tools: { get_weather, get_time },
});

const [question, followUp] = process.argv.slice(2, 4);
const messages = [{ role: "user", content: question }];
const first = await agent.generate(messages);
console.log(first.text);
messages.push(...first.response.messages, { role: "user", content: followUp });
const second = await agent.stream(messages);
let text = "";
for await (const part of second.textStream) text += part;
console.log(text);
