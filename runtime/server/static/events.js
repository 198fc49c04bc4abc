// Server-sent events over fetch: unlike EventSource it can post, carry a key, and be aborted.

/** Headers with the API key, where the user gave one. */
export function headers(extra = {}) {
  const key = document.getElementById("key").value.trim();
  return key ? { ...extra, authorization: `Bearer ${key}` } : extra;
}

/** Yields the `data` of each event as text. Throws an Error with the server's own message on a bad status. */
export async function* events(url, init = {}) {
  const response = await fetch(url, init);
  if (!response.ok) throw Object.assign(new Error(await reason(response)), { status: response.status });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  try {
    while (true) {
      const { value, done } = await reader.read();
      if (done) return;
      buffer += value;
      const parts = buffer.split("\n\n");
      buffer = parts.pop();
      for (const part of parts) {
        const data = part.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
        if (data) yield data;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

async function reason(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return text || response.statusText;
  }
}
