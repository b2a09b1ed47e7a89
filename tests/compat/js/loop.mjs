// The AI SDK with its providers, and openai for JavaScript. Run by tests/compat/test_loops.py.
import assert from 'node:assert/strict'
import test from 'node:test'
import { createAnthropic } from '@ai-sdk/anthropic'
import { createOpenAI } from '@ai-sdk/openai'
import { createOpenAICompatible } from '@ai-sdk/openai-compatible'
import { embedMany, generateText, Output, stepCountIs, streamText, tool } from 'ai'
import OpenAI from 'openai'
import { z } from 'zod'

const { COMPAT_URL: url, COMPAT_KEY: apiKey } = process.env
const baseURL = `${url}/v1`
const TEXT = 'naïve "日本" 🎉\n- ok'
const script = (...turns) => `Do it: <<${JSON.stringify(turns)}>>`
const call = (name, args) => ({ name, arguments: args })
const LOOP = script(
  { reasoning: 'Two sums.', calls: [call('add', { a: 1, b: 2 }), call('add', { a: 3, b: 4 })] },
  { calls: [call('add', { a: 3, b: 7 })] },
  { text: TEXT },
)
const add = tool({
  description: 'Adds.',
  inputSchema: z.object({ a: z.number(), b: z.number() }),
  execute: async ({ a, b }) => a + b,
})
const openai = createOpenAI({ baseURL, apiKey })
const models = {
  responses: openai('scripted'), // its default, which names stored items by their ids
  stateless: openai('scripted'),
  chat: openai.chat('scripted'),
  compatible: createOpenAICompatible({
    name: 'polyhost',
    baseURL,
    apiKey,
    includeUsage: true,
    supportsStructuredOutputs: true,
  })('scripted'),
  messages: createAnthropic({ baseURL, apiKey })('scripted'),
}

for (const [name, model] of Object.entries(models)) {
  const providerOptions = name === 'stateless' ? { openai: { store: false } } : {}
  test(`a loop by ${name}`, async () => {
    const options = { model, prompt: LOOP, tools: { add }, stopWhen: stepCountIs(5), providerOptions }
    const result = await generateText(options)
    assert.equal(result.text, TEXT)
    const outputs = result.steps.flatMap((step) => step.toolResults.map((one) => one.output))
    assert.deepEqual(outputs, [3, 7, 10])
  })

  test(`a streamed loop by ${name}`, async () => {
    const result = streamText({
      model,
      prompt: LOOP,
      tools: { add },
      stopWhen: stepCountIs(5),
      providerOptions,
      onError: ({ error }) => assert.fail(error),
    })
    let text = ''
    for await (const piece of result.textStream) text += piece
    assert.equal(text, TEXT)
    assert.ok((await result.totalUsage).outputTokens > 0)
  })

  test(`an object by ${name}`, async () => {
    const schema = z.object({ name: z.string(), people: z.number() })
    const prompt = script({ text: '{"name": "Oslo", "people": 12}' })
    const result = await generateText({ model, prompt, output: Output.object({ schema }) })
    assert.deepEqual(result.output, { name: 'Oslo', people: 12 })
  })
}

test('vectors', async () => {
  const { embeddings } = await embedMany({
    model: openai.embeddingModel('embed'),
    values: ['a', 'b'],
  })
  assert.deepEqual(embeddings.map((one) => one.length), [32, 32])
})

test('openai for JavaScript', async () => {
  const client = new OpenAI({ baseURL, apiKey })
  const runner = client.chat.completions.runTools({
    model: 'scripted',
    messages: [{ role: 'user', content: LOOP }],
    tools: [
      {
        type: 'function',
        function: {
          name: 'add',
          parse: JSON.parse,
          function: ({ a, b }) => `${a + b}`,
          parameters: { type: 'object', properties: { a: { type: 'number' }, b: { type: 'number' } } },
        },
      },
    ],
  })
  assert.equal(await runner.finalContent(), TEXT)
  const stream = client.responses.stream({ model: 'scripted', input: script({ text: TEXT }) })
  assert.equal((await stream.finalResponse()).output_text, TEXT)
  await assert.rejects(client.models.retrieve('none'), OpenAI.NotFoundError)
})
