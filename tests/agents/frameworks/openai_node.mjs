// openai-node's tool runner; the second run is streamed.
import OpenAI from "openai";

const client = new OpenAI();
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };

function getWeather({ city }) {
  if (city === "Atlantis") throw new Error(`city not found: ${city}`);
  return "light rain";
}

function getTime() {
  return "12:30";
}

// The runner ends at an exception, so the tools catch it.
const safely = (tool) => (input) => {
  try {
    return tool(input);
  } catch (error) {
    return `Error: ${error.message}`;
  }
};

const tools = Object.entries({ get_weather: getWeather, get_time: getTime }).map(([name, tool]) => ({
  type: "function",
  function: { name, description: name, parameters, function: safely(tool), parse: JSON.parse },
}));

let messages = [{ role: "system", content: "You are a helpful assistant." }];
for (const [number, content] of process.argv.slice(2, 4).entries()) {
  const request = { model: "gpt-4.1", messages: [...messages, { role: "user", content }], tools };
  const runner = client.chat.completions.runTools(number === 1 ? { ...request, stream: true } : request);
  console.log(await runner.finalContent());
  messages = runner.messages;
}
