// Buttons that copy a text and say so.

const SAID_FOR = 2000;

async function copied(text, from) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    // a page that came from another machine without TLS has no such clipboard
    const field = document.createElement("textarea");
    field.value = text;
    field.className = "unseen";
    from.after(field);
    field.select();
    const isDone = document.execCommand("copy");
    field.remove();
    from.focus();
    return isDone;
  }
}

// A button; `text` makes what it copies.
export function copyButton(label, text, name = label) {
  const node = document.createElement("button");
  let timer;
  const say = (shown, meant = shown) => {
    node.textContent = shown;
    node.setAttribute("aria-label", meant);
  };
  node.type = "button";
  node.className = "copy";
  node.addEventListener("click", async () => {
    say((await copied(text(), node)) ? "Copied" : "Not copied");
    document.getElementById("said").textContent = node.textContent;
    clearTimeout(timer);
    timer = setTimeout(() => {
      say(label, name);
      document.getElementById("said").textContent = "";
    }, SAID_FOR);
  });
  say(label, name);
  return node;
}
