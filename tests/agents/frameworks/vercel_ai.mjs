// Vercel AI SDK: `openai()` speaks the Responses API, with the argument `chat` chat completions; the second is streamed.
import { openai } from "@ai-sdk/openai";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const inputSchema = z.object({ city: z.string() });
const tools = {
  get_weather: tool({
    description: "The weather in a city.",
    inputSchema,
    execute: async ({ city }) => {
      if (city === "Atlantis") throw new Error(`city not found: ${city}`);
      return "light rain";
    },
  }),
  get_time: tool({ description: "The time in a city.", inputSchema, execute: async () => "12:30" }),
};
const model = process.argv.includes("chat") ? openai.chat("gpt-4.1") : openai("gpt-4.1");
const settings = { model, tools, system: "You are a helpful assistant.", stopWhen: stepCountIs(5) };

const [question, followUp] = process.argv.slice(2, 4);
const messages = [{ role: "user", content: question }];
const first = await generateText({ ...settings, messages });
console.log(first.text);
// Version 7 has those of all steps there; in its `response` are those of the last step alone.
messages.push(...(first.responseMessages ?? first.response.messages), { role: "user", content: followUp });
let text = "";
for await (const part of streamText({ ...settings, messages }).textStream) text += part;
console.log(text);
