// Conversations, kept in this browser (IndexedDB).

const STORE = "conversations";

const opened = new Promise((resolve, reject) => {
  const request = indexedDB.open("localkv", 1);
  request.onupgradeneeded = () => request.result.createObjectStore(STORE, { keyPath: "id" });
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});

async function run(mode, act) {
  const transaction = (await opened).transaction(STORE, mode);
  const request = act(transaction.objectStore(STORE));
  return new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve(request.result);
    transaction.onerror = transaction.onabort = () => reject(transaction.error);
  });
}

// An answer that was being written when it was stored last did not come to its end.
function settled(conversation) {
  for (const { variants = [] } of conversation.messages)
    for (const one of variants.filter((variant) => variant.waiting))
      Object.assign(one, { waiting: false, error: "This answer was cut: the page was closed." });
  return conversation;
}

export async function all() {
  const found = (await run("readonly", (store) => store.getAll())).map(settled);
  return found.sort((a, b) => b.changed - a.changed);
}

export const save = (conversation) =>
  run("readwrite", (store) => store.put({ ...conversation, changed: Date.now() }));

export const remove = (id) => run("readwrite", (store) => store.delete(id));

export const fresh = () => ({ id: crypto.randomUUID?.() ?? String(Math.random()), title: "", messages: [], changed: 0 });
