// The data of the page: in the page itself, or on its server, which is asked only for what has changed.

const TIMEOUT_MS = 20000;
const KEY = "rollmesh-key";

export class Refused extends Error {}

/** The source of this page. */
export function openSource() {
  const embedded = document.getElementById("data");
  return embedded ? new EmbeddedSource(JSON.parse(embedded.textContent)) : new ServerSource();
}

class EmbeddedSource {
  constructor(data) {
    this.inFile = true;
    this.runs = data.index.runs.map((run, place) => ({ name: run.name, panels: data.panels[place] }));
    this.index = data.index;
    this.tags = data.index.runs.map((run) => run.panels);
  }

  async refresh() {}
}

class ServerSource {
  constructor() {
    this.inFile = false;
    this.runs = [];
    this.tags = [];
    this.index = null;
    takeKey();
  }

  /** Reads what has changed: `runs`, `index`, and `tags`, which name the state of each panel. */
  async refresh() {
    const index = await ask("/api/index");
    const runs = await Promise.all(index.runs.map((run, place) => this.#run(run, place)));
    this.index = index;
    this.runs = runs;
    this.tags = index.runs.map((run) => run.panels);
  }

  async #run(run, place) {
    const before = this.runs[place]?.panels ?? {};
    const known = this.tags[place] ?? {};
    const panels = await Promise.all(
      Object.entries(run.panels).map(async ([name, tag]) => [
        name,
        known[name] === tag ? before[name] : await ask(`/api/runs/${place}/${name}`),
      ]),
    );
    return { name: run.name, panels: Object.fromEntries(panels) };
  }
}

/** Keeps the key of the fragment for this tab, and takes it out of sight. */
function takeKey() {
  const key = new URLSearchParams(location.hash.slice(1)).get("key");
  if (!key) return;
  sessionStorage.setItem(KEY, key);
  history.replaceState(null, "", location.pathname);
}

/** Keeps a key that the reader has typed. */
export const giveKey = (key) => sessionStorage.setItem(KEY, key);

async function ask(path) {
  const response = await fetch(path, {
    headers: { Authorization: `Bearer ${sessionStorage.getItem(KEY) ?? ""}` },
    signal: AbortSignal.timeout(TIMEOUT_MS),
  });
  if (response.status === 401) throw new Refused();
  if (!response.ok) throw new Error(`${path}: ${response.status}`);
  return response.json();
}
