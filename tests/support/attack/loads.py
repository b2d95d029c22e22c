"""Loads models at the same time, to be run as a program. Arguments: a model file."""

from __future__ import annotations

import json
import sys
import threading

from localkv import LLM


def main(path: str) -> None:
    start, texts = threading.Barrier(4), list[str]()

    def load(type_k: str) -> None:
        start.wait(60)
        llm = LLM(path, n_ctx=64, cache_type_k=type_k)
        texts.append(llm.complete("The fox", max_tokens=8, temperature=0.0).text)

    threads = [threading.Thread(target=load, args=(name,)) for name in ("f16", "q8_0") * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(json.dumps({"loaded": len(texts)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
