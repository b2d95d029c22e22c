"""Texts that are saved and restored over HTTP, and names that lead elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.server import RunningServer

BODY = {"prompt": "Once upon a time a dog " * 20, "n_predict": 12, "temperature": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("states")


@pytest.fixture(scope="module")
def saving(folder: Path) -> Iterator[RunningServer]:
    """A server that may save."""
    server = RunningServer("--slot-save-path", str(folder)).wait()
    yield server
    assert server.stop() == 0


@pytest.mark.slow
def test_a_text_goes_on_from_a_file(saving: RunningServer, folder: Path):
    first = saving.post("/completion", BODY)[1]
    status, saved = saving.post("/slots/0?action=save", {"filename": "a.state"})
    assert status == 200, saved
    assert saved["n_written"] == (folder / "a.state").stat().st_size
    assert saving.post("/slots/0?action=erase", b"")[1]["n_erased"] == saved["n_saved"]
    without = saving.post("/completion", BODY)[1]
    assert without["timings"]["cache_n"] == 0
    assert saving.post("/slots/0?action=erase", b"")[0] == 200
    status, restored = saving.post("/slots/1?action=restore", {"filename": "a.state"})
    assert (status, restored["n_restored"]) == (200, saved["n_saved"])
    again = saving.post("/completion", BODY)[1]
    assert again["content"] == without["content"] == first["content"]
    assert again["timings"]["prompt_n"] == 1


@pytest.mark.slow
def test_a_text_has_the_slot_that_it_asks_for(saving: RunningServer):
    ask = {"prompt": "A hen and a duck", "n_predict": 6, "temperature": 0, "id_slot": 2}
    assert saving.post("/completion", ask)[1]["id_slot"] == 2
    status, saved = saving.post("/slots/2?action=save", {"filename": "two.state"})
    assert status == 200
    assert saved["n_saved"] > 6
    assert saving.post("/slots/2?action=erase", {})[0] == 200
    assert saving.post("/completion", ask)[1]["timings"]["cache_n"] < 3  # BOS
    assert saving.post("/completion", {**ask, "id_slot": 99})[0] == 400


@pytest.mark.slow
def test_what_can_not_be_saved_or_restored_is_refused(
    saving: RunningServer, folder: Path, server: RunningServer
):
    (folder / "link").symlink_to("/etc/passwd")
    (folder / "bad").write_bytes(b"\0" * 100)
    for name in ("../a", "/etc/passwd", "", ".", "..", "a\0b", "link", "none", "bad", "x" * 129):
        status, answer = saving.post("/slots/0?action=restore", {"filename": name})
        assert status == 400, name
        assert str(folder) not in answer["error"]["message"]
    for path in ("/slots/4?action=save", "/slots/-1?action=save", "/slots/0?action=rm"):
        assert saving.post(path, {"filename": "a"})[0] == 400
    assert saving.post("/slots/3?action=save", {"filename": "a"})[0] == 400
    assert server.post("/slots/0?action=save", {"filename": "a"})[0] == 501
