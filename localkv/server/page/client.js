// What the page asks of the server.

export const key = {
  get: () => localStorage.getItem("key") ?? "",
  set: (value) => (value ? localStorage.setItem("key", value) : localStorage.removeItem("key")),
};

const headers = () => ({
  "content-type": "application/json",
  ...(key.get() ? { authorization: `Bearer ${key.get()}` } : {}),
});

async function failure(answer) {
  const text = await answer.text();
  try {
    return new Error(JSON.parse(text).error.message);
  } catch {
    return new Error(text || `status ${answer.status}`);
  }
}

export async function get(path) {
  const answer = await fetch(path, { headers: headers() });
  if (!answer.ok) throw await failure(answer);
  return answer.json();
}

// The chunks of an answer as they come.
export async function* chat(body, signal) {
  const answer = await fetch("v1/chat/completions", {
    method: "POST",
    headers: headers(),
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  if (!answer.ok) throw await failure(answer);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("the server ended the answer");
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue;
      if (line === "data: [DONE]") return;
      const chunk = JSON.parse(line.slice(6));
      if (chunk.error) throw new Error(chunk.error.message);
      yield chunk;
    }
  }
}
