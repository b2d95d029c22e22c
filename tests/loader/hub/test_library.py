"""What huggingface_hub does not promise, which is why localkv downloads and searches by itself.

When one of these fails, the library has learnt it, and our part can go.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants, hf_hub_download, scan_cache_dir
from huggingface_hub.utils.tqdm import tqdm

from localkv.loader.hub.cache import cache_folder, cached_models
from support.fake_hub import FakeHub

DATA = bytes(range(256)) * 4096


class StopsEarly(tqdm):
    n_updates = 0

    def update(self, n: float | None = 1) -> Any:
        self.n_updates += 1
        if self.n_updates == 3:
            raise KeyboardInterrupt
        return super().update(n)


@pytest.fixture
def repo(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1 << 16)
    hub.repos["org/repo"] = {"m.gguf": DATA}
    return hub


def test_a_download_that_is_interrupted_begins_again(repo: FakeHub, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        hf_hub_download("org/repo", "m.gguf", cache_dir=tmp_path, tqdm_class=StopsEarly)
    assert list(tmp_path.glob("**/*.incomplete")) == []
    hf_hub_download("org/repo", "m.gguf", cache_dir=tmp_path)
    assert [request.range for request in repo.downloads] == [None, None]


def test_other_bytes_than_announced_are_taken(repo: FakeHub, tmp_path: Path) -> None:
    repo.wrong.add("m.gguf")
    path = hf_hub_download("org/repo", "m.gguf", cache_dir=tmp_path)
    assert Path(path).read_bytes() == bytes(len(DATA))


def test_one_odd_entry_hides_a_repository(repo: FakeHub) -> None:
    path = Path(hf_hub_download("org/repo", "m.gguf", cache_dir=cache_folder()))
    (path.parent / "gone.gguf").symlink_to("nowhere")
    assert len(cached_models()) == 1
    assert not scan_cache_dir(cache_folder()).repos
