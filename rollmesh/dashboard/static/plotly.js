// plotly.js, loaded once: from the server, or inflated from the page itself.

let loading = null;

/** The library; everything is drawn after it has come. */
export function plotly() {
  loading ??= load();
  return loading;
}

async function load() {
  const embedded = document.getElementById("plotly");
  const url = embedded ? URL.createObjectURL(await inflate(embedded.textContent)) : "/plotly.min.js";
  await new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = url;
    script.onload = resolve;
    script.onerror = () => reject(new Error("plotly.js cannot be loaded"));
    document.head.append(script);
  });
  if (embedded) URL.revokeObjectURL(url);
  return window.Plotly;
}

async function inflate(base64) {
  const bytes = Uint8Array.from(atob(base64), (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Blob([await new Response(stream).blob()], { type: "text/javascript" });
}
