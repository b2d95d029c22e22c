// The page: a conversation, the list of all, settings, and the meter of the cache.

import * as store from "./conversations.js";
import { chat, get, key } from "./client.js";
import { markdown } from "./markdown.js";

const $ = (id) => document.getElementById(id);
const text = $("text"), list = $("messages"), dialog = $("settings");
const FIELDS = ["temperature", "top_k", "top_p", "min_p", "repeat_penalty", "max_tokens", "seed"];
const SCROLL_SLACK = 60;

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

function messageNode(message, index) {
  const node = document.createElement("li");
  node.className = `message ${message.role}`;
  fill(node, message, index);
  return node;
}

function fill(node, message, index) {
  const one = shown(message);
  const body = document.createElement("div");
  body.className = "text";
  if (message.role === "user") body.textContent = one.content;
  else body.append(...markdown(one.content));
  const parts = [body];
  if (one.reasoning) {
    const details = document.createElement("details");
    details.open = node.querySelector("details")?.open ?? false;
    const summary = document.createElement("summary"), inner = document.createElement("div");
    summary.textContent = one.content || !one.waiting ? "Reasoning" : "Reasoning…";
    inner.textContent = one.reasoning;
    details.append(summary, inner);
    parts.unshift(details);
  }
  if (one.error) {
    const error = document.createElement("p");
    error.className = "error";
    error.textContent = one.error;
    parts.push(error);
  }
  node.classList.toggle("waiting", Boolean(one.waiting));
  if (!one.waiting) parts.push(actions(message, one, index));
  node.replaceChildren(...parts);
}

function actions(message, one, index) {
  const row = document.createElement("div");
  row.className = "actions";
  row.append(button("Copy", () => navigator.clipboard?.writeText(one.content)));
  if (message.role === "user") row.append(button("Edit", () => edit(index)));
  else {
    if (index === current.messages.length - 1) row.append(button("Again", again));
    if (message.variants?.length > 1) {
      const at = message.chosen ?? message.variants.length - 1;
      const turn = (by) => () => {
        message.chosen = (at + by + message.variants.length) % message.variants.length;
        keep();
        show();
      };
      row.append(button("‹", turn(-1)), `${at + 1}/${message.variants.length}`, button("›", turn(1)));
    }
    if (one.stats) row.append(one.stats);
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
        await store.remove(one.id);
        if (one.id === current.id) start();
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

async function keep() {
  try {
    await store.save(current);
    await refresh();
  } catch (error) {
    notice(`This conversation can't be kept in the browser: ${error.message}`);
  }
}

// Conversations

function select(conversation) {
  stop();
  current = conversation;
  closeMenu();
  show();
  showList();
  text.focus();
}

const start = () => select(store.fresh());

function edit(index) {
  stop();
  text.value = shown(current.messages[index]).content;
  current.messages.length = index;
  keep();
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
  return { messages: system ? [{ role: "system", content: system }, ...messages] : messages, ...sampling };
}

async function answer(conversation, reply) {
  const body = asked(conversation, reply);
  const one = { content: "", reasoning: "", waiting: true };
  reply.variants.push(one);
  delete reply.chosen;
  const control = (running = new AbortController());
  busy(true);
  const draw = () => {
    if (conversation !== current) return;
    const isAtEnd = list.scrollHeight - list.scrollTop - list.clientHeight < SCROLL_SLACK;
    const index = current.messages.indexOf(reply);
    if (list.children[index]) fill(list.children[index], reply, index);
    if (isAtEnd) list.scrollTop = list.scrollHeight;
  };
  show();
  let pending = false;
  const soon = () => {
    if (pending) return;
    pending = true;
    requestAnimationFrame(() => {
      pending = false;
      draw();
    });
  };
  try {
    for await (const chunk of chat(body, control.signal)) {
      const choice = chunk.choices[0];
      one.content += choice?.delta.content ?? "";
      one.reasoning += choice?.delta.reasoning_content ?? "";
      if (chunk.timings) one.stats = stats(chunk.timings);
      soon();
    }
  } catch (error) {
    if (error.name !== "AbortError") one.error = error.message;
  }
  one.waiting = false;
  if (running === control) {
    running = null;
    busy(false);
  }
  draw();
  try {
    await store.save(conversation);
    await refresh();
  } catch (error) {
    notice(`This conversation can't be kept in the browser: ${error.message}`);
  }
  meter();
}

const stats = (timings) =>
  `${timings.predicted_n} tokens, ${timings.predicted_per_second.toFixed(1)}/s` +
  (timings.cache_n ? `, ${timings.cache_n} of the prompt known` : "");

function stop() {
  running?.abort();
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
    const pool = await get("localkv/cache");
    const part = (pages) => pages / pool.pages.all;
    $("meter-bar").children[0].style.width = `${100 * part(pool.pages.running)}%`;
    $("meter-bar").children[1].style.width = `${100 * part(pool.pages.kept)}%`;
    const used = part(pool.pages.running + pool.pages.kept);
    const read = pool.prompt_tokens.evaluated + pool.prompt_tokens.reused;
    const hits = read ? `, ${Math.round((100 * pool.prompt_tokens.reused) / read)} % of prompts reused` : "";
    const more = document.createElement("span");
    more.textContent = `, ${sized(used * pool.bytes)} of ${sized(pool.bytes)} in ${pool.type_k}/${pool.type_v}${hits}`;
    const count = (tokens) => Math.round(tokens).toLocaleString("en");
    $("meter-text").replaceChildren(`${count(used * pool.tokens)} of ${count(pool.tokens)} tokens`, more);
    $("meter").title =
      `${pool.requests.running} running, ${pool.requests.waiting} waiting; ${pool.pages.shared} of ` +
      `${pool.pages.all} pages are shared`;
  } catch (error) {
    $("meter-text").textContent = error.message;
  }
}

async function showModel() {
  try {
    const { data } = await get("v1/models");
    $("model").textContent = data[0].id;
    document.title = `${data[0].id} · localkv`;
    if (data[0].status.value !== "loaded") setTimeout(showModel, 500);
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

await refresh();
if (conversations.length) select(conversations[0]);
showModel();
