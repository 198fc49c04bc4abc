"""The server: OpenAI, TGI and Anthropic routes over `AsyncLLM`, and what an operator needs to trust it.

`app.create_app` puts it together; `run.serve` runs it in uvicorn. A request's way: `middleware` (id, log, key) ->
`routes/*` (one protocol a file; types in `protocol/*`) -> `prompts` and `sampling` (text to ids, fields to
`SamplingParams`) -> `generation` (the engine's deltas, counted and abortable) -> `parsers` (reasoning, tool calls) ->
JSON or `sse`.
"""
