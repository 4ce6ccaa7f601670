// Puts the texts and data of another configuration in place. Every text was made when the page was written.
const data = JSON.parse(document.getElementById("data").textContent);
const views = {};
const root = document.documentElement;
let shown = data.shown, compared = data.compared;

const rows = (follow) => follow.timeline.map(([percent, mib]) => ({ percent, mib }));

function theme() {
  return root.dataset.theme === "dark" ? "dark" : "light";
}

// One thing after the other: what is chosen while charts are drawn waits for them.
let pending = Promise.resolve();
function then(action) {
  pending = pending.then(action);
  return pending;
}

async function draw() {
  delete root.dataset.ready;
  // errors only: that nothing is laid over a timeline is no reason to warn of an empty scale
  const options = { actions: false, logLevel: 1, renderer: "svg", tooltip: { theme: theme() } };
  for (const [name, specifications] of Object.entries(data.charts)) {
    if (views[name]) views[name].finalize();
    const result = await window.vegaEmbed(document.getElementById(name), structuredClone(specifications[theme()]), options);
    views[name] = result.view;
    if (name === "frontier") {
      result.view.addEventListener("click", (_event, item) => {
        if (item && item.datum && item.datum.index !== undefined) choose(Number(item.datum.index));
      });
    }
  }
  await replaceData();
  root.dataset.ready = "true";
}

const other = () => (compared === null || compared === shown ? null : data.follows[compared]);

async function replaceData() {
  const now = data.follows[shown], beside = other();
  views.timeline.data("shown", rows(now)).data("compared", beside ? rows(beside) : []).data("shades", now.shades);
  views.alive.data("alive", now.alive);
  if (views.frontier) views.frontier.data("chosen", data.points.filter((point) => point.index === shown));
  for (const view of Object.values(views)) await view.resize().runAsync();
}

function fill(id, lines, tag) {
  const place = document.getElementById(id);
  const made = lines.map((line) => {
    const element = document.createElement(tag);
    if (tag === "tr") {
      for (const text of line) element.appendChild(document.createElement("td")).textContent = text;
    } else {
      element.textContent = line;
    }
    return element;
  });
  (tag === "tr" ? place.tBodies[0] : place).replaceChildren(...made);
}

function putTexts() {
  const now = data.follows[shown], beside = other();
  for (const element of document.querySelectorAll('[data-text="name"]')) element.textContent = now.name;
  for (const element of document.querySelectorAll('[data-text="compared"]')) element.textContent = beside ? beside.name : "";
  document.getElementById("compared-key").hidden = beside === null;
  document.getElementById("no-timeline").hidden = now.timeline.length > 0;
  fill("regions", now.regions, "li");
  fill("figures", now.figures, "tr");
  fill("groups", now.groups, "tr");
  fill("buffers", now.buffers, "tr");
  const undecided = document.getElementById("no-decisions");
  if (undecided) {
    undecided.textContent = now.undecided;
    undecided.hidden = now.modules !== null;
  }
  for (const element of document.querySelectorAll("[data-module]")) {
    const [module, column] = element.dataset.module.split(".");
    element.textContent = now.modules ? now.modules[module][column] : "";
  }
  for (const element of document.querySelectorAll("[data-value]")) {
    element.textContent = now.values ? now.values[element.dataset.value] : "";
  }
  document.getElementById("code").textContent = now.code;
  document.getElementById("code-section").hidden = !now.code;
  for (const input of document.querySelectorAll('input[name="shown"]')) {
    input.checked = Number(input.value) === shown;
    input.closest("tr").classList.toggle("chosen", input.checked);
  }
}

function choose(index) {
  shown = index;
  putTexts();
  return then(replaceData);
}

for (const input of document.querySelectorAll('input[name="shown"]')) {
  input.addEventListener("change", () => choose(Number(input.value)));
}
for (const input of document.querySelectorAll('input[name="compared"]')) {
  input.addEventListener("change", () => {
    compared = Number(input.value);
    putTexts();
    then(replaceData);
  });
}

const button = document.getElementById("theme");
function setTheme(name) {
  root.dataset.theme = name;
  button.textContent = name === "dark" ? "light" : "dark";
  button.setAttribute("aria-pressed", String(name === "dark"));
}
setTheme(window.matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
button.addEventListener("click", () => {
  setTheme(theme() === "dark" ? "light" : "dark");
  then(draw);
});
then(draw);
