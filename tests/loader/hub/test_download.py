"""Models from Hugging Face: fetched, resumed, verified, found in the cache, deleted."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from localkv.errors import HubError, LocalKVError
from localkv.loader.hub import download
from localkv.loader.hub.cache import CachedModel, cached_models, plan_removal, remove
from localkv.loader.hub.client import NO_NETWORK
from localkv.loader.hub.download import Download, Partial, fetch
from localkv.loader.hub.find import find, local_path
from localkv.loader.hub.reference import parse_reference
from support.fake_hub import COMMIT, FakeHub

MIB = 1 << 20


def some_bytes(n_bytes: int, seed: int = 0) -> bytes:
    """Bytes without a pattern."""
    return hashlib.shake_128(seed.to_bytes(4, "little")).digest(n_bytes)


Q4, Q8 = some_bytes(MIB, 1), some_bytes(3 * MIB // 2, 2)


@pytest.fixture
def repo(hub: FakeHub) -> FakeHub:
    """A hub with one repository of two models."""
    hub.repos["org/repo"] = {"m-Q4_K_M.gguf": Q4, "m-Q8_0.gguf": Q8, "README.md": b"read me"}
    return hub


def get(text: str, **options: bool) -> CachedModel:
    """Find or fetch a model."""
    found = find(parse_reference(text), **options)
    return fetch(found, lambda _: None) if isinstance(found, Download) else found


def folder(tmp_path: Path) -> Path:
    return tmp_path / "hub" / "models--org--repo"


def incomplete(tmp_path: Path) -> list[Path]:
    return list(folder(tmp_path).glob("blobs/*.incomplete"))


def error_of(text: str, **options: bool) -> LocalKVError:
    with pytest.raises(LocalKVError) as caught:
        get(text, **options)
    assert "\n" not in str(caught.value)
    return caught.value


def test_a_model_is_fetched_once(repo: FakeHub, tmp_path: Path) -> None:
    model = get("org/repo")
    assert model.name == "org/repo:Q4_K_M"
    assert model.path == folder(tmp_path) / "snapshots" / COMMIT / "m-Q4_K_M.gguf"
    assert model.path.read_bytes() == Q4
    n_requests = len(repo.requests)
    assert get("org/repo") == get("org/repo:q4_k_m") == get("org/repo/m-Q4_K_M.gguf") == model
    assert len(repo.requests) == n_requests, "a cached model needs no request"
    assert get("org/repo:q8_0").path.read_bytes() == Q8
    assert [r.path for r in repo.downloads] == [
        f"/org/repo/resolve/{COMMIT}/m-{quant}.gguf" for quant in ("Q4_K_M", "Q8_0")
    ]
    assert incomplete(tmp_path) == []


def test_the_cache_is_huggingface_hubs_own(repo: FakeHub, tmp_path: Path) -> None:
    from huggingface_hub import hf_hub_download, scan_cache_dir, try_to_load_from_cache

    path = get("org/repo").path
    found = try_to_load_from_cache("org/repo", "m-Q4_K_M.gguf")
    assert found == str(path)
    offline = hf_hub_download("org/repo", "m-Q4_K_M.gguf", local_files_only=True)
    assert offline == str(path)
    cache = scan_cache_dir(tmp_path / "hub")
    assert cache.warnings == []
    (cached,) = cache.repos
    assert (cached.repo_id, cached.size_on_disk) == ("org/repo", MIB)
    assert set(cached.refs) == {"main"}


def test_what_another_program_fetched_is_found(repo: FakeHub, tmp_path: Path) -> None:
    blobs, snapshot = folder(tmp_path) / "blobs", folder(tmp_path) / "snapshots" / COMMIT
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    digest = hashlib.sha256(Q4).hexdigest()
    (blobs / digest).write_bytes(Q4)
    (snapshot / "m-Q4_K_M.gguf").symlink_to(f"../../blobs/{digest}")
    assert get("org/repo").path.read_bytes() == Q4
    (snapshot / "m-Q8_0.gguf").write_bytes(Q8)  # a system without links
    assert get("org/repo:Q8_0").path == snapshot / "m-Q8_0.gguf"
    assert get("org/repo:Q8_0", update=True).path == snapshot / "m-Q8_0.gguf"
    assert repo.downloads == []


def test_a_cut_connection_goes_on_where_it_was(repo: FakeHub) -> None:
    repo.cuts = [300_000, 1, 0, 400_000]
    seen: list[int] = []
    found = find(parse_reference("org/repo"))
    assert isinstance(found, Download)
    assert fetch(found, seen.append).path.read_bytes() == Q4
    assert [r.range for r in repo.downloads] == [
        "bytes=0-",
        "bytes=300000-",
        "bytes=300001-",
        "bytes=300001-",
        "bytes=700001-",
    ]
    assert sum(seen) == sum(r.sent for r in repo.downloads) == found.n_bytes == MIB


def test_a_server_without_ranges_starts_over(repo: FakeHub) -> None:
    repo.ranges = False
    repo.cuts = [300_000]
    seen: list[int] = []
    found = find(parse_reference("org/repo"))
    assert isinstance(found, Download)
    assert fetch(found, seen.append).path.read_bytes() == Q4
    assert sum(seen) == MIB
    assert min(seen) == -300_000


def test_a_dead_connection_is_given_up_and_resumed_later(repo: FakeHub, tmp_path: Path) -> None:
    repo.cuts = [500_000, *[0] * download.MAX_TRIES]
    error = error_of("org/repo")
    assert "ended within" in error.message or "can't be reached" in error.message
    assert [path.stat().st_size for path in incomplete(tmp_path)] == [500_000]
    n_before = len(repo.downloads)
    assert n_before == 1 + download.MAX_TRIES
    found = find(parse_reference("org/repo"))
    assert isinstance(found, Download)
    assert (found.n_bytes, found.present_bytes) == (MIB, 500_000)
    assert fetch(found, lambda _: None).path.read_bytes() == Q4
    assert [(r.range, r.sent) for r in repo.downloads[n_before:]] == [
        ("bytes=500000-", MIB - 500_000)
    ]


def test_what_arrived_whole_needs_no_request(repo: FakeHub, tmp_path: Path) -> None:
    blobs = folder(tmp_path) / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{hashlib.sha256(Q4).hexdigest()}.incomplete").write_bytes(Q4)
    assert get("org/repo").path.read_bytes() == Q4
    assert repo.downloads == []


def test_more_than_there_should_be_starts_over(repo: FakeHub, tmp_path: Path) -> None:
    blobs = folder(tmp_path) / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{hashlib.sha256(Q4).hexdigest()}.incomplete").write_bytes(Q4 + b"x")
    assert get("org/repo").path.read_bytes() == Q4
    assert [r.range for r in repo.downloads] == ["bytes=0-"]


@pytest.mark.parametrize("resumed", [False, True])
def test_a_wrong_checksum_is_not_kept(repo: FakeHub, tmp_path: Path, resumed: bool) -> None:
    if resumed:  # the beginning is another file's
        blobs = folder(tmp_path) / "blobs"
        blobs.mkdir(parents=True)
        (blobs / f"{hashlib.sha256(Q4).hexdigest()}.incomplete").write_bytes(b"other")
    else:
        repo.wrong = {"m-Q4_K_M.gguf"}
    error = error_of("org/repo")
    assert (
        error.message == "m-Q4_K_M.gguf is not the file that org/repo announces: another checksum"
    )
    assert list(folder(tmp_path).glob("blobs/*")) == []
    assert cached_models() == []
    repo.wrong = set()
    assert get("org/repo").path.read_bytes() == Q4


def test_a_small_file_outside_large_file_storage(hub: FakeHub, tmp_path: Path) -> None:
    hub.repos["org/repo"] = {"tiny.gguf": b"GGUF and a bit"}
    assert get("org/repo").path.read_bytes() == b"GGUF and a bit"
    hub.repos["org/repo"] = {"tiny.gguf": b"GGUF and a bat"}
    hub.commit, hub.wrong = "a" * 40, {"tiny.gguf"}
    with pytest.raises(HubError, match="another checksum"):
        get("org/repo", update=True)


def test_split_files_are_fetched_whole(hub: FakeHub) -> None:
    parts = {f"Q4_K_M/m-Q4_K_M-0000{i}-of-00003.gguf": some_bytes(9000, i) for i in (1, 2, 3)}
    hub.repos["org/repo"] = {**parts, "mmproj-m-F16.gguf": some_bytes(500)}
    hub.cuts = [9000, 100]
    model = get("org/repo")
    assert model.name == "org/repo:Q4_K_M"
    assert model.path.name == "m-Q4_K_M-00001-of-00003.gguf"
    for path, data in parts.items():
        assert (model.path.parent / Path(path).name).read_bytes() == data
    assert sum(r.sent for r in hub.downloads) == 3 * 9000
    assert get("org/repo/Q4_K_M/m-Q4_K_M-00002-of-00003.gguf") == model


def test_a_part_that_is_missing_in_the_cache_is_fetched(hub: FakeHub) -> None:
    hub.repos["org/repo"] = {f"m-0000{i}-of-00002.gguf": some_bytes(900, i) for i in (1, 2)}
    model = get("org/repo")
    second = model.path.with_name("m-00002-of-00002.gguf")
    blob = second.resolve()
    second.unlink()
    blob.unlink()
    assert cached_models() == []
    assert get("org/repo") == model
    assert [r.path[-22:] for r in hub.downloads[2:]] == ["/m-00002-of-00002.gguf"]


def test_a_new_revision_is_fetched_by_update_only(repo: FakeHub) -> None:
    old = get("org/repo")
    repo.commit = "b" * 40
    repo.repos["org/repo"]["m-Q4_K_M.gguf"] = Q8
    assert get("org/repo") == old
    new = get("org/repo", update=True)
    assert new.path.read_bytes() == Q8
    assert get("org/repo") == new
    assert len(cached_models()) == 1
    repo.commit = "d" * 40  # another commit, the same file: a link is enough
    n_downloads = len(repo.downloads)
    assert get("org/repo", update=True).path.read_bytes() == Q8
    assert len(repo.downloads) == n_downloads


def test_a_revision_by_url(repo: FakeHub) -> None:
    url = f"https://huggingface.co/org/repo/blob/{COMMIT}/m-Q8_0.gguf"
    assert get(url).path.read_bytes() == Q8
    assert not (folder(Path(repo_cache())) / "refs").exists()
    error = error_of("https://huggingface.co/org/repo/blob/v9/m-Q4_K_M.gguf")
    assert error.message == "org/repo has no revision 'v9'"


def repo_cache() -> str:
    from huggingface_hub import constants

    return str(Path(constants.HF_HUB_CACHE).parent)


def test_files_of_another_host_get_no_token(repo: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    repo.redirects = True
    repo.cuts = [1000]
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert get("org/repo").path.read_bytes() == Q4
    by_host = {r.host.split(":")[0]: set() for r in repo.requests}
    for request in repo.requests:
        by_host[request.host.split(":")[0]].add(request.authorization)
    assert by_host == {"127.0.0.1": {"Bearer hf_secret"}, "localhost": {None}}
    assert [r.range for r in repo.downloads] == ["bytes=0-", "bytes=1000-"]


# -- what a hub refuses

API = "/api/models/org/repo"
FILE = "/org/repo/resolve"


@pytest.mark.parametrize(
    ("status", "headers", "message", "hint"),
    [
        (401, {}, "org/repo is not a repository on {host}", "HF_TOKEN"),
        (404, {"X-Error-Code": "RepoNotFound"}, "org/repo is not a repository on {host}", ""),
        (
            401,
            {"X-Error-Message": "Invalid credentials in Authorization header"},
            "{host} does not accept your access token",
            "HF_TOKEN",
        ),
        (
            403,
            {"X-Error-Code": "GatedRepo"},
            "org/repo is open only to those who have accepted its terms",
            "https://{host}/org/repo",
        ),
        (403, {}, "{host} denies access to org/repo (403)", None),
        (429, {}, "{host} wants fewer requests (429)", "minutes"),
        (503, {}, "{host} has an error (503)", "later"),
        (418, {}, "{host} answers with status 418 for org/repo", None),
    ],
)
@pytest.mark.parametrize("where", [API, FILE])
def test_a_refusal(
    repo: FakeHub,
    status: int,
    headers: dict[str, str],
    message: str,
    hint: str | None,
    where: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    repo.failures[where] = (status, headers)
    if "token" in message:
        monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    error = error_of("org/repo")
    host = f"127.0.0.1:{repo.port}"
    assert error.message == message.format(host=host)
    assert (error.hint is None) == (hint is None)
    assert (hint or "").format(host=host) in (error.hint or "")
    assert error.exit_code == 1


@pytest.mark.parametrize("headers", [{}, {"Content-Type": "text/html"}])
def test_an_answer_that_is_no_hubs(repo: FakeHub, headers: dict[str, str]) -> None:
    repo.failures[API] = (200, headers)
    assert "gave an answer that makes no sense" in error_of("org/repo").message


def test_a_repository_that_is_not_there(hub: FakeHub) -> None:
    assert error_of("no/such").message == f"no/such is not a repository on 127.0.0.1:{hub.port}"


def test_a_type_that_is_not_there(repo: FakeHub) -> None:
    error = error_of("org/repo:Q5_K_M")
    assert error.message == f"org/repo:Q5_K_M is not in 127.0.0.1:{repo.port}"
    assert error.hint == "there is org/repo:Q4_K_M (1.00 MiB), org/repo:Q8_0 (1.50 MiB)"


def test_a_moment_out_of_order_is_waited_for(repo: FakeHub) -> None:
    found = find(parse_reference("org/repo"))
    assert isinstance(found, Download)
    repo.failures[FILE] = (503, {})
    waits = iter([None, None])

    def sleep(_: float) -> None:
        if next(waits, "over") == "over":
            repo.failures.clear()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(download.time, "sleep", sleep)
        assert fetch(found, lambda _: None).path.read_bytes() == Q4


def test_a_hub_that_can_not_be_reached(repo: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    get("org/repo:Q8_0")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    assert get("org/repo:Q8_0").path.read_bytes() == Q8
    error = error_of("org/repo")
    assert error.message.startswith("127.0.0.1:1 can't be reached: ")
    assert error.hint == "--offline uses the cache, which has: org/repo:Q8_0"
    assert get("org/repo", offline=True).path.read_bytes() == Q8
    assert error_of("other/repo").hint == NO_NETWORK


def test_offline(repo: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    error = error_of("org/repo")
    assert error.message == "org/repo is not in the cache, and requests are turned off"
    update = error_of("org/repo", update=True)
    assert update.message == f"127.0.0.1:{repo.port} is not asked: HF_HUB_OFFLINE is set"
    assert "-m FILE" in error.hint
    assert "-m FILE" in update.hint
    assert repo.requests == []
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    get("org/repo:Q8_0")
    n_requests = len(repo.requests)
    assert get("org/repo", offline=True).name == "org/repo:Q8_0"
    error = error_of("org/repo:Q4_K_M", offline=True)
    assert error.message == "org/repo:Q4_K_M is not in the cache"
    assert error.hint == "there is org/repo:Q8_0 (1.50 MiB)"
    assert len(repo.requests) == n_requests


@pytest.mark.parametrize("path", ["../../evil.gguf", "/etc/evil.gguf", "a\\..\\evil.gguf"])
def test_a_path_that_leaves_the_cache_is_refused(repo: FakeHub, tmp_path: Path, path: str) -> None:
    repo.announced["m-Q8_0.gguf"] = path
    assert "makes no sense" in error_of("org/repo").message
    assert not list(tmp_path.rglob("*evil*"))


def test_a_commit_that_is_none_is_refused(repo: FakeHub) -> None:
    repo.commit = "../../.."
    assert "makes no sense" in error_of("org/repo").message


# -- disks


def test_room_is_looked_for_first(
    repo: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def disk_usage(path: Path) -> SimpleNamespace:
        asked.append(path)
        return SimpleNamespace(free=MIB - 1)

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    error = error_of("org/repo")
    cache = tmp_path / "hub"
    assert error.message == f"m-Q4_K_M.gguf needs 1.00 MiB more, {cache} has 1024.00 KiB free"
    assert asked == [tmp_path]
    assert repo.downloads == []
    blobs = folder(tmp_path) / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{hashlib.sha256(Q4).hexdigest()}.incomplete").write_bytes(Q4[:1])
    assert get("org/repo").path.read_bytes() == Q4


def test_a_disk_that_becomes_full(
    repo: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = Partial.append

    def full(partial: Partial, data: bytes) -> None:
        if partial.n_bytes > MIB // 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        append(partial, data)

    with monkeypatch.context() as patch:
        patch.setattr(Partial, "append", full)
        error = error_of("org/repo")
    assert (
        error.message == f"{tmp_path / 'hub'}: the disk is full; the part that has arrived is kept"
    )
    (partial,) = incomplete(tmp_path)
    kept = partial.stat().st_size
    assert kept > MIB // 2
    assert get("org/repo").path.read_bytes() == Q4
    assert repo.downloads[-1].range == f"bytes={kept}-"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_cache_that_can_not_be_written(repo: FakeHub, tmp_path: Path) -> None:
    tmp_path.joinpath("hub").mkdir(mode=0o500)
    assert error_of("org/repo").message.endswith("hub: Permission denied")


# -- deleting


def test_removal_of_one_of_two(repo: FakeHub, tmp_path: Path) -> None:
    get("org/repo:Q4_K_M")
    get("org/repo:Q8_0")
    with pytest.raises(HubError, match="org/repo can mean 2 models in the cache") as caught:
        plan_removal(parse_reference("org/repo"))
    assert caught.value.hint == "there is org/repo:Q4_K_M (1.00 MiB), org/repo:Q8_0 (1.50 MiB)"
    removal = plan_removal(parse_reference("org/repo:q8_0"))
    assert removal.n_bytes == len(Q8)
    remove(removal)
    assert [item.name for item in cached_models()] == ["org/repo:Q4_K_M"]
    assert [path.name for path in (folder(tmp_path) / "blobs").iterdir()] == [
        hashlib.sha256(Q4).hexdigest()
    ]
    remove(plan_removal(parse_reference("org/repo")))
    assert not folder(tmp_path).exists()


def test_removal_takes_all_revisions(repo: FakeHub, tmp_path: Path) -> None:
    get("org/repo:Q4_K_M")
    get("org/repo:Q8_0")
    repo.commit = "b" * 40
    repo.repos["org/repo"]["m-Q4_K_M.gguf"] = Q8[:9000]
    get("org/repo:Q4_K_M", update=True)
    remove(plan_removal(parse_reference("org/repo:Q4_K_M")))
    assert [item.name for item in cached_models()] == ["org/repo:Q8_0"]
    assert len(list((folder(tmp_path) / "blobs").iterdir())) == 1


def test_removal_of_what_is_not_whole(repo: FakeHub, tmp_path: Path) -> None:
    repo.cuts = [1000, *[0] * download.MAX_TRIES]
    error_of("org/repo")
    removal = plan_removal(parse_reference("org/repo"))
    assert (removal.models, removal.partial_bytes) == ((), 1000)
    remove(removal)
    assert not folder(tmp_path).exists()
    with pytest.raises(HubError, match="org/repo is not in the cache"):
        plan_removal(parse_reference("org/repo"))


def test_removal_of_what_is_not_there(repo: FakeHub) -> None:
    get("org/repo")
    with pytest.raises(HubError, match="org/repo:Q6_K is not in the cache"):
        plan_removal(parse_reference("org/repo:Q6_K"))


# -- from Python


def test_local_path(repo: FakeHub, tmp_path: Path) -> None:
    assert local_path("models/x.gguf") == "models/x.gguf"
    assert local_path(tmp_path) == tmp_path
    assert local_path("hf.co/org/repo") == get("org/repo").path
