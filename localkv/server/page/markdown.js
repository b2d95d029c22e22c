// Markdown as DOM nodes. Text only ever becomes text: nothing here parses HTML.
//
// Whatever the text is, drawing it takes time in proportion to its length, and blocks and spans lie in each other
// at most MOST_NESTED deep: browsers lay nodes out by recursion, and a tab ends where that goes too deep. What is
// nested deeper, or comes after MOST_NODES, is shown as it was written.

import { copyButton } from "./copy.js";

const MOST_NESTED = 20, MOST_NODES = 20000, MOST_COLUMNS = 50;

let nodesLeft = MOST_NODES;

function element(name, children = []) {
  nodesLeft--;
  const node = document.createElement(name);
  for (const child of children) node.append(child); // spread, they could be too many for a call
  return node;
}

function plain(text) {
  const node = element("div", [text]);
  node.className = "plain";
  return node;
}

// Spans in a line

const SPECIAL = /\\[*_`~]|`+|\*\*?|__?|~~|\[|https?:\/\//g;
const MARKS = { "**": "strong", __: "strong", "*": "em", _: "em", "~~": "del" };

const isSpace = (character) => character === undefined || /\s/.test(character);
const isWord = (character) => character !== undefined && /[\p{L}\p{N}_]/u.test(character);

function link(target, children) {
  const node = element("a", children);
  node.href = target;
  node.rel = "noopener noreferrer";
  node.target = "_blank";
  return node;
}

// Finds texts at or after positions that only ever grow: all searches together read the line once.
function finder(text) {
  const known = new Map();
  return (what, from) => {
    const last = known.get(what);
    if (last !== undefined && last >= from) return last;
    const at = text.indexOf(what, from);
    const found = at < 0 ? Infinity : at;
    known.set(what, found);
    return found;
  };
}

// The end of each run of backticks at which a run of the same length begins next, by where it begins.
function codeEnds(text) {
  const ends = new Map(), last = new Map();
  for (const { 0: run, index } of text.matchAll(/`+/g)) {
    if (last.has(run.length)) ends.set(last.get(run.length), index);
    last.set(run.length, index);
  }
  return ends;
}

function inline(text, depth) {
  if (depth > MOST_NESTED || !text) return text ? [text] : [];
  const nodes = [], next = finder(text), ends = codeEnds(text);
  let done = 0, at = 0;
  const take = (from, to, node) => {
    if (from > done) nodes.push(text.slice(done, from));
    nodes.push(node);
    nodesLeft--;
    done = at = to;
  };
  while (nodesLeft > 0) {
    SPECIAL.lastIndex = at;
    const found = SPECIAL.exec(text);
    if (!found) break;
    const mark = found[0], from = found.index, inside = from + mark.length;
    at = inside;
    if (mark[0] === "\\") take(from, inside, mark[1]);
    else if (mark[0] === "`") {
      const end = ends.get(from);
      if (end === undefined) continue;
      const code = text.slice(inside, end);
      const isPadded = code.startsWith(" ") && code.endsWith(" ") && code.trim();
      take(from, end + mark.length, element("code", [isPadded ? code.slice(1, -1) : code]));
    } else if (mark === "[") {
      const close = next("]", inside);
      if (close === inside || text[close + 1] !== "(") continue;
      const end = next(")", close + 2), target = end === Infinity ? "" : text.slice(close + 2, end);
      // a target has no spaces, and is looked through once only
      if (target.length > 4096 || !/^(https?:|mailto:)\S+$/i.test(target)) continue;
      take(from, end + 1, link(target, inline(text.slice(inside, close), depth + 1)));
    } else if (mark[0] === "h") {
      let end = inside;
      while (end < text.length && !/[\s<>()]/.test(text[end])) end++;
      while (end > inside && ".,;:!?'\"*_`".includes(text[end - 1])) end--;
      if (end > inside) take(from, end, link(text.slice(from, end), [text.slice(from, end)]));
    } else {
      let end = next(mark, inside);
      if (mark === "**" && text[end + 2] === "*") end++; // *** ends what is inside first
      const isTight = !isSpace(text[inside]) && end > inside && !isSpace(text[end - 1]);
      const isApart = mark[0] !== "_" || (!isWord(text[from - 1]) && !isWord(text[end + mark.length]));
      if (end === Infinity || !isTight || !isApart || (mark === "*" && text[end + 1] === "*")) continue;
      take(from, end + mark.length, element(MARKS[mark], inline(text.slice(inside, end), depth + 1)));
    }
  }
  if (done < text.length) nodes.push(text.slice(done));
  return nodes;
}

// Blocks: each takes the lines from one place to another

const ITEM = /^(\s*)([-*+]|\d{1,9}[.)]) +([^]*)$/;
const FENCE = /^( {0,3})(`{3,}|~{3,})([^`]*)$/;
const HEADING = /^(#{1,6}) +/;
const RULE = /^(-{3,}|\*{3,}|_{3,})\s*$/;

const isIndented = (line) => line !== undefined && /^\s+\S/.test(line);
const isBlock = (line) =>
  HEADING.test(line) || line.startsWith(">") || FENCE.test(line) || ITEM.test(line) || RULE.test(line);
const isTable = (lines, at) =>
  lines[at].includes("|") && /^[\s|:-]+$/.test(lines[at + 1] ?? "") && lines[at + 1].includes("-");
const isNumber = (item) => /\d/.test(item[2][0]);

function closes(line, mark) {
  const rest = line.trim();
  return rest.startsWith(mark) && !rest.slice(mark.length).replaceAll(mark[0], "");
}

// Where the block ends that begins at a line, which is not blank.
function blockEnd(lines, at) {
  const line = lines[at], fence = FENCE.exec(line), item = ITEM.exec(line);
  let end = at + 1;
  if (fence) {
    while (end < lines.length && !closes(lines[end], fence[2])) end++;
    return Math.min(end + 1, lines.length);
  }
  if (HEADING.test(line) || RULE.test(line)) return end;
  if (line.startsWith(">")) while (end < lines.length && lines[end].startsWith(">")) end++;
  else if (item) {
    const goesOn = (number) => {
      const other = ITEM.exec(lines[number] ?? "");
      if (!other || other[1].length > item[1].length + 1) return isIndented(lines[number]);
      return isNumber(other) === isNumber(item);
    };
    while (end < lines.length && (goesOn(end) || (!lines[end].trim() && goesOn(end + 1)))) end++;
  } else if (isTable(lines, at)) {
    end++; // a line of dashes may have no bar
    while (end < lines.length && lines[end].includes("|")) end++;
  } else while (end < lines.length && lines[end].trim() && !isBlock(lines[end]) && !isTable(lines, end)) end++;
  return end;
}

function list(lines, depth) {
  const [, indent, mark] = ITEM.exec(lines[0]);
  const node = element(/\d/.test(mark) ? "ol" : "ul");
  const most = indent.length + mark.length + 1; // of the spaces before what an item holds
  let inner = null, number = null;
  const finish = () => {
    if (!inner) return;
    const entry = element("li", blocks(inner, depth + 1));
    if (number) entry.value = parseInt(number); // as it was written
    node.append(entry);
  };
  for (const [at, line] of lines.entries()) {
    const item = ITEM.exec(line);
    if (item && item[1].length <= indent.length + 1) {
      finish();
      if (nodesLeft <= 0) {
        node.append(element("li", [plain(lines.slice(at).join("\n"))]));
        return node;
      }
      inner = [item[3]];
      number = isNumber(item) ? item[2] : null;
    } else {
      let cut = 0;
      while (cut < most && (line[cut] === " " || line[cut] === "\t")) cut++;
      inner.push(line.slice(cut));
    }
  }
  finish();
  return node;
}

function cells(line) {
  const found = line.trim().replace(/^\||\|$/g, "").replaceAll("\\|", "\0").split("|");
  if (found.length > MOST_COLUMNS) found.push(found.splice(MOST_COLUMNS - 1).join("|"));
  return found.map((cell) => cell.replaceAll("\0", "|").trim());
}

function table(lines, depth) {
  const row = (line, kind) => element("tr", cells(line).map((cell) => element(kind, inline(cell, depth + 1))));
  const head = element("thead", [row(lines[0], "th")]), body = element("tbody");
  for (let at = 2; at < lines.length; at++) {
    if (nodesLeft > 0) body.append(row(lines[at], "td"));
    else {
      body.append(element("tr", [element("td", [plain(lines.slice(at).join("\n"))])]));
      break;
    }
  }
  const node = element("div", [element("table", [head, body])]);
  node.className = "table";
  return node;
}

function code(lines) {
  const [, indent, mark, name] = FENCE.exec(lines[0]);
  const isClosed = lines.length > 1 && closes(lines.at(-1), mark);
  const inner = lines.slice(1, isClosed ? -1 : undefined);
  const text = inner.map((line) => (line.startsWith(indent) ? line.slice(indent.length) : line)).join("\n");
  const head = element("div", [element("span", [name.trim()]), copyButton("Copy", () => text, "Copy code")]);
  const pre = element("pre", [element("code", [text])]);
  pre.tabIndex = 0; // a keyboard scrolls long lines
  const node = element("div", [head, pre]);
  node.className = "code";
  head.className = "code-head";
  return node;
}

function heading(line, depth) {
  const [all, marks] = HEADING.exec(line);
  let text = line.slice(all.length).trimEnd(), end = text.length;
  while (text[end - 1] === "#") end--;
  if (text[end - 1] === " " || !end) text = text.slice(0, end);
  return element(`h${marks.length}`, inline(text, depth + 1));
}

function paragraph(lines, depth) {
  const node = element("p");
  for (const [at, line] of lines.entries()) {
    if (nodesLeft <= 0) {
      node.append(plain(lines.slice(at).join("\n")));
      break;
    }
    if (at) node.append(element("br"));
    for (const part of inline(line, depth + 1)) node.append(part);
  }
  return node;
}

function block(lines, depth) {
  const line = lines[0];
  if (depth >= MOST_NESTED) return plain(lines.join("\n"));
  if (FENCE.test(line)) return code(lines);
  if (HEADING.test(line)) return heading(line, depth);
  if (RULE.test(line)) return element("hr");
  if (line.startsWith(">"))
    return element("blockquote", blocks(lines.map((quoted) => quoted.replace(/^> ?/, "")), depth + 1));
  if (ITEM.test(line)) return list(lines, depth);
  if (isTable(lines, 0)) return table(lines, depth);
  return paragraph(lines, depth);
}

// The lines of each block, and where it begins.
function* ranges(lines) {
  for (let at = 0; at < lines.length; ) {
    if (!lines[at].trim()) at++;
    else {
      const end = blockEnd(lines, at);
      yield [lines.slice(at, end), at];
      at = end;
    }
  }
}

function blocks(lines, depth) {
  const nodes = [];
  for (const [part, at] of ranges(lines)) {
    if (nodesLeft <= 0) return [...nodes, plain(lines.slice(at).join("\n"))];
    nodes.push(block(part, depth));
  }
  return nodes;
}

const drawn = new WeakMap(); // the source of each block that was drawn

// Let a node show a text; blocks that it shows already stay, with the focus and the selection in them.
export function draw(node, text) {
  try {
    nodesLeft = MOST_NODES;
    let shown = node.firstChild;
    const dropRest = () => {
      while (shown) {
        const following = shown.nextSibling;
        shown.remove();
        shown = following;
      }
    };
    const lines = text.split(/\r?\n/);
    for (const [part, at] of ranges(lines)) {
      const isLast = nodesLeft <= 0, source = (isLast ? lines.slice(at) : part).join("\n");
      if (shown && drawn.get(shown) === source) {
        nodesLeft -= shown.querySelectorAll("*").length + 1;
        shown = shown.nextSibling;
      } else {
        dropRest();
        const made = isLast ? plain(source) : block(part, 0);
        drawn.set(made, source);
        node.append(made);
      }
      if (isLast) break;
    }
    dropRest();
  } catch (error) {
    console.warn("this answer is shown as it was written", error);
    node.replaceChildren(plain(text));
  }
}

// A text as nodes.
export function markdown(text) {
  const node = document.createElement("div");
  draw(node, text);
  return [...node.childNodes];
}
