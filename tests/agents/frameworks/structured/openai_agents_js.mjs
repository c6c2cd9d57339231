// OpenAI Agents SDK with an output type.
import { Agent, run, setOpenAIAPI } from "@openai/agents";
import { z } from "zod";

if (process.argv.includes("chat")) setOpenAIAPI("chat_completions");

const outputType = z.object({ weather: z.string(), time: z.string() });
const agent = new Agent({ name: "Reporter", instructions: "You report.", outputType });
console.log(JSON.stringify((await run(agent, process.argv[2])).finalOutput));
