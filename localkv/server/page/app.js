// The page: a conversation, the list of all, settings, and the meter of the cache.

import * as store from "./conversations.js";
import { chat, get, key } from "./client.js";
import { copyButton } from "./copy.js";
import { draw } from "./markdown.js";

const $ = (id) => document.getElementById(id);
const text = $("text"), list = $("messages"), dialog = $("settings");
const FIELDS = ["temperature", "top_k", "top_p", "min_p", "repeat_penalty", "max_tokens", "seed"];
const SCROLL_SLACK = 60;
const DRAW_PAUSE = 40; // ms; an answer is drawn so often, and rarer where that takes long

let current = store.fresh();
let conversations = [];
let running = null;

// Settings

const settings = () => JSON.parse(localStorage.getItem("settings") ?? "{}");

function openSettings() {
  const form = dialog.querySelector("form"), known = settings();
  for (const name of ["system", ...FIELDS]) form.elements[name].value = known[name] ?? "";
  form.elements.key.value = key.get();
  dialog.showModal();
}

dialog.addEventListener("close", () => {
  if (dialog.returnValue !== "save") return;
  const form = dialog.querySelector("form"), chosen = {};
  if (form.elements.system.value.trim()) chosen.system = form.elements.system.value;
  for (const name of FIELDS)
    if (form.elements[name].value !== "") chosen[name] = Number(form.elements[name].value);
  localStorage.setItem("settings", JSON.stringify(chosen));
  key.set(form.elements.key.value.trim());
  notice("");
  showModel();
  text.focus();
});

// What is shown

function notice(message) {
  $("notice").textContent = message;
  $("notice").hidden = !message;
}

const button = (label, act) => {
  const node = document.createElement("button");
  node.type = "button";
  node.textContent = label;
  node.addEventListener("click", act);
  return node;
};

const shown = (message) => message.variants?.[message.chosen ?? message.variants.length - 1] ?? message;

const piece = (name, className = "") => {
  const node = document.createElement(name);
  node.className = className;
  return node;
};

function messageNode(message, index) {
  const node = piece("li", `message ${message.role}`);
  if (message.role === "user") node.append(piece("div", "text"), piece("div", "actions"));
  else {
    const details = piece("details");
    details.append(piece("summary"), piece("div"));
    node.append(details, piece("div", "text"), piece("div", "calls"), piece("p", "error"), piece("div", "actions"));
  }
  fill(node, message, index);
  return node;
}

// Bring a message's node in line with it; what has not changed keeps the focus and the selection.
function fill(node, message, index) {
  const one = shown(message), body = node.querySelector(":scope > .text");
  if (message.role === "user") set(body, one.content);
  else {
    const [details, , calls, error] = node.children;
    details.hidden = !one.reasoning;
    set(details.firstChild, one.content || !one.waiting ? "Reasoning" : "Reasoning…");
    set(details.lastChild, one.reasoning ?? "");
    draw(body, one.content);
    const asCall = ({ name, arguments: values }) => {
      const call = piece("pre");
      call.textContent = `${name} ${values}`;
      return call;
    };
    calls.replaceChildren(...(one.calls ?? []).map(asCall));
    set(error, one.error ?? "");
    error.hidden = !one.error;
  }
  node.classList.toggle("waiting", Boolean(one.waiting));
  node.lastChild.replaceChildren(...(one.waiting ? [] : actions(message, one, index)));
}

function set(node, value) {
  if (node.textContent !== value) node.textContent = value;
}

function actions(message, one, index) {
  const row = [copyButton("Copy", () => one.content)];
  if (message.role === "user") row.push(button("Edit", () => edit(index)));
  else {
    if (index === current.messages.length - 1) row.push(button("Again", again));
    if (message.variants?.length > 1) {
      const at = message.chosen ?? message.variants.length - 1;
      const turn = (by) => () => {
        message.chosen = (at + by + message.variants.length) % message.variants.length;
        keep();
        show();
      };
      row.push(button("‹", turn(-1)), `${at + 1}/${message.variants.length}`, button("›", turn(1)));
    }
    if (one.stats) row.push(one.stats);
  }
  return row;
}

function show() {
  list.replaceChildren(...current.messages.map(messageNode));
  list.scrollTop = list.scrollHeight;
}

function showList() {
  $("conversations").replaceChildren(
    ...conversations.map((one) => {
      const item = document.createElement("li");
      if (one.id === current.id) item.setAttribute("aria-current", "true");
      const open = button(one.title || "New conversation", () => select(one));
      open.className = "open";
      const remove = button("×", async () => {
        const isOpen = one.id === current.id;
        if (isOpen) await stop(); // or the answer would be kept after that
        await store.remove(one.id);
        if (isOpen) await start();
        await refresh();
      });
      remove.className = "delete";
      remove.setAttribute("aria-label", `Delete ${one.title}`);
      item.append(open, remove);
      return item;
    }),
  );
}

async function refresh() {
  conversations = await store.all();
  showList();
}

async function keep(conversation = current) {
  try {
    await store.save(conversation);
    await refresh();
  } catch (error) {
    notice(`This conversation can't be kept in the browser: ${error.message}`);
  }
}

// Conversations

async function select(conversation) {
  if (conversation.id !== current.id || !running) {
    await stop();
    current = conversations.find((one) => one.id === conversation.id) ?? conversation;
  }
  closeMenu();
  show();
  showList();
  text.focus();
}

const start = () => select(store.fresh());

async function edit(index) {
  await stop();
  text.value = shown(current.messages[index]).content;
  current.messages.length = index; // what is stored stays until the message is sent
  show();
  grow();
  text.focus();
}

function again() {
  if (!running) answer(current, current.messages.at(-1));
}

async function send() {
  const content = text.value.trim();
  if (!content || running) return;
  text.value = "";
  grow();
  current.title ||= content.slice(0, 60);
  current.messages.push({ role: "user", content });
  const reply = { role: "assistant", variants: [] };
  current.messages.push(reply);
  await answer(current, reply);
}

function asked(conversation, reply) {
  const { system, ...sampling } = settings();
  const before = conversation.messages.slice(0, conversation.messages.indexOf(reply));
  const messages = before.map((message) => ({ role: message.role, content: shown(message).content }));
  return { ...chosen(), messages: system ? [{ role: "system", content: system }, ...messages] : messages, ...sampling };
}

async function answer(conversation, reply) {
  const body = asked(conversation, reply);
  const one = { content: "", reasoning: "", waiting: true };
  reply.variants.push(one);
  delete reply.chosen;
  const control = new AbortController();
  running = { control, done: written(conversation, reply, one, body, control) };
  await running.done;
}

async function written(conversation, reply, one, body, control) {
  busy(true);
  show();
  await keep(conversation);
  let pending = null;
  // an answer is stored before it is drawn: whatever drawing does, the text is there when the page opens again
  const soon = (pause) => {
    pending ??= setTimeout(async () => {
      const began = performance.now();
      await store.save(conversation).catch(() => {});
      pending = null;
      drawAnswer(conversation, reply);
      drawingTook = performance.now() - began;
    }, pause);
  };
  let drawingTook = 0;
  try {
    for await (const chunk of chat(body, control.signal)) {
      const delta = chunk.choices[0]?.delta ?? {};
      one.content += delta.content ?? "";
      one.reasoning += delta.reasoning_content ?? "";
      for (const call of delta.tool_calls ?? []) {
        const known = ((one.calls ??= [])[call.index] ??= { name: "", arguments: "" });
        known.name += call.function?.name ?? "";
        known.arguments += call.function?.arguments ?? "";
      }
      if (chunk.timings) one.stats = stats(chunk.timings);
      soon(Math.max(DRAW_PAUSE, 4 * drawingTook));
    }
  } catch (error) {
    if (error.name !== "AbortError") one.error = error.message;
  }
  clearTimeout(pending);
  one.waiting = false;
  running = null;
  busy(false);
  await keep(conversation);
  drawAnswer(conversation, reply);
  meter();
}

function drawAnswer(conversation, reply) {
  if (conversation !== current) return;
  const isAtEnd = list.scrollHeight - list.scrollTop - list.clientHeight < SCROLL_SLACK;
  const index = current.messages.indexOf(reply);
  if (list.children[index]) fill(list.children[index], reply, index);
  if (isAtEnd) list.scrollTop = list.scrollHeight;
}

const stats = (timings) =>
  `${timings.predicted_n} tokens, ${timings.predicted_per_second.toFixed(1)}/s` +
  (timings.cache_n ? `, ${timings.cache_n} of the prompt known` : "");

// Resolves once the answer so far is kept.
function stop() {
  running?.control.abort();
  return running?.done;
}

function busy(is) {
  $("send").hidden = is;
  $("stop").hidden = !is;
}

// The meter

const sized = (bytes) => {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const at = Math.min(Math.floor(Math.log2(Math.max(bytes, 1)) / 10), units.length - 1);
  return `${(bytes / 2 ** (10 * at)).toFixed(at ? 1 : 0)} ${units[at]}`;
};

async function meter() {
  try {
    const pool = await get(`localkv/cache?${new URLSearchParams(chosen())}`);
    const part = (pages) => pages / pool.pages.all;
    $("meter-bar").children[0].style.width = `${100 * part(pool.pages.running)}%`;
    $("meter-bar").children[1].style.width = `${100 * part(pool.pages.kept)}%`;
    const used = part(pool.pages.running + pool.pages.kept);
    const read = pool.prompt_tokens.evaluated + pool.prompt_tokens.reused;
    const hits = read ? `, ${Math.round((100 * pool.prompt_tokens.reused) / read)} % of prompts reused` : "";
    const unit = piece("span", "unit"), more = piece("span", "more");
    unit.textContent = " tokens";
    more.textContent = `, ${sized(used * pool.bytes)} of ${sized(pool.bytes)} in ${pool.type_k}/${pool.type_v}${hits}`;
    const count = (tokens) => Math.round(tokens).toLocaleString("en");
    $("meter-text").replaceChildren(`${count(used * pool.tokens)} of ${count(pool.tokens)}`, unit, more);
    $("meter").title =
      `${pool.requests.running} running, ${pool.requests.waiting} waiting; ${pool.pages.shared} of ` +
      `${pool.pages.all} pages are shared`;
  } catch (error) {
    $("meter-text").textContent = error.message;
  }
}

// The model that is asked, where the server has several.
const chosen = () => ($("models").options.length > 1 ? { model: $("models").value } : {});

function offer(names) {
  const menu = $("models"), last = localStorage.getItem("model");
  if (menu.options.length === names.length) return;
  menu.replaceChildren(...names.map((name) => new Option(name, name)));
  if (names.includes(last)) menu.value = last;
  menu.hidden = names.length < 2;
  $("model").hidden = names.length > 1;
}

async function showModel() {
  try {
    const { data } = await get("v1/models");
    offer(data.map((one) => one.id));
    const shown = data.find((one) => one.id === chosen().model) ?? data[0];
    $("model").textContent = shown.id;
    document.title = `${shown.id} · localkv`;
    if (shown.status.value === "loading") setTimeout(showModel, 500);
  } catch (error) {
    notice(error.message);
  }
  meter();
}

// Keys and buttons

function grow() {
  text.style.height = "auto";
  text.style.height = `${text.scrollHeight + 2}px`;
}

function closeMenu() {
  $("sidebar").classList.remove("open");
  $("menu").setAttribute("aria-expanded", "false");
}

$("models").addEventListener("change", () => {
  localStorage.setItem("model", $("models").value);
  showModel();
});
$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
text.addEventListener("input", grow);
text.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !dialog.open) {
    stop();
    closeMenu();
  }
  if (event.altKey && event.code === "KeyN") start();
  if (event.altKey && event.code === "KeyS") openSettings();
});
$("new").addEventListener("click", start);
$("stop").addEventListener("click", stop);
$("settings-open").addEventListener("click", openSettings);
$("menu").addEventListener("click", () => {
  const isOpen = $("sidebar").classList.toggle("open");
  $("menu").setAttribute("aria-expanded", String(isOpen));
});
list.addEventListener("click", closeMenu);
$("export").addEventListener("click", async () => {
  const file = new Blob([JSON.stringify(await store.all(), null, 1)], { type: "application/json" });
  const anchor = document.createElement("a");
  anchor.href = URL.createObjectURL(file);
  anchor.download = "conversations.json";
  anchor.click();
  URL.revokeObjectURL(anchor.href);
});
setInterval(() => document.hidden || meter(), 2000);

showModel();
try {
  await refresh();
  if (conversations.length) await select(conversations[0]);
} catch (error) {
  notice(`Conversations can't be kept in this browser: ${error.message}`);
}
