// The page: one section per panel; a panel is drawn again when its data have changed.

import { h } from "rollmesh/dom.js";
import { PANELS } from "rollmesh/panels/all.js";
import { Refused, giveKey, openSource } from "rollmesh/source.js";
import { onScheme } from "rollmesh/theme.js";

const LIVE_MS = 2000;
const IDLE_MS = 15000;

class Page {
  constructor(main, nav, freshness) {
    this.main = main;
    this.nav = nav;
    this.freshness = freshness;
    this.source = openSource();
    this.selected = 0;
    this.sections = new Map();
    this.drawn = new Map();
  }

  /** Runs of the page: `{ name, panels }` each. */
  get runs() {
    return this.source.runs;
  }

  get selectedRun() {
    return this.runs[this.selected];
  }

  /** True in a page of one file, next to the folder of its run. */
  get inFile() {
    return this.source.inFile;
  }

  /** Shows the panels of another run; the curves are those of all runs. */
  select(place) {
    this.selected = place;
    this.draw();
  }

  draw() {
    for (const [name, panel] of Object.entries(PANELS)) this.#drawPanel(name, panel);
    this.#drawNavigation();
  }

  #drawPanel(name, panel) {
    const data = this.selectedRun.panels[name];
    const tags = panel.everyRun ? this.source.tags : [this.source.tags[this.selected]];
    const state = JSON.stringify([this.selected, ...tags.map((run) => run[name] ?? null)]);
    if (this.drawn.get(name) === state) return;
    this.drawn.set(name, state);
    const shown = panel.everyRun ? this.runs.some((run) => run.panels[name]) : Boolean(data);
    const section = this.#section(name, panel);
    section.hidden = !shown;
    if (!shown) return;
    panel.render(section.lastElementChild, data, this);
  }

  #section(name, panel) {
    let section = this.sections.get(name);
    if (!section) {
      const body = h("div", { class: `panel panel-${name}` });
      const heading = panel.title ? h("h2", { id: `${name}-title` }, panel.title) : null;
      section = h("section", { id: name, "aria-labelledby": heading && `${name}-title` }, heading, body);
      this.sections.set(name, section);
      this.main.append(section);
    }
    return section;
  }

  #drawNavigation() {
    const links = Object.entries(PANELS)
      .filter(([name]) => !this.sections.get(name).hidden)
      .flatMap(([name, panel]) => panel.links ?? (panel.link ? [[name, panel.link]] : []))
      .filter(([name]) => document.getElementById(name)?.hidden === false);
    const text = JSON.stringify(links);
    if (this.nav.dataset.links === text) return;
    this.nav.dataset.links = text;
    this.nav.replaceChildren(...links.map(([name, label]) => h("a", { href: `#${name}` }, label)));
  }

  async refresh() {
    await this.source.refresh();
    if (this.selected >= this.runs.length) this.selected = 0;
    this.main.querySelector(".notice")?.remove();
    this.draw();
    document.title = `${this.runs.map((run) => run.name).join(", ")} · Rollmesh`;
    this.main.dataset.state = "drawn";
    const live = this.source.index.live && !this.inFile;
    this.freshness.textContent = live ? "live" : "";
    return live;
  }

  /** Draws the page, and again whenever something is new while it is in sight. */
  async follow() {
    for (;;) {
      let wait = IDLE_MS;
      try {
        if (await this.refresh()) wait = LIVE_MS;
      } catch (error) {
        if (error instanceof Refused) await this.#askForKey();
        else this.#trouble(error);
        if (error instanceof Refused) continue;
      }
      if (this.inFile) return;
      await new Promise((resolve) => setTimeout(resolve, wait));
      await inSight();
    }
  }

  #trouble(error) {
    this.freshness.textContent = "no connection: what is shown is old";
    if (!this.runs.length) this.#notice(h("p", {}, `The page cannot be shown: ${error.message}`));
  }

  /** Waits for the key of the page. */
  #askForKey() {
    return new Promise((resolve) => {
      const input = h("input", { id: "key", type: "password", autocomplete: "off", required: true });
      const form = h(
        "form",
        {
          submit: (event) => {
            event.preventDefault();
            giveKey(input.value.trim());
            resolve();
          },
        },
        h("label", { for: "key" }, "Key that the command which serves this page has printed"),
        input,
        h("button", {}, "Show the page"),
      );
      this.#notice(form);
    });
  }

  #notice(content) {
    this.main.querySelector(".notice")?.remove();
    this.main.prepend(h("div", { class: "notice" }, content));
  }
}

/** Resolves once the page is in sight. */
function inSight() {
  if (!document.hidden) return Promise.resolve();
  return new Promise((resolve) => document.addEventListener("visibilitychange", resolve, { once: true }));
}

const page = new Page(...["main", "nav", "freshness"].map((id) => document.getElementById(id)));
onScheme(() => {
  page.drawn.clear();
  if (page.runs.length) page.draw();
});
page.follow();
