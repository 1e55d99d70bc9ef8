// Renders a small subset of Markdown with createElement and textContent: text never becomes HTML.

const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([^\s`]*)/;
const HEADING = /^ {0,3}#{1,6}[ \t]+(.*)$/;
const ITEM = /^([ \t]*)([-*+]|\d{1,9}[.)])[ \t]+(.*)$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const TABLE = /^ {0,3}\|/;
// The lengths are bounded, so that marks without an end cost linear time.
const INLINE = /(`+)(?!`)([^\n]{1,1000}?[^`\n]|[^`\n])\1(?!`)|\*\*(?=\S)([^\n]{1,1000}?\S|\S)\*\*|\*(?![\s*])([^*\n]{0,500}[^\s*])\*/g;

function element(name, classes = "", text = "") {
  const made = document.createElement(name);
  if (classes) made.className = classes;
  if (text) made.textContent = text;
  return made;
}

function kindOf(line) {
  if (FENCE.test(line)) return "fence";
  if (HEADING.test(line)) return "heading";
  if (ITEM.test(line)) return "list";
  if (QUOTE.test(line)) return "quote";
  return TABLE.test(line) ? "table" : "paragraph";
}

function endOfFence(lines, start) {
  const mark = FENCE.exec(lines[start])[1];
  const closes = (line) => {
    const bare = line.trim();
    return bare.length >= mark.length && bare === mark[0].repeat(bare.length);
  };
  let end = start + 1;
  while (end < lines.length && !closes(lines[end])) end += 1;
  return Math.min(end + 1, lines.length);
}

function endOfList(lines, start) {
  const mark = (line) => (/^\d/.test(line) ? "1" : line[0]);
  let end = start + 1;
  for (let at = start + 1; at < lines.length; at += 1) {
    const atMargin = ITEM.test(lines[at]) && /^\S/.test(lines[at]);
    if (atMargin && mark(lines[at]) !== mark(lines[start])) break;
    const continues = ITEM.test(lines[at]) || /^[ \t]{2,}\S/.test(lines[at]);
    const lazy = at === end && lines[at].trim() && kindOf(lines[at]) === "paragraph";
    if (continues || lazy) end = at + 1;
    else if (lines[at].trim()) break;
  }
  return end;
}

// Splits text into blocks, so that a longer text replaces only the last of them.
function blocksOf(text) {
  const lines = text.split("\n");
  const blocks = [];
  for (let at = 0; at < lines.length; ) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const kind = kindOf(lines[at]);
    let end = at + 1;
    if (kind === "fence") end = endOfFence(lines, at);
    else if (kind === "list") end = endOfList(lines, at);
    else if (kind !== "heading") while (end < lines.length && lines[end].trim() && kindOf(lines[end]) === kind) end += 1;
    blocks.push({ kind, source: lines.slice(at, end).join("\n") });
    at = end;
  }
  return blocks;
}

function appendInline(parent, text) {
  let from = 0;
  for (const match of text.matchAll(INLINE)) {
    parent.append(text.slice(from, match.index));
    from = match.index + match[0].length;
    const [, , code, bold, italic] = match;
    if (code !== undefined) {
      parent.append(element("code", "", code));
    } else {
      const styled = element(bold !== undefined ? "strong" : "em");
      appendInline(styled, bold ?? italic);
      parent.append(styled);
    }
  }
  parent.append(text.slice(from));
  return parent;
}

function codeBlock(language, code) {
  const box = element("div", "code");
  const head = element("div");
  const copy = element("button", "quiet", "Copy");
  copy.type = "button";
  copy.onclick = () => copyText(copy, code);
  head.append(element("span", "", language), copy);
  const pre = element("pre");
  pre.tabIndex = 0; // The keyboard can then scroll it.
  pre.append(element("code", "", code));
  box.append(head, pre);
  return box;
}

function list(source) {
  const root = element("div");
  const open = [{ indent: -1, list: root, item: root }];
  for (const line of source.split("\n")) {
    const match = ITEM.exec(line);
    if (!match) {
      if (line.trim()) appendInline(open.at(-1).item, `\n${line.trim()}`);
      continue;
    }
    const [, blanks, mark, text] = match;
    const indent = blanks.replaceAll("\t", "    ").length;
    while (open.length > 1 && indent < open.at(-1).indent) open.pop();
    if (indent > open.at(-1).indent + (open.length > 1 ? 1 : 0)) {
      const ordered = /\d/.test(mark);
      const made = element(ordered ? "ol" : "ul");
      if (ordered) made.start = parseInt(mark, 10);
      open.at(-1).item.append(made);
      open.push({ indent, list: made });
    }
    const item = element("li");
    appendInline(item, text);
    open.at(-1).list.append(item);
    open.at(-1).item = item;
  }
  return root.childNodes.length === 1 ? root.firstChild : root;
}

function table(source) {
  const made = element("table");
  const rows = source.split("\n").map((line) => line.trim().replace(/^\||\|$/g, "").split("|"));
  const isRule = (cells) => cells.every((cell) => /^\s*:?-+:?\s*$/.test(cell));
  rows.forEach((cells, index) => {
    if (isRule(cells)) return;
    const row = made.insertRow();
    const head = index === 0 && rows.length > 1 && isRule(rows[1]);
    for (const cell of cells) row.append(appendInline(element(head ? "th" : "td"), cell.trim()));
  });
  const scroller = element("div", "table");
  scroller.tabIndex = 0;
  scroller.append(made);
  return scroller;
}

function renderBlock({ kind, source }) {
  switch (kind) {
    case "fence": {
      const lines = source.split("\n");
      const end = lines.length > 1 && FENCE.test(lines.at(-1)) ? -1 : undefined;
      return codeBlock(FENCE.exec(lines[0])[2], lines.slice(1, end).join("\n"));
    }
    case "heading":
      return appendInline(element("h3"), HEADING.exec(source)[1]);
    case "list":
      return list(source);
    case "quote":
      return appendInline(element("blockquote"), source.replace(/^ {0,3}> ?/gm, ""));
    case "table":
      return table(source);
    default:
      return appendInline(element("p"), source);
  }
}

const rendered = new WeakMap();

// Makes `parent` show `text`. Blocks that did not change keep their elements, and so their selection.
function renderMarkdown(parent, text) {
  const blocks = blocksOf(text);
  blocks.forEach((block, index) => {
    const old = parent.children[index];
    if (old && rendered.get(old) === block.source) return;
    const made = renderBlock(block);
    rendered.set(made, block.source);
    if (old) old.replaceWith(made);
    else parent.append(made);
  });
  while (parent.children.length > blocks.length) parent.lastChild.remove();
}

async function copyText(button, text) {
  const label = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Not allowed"; // Browsers offer the clipboard to https and localhost only.
  }
  setTimeout(() => { button.textContent = label; }, 1500);
}
