// The panels in the order of the page, by the names of their data.
//
// A panel is a module with `title` (its heading; empty: none), `link` (its name in the navigation; left out: none) and
// `render(root, data, page)`, which fills an element with the data of the selected run. It is called when the data have
// changed. With `everyRun` it draws all runs of `page.runs`.

import * as attention from "rollmesh/panels/attention.js";
import * as charts from "rollmesh/panels/charts.js";
import * as head from "rollmesh/panels/head.js";
import * as ledger from "rollmesh/panels/ledger.js";
import * as mesh from "rollmesh/panels/mesh.js";
import * as metrics from "rollmesh/panels/metrics.js";
import * as samples from "rollmesh/panels/samples.js";
import * as settings from "rollmesh/panels/settings.js";
import { grid } from "rollmesh/panels/grid.js";

export const PANELS = {
  head,
  attention,
  mesh,
  charts,
  ledger,
  pushes: grid("Weights on their way to generators", "Weights"),
  evaluations: grid("Evaluations", "Evaluations"),
  samples,
  stalls: grid("Stalls"),
  memory: grid("Peak memory by phase of turns, MiB"),
  facts: grid("Summary"),
  metrics,
  settings,
};
