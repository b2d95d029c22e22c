"""`pull` that is interrupted, killed, raced or out of disk, at every stage.

Whatever happens when, what is in the cache is whole or counts as not there, and the next `pull`
goes on from it.
"""

from __future__ import annotations

import errno
import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from localkv.errors import HubError
from localkv.loader.hub.cache import cached_models
from localkv.loader.hub.download import Download, fetch
from localkv.loader.hub.find import find
from localkv.loader.hub.reference import parse_reference
from support.fake_hub import FakeHub
from support.program import Process, hub_env, localkv_process
from support.waiting import wait_for

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals and limits of POSIX")

REPO = "org/repo"
PARTS = {
    f"m-Q4_K_M-0000{i}-of-00002.gguf": hashlib.shake_128(bytes([i])).digest(300_000) for i in (1, 2)
}
N_KILLS_FAST, N_KILLS_LONG = 3, 60


@pytest.fixture
def split(hub: FakeHub) -> FakeHub:
    """A hub with a model of two parts."""
    hub.repos[REPO] = dict(PARTS)
    return hub


def pull(hub: FakeHub, tmp_path: Path, **popen: Any) -> Process:
    return localkv_process("pull", REPO, env=hub_env(hub, tmp_path), **popen)


def get() -> Path:
    found = find(parse_reference(REPO), update=True)
    return (fetch(found, lambda _: None) if isinstance(found, Download) else found).path


def is_sound(folder: Path) -> None:
    """Nothing half is taken for whole."""
    for path in folder.rglob("*"):
        if path.is_file() and len(path.name) == 64 and path.parent.name == "blobs":
            assert hashlib.sha256(path.read_bytes()).hexdigest() == path.name
    for model in cached_models():
        for file in model.model.files:
            assert (model.folder / file.path).read_bytes() == PARTS[file.path]


def goes_on(tmp_path: Path) -> None:
    """What there is is sound, and the next try succeeds."""
    is_sound(tmp_path / "hub")
    path = get()
    for name, data in PARTS.items():
        assert path.with_name(name).read_bytes() == data
    assert not list((tmp_path / "hub").rglob("*.incomplete"))


# -- every step, in this process

STEPS = ("mkdir", "open", "symlink", "replace", "fsync", "unlink", "write", "rename")


class Fault:
    """The n-th step that concerns the cache fails: before it is done, or as soon as it is."""

    def __init__(self, n: int, error: BaseException, after: bool, folder: Path) -> None:
        self.left, self.error, self.after, self.folder = n, error, after, str(folder)

    def around(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def faulty(*args: Any, **kwargs: Any) -> Any:
            ours = isinstance(args[0], int) or os.fspath(args[0]).startswith(self.folder)
            self.left -= ours
            fails = ours and self.left == 0
            if fails and not self.after:
                raise self.error
            result = step(*args, **kwargs)
            if fails:
                if step is os_open:
                    os.close(result)
                raise self.error
            return result

        return faulty


os_open = os.open


def faults(
    tmp_path: Path, error: Callable[[], BaseException], after: bool, said: list[str]
) -> Iterator[Path]:
    """Pull once for each step, which then fails: where that left the cache, and what was said."""
    n = 0
    while True:
        n += 1
        folder = tmp_path / f"{n}"
        fault = Fault(n, error(), after, folder)
        with pytest.MonkeyPatch.context() as patch:
            from huggingface_hub import constants

            patch.setattr(constants, "HF_HUB_CACHE", str(folder / "hub"))
            with pytest.MonkeyPatch.context() as steps:
                for name in STEPS:
                    steps.setattr(os, name, fault.around(getattr(os, name)))
                try:
                    get()
                except KeyboardInterrupt:
                    pass
                except HubError as caught:
                    said.append(str(caught))
            yield folder
        if fault.left > 0:
            return


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    "error",
    [
        pytest.param(KeyboardInterrupt, id="Ctrl-C"),
        pytest.param(lambda: OSError(errno.ENOSPC, "No space left on device"), id="full"),
        pytest.param(
            lambda: OSError(errno.EIO, "Input/output error"), id="broken", marks=pytest.mark.slow
        ),
        pytest.param(
            lambda: PermissionError(errno.EACCES, "Permission denied"),
            id="denied",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_every_step_fails_once(
    split: FakeHub, tmp_path: Path, error: Callable[[], BaseException], after: bool
) -> None:
    n_steps, said = 0, []
    for folder in faults(tmp_path, error, after, said):
        goes_on(folder)
        n_steps += 1
    assert n_steps > 15, "steps were found at all"
    assert all(line.isprintable() for line in said)
    assert len(said) > 5 or error is KeyboardInterrupt


# -- Ctrl-C, in a process of its own

STOP_AT = """
import runpy, sys, time
from pathlib import Path
from localkv.loader.hub import download
marker, owner, name = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
owner = {"Partial": download.Partial, "download": download}[owner]
def stop(*_, **__):
    marker.touch()
    for _ in range(600):  # a signal just before a sleep would not end it
        time.sleep(0.1)
setattr(owner, name, stop)
sys.argv = ["localkv", "pull", "org/repo"]
runpy.run_module("localkv", run_name="__main__", alter_sys=True)
"""


def interrupt(process: Process) -> None:
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, b""), err
    assert b"Traceback" not in err
    assert err.count(b"\n") <= 1, err


@pytest.mark.parametrize("stage", ["listing", "headers", "body"])
def test_ctrl_c_while_the_hub_is_awaited(split: FakeHub, tmp_path: Path, stage: str) -> None:
    def silent(kind: str, path: str) -> Iterator[bytes] | None:
        return wait() if kind == "file" else None

    def wait() -> Iterator[bytes]:
        split.stalled.set()
        split.go_on.wait(60)
        yield b""

    if stage == "listing":
        split.waiting = True
    elif stage == "headers":
        split.lie = silent
    else:
        split.stall_after = 100_000
    with pull(split, tmp_path) as process:
        assert split.stalled.wait(60)
        interrupt(process)
    split.go_on.set()
    split.lie, split.stall_after = None, None
    goes_on(tmp_path)


@pytest.mark.parametrize(
    "stage",
    [
        "Partial is_right",
        "Partial move_to",
        "download link_blob",
        "download set_revision",
        "download cached_model",
    ],
)
def test_ctrl_c_when_all_has_arrived(split: FakeHub, tmp_path: Path, stage: str) -> None:
    marker = tmp_path / "marker"
    command = [sys.executable, "-c", STOP_AT, str(marker), *stage.split()]
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with Process(command, env=hub_env(split, tmp_path), **streams) as process:
        wait_for(lambda: marker.exists() or process.poll() is not None)
        interrupt(process)
    goes_on(tmp_path)


@pytest.mark.slow
def test_ctrl_c_while_another_fetches_it(split: FakeHub, tmp_path: Path) -> None:
    split.stall_after = 100_000
    with pull(split, tmp_path) as first:
        assert split.stalled.wait(60)
        with pull(split, tmp_path) as second:
            assert second.stderr is not None
            assert second.stderr.readline().startswith(b"fetching")
            time.sleep(0.2)
            interrupt(second)
        split.go_on.set()
        _, err = first.communicate(timeout=60)
        assert first.returncode == 0, err
    goes_on(tmp_path)


# -- two at once, and killed


@pytest.mark.slow
def test_two_at_once_fetch_it_once(split: FakeHub, tmp_path: Path) -> None:
    split.pace = 0.02
    with pull(split, tmp_path) as first, pull(split, tmp_path) as second:
        results = [process.communicate(timeout=60) for process in (first, second)]
        assert (first.returncode, second.returncode) == (0, 0), results
    assert results[0][0] == results[1][0]
    assert sum(request.sent for request in split.downloads) == sum(map(len, PARTS.values()))
    goes_on(tmp_path)


@pytest.mark.slow
def test_who_waits_goes_on_where_the_other_was_killed(split: FakeHub, tmp_path: Path) -> None:
    split.stall_after = 100_000
    with pull(split, tmp_path) as first:
        assert split.stalled.wait(60)
        partial = tmp_path / "hub" / "models--org--repo" / "blobs"
        wait_for(lambda: sum(p.stat().st_size for p in partial.glob("*.incomplete")) >= 100_000)
        with pull(split, tmp_path) as second:
            assert second.stderr is not None
            assert second.stderr.readline().startswith(b"fetching")
            split.stall_after = None
            first.kill()
            _, err = second.communicate(timeout=60)
            assert second.returncode == 0, err
    split.go_on.set()
    assert split.downloads[1].range == "bytes=100000-"
    goes_on(tmp_path)


def kill_at_random(split: FakeHub, tmp_path: Path, n_kills: int) -> int:
    """Count the processes that were killed before they were done."""
    split.pace = 0.02
    random, killed = Random(n_kills), 0
    for round_ in range(n_kills):
        home = tmp_path / f"{round_ // 4}"  # a few kills for each download
        with pull(split, home) as process:
            time.sleep(random.uniform(0.2, 1.6))
            killed += process.poll() is None
            process.kill()
        with pytest.MonkeyPatch.context() as patch:
            from huggingface_hub import constants

            patch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
            is_sound(home / "hub")
            if round_ % 4 == 3 or round_ == n_kills - 1:
                split.pace = 0.0
                goes_on(home)
                split.pace = 0.02
    return killed


@pytest.mark.slow
def test_killed_at_random_moments(split: FakeHub, tmp_path: Path) -> None:
    assert kill_at_random(split, tmp_path, N_KILLS_FAST)


@pytest.mark.attack
def test_killed_at_many_random_moments(split: FakeHub, tmp_path: Path) -> None:
    killed = kill_at_random(split, tmp_path, N_KILLS_LONG)
    print(f"{killed} killed before they were done")
    assert killed > N_KILLS_LONG // 4


# -- disks and limits


def test_a_limit_on_the_size_of_files(split: FakeHub, tmp_path: Path) -> None:
    def limit() -> None:
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))

    with pull(split, tmp_path, preexec_fn=limit) as process:
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (1, b"")
    lines = err.decode().splitlines()
    assert (
        lines[1] == f"error: {tmp_path / 'hub'}: no file may be that large; "
        "the part that has arrived is kept"
    )
    (partial,) = (tmp_path / "hub").rglob("*.incomplete")
    assert partial.stat().st_size == 200_000
    goes_on(tmp_path)
    assert split.downloads[1].range == "bytes=200000-"


IN_A_SMALL_FILE_SYSTEM = """
mount -t tmpfs -o size=400k none "$1" || exit 8
shift
"$@"
"""
BELIEVES_IN_ROOM = """
import runpy, shutil, sys
from types import SimpleNamespace
shutil.disk_usage = lambda _: SimpleNamespace(free=1 << 40)
runpy.run_module("localkv", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize("how", ["found before", "found on the way"])
def test_a_disk_that_is_full(split: FakeHub, tmp_path: Path, how: str) -> None:
    home = tmp_path / "home"
    home.mkdir()
    python = ["-m", "localkv"] if how == "found before" else ["-c", BELIEVES_IN_ROOM]
    mount = ["unshare", "-rm", "sh", "-c", IN_A_SMALL_FILE_SYSTEM, "sh", str(home)]
    command = [*mount, sys.executable, *python, "pull", REPO]
    try:
        done = subprocess.run(
            command, env=hub_env(split, home), capture_output=True, text=True, timeout=120
        )
    except FileNotFoundError:
        pytest.skip("no unshare")
    if done.returncode == 8 or "unshare" in done.stderr:
        pytest.skip(f"no file system of one's own: {done.stderr}")
    assert (done.returncode, done.stdout) == (1, "")
    *_, message, hint = done.stderr.splitlines()
    if how == "found before":
        assert message.startswith("error: m-Q4_K_M-00001-of-00002.gguf needs 585.94 KiB more, ")
    else:
        assert message == f"error: {home}/hub: the disk is full; the part that has arrived is kept"
    assert hint == "hint: localkv rm makes room; HF_HOME=FOLDER takes another disk"
