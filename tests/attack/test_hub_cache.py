"""A cache in which anything may lie: commands read what is a model, and delete nothing else."""

from __future__ import annotations

import hashlib
import mmap
import os
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from localkv.loader.hub.cache import cached_models
from localkv.loader.hub.download import Download, fetch
from localkv.loader.hub.find import find
from localkv.loader.hub.reference import parse_reference
from localkv.loader.split_name import split_name
from support.attack.odd_cache import fill_at_random
from support.fake_hub import COMMIT, FakeHub
from support.program import Program, Result

REPO = "org/repo"
FAST_SEEDS, LONG_SEEDS = 30, 1500
DATA = hashlib.shake_128(b"model").digest(100_000)
OTHER = hashlib.shake_128(b"other").digest(3_000)
OTHER_DIGEST = hashlib.sha256(OTHER).hexdigest()


@pytest.fixture
def here(
    program: Program, monkeypatch: pytest.MonkeyPatch, hub: FakeHub, tmp_path: Path
) -> Program:
    """The program, without a shelf; the hub has two models."""
    monkeypatch.setattr("localkv.loader.local_models.shelves", list)
    monkeypatch.chdir(tmp_path)
    hub.repos[REPO] = {"m-Q4_K_M.gguf": DATA, "m-Q8_0.gguf": OTHER}
    return program


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """The repository's folder; deleted afterwards, since pytest does not get rid of all of it."""
    yield tmp_path / "hub" / "models--org--repo"
    subprocess.run(
        ["chmod", "-R", "u+rwx", str(tmp_path / "hub")], check=False, stderr=subprocess.DEVNULL
    )
    subprocess.run(["rm", "-rf", str(tmp_path / "hub")], check=True)


@pytest.fixture
def snapshot(folder: Path) -> Path:
    path = folder / "snapshots" / COMMIT
    path.mkdir(parents=True)
    return path


def get(text: str = REPO, **options: bool) -> Path:
    found = find(parse_reference(text), **options)
    return (fetch(found, lambda _: None) if isinstance(found, Download) else found).path


def in_lines(result: Result) -> Result:
    """What no command does, whatever lies in the cache."""
    assert result.code in (0, 1, 2)
    assert "Traceback" not in result.err
    assert "a bug" not in result.err
    assert all(line.isprintable() for line in [*result.err_lines, *result.out.splitlines()])
    return result


def every_command(here: Program) -> None:
    """All that read the cache."""
    for argv in (
        ("list",),
        ("list", "-q"),
        ("list", "--json"),
        ("show", REPO),
        ("show", f"{REPO}:Q4_K_M"),
        ("rm", f"{REPO}:Q2_K", "-y"),
        ("show", "-hf", REPO, "--offline"),
    ):
        in_lines(here(*argv))
    in_lines(complete(here))


def complete(here: Program) -> Result:
    from click.shell_completion import CompletionItem

    from localkv.commands.completion import cached_values

    for item in cached_values(None, None, ""):  # type: ignore[arg-type]
        assert isinstance(item, CompletionItem)
        assert item.value.isprintable()
    return Result(0, "", "")


def fill(case: str, folder: Path, snapshot: Path) -> None:
    """Put something odd into the cache."""
    names = {
        "no parts": "x-00001-of-00000.gguf",
        "part 3 of 2": "x-00003-of-00002.gguf",
        "part 0": "x-00000-of-00002.gguf",
        "many parts": "x-00001-of-99999.gguf",
        "other digits": "x-٠٠٠٠١-of-٠٠٠٠١.gguf",
        "no stem": ".gguf",
        "a line break": "a\nb-Q4_K_M.gguf",
        "escapes": "a\x1b]52;c;eA==\x07-Q4_K_M.gguf",
        "no UTF-8": os.fsdecode(b"a\xff-Q4_K_M.gguf"),
        "spaces": " .gguf",
        "long": "x" * 250 + ".gguf",
    }
    if case in names:
        (snapshot / names[case]).write_bytes(b"GGUF and more")
    elif case == "a folder in place of a file":
        (snapshot / "m-Q4_K_M.gguf").mkdir()
    elif case == "a link in a circle":
        (snapshot / "m-Q4_K_M.gguf").symlink_to("m-Q4_K_M.gguf")
        (snapshot / "d").symlink_to(snapshot)
    elif case == "a link to nothing":
        (snapshot / "m-Q4_K_M.gguf").symlink_to("../../blobs/none")
    elif case == "a pipe":
        os.mkfifo(snapshot / "m-Q4_K_M.gguf")
        (folder / "refs").mkdir()
        os.mkfifo(folder / "refs" / "main")
    elif case == "a file in place of snapshots":
        shutil.rmtree(folder / "snapshots")
        (folder / "snapshots").write_text("")
    elif case == "a file as a snapshot":
        (folder / "snapshots" / "main").write_text("")
        (folder / "snapshots" / "loop").symlink_to("loop")
    elif case == "a file as a repository":
        shutil.rmtree(folder)
        folder.write_text("")
    elif case == "odd repositories":
        for name in (
            "models--..--..",
            "models--",
            "models--a--b--c",
            "models--\n--x",
            "models--a-- ",
        ):
            path = folder.parent / name / "snapshots" / COMMIT
            path.mkdir(parents=True)
            (path / "m.gguf").write_bytes(b"GGUF")
        (folder.parent / "models--l--l").symlink_to("models--l--l")
    elif case.startswith("a reference"):
        (folder / "refs").mkdir()
        what: dict[str, bytes] = {
            "a reference that leaves": b"../../../../../../etc",
            "a reference of bytes": b"\xff\xfe\0",
            "a reference of lines": b"a\n" * 1000,
            "a reference of much": b"x" * 10_000_000,
        }
        if case in what:
            (folder / "refs" / "main").write_bytes(what[case])
        else:
            (folder / "refs" / "main").mkdir()
    elif case == "deep folders":
        for _ in range(1500):
            snapshot = snapshot / "d"
            snapshot.mkdir()
    elif case == "no rights":
        (snapshot / "m-Q4_K_M.gguf").write_bytes(b"GGUF")
        (snapshot / "m-Q4_K_M.gguf").chmod(0)
        closed = snapshot / "closed"
        closed.mkdir(mode=0)
    elif case == "a date far away":
        (snapshot / "m-Q4_K_M.gguf").write_bytes(b"GGUF")
        for date in (2**40, -(2**40)):
            os.utime(snapshot / "m-Q4_K_M.gguf", (date, date))
    else:
        raise ValueError(case)


CASES = [
    "no parts",
    "part 3 of 2",
    "part 0",
    "many parts",
    "other digits",
    "no stem",
    "a line break",
    "escapes",
    "no UTF-8",
    "spaces",
    "long",
    "a folder in place of a file",
    "a link in a circle",
    "a link to nothing",
    "a pipe",
    "a file in place of snapshots",
    "a file as a snapshot",
    "a file as a repository",
    "odd repositories",
    "a reference that leaves",
    "a reference of bytes",
    "a reference of lines",
    "a reference of much",
    "a reference as a folder",
    "deep folders",
    "no rights",
    "a date far away",
]


IN_THE_WAY = ("a file in place of snapshots", "a file as a repository", "a reference as a folder")


@pytest.mark.parametrize("case", CASES)
def test_what_may_lie_in_the_cache(
    here: Program, folder: Path, snapshot: Path, tmp_path: Path, case: str
) -> None:
    fill(case, folder, snapshot)
    mine = tmp_path / "mine"
    mine.write_text("mine")
    every_command(here)
    path = in_lines(here("pull", f"{REPO}:Q8_0"))
    if path.code == 0:
        assert Path(path.out.strip()).read_bytes() == OTHER
        assert f"{REPO}:Q8_0" in here("list", "-q").out.splitlines()
        removed = in_lines(here("rm", f"{REPO}:Q8_0", "-y"))
        assert removed.code == 0 or "nested too deeply" in removed.err or case == "no rights"
        if removed.code:
            return
        assert not (folder / "blobs" / OTHER_DIGEST).exists()
    else:
        assert case in IN_THE_WAY
        assert "is in the way" in path.err
    in_lines(here("pull", REPO))
    in_lines(here("rm", REPO, "-y"))
    assert mine.exists()


def test_names_of_parts() -> None:
    assert split_name("x-00002-of-00003.gguf") == ("x", 2, 3)
    for numbers in ("00001-of-00000", "00003-of-00002", "00000-of-00002", "٠٠٠٠١-of-٠٠٠٠٢"):
        assert split_name(f"x-{numbers}.gguf") is None


def test_an_odd_name_hides_no_other(here: Program, snapshot: Path, tiny_model: Path) -> None:
    for name in ("m-Q4_K_M.gguf", "x-00001-of-00000.gguf"):
        (snapshot / name).write_bytes(tiny_model.read_bytes())
    assert here("list", "-q").out.splitlines() == [
        f"{REPO}:Q4_K_M",
        f"{REPO}/x-00001-of-00000.gguf",
    ]
    for name in here("list", "-q").out.splitlines():
        assert here("show", name).code == 0


def test_many_entries(here: Program, folder: Path, snapshot: Path) -> None:
    names = [f"x{i}-00001-of-99999.gguf" for i in range(4_000)]
    names += [f"y{i}-Q8_0.gguf" for i in range(4_000)]
    for name in names:
        os.link(snapshot / names[0], snapshot / name) if name != names[0] else (
            snapshot / name
        ).write_bytes(b"GGUF")
    start = time.monotonic()
    assert len(cached_models()) == 4_000
    error = in_lines(here("show", REPO))
    assert error.code == 1
    removal = in_lines(here("rm", REPO, "-y"))
    assert "can mean 4000 models" in removal.err
    assert "and 3988 more" in removal.err
    assert len(removal.err) < 1200
    assert time.monotonic() - start < 5


@pytest.mark.attack
def test_twenty_thousand_models(here: Program, snapshot: Path) -> None:
    (snapshot / "x.gguf").write_bytes(b"GGUF")
    for i in range(20_000):
        (snapshot / f"m{i}-Q8_0.gguf").write_bytes(b"GGUF")
    start = time.monotonic()
    assert len(cached_models()) == 20_001
    assert "can mean" in in_lines(here("rm", REPO, "-y")).err
    assert here("rm", f"{REPO}/x.gguf", "-y").code == 0
    assert time.monotonic() - start < 60


def search(here: Program, tmp_path: Path, model: Path, seeds: range) -> Counter[str]:
    """Count the outcomes of `rm` in caches filled at random, and what was listed there."""
    outcomes: Counter[str] = Counter()
    for seed in seeds:
        try:
            outcomes += look_at_all(here, tmp_path / f"{seed}", model, Random(seed))
        except BaseException:
            print(f"seed {seed}")
            raise
        assert model.exists()
        shutil.rmtree(tmp_path / f"{seed}")
    return outcomes


def look_at_all(here: Program, box: Path, model: Path, random: Random) -> Counter[str]:
    """Fill a cache, show and delete all that is listed there; nothing else has to change."""
    from huggingface_hub import constants

    outside = box / "outside"
    outside.mkdir(parents=True)
    (outside / "important.gguf").write_bytes(DATA)
    fill_at_random(random, box / "hub", model, outside)
    outcomes: Counter[str] = Counter()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_CACHE", str(box / "hub"))
        every_command(here)
        names = here("list", "-q").out.splitlines()
        for name in (*names, REPO, "org/two"):
            in_lines(here("show", name))
            outcomes[f"rm {in_lines(here('rm', name, '-y')).code}"] += 1
        outcomes["listed"] += len(names)
        assert in_lines(here("pull", f"{REPO}:Q8_0")).code in (0, 1)
    assert [path.name for path in outside.iterdir()] == ["important.gguf"]
    assert (outside / "important.gguf").read_bytes() == DATA
    return outcomes


@pytest.mark.slow
def test_random_caches(here: Program, tmp_path: Path, tiny_model: Path) -> None:
    outcomes = search(here, tmp_path, tiny_model, range(FAST_SEEDS))
    assert min(outcomes["rm 0"], outcomes["rm 1"], outcomes["listed"]) > FAST_SEEDS // 5


@pytest.mark.attack
def test_many_random_caches(here: Program, tmp_path: Path, tiny_model: Path) -> None:
    outcomes = search(here, tmp_path, tiny_model, range(1000, 1000 + LONG_SEEDS))
    print(dict(outcomes))
    assert min(outcomes["rm 0"], outcomes["rm 1"], outcomes["listed"]) > LONG_SEEDS // 5


# -- rm


def other_file(tmp_path: Path) -> Path:
    path = tmp_path / "mine" / "important.gguf"
    path.parent.mkdir()
    path.write_bytes(DATA)
    return path


@pytest.mark.parametrize("with_another", [False, True])
@pytest.mark.parametrize("target", ["absolute", "relative", "dots", "file of another repository"])
def test_rm_follows_no_link(
    here: Program, folder: Path, snapshot: Path, tmp_path: Path, target: str, with_another: bool
) -> None:
    mine = other_file(tmp_path)
    if target == "file of another repository":
        mine = folder.parent / "models--a--b" / "blobs" / ("a" * 64)
        mine.parent.mkdir(parents=True)
        mine.write_bytes(DATA)
    link = str(mine) if target == "absolute" else os.path.relpath(mine, snapshot)
    if target == "dots":
        (folder / "blobs").mkdir()
        link = f"../../blobs/../blobs/../{os.path.relpath(mine, folder)}"
    (snapshot / "m-Q4_K_M.gguf").symlink_to(link)
    if with_another:
        get(f"{REPO}:Q8_0")
    assert in_lines(here("rm", f"{REPO}:Q4_K_M", "-y")).code == 0
    assert mine.read_bytes() == DATA
    assert not os.path.lexists(snapshot / "m-Q4_K_M.gguf")
    assert (here("list", "-q").out == f"{REPO}:Q8_0\n") == with_another


@pytest.mark.parametrize("which", ["", "snapshots", "blobs"])
def test_rm_leaves_alone_what_a_folder_leads_to(
    here: Program, folder: Path, tmp_path: Path, which: str
) -> None:
    get(f"{REPO}:Q8_0")
    get(REPO)
    elsewhere = tmp_path / "elsewhere"
    (folder / which).rename(elsewhere)
    (folder / which).symlink_to(elsewhere)
    before = sorted(elsewhere.rglob("*"))
    result = in_lines(here("rm", f"{REPO}:Q8_0", "-y"))
    assert result.code == 1
    if which != "snapshots":  # whose links lead nowhere now
        assert "is a link, and its target is left alone" in result.err
    assert sorted(elsewhere.rglob("*")) == before


def test_rm_of_one_repository_of_two_with_the_same_commit(here: Program, hub: FakeHub) -> None:
    hub.repos["org/two"] = {"m-Q4_K_M.gguf": OTHER}
    get(REPO)
    get("org/two")
    for name in ("org/two", REPO):
        assert here("rm", name, "-y").code == 0
        assert here("list", "-q").out == (f"{REPO}:Q4_K_M\n" if name == "org/two" else "")


def test_rm_is_not_kept_from_it_by_another_repository(here: Program, folder: Path) -> None:
    get(REPO)
    odd = folder.parent / "models--a--b"
    (odd / "refs").mkdir(parents=True)
    (odd / "snapshots").mkdir()
    (odd / "refs" / "main").write_bytes(b"\xff")
    assert in_lines(here("rm", REPO, "-y")).code == 0
    assert not folder.exists()


@pytest.mark.parametrize("is_named", [False, True])
def test_rm_deletes_a_pipe_without_opening_it(
    here: Program, folder: Path, snapshot: Path, is_named: bool
) -> None:
    get(REPO)
    get(f"{REPO}:Q8_0")
    os.mkfifo(folder / "blobs" / ("a" * 64))
    (folder / "blobs" / f"{OTHER_DIGEST}.incomplete").write_bytes(OTHER[:5])
    (snapshot / "README.md").write_text("keeps the repository")
    if is_named:
        (snapshot / "x-00001-of-00001.gguf").symlink_to("../../blobs/" + "a" * 64)
    for name in (REPO, f"{REPO}:Q8_0"):
        in_lines(here("rm", f"{name}/m-Q4_K_M.gguf" if name == REPO else name, "-y"))
    assert here("list", "-q").out == ""
    assert (folder / "blobs" / ("a" * 64)).exists() == is_named


def test_rm_says_what_it_can_not_delete(here: Program, folder: Path, monkeypatch) -> None:
    get(REPO)

    def refuse(path: object, **_: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(shutil, "rmtree", refuse)
    result = in_lines(here("rm", REPO, "-y"))
    assert result.code == 1
    assert "can't be deleted" in result.err


def test_bytes_without_a_name_are_counted_and_deleted(here: Program, folder: Path) -> None:
    """A process that ended between the two leaves them like this."""
    get(REPO)
    for path in (folder / "snapshots" / COMMIT).iterdir():
        path.unlink()
    assert here("list", "-q").out == ""
    result = in_lines(here("rm", REPO, "-y"))
    assert result.err.startswith(f"deleted interrupted downloads of {REPO}, 97.66 KiB")
    assert not folder.exists()


# -- what is in the way of a download


@pytest.mark.parametrize(
    "which", ["blobs", "snapshots", "refs", "refs/main", "blobs/DIGEST", "lock"]
)
@pytest.mark.parametrize("what", ["file", "folder", "link"])
def test_what_is_in_the_way(
    here: Program, folder: Path, tmp_path: Path, which: str, what: str
) -> None:
    digest = hashlib.sha256(DATA).hexdigest()
    place = folder / which.replace("DIGEST", digest)
    if which == "lock":
        place = folder.parent / ".locks" / folder.name / f"{digest}.lock"
    place.parent.mkdir(parents=True, exist_ok=True)
    mine = tmp_path / "mine"
    mine.write_text("mine")
    if what == "file":
        place.write_text("?")
    elif what == "folder":
        (place / "x").mkdir(parents=True)
    else:
        place.symlink_to(mine)
    result = in_lines(here("pull", REPO))
    if result.code == 0:
        assert Path(result.out.strip()).read_bytes() == DATA
    else:
        assert "localkv rm makes room" not in result.err
        assert "is in the way" in result.err or "is a link" in result.err or which == "lock"
    assert mine.read_text() == "mine" or which == "lock"


@pytest.mark.parametrize("which", ["blobs", "snapshots", f"snapshots/{COMMIT}", "refs"])
def test_nothing_is_fetched_through_a_link(
    here: Program, folder: Path, tmp_path: Path, which: str
) -> None:
    mine = other_file(tmp_path)
    (mine.parent / "m-Q4_K_M.gguf").write_bytes(b"mine")
    (folder / which).parent.mkdir(parents=True)
    (folder / which).symlink_to(mine.parent)
    result = in_lines(here("pull", REPO))
    assert result.code == 1
    assert "is a link, and nothing is fetched to its target" in result.err
    assert {path.name for path in mine.parent.iterdir()} == {mine.name, "m-Q4_K_M.gguf"}
    assert (mine.parent / "m-Q4_K_M.gguf").read_bytes() == b"mine"


def test_a_repository_on_another_disk(here: Program, folder: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    folder.parent.mkdir()
    folder.symlink_to(elsewhere)
    assert here("pull", REPO).code == 0
    assert here("list", "-q").out == f"{REPO}:Q4_K_M\n"


def test_a_partial_file_that_is_a_link(here: Program, folder: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_bytes(b"mine")
    place = folder / "blobs" / f"{hashlib.sha256(DATA).hexdigest()}.incomplete"
    place.parent.mkdir(parents=True)
    place.symlink_to(mine)
    assert "is in the way" in in_lines(here("pull", REPO)).err
    assert mine.read_bytes() == b"mine"
    place.unlink()
    os.mkfifo(place)
    assert "is in the way" in in_lines(here("pull", REPO)).err


def test_a_blob_of_another_size_is_replaced_at_once(here: Program, folder: Path) -> None:
    """Who has mapped it keeps what it mapped."""
    path = get(REPO)
    blob = path.resolve()
    blob.write_bytes(DATA[:-1] + b"??")
    with blob.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        before = bytes(mapped)
        assert get(REPO, update=True).read_bytes() == DATA
        assert bytes(mapped) == before


def test_a_revision_never_leaves_its_folder(here: Program, hub: FakeHub, tmp_path: Path) -> None:
    hub.lie = lambda kind, _: None
    url = "https://huggingface.co/org/repo/blob/..%2F..%2F..%2F..%2Fevil/m-Q4_K_M.gguf"
    result = in_lines(here("pull", url))
    assert result.code == 2
    assert "is not a branch, tag or commit" in result.err
    assert hub.requests == []
    assert not list(tmp_path.rglob("evil*"))


@pytest.mark.parametrize("text", ["https://[::1/org/repo", "hf.co/org/repo/blob/a%00b/m.gguf"])
def test_an_address_that_is_none(here: Program, text: str) -> None:
    assert in_lines(here("pull", text)).code == 2
