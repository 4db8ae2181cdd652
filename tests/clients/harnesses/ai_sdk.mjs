// Vercel's `ai`: generateText and streamText with a tool, whose first step has to call it.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const [url, name] = process.argv.slice(2);
const model = createOpenAICompatible({ name: "server", baseURL: `${url}/v1`, apiKey: "none", includeUsage: true })(name);
const calls = [];
const weather = tool({
  description: "Look up the weather in a city.",
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => {
    calls.push(city);
    return `The sun shines in ${city}.`;
  },
});
const question = {
  model,
  prompt: "How is the weather in Rome?",
  tools: { weather },
  prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "auto" }),
  stopWhen: stepCountIs(3),
  // One call: the guide of "required" lets the model write more.
  providerOptions: { server: { parallel_tool_calls: false } },
  maxOutputTokens: 64,
  temperature: 0,
  maxRetries: 0,
};

function report(answer) {
  console.log(JSON.stringify({ calls: calls.splice(0), answer }));
}

report((await generateText(question)).text);
report(await streamText(question).text);
