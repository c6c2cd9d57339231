// LangChain.js's agent; the second run is streamed.
import { ChatOpenAI } from "@langchain/openai";
import { MemorySaver } from "@langchain/langgraph";
import { createAgent, createMiddleware, tool } from "langchain";
import { ToolMessage } from "@langchain/core/messages";
import * as z from "zod";

const schema = z.object({ city: z.string() });
const getWeather = tool(
  ({ city }) => {
    if (city === "Atlantis") throw new Error(`city not found: ${city}`);
    return "light rain";
  },
  { name: "get_weather", description: "The weather in a city.", schema },
);
const getTime = tool(() => "12:30", { name: "get_time", description: "The time in a city.", schema });

const handleToolErrors = createMiddleware({
  name: "HandleToolErrors",
  wrapToolCall: async (request, handler) => {
    try {
      return await handler(request);
    } catch (error) {
      return new ToolMessage({ content: `Tool error: ${error.message}`, tool_call_id: request.toolCall.id });
    }
  },
});

const agent = createAgent({
  model: new ChatOpenAI({ model: "gpt-4.1" }),
  tools: [getWeather, getTime],
  systemPrompt: "You are a helpful assistant.",
  middleware: [handleToolErrors],
  checkpointer: new MemorySaver(),
});
const config = { configurable: { thread_id: "1" } };
const [question, followUp] = process.argv.slice(2, 4);
const state = await agent.invoke({ messages: [{ role: "user", content: question }] }, config);
console.log(state.messages.at(-1).text);
let text = "";
const messages = [{ role: "user", content: followUp }];
for await (const [chunk] of await agent.stream({ messages }, { ...config, streamMode: "messages" })) {
  if (chunk.getType() === "ai") text += chunk.text;
}
console.log(text);
