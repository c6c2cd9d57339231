// Vercel AI SDK with an object as output.
import { openai } from "@ai-sdk/openai";
import { generateText, Output } from "ai";
import { z } from "zod";

const schema = z.object({ weather: z.string(), time: z.string() });
const model = process.argv.includes("chat") ? openai.chat("gpt-4.1") : openai("gpt-4.1");
const { output } = await generateText({ model, prompt: process.argv[2], output: Output.object({ schema }) });
console.log(JSON.stringify(output));
