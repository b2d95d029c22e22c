"""localkv: a local LLM runtime that keeps the KV cache packed.

`LLM`, `SamplingParams` and `LocalKVError` are imported on first use, so that `import localkv` and
the command line stay light until a model is loaded.
"""

TYPE_CHECKING = False  # `typing` would be half the time that it takes to import this package
if TYPE_CHECKING:
    from localkv.errors import LocalKVError
    from localkv.llm import LLM
    from localkv.sampling.params import SamplingParams

__version__ = "0.3.0"
__all__ = ["LLM", "LocalKVError", "SamplingParams", "__version__"]

_HOMES = {
    "LLM": "localkv.llm",
    "LocalKVError": "localkv.errors",
    "SamplingParams": "localkv.sampling.params",
}


def __getattr__(name: str) -> object:
    if name in _HOMES:
        import importlib

        from localkv.system.this_process import uncollected

        with uncollected():
            return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
