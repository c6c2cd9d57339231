// LangChain.js with structured output.
import { ChatOpenAI } from "@langchain/openai";
import { z } from "zod";

const Report = z.object({ weather: z.string(), time: z.string() });
const model = new ChatOpenAI({ model: "gpt-4.1" }).withStructuredOutput(Report);
console.log(JSON.stringify(await model.invoke(process.argv[2])));
