"""Types of weights, K and V chosen together, beside types that are chosen apart, for some budgets.

For each budget of MiB the choice of `localkv plan --quality` is made, and what is best if all
matrices, or K and V of all layers, have one type. Each file is made with `localkv quantize`. Its
predictions over a text are compared with the model's own, with float32 activations and an f16
cache:

    python benchmarks/joint_choice.py MODEL WEIGHTS KV TEXT --budgets 120,150,190

The profiles are what `localkv calibrate` measured, with `--weight-types` and without.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from localkv.cache.profile import TypeList, read_profile, with_profile_types
from localkv.commands.plan.quality import (
    MIB,
    CacheChoice,
    JointChoice,
    QualityPlan,
    bits_of,
    type_lines,
)
from localkv.config import CacheConfig
from localkv.kernels.cpu.cpu_backend import cpu_backend
from localkv.llm import LLM
from localkv.loader.gguf_file import open_gguf
from localkv.loader.model_header import model_spec
from localkv.loader.weights import load_model
from localkv.memory.plan import ModelMemory
from localkv.quality.kv_profile import ChunkCosts, base_types
from localkv.quality.scores import text_chunks
from localkv.quality.weight_profile import Curve, read_weight_profile

N_CTX, N_BATCH, N_THREADS = 4096, 64, 2
"""The context, batch and threads whose bytes are counted."""


def main() -> None:
    """Measure all budgets, and print a row for each choice."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("weights", type=Path)
    parser.add_argument("kv", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--budgets", default="120,150,190")
    parser.add_argument("--tokens", type=int, default=768)
    given = parser.parse_args()
    llm = LLM(given.model, n_ctx=128)
    bos_id = llm.tokenizer.bos_id if llm.tokenizer.add_bos else None
    ids = llm.tokenize(given.text.read_text("utf-8"))
    llm.close()
    chunk = text_chunks(ids, given.tokens, bos_id=bos_id, limit=1)[0]
    gguf, weights, kv = (
        open_gguf(given.model),
        read_weight_profile(given.weights),
        read_profile(given.kv),
    )
    memory = ModelMemory(tuple(gguf.tensors.values()), model_spec(gguf), "cpu", N_BATCH, N_THREADS)

    def cache(name: str, types: TypeList | None) -> CacheChoice:
        config = CacheConfig(n_ctx=N_CTX)
        plan = memory.plan(config if types is None else with_profile_types(config, types))
        kld = 0.0 if types is None else types.verified
        return CacheChoice(name, plan.cache_k + plan.cache_v, plan.scratch, kld, types)

    f16 = [cache("f16", None)]
    by_layer = f16 + [cache(f"{one.bits:.4g} bits by layer", one) for one in kv.lists]
    alike = f16 + [cache("/".join(next(filter(None, o.layers))), o) for o in kv.uniform]
    plan = QualityPlan(weights, Curve(weights), by_layer, 0)
    matrices = {name for name, tensor in gguf.tensors.items() if len(tensor.shape) > 1}
    base = load_model(gguf, cpu_backend(), decoded=matrices)[0]
    exact = CacheConfig("f16", "f16", n_ctx=given.tokens, kv_tail=0, kv_sink=0)
    costs = ChunkCosts(base, chunk, exact)
    costs.forget_inputs()

    def measured(choice: JointChoice) -> float:
        with tempfile.TemporaryDirectory() as folder:
            types, made = Path(folder) / "types", Path(folder) / "made.gguf"
            types.write_text(type_lines(weights, choice.types))
            command = [sys.executable, "-m", "localkv", "quantize", "--allow-requantize"]
            command += ["--tensor-type-file", str(types), str(given.model), str(made), "Q8_0"]
            subprocess.run(command, check=True, capture_output=True)
            costs.model = load_model(made, cpu_backend())[0]
            of_cache = choice.cache.types
            layers = base_types(base) if of_cache is None else of_cache.layers
            return costs.divergence(layers, first=0) / len(costs.targets)

    print("| MiB | Choice | Bits of weights | K and V | KLD predicted | measured |")
    print("|---|---|---|---|---|---|")
    for mib in map(int, given.budgets.split(",")):
        budget = mib * MIB
        for name, choice in (
            ("together", plan.within(budget)),
            ("one type of weights, K and V by layer", plan.one_type(budget, by_layer)),
            ("weights by matrix, one type of K and V", plan.within(budget, alike)),
            ("one type of weights, one of K and V", plan.one_type(budget, alike)),
            ("weights by matrix, f16 K and V", plan.within(budget, f16)),
        ):
            if choice is None:
                print(f"| {mib} | {name} | nothing fits | | | |", flush=True)
                continue
            print(
                f"| {mib} | {name} | {bits_of(weights, choice.types):.2f} | {choice.cache.name} "
                f"| {choice.kld:.4f} | {measured(choice):.4f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
