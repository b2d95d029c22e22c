"""Small models by name, each loaded once for a file of tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from localkv.kernels.cpu.cpu_backend import cpu_backend
from localkv.loader.weights import load_model
from localkv.model import Transformer
from support.hybrid_models import hybrid
from support.latent_models import latent_tensors, write_latent
from support.random_gemma import RandomGemma
from support.random_model import variant


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Transformer]:
    """An architecture's name -> a random model of it on the CPU."""
    folder, models = tmp_path_factory.mktemp("models"), dict[str, Transformer]()

    def load(name: str) -> Transformer:
        if name not in models:
            path = folder / f"{name}.gguf"
            if name == "plm":
                write_latent(path, name, latent_tensors(name))
            else:
                {"qwen35": hybrid, "gemma4": RandomGemma}.get(name, variant)(name).write(path)
            models[name] = load_model(path, cpu_backend())[0]
        return models[name]

    return load
