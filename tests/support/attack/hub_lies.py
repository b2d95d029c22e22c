"""Makes hostile answers of a hub out of honest ones: structure, bytes, headers, redirects."""

from __future__ import annotations

import copy
import gzip
import json
from random import Random
from typing import Any

DEEP = 200_000

NAMES = (
    "",
    ".",
    "..",
    ".gguf",
    "a/.gguf",
    "./m.gguf",
    "a/./m.gguf",
    "a//m.gguf",
    "/etc/m.gguf",
    "../m.gguf",
    "a/../../m.gguf",
    "..\\m.gguf",
    "C:\\m.gguf",
    "C:m.gguf",
    "a\0m.gguf",
    "a\nm.gguf",
    "a\x1b]52;c;eA==\x07m.gguf",
    "a\x9bm.gguf",
    "\u202em.gguf",
    "\ud800m.gguf",
    "m.gguf/",
    "m.gguf/m.gguf",
    "~/m.gguf",
    "$HOME/m.gguf",
    "-rf.gguf",
    "x" * 300 + ".gguf",
    "/".join("d" * 200 for _ in range(30)) + "/m.gguf",
    "x-00001-of-00000.gguf",
    "x-00003-of-00002.gguf",
    "x-00000-of-00002.gguf",
    "x-00001-of-99999.gguf",
    "x-٠٠٠٠١-of-٠٠٠٠٢.gguf",
    "m.GGUF",
    "m.gguf ",
    " m.gguf",
    "refs/heads/main.gguf",
    "%2e%2e%2fm.gguf",
    "é\u0301m.gguf",
    "CON.gguf",
)
VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    -5,
    0,
    1,
    1.5,
    1e300,
    1e999,
    2**63,
    10**40,
    "",
    "5",
    "\0",
    "\ud800",
    "0" * 64,
    "F" * 64,
    "../../../x",
    [],
    {},
    [[]],
    {"a": 1},
    [None],
    *NAMES,
)
LOCATIONS = (
    "file:///etc/passwd",
    "ftp://127.0.0.1/x",
    "http://",
    "http:///x",
    "//",
    "http://[::1",
    "http://127.0.0.1:99999/x",
    "http://127.0.0.1:-1/",
    "http://127.0.0.1:1/x",
    "data:,x",
    "javascript:1",
    "",
    "?",
    "#",
    "http://\x7f/",
    "http://a b/",
    "http://" + "a" * 3000 + "/",
    "http://user:secret@127.0.0.1:1/",
    "\u202e",
    "HTTP://localhost:1/%",
    "/" * 2000,
    "http://xn--/",
    "http://ä/",
)
ENCODINGS = ("gzip", "br", "zstd", "deflate", "gzip, gzip", "x", "identity", "chunked", "")
STATUSES = (
    b"HTTP/1.1 200 OK",
    b"HTTP/1.1 204 No Content",
    b"HTTP/1.1 206 Partial Content",
    b"HTTP/1.1 300 Multiple Choices",
    b"HTTP/1.1 304 Not Modified",
    b"HTTP/1.1 400 \x1b[31mBad",
    b"HTTP/1.1 401 Unauthorized",
    b"HTTP/1.1 403 Forbidden",
    b"HTTP/1.1 404 Not Found",
    b"HTTP/1.1 416 Range Not Satisfiable",
    b"HTTP/1.1 418 I'm a teapot",
    b"HTTP/1.1 429 Too Many Requests",
    b"HTTP/1.1 500 Internal Server Error",
    b"HTTP/1.1 599 x",
    b"HTTP/1.1 999 x",
    b"HTTP/1.1 000 x",
    b"HTTP/1.1 -1 x",
    b"HTTP/1.1 20\xb2 x",
    b"HTTP/1.1 2000 x",
    b"HTTP/9.9 200 OK",
    b"HTTP/1.0 200 OK",
    b"ICY 200 OK",
    b"HTTP/1.1 200",
    b"",
    b"\0",
)
HEADERS = (
    b"Content-Range: bytes 0-9/10",
    b"Content-Range: bytes 5-9/*",
    b"Content-Range: bytes 0-/",
    b"Content-Range: bytes */*",
    b"Content-Range: x",
    b"Content-Range: bytes 0-99999999999999999999999/99999999999999999999999",
    b"Content-Length: -1",
    b"Content-Length: x",
    b"Content-Length: 99999999999999999999999",
    b"Content-Length: 5\r\nContent-Length: 6",
    b"Transfer-Encoding: chunked",
    b"Transfer-Encoding: gzip, chunked",
    b'ETag: "../../../../x"',
    b'X-Linked-Etag: "../x"',
    b"X-Repo-Commit: ../../../x",
    b'Link: <http://127.0.0.1:1/>; rel="next"',
    b"X-Error-Code: GatedRepo",
    b"X-Error-Code: RevisionNotFound",
    b"X-Error-Code: EntryNotFound",
    b"X-Error-Code: RepoNotFound",
    b"X-Error-Code: \xff\xfe",
    b"X-Error-Message: \x1b]0;x\x07",
    b"X-Error-Message: Access to this resource is disabled.",
    b"X-HF-Warning: a;\x1b[31mb",
    b'RateLimit: "api";r=0;t=99999999999999999999999999',
    b"Retry-After: 99999999999999999999",
    b"Content-Type: text/html; charset=nonsense",
    b"Content-Type: multipart/byteranges; boundary=x",
    b"Set-Cookie: a=b; expires=\xff; domain=.",
    b"Bad Header",
    b": x",
    b"X: " + b"y" * 70_000,
    b"X: y\r\n" * 2000 + b"X: y",
    b"X: a\x00b",
    b"Connection: upgrade",
    b"Upgrade: x",
)


def mutated_listing(random: Random, listing: dict[str, Any]) -> bytes:
    """The JSON of a repository with one to three things wrong, and sometimes wrong bytes."""
    listing = copy.deepcopy(listing)
    for _ in range(random.randint(1, 3)):
        if not isinstance(listing, dict):
            break
        listing = _mutate(random, listing)
    kind = random.random()
    if kind < 0.03:
        return b"[" * DEEP
    if kind < 0.06:
        body = json.dumps(listing).encode()
        return body.replace(b'"siblings"', b'"x": ' + b"[" * DEEP + b"]" * DEEP + b', "siblings"')
    if kind < 0.09:
        return b'{"siblings": [' + b"1" * 10_000 + b"]}"
    body = json.dumps(listing, ensure_ascii=random.random() < 0.5).encode("utf-8", "surrogatepass")
    return mutated_bytes(random, body) if random.random() < 0.3 else body


def _mutate(random: Random, listing: dict[str, Any]) -> Any:
    """One change, most often at a file of the list."""
    files = listing.get("siblings")
    good = isinstance(files, list) and [file for file in files if isinstance(file, dict)]
    kind = random.random()
    if not good or kind < 0.15:
        if random.random() < 0.1:
            return random.choice(VALUES)
        listing[random.choice(("sha", "siblings", "id", "tags", "lastModified"))] = random.choice(
            VALUES
        )
        return listing
    file = random.choice(good)
    if kind < 0.45:
        file["rfilename"] = random.choice(NAMES)
    elif kind < 0.65:
        key = random.choice(("rfilename", "size", "blobId", "lfs"))
        if random.random() < 0.2:
            file.pop(key, None)
        else:
            file[key] = random.choice(VALUES)
    elif kind < 0.8 and isinstance(file.get("lfs"), dict):
        file["lfs"][random.choice(("sha256", "size", "pointerSize"))] = random.choice(VALUES)
    elif kind < 0.9:
        files.insert(random.randrange(len(files) + 1), copy.deepcopy(random.choice(files)))
    elif kind < 0.95:
        files.append(random.choice(VALUES))
    else:
        size = file.get("size")
        file["size"] = (size if isinstance(size, int) else 0) + random.choice((-1, 1, 100, 1 << 60))
        if isinstance(file.get("lfs"), dict) and random.random() < 0.7:
            file["lfs"]["size"] = file["size"]
    return listing


def mutated_bytes(random: Random, data: bytes) -> bytes:
    """Flip, cut, double or add a few bytes."""
    damaged = bytearray(data)
    for _ in range(random.randint(1, 4)):
        at = random.randrange(len(damaged) + 1)
        kind = random.randrange(5)
        if kind == 0 and at < len(damaged):
            damaged[at] ^= 1 << random.randrange(8)
        elif kind == 1:
            del damaged[at:]
        elif kind == 2:
            damaged[at:at] = random.randbytes(random.randint(1, 20))
        elif kind == 3:
            damaged[at:at] = damaged[max(0, at - 50) : at]
        else:
            del damaged[at : at + random.randint(1, 50)]
    return bytes(damaged)


def hostile_answer(random: Random, body: bytes, port: int) -> list[bytes]:
    """An answer whose status, headers and framing are anything."""
    headers = [random.choice(HEADERS) for _ in range(random.randint(0, 3))]
    status = random.choice(STATUSES) if random.random() < 0.6 else STATUSES[0]
    if random.random() < 0.2:
        status = random.choice((b"HTTP/1.1 301 x", b"HTTP/1.1 302 x", b"HTTP/1.1 308 x"))
        location = random.choice(
            (*LOCATIONS, f"http://localhost:{port}/cdn/x", "/api/models/org/repo")
        )
        headers.append(b"Location: " + location.encode())
    if random.random() < 0.15:
        encoding = random.choice(ENCODINGS)
        headers.append(b"Content-Encoding: " + encoding.encode())
        if encoding == "gzip":
            body = gzip.compress(body)
    if random.random() < 0.6:
        length = len(body) + random.choice((0, 0, 0, 1, -1, 1000, -len(body)))
        headers.append(b"Content-Length: %d" % length)
    head = b"\r\n".join((status, *headers)) + b"\r\n\r\n"
    if random.random() < 0.1:
        head = b"HTTP/1.1 100 Continue\r\n\r\n" * random.randint(1, 200) + head
    if random.random() < 0.15:
        head = mutated_bytes(random, head)
    if random.random() < 0.1:
        body = mutated_bytes(random, body)
    return [head, body]
