// A request to the server's own API, streamed as JSON lines.
import { authorization, reason } from "./events.js";
import { count, milliseconds } from "./format.js";

export class Story {
  constructor(panel, lanes) {
    this.panel = panel;
    this.lanes = lanes;
    this.said = panel.querySelector("#story-said");
    this.button = panel.querySelector("#generate");
    this.told = panel.querySelector("#told");
    this.model = null;
    this.running = null;
    panel.querySelector("form").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.running) this.running.abort();
      else this.tell(panel.querySelector("#prompt").value, Number(panel.querySelector("#tokens").value));
    });
    panel.querySelector("#prompt").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        if (!this.running) this.button.click();
      }
    });
  }

  async tell(prompt, tokens) {
    this.running = new AbortController();
    this.button.textContent = "Stop";
    this.said.textContent = "waiting";
    const id = `page-${Math.random().toString(36).slice(2, 10)}`;
    this.lanes.own = id;
    this.told.replaceChildren(Object.assign(document.createElement("em"), { textContent: prompt }));
    const figures = { began: performance.now(), first: null, tokens: 0 };
    try {
      await this.stream(prompt, tokens, id, figures);
      this.said.textContent = this.summary(figures);
    } catch (error) {
      const stopped = error.name === "AbortError";
      this.said.textContent = stopped ? `stopped, ${this.summary(figures)}` : "failed";
      if (!stopped) this.wrong(error.message);
    } finally {
      this.running = null;
      this.button.textContent = "Generate";
    }
  }

  async stream(prompt, tokens, id, figures) {
    const body = JSON.stringify({ inputs: prompt, parameters: { max_new_tokens: tokens, output_formatter: "jsonlines" }, stream: true });
    const headers = { "Content-Type": "application/json", "x-request-id": id, ...authorization() };
    const path = `predictions/${encodeURIComponent(this.model ?? "")}`;
    const response = await fetch(path, { method: "POST", headers, body, signal: this.running.signal });
    if (!response.ok) throw new Error(await reason(response));
    const decoder = new TextDecoder(), reader = response.body.getReader();
    for (let rest = ""; ; ) {
      const { done, value } = await reader.read();
      const lines = (rest + decoder.decode(value, { stream: !done })).split("\n");
      rest = done ? "" : lines.pop();
      for (const line of lines) if (line.trim()) this.line(line, figures);
      if (done) return;
      this.said.textContent = this.summary(figures);
    }
  }

  line(line, figures) {
    let text = line, chunk = null;
    try {
      chunk = JSON.parse(line);
      text = chunk.token?.text ?? "";
    } catch { /* a model's own format */ }
    if (chunk?.error ?? chunk?.details?.finish_reason === "error") throw new Error(chunk.error ?? "the server could not finish");
    if (chunk === null || chunk.token) {
      figures.first ??= performance.now();
      figures.last = performance.now();
      figures.tokens += 1;
    }
    const end = this.told.scrollHeight - this.told.scrollTop - this.told.clientHeight < 20;
    this.told.append(text);
    if (end) this.told.scrollTop = this.told.scrollHeight;
  }

  wrong(text) {
    this.told.append(Object.assign(document.createElement("span"), { className: "wrong", textContent: ` ${text}` }));
  }

  summary({ began, first, last, tokens }) {
    if (first === null) return "waiting";
    const rate = tokens > 1 && last > first ? ` · ${count((tokens - 1) / ((last - first) / 1000))} tokens/s` : "";
    return `${count(tokens)} tokens · first after ${milliseconds(first - began)}${rate}`;
  }
}
