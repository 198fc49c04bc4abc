// The chat box: streams an answer and says what it took.

import { events, headers } from "./events.js";
import { seconds } from "./charts.js";

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "seed"];
const $ = (id) => document.getElementById(id);

export class Chat {
  /** `model()` gives the chosen model's snapshot. */
  constructor(model) {
    this.model = model;
    this.messages = [];
    this.abort = null;
    $("form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    $("prompt").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.send();
      }
    });
    $("prompt").addEventListener("input", () => this.grow());
    $("stop-button").addEventListener("click", () => this.abort?.abort());
    $("clear").addEventListener("click", () => this.clear());
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.abort?.abort();
      if (event.key === "/" && !/^(INPUT|TEXTAREA|SELECT)$/.test(document.activeElement.tagName)) {
        event.preventDefault();
        $("prompt").focus();
      }
    });
  }

  grow() {
    const box = $("prompt");
    box.style.height = "auto";
    box.style.height = `${box.scrollHeight + 2}px`;
  }

  clear() {
    this.abort?.abort();
    this.messages = [];
    $("log").replaceChildren($("hello") ?? this.hello);
    $("prompt").focus();
  }

  /** Sampling fields that were filled in; null where one is invalid (the browser says which). */
  sampling() {
    const chosen = {};
    for (const name of NUMBERS) {
      const input = $(name);
      if (!input.checkValidity()) {
        $("controls").open = true;
        input.reportValidity();
        return null;
      }
      if (input.value !== "") chosen[name] = Number(input.value);
    }
    if ($("stop").value) chosen.stop = [$("stop").value];
    return chosen;
  }

  async send() {
    const text = $("prompt").value.trim();
    const model = this.model();
    const sampling = this.sampling();
    if (!text || !model || !sampling || this.abort) return;
    $("prompt").value = "";
    this.grow();
    this.messages.push({ role: "user", content: text });
    this.bubble("user", text);
    const reply = new Reply(this.bubble("assistant", ""));
    this.abort = new AbortController();
    $("stop-button").hidden = false;
    $("send").hidden = true;
    try {
      await this.stream(model, sampling, reply);
    } catch (error) {
      if (error.name !== "AbortError") {
        if (error.status === 401) {
          $("controls").open = true;
          $("key").focus();
        }
        this.bubble("error", error.message);
      }
    } finally {
      this.abort = null;
      $("stop-button").hidden = true;
      $("send").hidden = false;
      reply.end();
      if (reply.text) this.messages.push({ role: "assistant", content: reply.text });
      else this.messages.pop();
    }
  }

  async stream(model, sampling, reply) {
    const system = $("system").value.trim();
    const body = { model: model.name, stream: true, stream_options: { include_usage: true }, ...sampling };
    let url = "v1/chat/completions";
    if (model.chat) {
      body.messages = [...(system ? [{ role: "system", content: system }] : []), ...this.messages];
    } else {
      url = "v1/completions";
      body.prompt = [system, ...this.messages.map((message) => message.content)].filter(Boolean).join("\n");
    }
    const init = {
      method: "POST",
      headers: headers({ "content-type": "application/json" }),
      body: JSON.stringify(body),
      signal: this.abort.signal,
    };
    for await (const data of events(url, init)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      if (chunk.usage) reply.usage = chunk.usage;
      for (const choice of chunk.choices) {
        if (choice.delta?.reasoning_content) reply.think(choice.delta.reasoning_content);
        reply.add(choice.delta?.content ?? choice.text ?? "");
        if (choice.finish_reason) reply.finish = choice.finish_reason;
      }
      this.follow();
    }
  }

  bubble(role, text) {
    if ($("hello")) {
      this.hello = $("hello");
      this.hello.remove();
    }
    const node = document.createElement("div");
    node.className = `message ${role}`;
    node.textContent = text;
    if (role === "error") node.setAttribute("role", "alert");
    $("log").append(node);
    this.follow(true);
    return node;
  }

  /** Keep the end in sight, unless the reader has scrolled up. */
  follow(always = false) {
    const log = $("log");
    if (always || log.scrollHeight - log.scrollTop - log.clientHeight < 80) log.scrollTop = log.scrollHeight;
  }
}

class Reply {
  constructor(node) {
    this.node = node;
    this.text = "";
    this.started = performance.now();
    this.first = null;
    this.usage = null;
    this.finish = null;
    node.classList.add("streaming");
    node.setAttribute("aria-busy", "true");
    this.body = document.createElement("div");
    this.body.className = "text";
    node.append(this.body);
  }

  add(text) {
    if (!text) return;
    this.first ??= performance.now();
    this.text += text;
    // Text stays text: code fences become blocks when the answer is complete.
    this.body.append(text);
  }

  think(text) {
    if (!this.thought) {
      const details = document.createElement("details");
      details.open = true;
      const summary = document.createElement("summary");
      summary.textContent = "Reasoning";
      this.thought = document.createElement("span");
      details.append(summary, this.thought);
      this.node.prepend(details);
    }
    this.first ??= performance.now();
    this.thought.append(text);
  }

  end() {
    this.node.classList.remove("streaming");
    this.node.removeAttribute("aria-busy");
    if (!this.text && !this.thought) {
      this.node.remove();
      return;
    }
    this.format();
    const meta = document.createElement("small");
    meta.className = "meta";
    const parts = [];
    if (this.first) parts.push(`first token ${seconds((this.first - this.started) / 1000)}`);
    const tokens = this.usage?.completion_tokens;
    if (tokens > 1) {
      const rate = ((tokens - 1) / (performance.now() - this.first)) * 1000;
      parts.push(`${tokens} tokens`, `${rate.toFixed(rate < 10 ? 1 : 0)} tokens/s`);
    }
    const cached = this.usage?.prompt_tokens_details?.cached_tokens;
    if (cached) parts.push(`${cached} of ${this.usage.prompt_tokens} prompt tokens cached`);
    parts.push(this.finish === "length" ? "cut at max tokens" : this.finish ? "" : "stopped");
    meta.textContent = parts.filter(Boolean).join(" · ");
    this.node.append(meta);
  }

  format() {
    const pieces = this.text.split(/^```[^\n]*\n([\s\S]*?)(?:^```[^\S\n]*$|$(?![\s\S]))/m);
    if (pieces.length === 1) return;
    this.body.replaceChildren(
      ...pieces.filter((piece) => piece).map((piece) => {
        if (pieces.indexOf(piece) % 2 === 0) return document.createTextNode(piece.trim());
        const block = document.createElement("pre");
        block.textContent = piece.replace(/\n$/, "");
        return block;
      }),
    );
  }
}
