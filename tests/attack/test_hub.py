"""A hub that lies: whatever it answers, `pull` succeeds or says in a line why it does not."""

from __future__ import annotations

import gzip
import hashlib
import json
import shutil
import socket
import struct
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from localkv.loader.hub import client, remote_header
from support.attack.hub_lies import NAMES, VALUES, hostile_answer, mutated_bytes, mutated_listing
from support.fake_hub import Answer, FakeHub
from support.program import Program, Result

REPO = "org/repo"
FAST_SEEDS, LONG_SEEDS = 120, 6000
LIMIT_S = 6.0
"""Seconds that one `pull` may take, with the waits below, on a busy machine."""

FILES = {
    "m-Q4_K_M.gguf": hashlib.shake_128(b"q4").digest(90_000),
    "m-Q8_0.gguf": hashlib.shake_128(b"q8").digest(5_000),
    "d/s-00001-of-00002.gguf": hashlib.shake_128(b"s1").digest(400),
    "d/s-00002-of-00002.gguf": hashlib.shake_128(b"s2").digest(50),
    "README.md": b"read me",
}


class Attack:
    """One hub after another, each with an empty cache, and what must hold whatever they say."""

    def __init__(self, program: Program, hub: FakeHub, tmp_path: Path, patch: pytest.MonkeyPatch):
        self.hub, self._program, self._patch = hub, program, patch
        self._outside = tmp_path / "box"
        self.cache = self._outside / "cache" / "hub"

    def pull(self, name: str = REPO) -> Result:
        """Run `pull` in an empty cache; nothing has to be changed outside of it."""
        from huggingface_hub import constants

        shutil.rmtree(self._outside, ignore_errors=True)
        self.cache.mkdir(parents=True)
        (self._outside / "other").write_text("mine")
        self._patch.setattr(constants, "HF_HUB_CACHE", str(self.cache))
        start = time.monotonic()
        result = self._program("pull", name)
        assert time.monotonic() - start < LIMIT_S
        self._check(result)
        return result

    def run(self, *argv: str) -> Result:
        """Run another command that asks the hub, in an empty cache, which stays empty."""
        shutil.rmtree(self._outside, ignore_errors=True)
        start = time.monotonic()
        result = self._program(*argv)
        assert time.monotonic() - start < LIMIT_S
        assert "a bug" not in result.err
        assert "Traceback" not in result.err
        assert all(line.isprintable() for line in result.err.splitlines())
        assert not self._outside.exists()
        return result

    def _check(self, result: Result) -> None:
        assert result.code in (0, 1), result
        assert "Traceback" not in result.err, result.err
        assert "a bug" not in result.err
        lines = result.err.splitlines()
        assert all(line.isprintable() for line in lines), result
        errors = [line for line in lines if line.startswith("error: ")]
        assert len(errors) == result.code, result
        assert len(result.err) < 4000
        outside = {path.name for path in self._outside.rglob("*") if self.cache not in path.parents}
        assert outside == {"other", "cache", "hub"}
        for path in self.cache.rglob("*"):
            assert path.resolve().is_relative_to(self.cache), path
            if path.parent.name == "blobs" and not path.is_symlink() and not path.suffix:
                assert _digest(path) == path.name
        whole = set(map(_content, FILES.values()))
        if result.code == 0:
            assert _content(Path(result.out.strip()).read_bytes()) in whole
        listed = self._program("list", "--json")
        assert listed.code == 0
        for model in json.loads(listed.out)["models"]:
            assert _content(Path(model["path"]).read_bytes()) in whole


def _content(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _digest(path: Path) -> str:
    data = path.read_bytes()
    if len(path.name) == 64:
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@pytest.fixture
def attack(
    program: Program, hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Attack]:
    """With waits that are short, and no shelf."""
    from huggingface_hub import constants

    ask = socket.getaddrinfo

    def on_loopback(name: str, *args: Any, **options: Any) -> Any:
        if name not in ("127.0.0.1", "localhost"):  # no name server hears of these names
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return ask(name, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", on_loopback)
    monkeypatch.setattr("localkv.loader.local_models.shelves", list)
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.5)
    monkeypatch.setattr(client, "ANSWER_SECONDS", 1.0)
    monkeypatch.setattr(client, "SLOW_SECONDS", 1.0)
    monkeypatch.setattr(client, "LISTING_SECONDS", 1.0)
    hub.repos[REPO] = dict(FILES)
    return Attack(program, hub, tmp_path, monkeypatch)


def listing(hub: FakeHub) -> dict:
    return hub.listing(REPO)


def ok(body: bytes, *headers: str) -> list[bytes]:
    lines = ["HTTP/1.1 200 OK", f"Content-Length: {len(body)}", *headers]
    return ["\r\n".join(lines).encode() + b"\r\n\r\n", body]


def says(kind: str, answer: Callable[[], Answer]) -> Callable[[str, str], Answer | None]:
    """A lie about the listing or about files only."""
    return lambda asked, _: answer() if asked == kind else None


# -- found by search


def one_lie(random: Random, hub: FakeHub) -> None:
    """Let the hub lie about one thing, which a seed chooses."""
    kind = random.random()
    if kind < 0.55:
        body = mutated_listing(random, listing(hub))
        hub.lie = says("listing", lambda: ok(body))
    elif kind < 0.7:
        body = json.dumps(listing(hub)).encode()
        answer = hostile_answer(random, body, hub.port)
        hub.lie = says("listing", lambda: answer)
    elif kind < 0.9:
        hub.lie = says("file", lambda: hostile_answer(random, FILES["m-Q4_K_M.gguf"], hub.port))
    else:  # right headers, other bytes
        data = mutated_bytes(random, FILES["m-Q4_K_M.gguf"])
        hub.lie = says("file", lambda: ok(data))


def search(attack: Attack, seeds: range) -> Counter[str]:
    """Count the outcomes of this many seeds, by kind."""
    outcomes: Counter[str] = Counter()
    for seed in seeds:
        try:
            one_lie(Random(seed), attack.hub)
            result = attack.pull()
        except BaseException:
            print(f"seed {seed}")
            raise
        outcomes["fetched" if result.code == 0 else "refused"] += 1
        if "makes no sense" in result.err:
            outcomes["nonsense"] += 1
    return outcomes


@pytest.mark.slow
def test_a_search(attack: Attack) -> None:
    outcomes = search(attack, range(FAST_SEEDS))
    assert min(outcomes["fetched"], outcomes["refused"], outcomes["nonsense"]) > FAST_SEEDS // 20


@pytest.mark.attack
@pytest.mark.parametrize("part", range(6))
def test_a_long_search(attack: Attack, part: int) -> None:
    n_seeds = LONG_SEEDS // 6
    outcomes = search(attack, range(1000 + part * n_seeds, 1000 + (part + 1) * n_seeds))
    print(dict(outcomes))
    assert min(outcomes["fetched"], outcomes["refused"]) > n_seeds // 20


# -- listings


@pytest.mark.parametrize("name", NAMES)
def test_a_name(attack: Attack, name: str) -> None:
    data = listing(attack.hub)
    data["siblings"] = [{**data["siblings"][0], "rfilename": name}]
    body = json.dumps(data).encode()
    attack.hub.lie = says("listing", lambda: ok(body))
    result = attack.pull()
    if not name.isprintable():
        assert "makes no sense" in result.err


@pytest.mark.parametrize("key", ["size", "blobId", "lfs", "lfs.sha256", "lfs.size"])
def test_a_value(attack: Attack, key: str) -> None:
    for value in VALUES[: -len(NAMES)]:
        data = listing(attack.hub)
        file = data["siblings"][0]
        outer, _, inner = key.partition(".")
        target = file[outer] if inner else file
        assert (inner or outer) in target
        if key == "blobId":
            file["lfs"] = None
        target[inner or outer] = value
        body = json.dumps(data).encode()
        attack.hub.lie = says("listing", lambda body=body: ok(body))
        result = attack.pull()
        good = key in ("size", "lfs") and value is None
        assert result.code == (0 if good else 1), value


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": -5}, "the size of 'm-Q4_K_M.gguf' is -5"),
        ({"size": True}, "the size of 'm-Q4_K_M.gguf' is True"),
        ({"size": 5.0}, "the size of 'm-Q4_K_M.gguf' is 5.0"),
        ({"size": 1 << 60}, f"the size of 'm-Q4_K_M.gguf' is {1 << 60}"),
        ({"size": None, "lfs": None}, "the size of 'm-Q4_K_M.gguf' is missing"),
        ({"size": 7}, "'m-Q4_K_M.gguf' has two sizes"),
        ({"rfilename": "m-Q8_0.gguf"}, "'m-Q8_0.gguf' is there twice"),
        ({"rfilename": "m-Q8_0.gguf/x.gguf"}, "'m-Q8_0.gguf' is a file and a folder"),
        ({"rfilename": "a\x1b[2Jm.gguf"}, "a file is called 'a\\x1b[2Jm.gguf'"),
        ({"rfilename": 7}, "the name of a file is 7"),
        ({"lfs": []}, "the storage of 'm-Q4_K_M.gguf' is a list"),
        ({"lfs": None, "blobId": "a/b"}, "the checksum of 'm-Q4_K_M.gguf' is 'a/b'"),
    ],
)
def test_what_is_said_of_a_file(attack: Attack, changes: dict, message: str) -> None:
    data = listing(attack.hub)
    file = data["siblings"][0]
    file.update(changes)
    if "size" in changes and file["lfs"] and message.startswith("the size"):
        file["lfs"]["size"] = changes["size"]
    body = json.dumps(data).encode()
    attack.hub.lie = says("listing", lambda: ok(body))
    host = f"127.0.0.1:{attack.hub.port}"
    expected = f"error: {host} gave an answer that makes no sense: {message}"
    assert attack.pull().err_lines == [expected]


def test_a_checksum_of_two_sizes(attack: Attack) -> None:
    data = listing(attack.hub)
    data["siblings"][1]["lfs"]["sha256"] = data["siblings"][0]["lfs"]["sha256"]
    body = json.dumps(data).encode()
    attack.hub.lie = says("listing", lambda: ok(body))
    assert "'m-Q8_0.gguf' has another file's checksum" in attack.pull().err


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b"7",
        b"[" * 200_000,
        b'{"siblings": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
        b'{"a":' * 200_000 + b"1" + b"}" * 200_000,
        b'\xff\xfe{"siblings": []}',
        b'{"siblings": [], "sha": "\xff"}',
        b"9" * 100_000,
        b'{"siblings": null}',
        b'{"siblings": {}}',
        b'{"siblings": [null]}',
        b'{"siblings": [], "sha": null}',
    ],
)
def test_a_body_that_is_no_listing(attack: Attack, body: bytes) -> None:
    attack.hub.lie = says("listing", lambda: ok(body))
    assert "makes no sense" in attack.pull().err


def test_what_is_not_used_may_be_anything(attack: Attack) -> None:
    data = {
        **listing(attack.hub),
        "lastModified": "yesterday",
        "createdAt": 7,
        "cardData": [],
        "id": 5,
    }
    body = json.dumps(data).encode()
    attack.hub.lie = says("listing", lambda: ok(body))
    assert attack.pull().code == 0


@pytest.mark.parametrize(("n_files", "refused"), [(4_000, False), (9_999, False), (10_001, True)])
def test_many_files(attack: Attack, n_files: int, refused: bool) -> None:
    sibling = {"size": 5, "blobId": "a" * 40}
    names = [f"part-{i}-00001-of-99999.gguf" for i in range(n_files // 2)]
    names += [f"m{i}-Q2_K.gguf" for i in range(n_files - len(names))]
    siblings = [{**sibling, "rfilename": name} for name in names]
    body = json.dumps({"sha": attack.hub.commit, "siblings": siblings}).encode()
    attack.hub.lie = says("listing", lambda: ok(body))
    start = time.monotonic()
    result = attack.pull()
    assert time.monotonic() - start < 3
    assert ("more than 10000" if refused else "and 4") in result.err or n_files == 4_000
    assert len(result.err) < 1500


# -- bodies without end


def flood(head: bytes, piece: bytes, n_bytes: int) -> Iterator[bytes]:
    yield head
    for _ in range(n_bytes // len(piece)):
        yield piece


ENDLESS = 256 << 20
PIECE = b" " * (1 << 16)


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 200 OK",
        b"HTTP/1.1 302 Found\r\nLocation: /elsewhere",
        b"HTTP/1.1 404 Not Found\r\nX-Error-Code: RepoNotFound",
        b"HTTP/1.1 500 Internal Server Error",
        b"HTTP/1.1 400 Bad Request\r\nContent-Type: application/json",
    ],
)
@pytest.mark.parametrize("kind", ["listing", "file"])
def test_a_body_without_end(attack: Attack, head: bytes, kind: str) -> None:
    attack.hub.lie = says(kind, lambda: flood(head + b"\r\n\r\n", PIECE, ENDLESS))
    assert attack.pull().code == 1
    n_tries = 8
    assert attack.hub.lie_bytes < n_tries * (client.MAX_LISTING_BYTES + (8 << 20))
    assert attack.hub.lie_bytes < ENDLESS


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "gzip, gzip", "x"])
@pytest.mark.parametrize("kind", ["listing", "file"])
def test_a_compressed_bomb(attack: Attack, encoding: str, kind: str) -> None:
    packed = gzip.compress(bytes(1 << 20)) if "gzip" in encoding else zlib.compress(bytes(1 << 20))
    attack.hub.lie = says(kind, lambda: ok(packed * 50, f"Content-Encoding: {encoding}"))
    result = attack.pull()
    assert "it is compressed, which was not asked for" in result.err
    assert attack.hub.lie_bytes < 8 << 20


def dripping(head: bytes, piece: bytes) -> Iterator[bytes]:
    yield head
    for _ in range(600):
        time.sleep(0.05)
        yield piece


@pytest.mark.parametrize(
    ("head", "piece"),
    [
        (b"", b"H"),
        (b"HTTP/1.1 200 OK\r\nX-A: ", b"y"),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 90000\r\n\r\n", b" "),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
    ],
    ids=["status", "header", "continue", "body", "chunks"],
)
@pytest.mark.parametrize("kind", ["listing", "file"])
def test_an_answer_that_drips(
    attack: Attack, monkeypatch: pytest.MonkeyPatch, head: bytes, piece: bytes, kind: str
) -> None:
    """Each read brings something in time, so no time-out of the connection ends it."""
    attack.hub.lie = says(kind, lambda: dripping(head, piece))
    monkeypatch.setattr("localkv.loader.hub.download.MAX_TRIES", 1)
    monkeypatch.setattr(client, "LISTING_SECONDS", 0.3)
    for name in ("ANSWER_SECONDS", "SLOW_SECONDS"):
        monkeypatch.setattr(client, name, 0.3)
    assert "is too slow" in attack.pull().err


def test_bytes_one_by_one(attack: Attack) -> None:
    """A connection for each byte would be 90,000 requests."""
    attack.hub.cuts = [1] * 1000
    assert attack.pull().code == 1
    assert len(attack.hub.downloads) < 20


def test_a_file_that_starts_over_for_ever(attack: Attack) -> None:
    attack.hub.ranges = False
    attack.hub.cuts = [80_000, 70_000] * 500
    assert attack.pull().code == 1
    assert len(attack.hub.downloads) < 20


# -- redirects and headers


def redirect(location: str) -> list[bytes]:
    return [f"HTTP/1.1 302 Found\r\nLocation: {location}\r\nContent-Length: 0\r\n\r\n".encode()]


@pytest.mark.parametrize("kind", ["listing", "file"])
@pytest.mark.parametrize(
    "location",
    [
        *("file:///etc/passwd", "ftp://localhost/x", "data:,x", "http://[::1", "x:y"),
        *("http://127.0.0.1:99999/x", "http://127.0.0.1:0/x", "http://127.0.0.1:-1/x"),
        *("//127.0.0.1:65536/x", "http://127.0.0.1:8x/x", "http://:80/x", "http:///x", "http:x"),
        *("", "   ", "http://a b/x", "http://1.2.3.4.5.6/x", "http://x..y/"),
        *(f"http://{'x' * 64}.invalid/", f"http://{'x.' * 200}invalid/"),
        *("http://user:secret@127.0.0.1:1/x", "http://user@127.0.0.1/x", "HTTPS://@/"),
    ],
)
def test_a_redirect_that_leads_nowhere_is_asked_for_once(
    attack: Attack, kind: str, location: str
) -> None:
    attack.hub.lie = says(kind, lambda: redirect(location))
    result = attack.pull()
    assert result.code == 1
    assert "makes no sense: a redirect leads nowhere" in result.err
    assert len(attack.hub.requests) == (1 if kind == "listing" else 2)


@pytest.mark.parametrize("kind", ["listing", "file"])
def test_a_redirect_in_a_circle(attack: Attack, kind: str) -> None:
    attack.hub.lie = lambda asked, path: redirect(path) if asked == kind else None
    assert "more than 10 redirects" in attack.pull().err
    assert len(attack.hub.requests) <= 1 + client.MAX_REDIRECTS


def test_another_host_gets_no_token(attack: Attack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    there = f"http://localhost:{attack.hub.port}"
    attack.hub.lie = lambda kind, path: (
        redirect(there + path) if attack.hub.requests[-1].host.startswith("127.") else None
    )
    assert attack.pull().code == 0
    tokens = {(r.host.split(":")[0], r.authorization) for r in attack.hub.requests}
    assert tokens == {("127.0.0.1", "Bearer hf_secret"), ("localhost", None)}


@pytest.mark.parametrize(
    ("status", "header", "message"),
    [
        (206, "Content-Range: bytes 5-89999/90000", "bytes from 0 on are 'bytes 5-89999/90000'"),
        (206, "Content-Range: bytes 0-99/100", "should have 90000 bytes, and {host} has 100 of it"),
        (206, "X: y", "bytes from 0 on are ''"),
        (200, "Content-Length: 100", "should have 90000 bytes, and {host} has 100 of it"),
        (416, "X: y", "should have 90000 bytes, and {host} has fewer of it"),
        (204, "X: y", "its status is 204"),
        (304, "X: y", "a redirect leads nowhere"),
    ],
)
def test_other_bytes_than_asked_for(attack: Attack, status: int, header: str, message: str) -> None:
    head = f"HTTP/1.1 {status} x\r\n{header}\r\n\r\n".encode()
    attack.hub.lie = says("file", lambda: [head, FILES["m-Q4_K_M.gguf"]])
    result = attack.pull()
    assert message.format(host=f"127.0.0.1:{attack.hub.port}") in result.err
    assert len(attack.hub.downloads) == 1, "it would be the same the next time"


def test_a_size_larger_than_the_file(attack: Attack) -> None:
    """What there is has arrived, and there is no more of it."""
    data = listing(attack.hub)
    file = data["siblings"][0]
    file["size"] = file["lfs"]["size"] = 100_000
    body = json.dumps(data).encode()
    attack.hub.lie = says("listing", lambda: ok(body))
    result = attack.pull()
    host = f"127.0.0.1:{attack.hub.port}"
    assert result.err_lines[1] == (
        f"error: m-Q4_K_M.gguf should have 100000 bytes, and {host} has 90000 of it"
    )
    assert "status" not in result.err


@pytest.mark.parametrize("token", ["hf_\u00e4", "hf_a\x1bb", "hf_a\nb"])
def test_a_token_that_is_none_is_not_shown(attack: Attack, monkeypatch, token: str) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    result = attack.pull()
    assert result.code == (1 if "\n" not in token else result.code)
    assert "hf_" not in result.err


@pytest.mark.parametrize(
    "endpoint", ["", "nonsense", "file:///x", "http://", "http://[::1", "http://a b", "http://\x1b"]
)
def test_an_endpoint_that_is_no_address(attack: Attack, monkeypatch, endpoint: str) -> None:
    from huggingface_hub import constants

    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    assert attack.pull().code == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HTTP_PROXY", "nonsense://x"),
        ("ALL_PROXY", "socks5://127.0.0.1:1"),
        ("SSL_CERT_FILE", "/dev/null/none"),
        ("HTTP_PROXY", "http://[::1"),
    ],
)
def test_a_client_that_can_not_be_set_up(
    attack: Attack, monkeypatch, name: str, value: str
) -> None:
    from huggingface_hub import close_session

    close_session()
    for variable in (name, name.lower()):
        monkeypatch.setenv(variable, value)
    attack.pull()  # what no variable forbids may succeed
    close_session()


@pytest.mark.parametrize("what", ["bytes", "folder"])
def test_a_token_that_can_not_be_read(attack: Attack, tmp_path: Path, what: str) -> None:
    path = tmp_path / "token"
    path.write_bytes(b"\xff\xfe") if what == "bytes" else path.mkdir()
    assert "the access token can't be read" in attack.pull().err


def test_a_password_for_the_hub_is_not_shown(attack: Attack, monkeypatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://me:secret@127.0.0.1:1")
    assert attack.pull().err.startswith("error: 127.0.0.1:1 can't be reached")


# -- headers of models that are not fetched


def plan(attack: Attack, seeds: range) -> Counter[str]:
    outcomes: Counter[str] = Counter()
    for seed in seeds:
        try:
            one_lie(Random(seed), attack.hub)
            result = attack.run("plan", "-hf", REPO)
        except BaseException:
            print(f"seed {seed}")
            raise
        assert result.code in (0, 1)
        outcomes["planned" if result.code == 0 else "refused"] += 1
    return outcomes


def test_a_search_for_headers(attack: Attack, tiny_model: Path) -> None:
    attack.hub.repos[REPO] = {**FILES, "m-Q4_K_M.gguf": tiny_model.read_bytes()}
    outcomes = plan(attack, range(FAST_SEEDS // 2))
    assert min(outcomes.values()) > FAST_SEEDS // 40


@pytest.mark.attack
def test_a_long_search_for_headers(attack: Attack, tiny_model: Path) -> None:
    attack.hub.repos[REPO] = {**FILES, "m-Q4_K_M.gguf": tiny_model.read_bytes()}
    n_seeds = LONG_SEEDS // 4
    outcomes = plan(attack, range(50_000, 50_000 + n_seeds))
    print(dict(outcomes))
    assert min(outcomes.values()) > n_seeds // 20


def test_a_header_without_end(attack: Attack, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of 1 TiB whose first value is an array of nearly as much."""
    size, limit = 1 << 40, 4 << 20
    monkeypatch.setattr(remote_header, "MAX_BYTES", limit)
    array = struct.pack("<IIQ", 9, 0, size // 2)  # of bytes
    head = b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"a" + array
    data = listing(attack.hub)
    file = data["siblings"][0]
    file["size"] = file["lfs"]["size"] = size
    body = json.dumps(data).encode()

    def answer(kind: str, path: str) -> Answer:
        if kind == "listing":
            return ok(body)
        start, _, last = (attack.hub.requests[-1].range or "").removeprefix("bytes=").partition("-")
        n_bytes = int(last) + 1 - int(start)
        about = f"HTTP/1.1 206 x\r\nContent-Range: bytes {start}-{last}/{size}\r\n\r\n"
        content = head + bytes(n_bytes - len(head)) if start == "0" else bytes(n_bytes)
        return [about.encode(), content]

    attack.hub.lie = answer
    result = attack.run("plan", "-hf", REPO)
    assert "the header of m-Q4_K_M.gguf takes more than 4.00 MiB" in result.err
    assert attack.hub.lie_bytes <= 2 * limit
