// The steps of openai_script.py with the official npm client.
// Usage: node openai_script.mjs http://127.0.0.1:8000/v1 [api-key]
import assert from "node:assert/strict";
import OpenAI from "openai";

const [baseURL, apiKey = "none"] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0, timeout: 120_000 });
const messages = [
  { role: "system", content: "You answer in English." },
  { role: "user", content: "Tell me something about music." },
];
const greedy = { messages, max_tokens: 12, temperature: 0 };
const chat = (body) => client.chat.completions.create(body);
const text = (answer) => answer.choices[0].message.content;

async function rejects(kind, param, promise) {
  await assert.rejects(promise, (error) => {
    assert.ok(error instanceof kind, `${error.constructor.name} for ${param}`);
    assert.equal(error.param, param);
    assert.ok(error.code && error.message);
    return true;
  });
}

const steps = {
  async models(model) {
    const listed = [];
    for await (const entry of client.models.list()) listed.push(entry.id);
    assert.ok(listed.includes(model));
    assert.equal((await client.models.retrieve(model)).id, model);
  },
  async chat(model) {
    const answer = await chat({ model, ...greedy });
    assert.equal(answer.choices[0].message.role, "assistant");
    assert.ok(text(answer));
    assert.ok(["stop", "length"].includes(answer.choices[0].finish_reason));
    const { prompt_tokens, completion_tokens, total_tokens } = answer.usage;
    assert.equal(total_tokens, prompt_tokens + completion_tokens);
    assert.ok(completion_tokens >= 1 && completion_tokens <= 12);
  },
  async chat_stream_equals_whole(model) {
    const whole = await chat({ model, ...greedy });
    const chunks = [];
    const stream = await chat({ model, ...greedy, stream: true, stream_options: { include_usage: true } });
    for await (const chunk of stream) chunks.push(chunk);
    assert.equal(chunks[0].choices[0].delta.role, "assistant");
    const joined = chunks.flatMap((chunk) => chunk.choices.map((choice) => choice.delta.content ?? "")).join("");
    assert.equal(joined, text(whole));
    const last = chunks.pop();
    for (const chunk of chunks) assert.equal(chunk.usage, null);
    assert.deepEqual(last.choices, []);
    assert.equal(last.usage.completion_tokens, whole.usage.completion_tokens);
  },
  async chat_choices(model) {
    const body = { model, ...greedy, temperature: 1, n: 2, seed: 7 };
    const [answer, again] = [await chat(body), await chat(body)];
    assert.deepEqual(answer.choices.map((choice) => choice.index), [0, 1]);
    const texts = (one) => one.choices.map((choice) => choice.message.content);
    assert.deepEqual(texts(answer), texts(again));
    assert.notEqual(texts(answer)[0], texts(answer)[1]);
  },
  async chat_logprobs(model) {
    const answer = await chat({ model, ...greedy, logprobs: true, top_logprobs: 2 });
    const { content, refusal } = answer.choices[0].logprobs;
    assert.equal(refusal, null);
    assert.ok(content.length > 0);
    for (const token of content) assert.ok(token.top_logprobs.length === 2 && token.logprob <= 0);
  },
  async chat_stop(model) {
    const full = [...text(await chat({ model, ...greedy }))];
    const stop = full.slice(Math.floor(full.length / 2)).slice(0, 3).join("");
    const answer = await chat({ model, ...greedy, stop: [stop] });
    const joined = full.join("");
    assert.equal(answer.choices[0].finish_reason, "stop");
    assert.equal(text(answer), joined.slice(0, joined.indexOf(stop)));
  },
  async structured(model) {
    const schema = {
      type: "object",
      properties: { city: { enum: ["Oslo", "São Paulo"] }, warm: { type: "boolean" } },
      required: ["city", "warm"],
      additionalProperties: false,
    };
    const response_format = { type: "json_schema", json_schema: { name: "weather", strict: true, schema } };
    const body = { model, ...greedy, max_tokens: 200, response_format };
    const answer = await client.chat.completions.parse(body);
    const { parsed, content } = answer.choices[0].message;
    assert.equal(answer.choices[0].finish_reason, "stop");
    assert.ok(["Oslo", "São Paulo"].includes(JSON.parse(content).city) && typeof JSON.parse(content).warm === "boolean");
    assert.ok(parsed === null || parsed.city === JSON.parse(content).city);
    const final = await client.chat.completions.stream(body).finalContent();
    assert.equal(final, content);
    const chosen = { model, prompt: "yes or no?", guided_choice: ["yes", "no"] };
    assert.ok(["yes", "no"].includes((await client.completions.create(chosen)).choices[0].text));
  },
  async completion(model) {
    const body = { model, prompt: ["Once upon a time", "The capital of France"], max_tokens: 8, temperature: 0 };
    const answer = await client.completions.create(body);
    assert.deepEqual(answer.choices.map((choice) => choice.index), [0, 1]);
    const streamed = ["", ""];
    for await (const chunk of await client.completions.create({ ...body, stream: true })) {
      for (const choice of chunk.choices) streamed[choice.index] += choice.text;
    }
    assert.deepEqual(streamed, answer.choices.map((choice) => choice.text));
  },
  async completion_echo(model) {
    const prompt = "Once upon a time";
    const body = { model, prompt, max_tokens: 4, temperature: 0, echo: true, logprobs: 1 };
    const { text: echoed, logprobs } = (await client.completions.create(body)).choices[0];
    assert.ok(echoed.startsWith(prompt));
    assert.equal(logprobs.tokens.length, logprobs.token_logprobs.length);
    assert.ok(logprobs.token_logprobs[0] === null || logprobs.token_logprobs[0] <= 0);
  },
  async errors(model) {
    const hello = [{ role: "user", content: "Hello" }];
    const tools = [{ type: "function", function: { name: "f", parameters: {} } }];
    await rejects(OpenAI.NotFoundError, "model", chat({ model: "no-such-model", messages: hello }));
    await rejects(OpenAI.BadRequestError, "n", chat({ model, messages: hello, n: 0, stream: true }));
    await rejects(OpenAI.BadRequestError, "messages", chat({ model, messages: [] }));
    await rejects(OpenAI.BadRequestError, "tools", chat({ model, messages: hello, tools }));
    await rejects(OpenAI.BadRequestError, "max_tokens", chat({ model, messages: hello, max_tokens: 2 ** 30 }));
  },
};

const model = (await client.models.list()).data[0].id;
for (const [name, step] of Object.entries(steps)) {
  await step(model);
  console.log("ok", name);
}
