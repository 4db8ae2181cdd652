// The server's snapshots: Server-Sent Events by fetch, because EventSource cannot send an API key.
const SILENT_SECONDS = 5; // a server that is there sends four snapshots a second

export const secrets = { key: location.hash.slice(1) }; // of the link that the server shows, or typed; nowhere else

export function authorization() {
  return secrets.key ? { Authorization: `Bearer ${secrets.key}` } : {};
}

// What an error response says, whatever format it has.
export async function reason(response) {
  const text = (await response.text()).slice(0, 2000);
  try {
    const body = JSON.parse(text), error = body.error ?? body.message ?? body.detail;
    return error?.message ?? (typeof error === "string" ? error : text);
  } catch {
    return text || `status ${response.status}`;
  }
}

export class Events {
  // `on`: snapshot(data), link(text), refused(status, text)
  constructor(on) {
    this.on = on;
    this.model = null;
    this.turn = 0;
  }

  async open() {
    const turn = ++this.turn;
    this.stop?.abort();
    for (let wait = 1; turn === this.turn; wait = Math.min(8, wait * 2)) {
      const began = performance.now();
      const again = await this.read(turn).catch(() => true);
      if (turn !== this.turn || !again) return;
      if (performance.now() - began > 5000) wait = 1;
      this.on.link(`disconnected, next try in ${wait} s`);
      await new Promise((resolve) => setTimeout(resolve, wait * 1000));
    }
  }

  close() {
    this.turn += 1;
    this.stop?.abort();
  }

  // Reads one response to its end. Whether it is worth another try.
  async read(turn) {
    const stop = new AbortController();
    this.stop = stop;
    let silent;
    const heard = () => {
      clearTimeout(silent);
      silent = setTimeout(() => stop.abort(), SILENT_SECONDS * 1000);
    };
    heard();
    try {
      return await this.listen(turn, stop.signal, heard);
    } finally {
      clearTimeout(silent);
    }
  }

  async listen(turn, signal, heard) {
    const query = this.model === null ? "" : `?model=${encodeURIComponent(this.model)}`;
    const response = await fetch(`monitor/events${query}`, { headers: authorization(), signal, cache: "no-store" });
    if (turn !== this.turn) return false;
    if (!response.ok) {
      const text = await reason(response);
      return turn === this.turn && this.on.refused(response.status, text);
    }
    const decoder = new TextDecoder(), reader = response.body.getReader();
    for (let rest = ""; ; ) {
      const { done, value } = await reader.read();
      if (done || turn !== this.turn) return true;
      heard();
      const parts = (rest + decoder.decode(value, { stream: true })).split("\n\n");
      rest = parts.pop();
      // Of several that came together only the last is news.
      const last = parts.filter((part) => part.startsWith("data: ")).at(-1);
      // A mistake in what shows it is not one of the connection.
      if (last) queueMicrotask(() => this.on.snapshot(JSON.parse(last.slice(6))));
    }
  }
}
