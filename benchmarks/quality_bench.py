"""Measures caches with one model, for `quality.py`."""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

from corpus import make_row
from curriculum import STAGES
from quality_bits import LENGTHS, bits_after
from quality_caches import CODEBOOKS, Case, cases, dry_run
from quality_outliers import NONE_APART, bits_without, outlier_cases
from quality_recall import Recall, encoder_of, make_series, recall
from quality_report import Measured

from localkv import LLM
from localkv.cache.layout import in_words, mean_bits_of
from localkv.cache.profile import KVProfile, wants_scales
from localkv.config import CacheConfig, KVCodebook, KVScales
from localkv.loader.smoothing import Smoothing, smoothing_of
from localkv.loader.weights import load_model
from localkv.model import Transformer
from localkv.quality.kv_profile import (
    BUDGETS,
    SELDOM_CHOSEN,
    Plan,
    learn_codebooks,
    measure,
    sensible_types,
)
from localkv.quality.ranges import calibrate, channel_sizes
from localkv.quality.scores import TokenScores, base_cache, divergence, joined, score_chunks

ROOT = Path(__file__).parents[1]
KNOWN_ROWS = 2
"""Rows of text that codebooks, smoothing and types by layer are measured with."""
REFERENCE_ROWS = 2
"""Rows of text that the reference backend reads."""
N_CTX = 2048  # holds the list of facts, the stories and the question


def text_options(description: str | None, *, rows: int) -> argparse.ArgumentParser:
    """The options of all that measure one model with rows of text.

    Args:
        description: of the program.
        rows: of text, by default.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    model = ROOT / "models" / "tales-4M-F16.gguf"
    parser.add_argument("-m", "--model", type=Path, default=model, help="one of models/train.py")
    parser.add_argument(
        "--rows", type=int, default=rows, help="rows of each text (default %(default)s)"
    )
    parser.add_argument(
        "--seed", type=int, default=1, help="of texts and facts (default %(default)s)"
    )
    return parser


@dataclass(frozen=True)
class Scope:
    """How much is measured.

    Attributes:
        rows, row_tokens: of the text.
        series: lists of facts.
        distances: tokens between a fact and its question.
        cases: caches.
        profile_types, budgets: of types by layer.
    """

    rows: int = 4
    row_tokens: int = 1024
    series: int = 2
    distances: tuple[int, ...] = (128, 512, 1024, 1800)
    cases: tuple[Case, ...] = field(default_factory=lambda: tuple(cases()))
    profile_types: tuple[str, ...] = field(
        default_factory=lambda: (*sensible_types(), *SELDOM_CHOSEN)
    )
    budgets: tuple[float, ...] = BUDGETS

    @classmethod
    def dry_run(cls) -> Scope:
        types = ("f16", "q8_0", "q4_0")
        return cls(2, 128, 1, (64, 128), tuple(dry_run()), types, (4.5, 6.0))


class Bench:
    """One model.

    Args:
        name: for the report.
        seed: of texts and facts.
    """

    def __init__(
        self, name: str, path: Path, scope: Scope, *, device: str, threads: int | None, seed: int
    ) -> None:
        self.name, self.path, self.scope, self.seed = name, path, scope, seed
        self.llm = LLM(path, n_ctx=N_CTX, device=device, n_threads=threads, progress=False)
        self.model = self.llm.engine.model
        self.text = self.rows(scope.rows, "text")
        self.known = self.rows(KNOWN_ROWS, "calibration")

    def rows(self, count: int, what: str) -> list[list[int]]:
        """Rows of what the model was trained with last, from another seed than the training's."""
        rng, encoder = random.Random(f"{what}:{self.seed}"), encoder_of(self.llm)
        length = self.scope.row_tokens
        return [make_row(rng, encoder, STAGES[-1].genres, length)[0] for _ in range(count)]

    def measure(self) -> list[Measured]:
        """All caches."""
        cases = self.scope.cases
        return [
            *self.measured([case for case in cases if not case.smoothed], self.model),
            *self.measured([case for case in cases if case.smoothed], self.smooth_model),
            *self.by_layer(),
            *self.references(),
        ]

    def measured(self, cases: Sequence[Case], model: Transformer) -> list[Measured]:
        """Some caches with the model, or with the smoothed one."""
        caches = [self.cache(case) for case in cases]
        recalls = self.recalls(cases, caches, model)
        chunks = list[list[TokenScores]]()
        base = base_cache(self.scope.row_tokens)
        for scores in score_chunks(model, self.text, caches, base=base):
            chunks.append(scores)
            self.tell(f"row {len(chunks)} of {len(self.text)}, {len(cases)} caches")
        return [
            self.found(case, cache, joined(scores), of_facts)
            for case, cache, scores, of_facts in zip(
                cases, caches, zip(*chunks, strict=True), recalls, strict=True
            )
        ]

    def recalls(
        self, cases: Sequence[Case], caches: Sequence[CacheConfig], model: Transformer
    ) -> list[dict[int, Recall]]:
        scope, found = self.scope, list[dict[int, Recall]]()
        series = make_series(encoder_of(self.llm), scope.distances, scope.series, self.seed)
        for case, cache in zip(cases, caches, strict=True):
            self.tell(f"facts, cache {len(found) + 1} of {len(cases)}")
            longer = replace(cache, n_ctx=N_CTX)
            found.append(recall(model, longer, series) if case.asks else {})
        return found

    def cache(self, case: Case) -> CacheConfig:
        """A case's cache, with the scales and the codebooks that belong to it."""
        cache = case.cache(self.scope.row_tokens)
        if wants_scales(cache.types):
            cache = replace(cache, kv_scales=self.scales[cache.kv_rotation])
        if not case.normal and {case.type_k, case.type_v} & set(CODEBOOKS):
            cache = replace(cache, kv_codebooks=self.codebooks[case.smoothed, case.rotation])
        return cache

    @cached_property
    def scales(self) -> dict[str, KVScales]:
        """Scales for types that are scaled by head, by rotation; "auto" does not rotate these."""
        found = {}
        for rotation in ("off", "on"):
            *_, found[rotation] = calibrate(
                self.model, self.known, n_ctx=self.scope.row_tokens, kv_rotation=rotation
            )
        return {**found, "auto": found["off"]}

    @cached_property
    def codebooks(self) -> dict[tuple[bool, str], tuple[KVCodebook, ...]]:
        """By smoothing and rotation."""
        n_ctx = self.scope.row_tokens
        return {
            (smoothed, rotation): learn_codebooks(
                model, self.known, Plan(CODEBOOKS, (), n_ctx, rotation)
            )
            for smoothed, model in ((False, self.model), (True, self.smooth_model))
            for rotation in ("auto", "off")
        }

    @cached_property
    def smoothing(self) -> Smoothing:
        sizes = channel_sizes(self.model, self.known, n_ctx=self.scope.row_tokens)
        return smoothing_of(self.llm.config, self.llm.gguf.tensors, sizes.k, sizes.v, q=sizes.q)

    @cached_property
    def smooth_model(self) -> Transformer:
        return load_model(self.llm.gguf, self.llm.backend, smoothing=self.smoothing)[0]

    @cached_property
    def profile(self) -> KVProfile:
        """The profile that `localkv calibrate` measures."""
        scope = self.scope
        return measure(
            self.smooth_model,
            self.known,
            Plan(scope.profile_types, scope.budgets, scope.row_tokens),
            digest="",
            text="corpus",
            smoothing=self.smoothing,
            on_step=lambda done, of, what: self.tell(f"by layer, {done} of {of}: {what}"),
        )

    def by_layer(self) -> list[Measured]:
        """The profile's types by layer."""
        n_ctx, profile = self.scope.row_tokens, self.profile
        cases = [
            Case(
                *("mixed", "mixed", "auto", one.kv_tail, one.kv_sink),
                smoothed=True,
                layers=one.layers,
            )
            for one in profile.lists
        ]
        caches = [replace(case.cache(n_ctx), kv_codebooks=profile.codebooks) for case in cases]
        chunks = list(score_chunks(self.smooth_model, self.text, caches, base=base_cache(n_ctx)))
        return [
            self.found(case, cache, joined(scores))
            for case, cache, scores in zip(cases, caches, zip(*chunks, strict=True), strict=True)
        ]

    def references(self) -> list[Measured]:
        """What the formats' references make of some types, with and without outliers apart."""
        found = list[Measured]()
        text, n_ctx = self.text[:REFERENCE_ROWS], self.scope.row_tokens
        for case, variant, scores in outlier_cases(self.path, text, self.known, n_ctx):
            self.tell(f"references: {case.type_k}")
            one = replace(self.found(case, case.cache(n_ctx), scores), variant=variant)
            if variant == NONE_APART:
                bits = bits_without(case.type_k)
                one = replace(one, bits=bits, bits_after=dict.fromkeys(LENGTHS, bits))
            found.append(one)
        self.tell("")
        return found

    def found(
        self,
        case: Case,
        cache: CacheConfig,
        scores: TokenScores,
        of_facts: dict[int, Recall] | None = None,
    ) -> Measured:
        far, config = divergence(scores), self.llm.config
        settled = case if case.layers else case.settled
        return Measured(
            model=self.name,
            type_k=case.type_k,
            type_v=case.type_v,
            rotated=settled.rotation,
            tail=settled.tail or 0,
            sink=settled.sink or 0,
            smoothed=case.smoothed,
            variant="normal numbers" if case.normal else "",
            layers=in_words(case.layers),
            bits=mean_bits_of(cache, config),
            bits_after={n: bits_after(cache, config.groups, n) for n in LENGTHS},
            kld=far.kld,
            kld_99=far.kld_percentiles[99],
            same_top=far.same_top,
            ppl_ratio=far.ppl_ratio.value,
            recall=of_facts or {},
        )

    def tell(self, text: str) -> None:
        """How far it is, on a terminal."""
        if sys.stderr.isatty():
            said = text and f"{self.name}: {text}"
            print(f"\r\x1b[K{said}", end="", file=sys.stderr, flush=True)
