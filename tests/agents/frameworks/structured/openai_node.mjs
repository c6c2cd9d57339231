// openai-node's `parse` over chat completions.
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const Report = z.object({ weather: z.string(), time: z.string() });
const completion = await new OpenAI().chat.completions.parse({
  model: "gpt-4.1",
  messages: [{ role: "user", content: process.argv[2] }],
  response_format: zodResponseFormat(Report, "report"),
});
console.log(JSON.stringify(completion.choices[0].message.parsed));
