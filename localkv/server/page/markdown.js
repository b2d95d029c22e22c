// Markdown as DOM nodes. Text only ever becomes text: nothing here parses HTML.

const INLINE = /(`+)([\s\S]+?)\1(?!`)|\*\*([\s\S]+?)\*\*|__([\s\S]+?)__|~~([\s\S]+?)~~|\*([^\s*][^*]*?)\*|\b_([^_]+?)_\b|\[([^\]]+)\]\(([^)\s]+)\)|(https?:\/\/[^\s<>()]+)/;

const element = (name, ...children) => {
  const node = document.createElement(name);
  node.append(...children);
  return node;
};

function link(target, ...children) {
  const node = element("a", ...children);
  if (!/^(https?:|mailto:)/i.test(target)) return element("span", ...children);
  node.href = target;
  node.rel = "noopener noreferrer";
  node.target = "_blank";
  return node;
}

function inline(text) {
  const nodes = [];
  let found;
  while ((found = INLINE.exec(text))) {
    nodes.push(text.slice(0, found.index));
    const [all, , code, bold, bold2, gone, slanted, slanted2, label, target, bare] = found;
    if (code !== undefined) nodes.push(element("code", code.replace(/^ (.*) $/s, "$1")));
    else if (bold ?? bold2) nodes.push(element("strong", ...inline(bold ?? bold2)));
    else if (gone) nodes.push(element("del", ...inline(gone)));
    else if (slanted ?? slanted2) nodes.push(element("em", ...inline(slanted ?? slanted2)));
    else if (label) nodes.push(link(target, ...inline(label)));
    else nodes.push(link(bare, bare));
    text = text.slice(found.index + all.length);
  }
  nodes.push(text);
  return nodes.filter((node) => node !== "");
}

const BLOCK = /^(#{1,6} |>|```|~~~|\s*([-*+]|\d+[.)]) |(-{3,}|\*{3,}|_{3,})\s*$)/;
const ITEM = /^(\s*)([-*+]|\d+[.)]) +(.*)$/;

function list(lines) {
  const [, indent, mark] = ITEM.exec(lines[0]);
  const node = document.createElement(/\d/.test(mark) ? "ol" : "ul");
  if (/\d/.test(mark) && parseInt(mark) !== 1) node.start = parseInt(mark);
  let inner = null;
  while (lines.length) {
    const item = ITEM.exec(lines[0]);
    if (item && item[1].length <= indent.length) {
      if (inner) node.append(element("li", ...blocks(inner)));
      inner = [item[3]];
      lines.shift();
    } else if (item || /^\s+\S/.test(lines[0]) || (lines[0] === "" && /^\s+\S/.test(lines[1] ?? ""))) {
      inner.push(lines.shift().slice(Math.min(indent.length + 2, 4)));
    } else break;
  }
  if (inner) node.append(element("li", ...blocks(inner)));
  return node;
}

function table(lines) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => inline(cell.trim()));
  const row = (line, kind) => element("tr", ...cells(line).map((cell) => element(kind, ...cell)));
  const node = element("table", element("thead", row(lines.shift(), "th")));
  lines.shift();
  const body = document.createElement("tbody");
  while (lines.length && lines[0].includes("|")) body.append(row(lines.shift(), "td"));
  node.append(body);
  return node;
}

function blocks(lines) {
  const nodes = [];
  lines = [...lines];
  while (lines.length) {
    const line = lines[0];
    const fence = /^(```+|~~~+)\s*(\S*)/.exec(line);
    if (!line.trim()) lines.shift();
    else if (fence) {
      lines.shift();
      const code = [];
      while (lines.length && !lines[0].startsWith(fence[1])) code.push(lines.shift());
      lines.shift();
      nodes.push(element("pre", element("code", code.join("\n"))));
    } else if (/^#{1,6} /.test(line)) {
      lines.shift();
      nodes.push(element(`h${/^#+/.exec(line)[0].length}`, ...inline(line.replace(/^#+ +| +#+$/g, ""))));
    } else if (/^(-{3,}|\*{3,}|_{3,})\s*$/.test(line)) {
      lines.shift();
      nodes.push(element("hr"));
    } else if (line.startsWith(">")) {
      const quoted = [];
      while (lines.length && lines[0].startsWith(">")) quoted.push(lines.shift().replace(/^> ?/, ""));
      nodes.push(element("blockquote", ...blocks(quoted)));
    } else if (ITEM.test(line)) nodes.push(list(lines));
    else if (line.includes("|") && /^[\s|:-]*-[\s|:-]*$/.test(lines[1] ?? "")) nodes.push(table(lines));
    else {
      const text = [lines.shift()];
      while (lines.length && lines[0].trim() && !BLOCK.test(lines[0])) text.push(lines.shift());
      const paragraph = document.createElement("p");
      text.forEach((part, at) => {
        if (at) paragraph.append(document.createElement("br"));
        paragraph.append(...inline(part));
      });
      nodes.push(paragraph);
    }
  }
  return nodes;
}

export function markdown(text) {
  return blocks(text.split("\n"));
}
