"""`SamplingParams`: how a request wants its tokens drawn; `SAMPLERS`: the chain that draws them.

Each number's field holds all that is known of it: default, range, and option. The options of the
command line, the fields of the server's requests and answers with their limits, the chat's `/set`,
and the documentation of these follow from the fields.

All of them read this module before anything is computed, so it imports no NumPy: a sampler's
function is found when it runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict

from localkv.errors import UsageError
from localkv.option_checks import unknown_name

if TYPE_CHECKING:
    from localkv.sampling.candidates import Candidates
    from localkv.sampling.state import SamplerState

LEAST_TEMPERATURE = 1e-30
"""The lowest temperature above 0."""
MOST_BIAS = 1e30
"""The most that a bias may add to a logit, or take off."""
MOST_BREAKERS = 32
"""Most sequence breakers of DRY."""
LONGEST_BREAKER = 128
"""Most characters of a breaker; its first 40 bytes count."""


def _never(params: SamplingParams) -> int:
    return 0


@dataclass(frozen=True)
class SamplerEntry:
    """One sampler.

    Attributes:
        name: what a chain calls it; its function has the same name.
        letter: in a chain written by letters; empty for one that is not part of chains, but runs in
            place of the whole chain where it acts.
        acts: whether it can change anything with these parameters; one that cannot does not run.
        aliases: other names that the command line takes.
        keeps_largest: it neither drops the largest logit nor lets another one overtake it, so that
            a greedy draw can do without it.
        last_n: how many of the latest tokens it reads, -1 for the whole context.
        is_last: it runs after the others, wherever a chain names it, since it decides the draw.
    """

    name: str
    letter: str
    acts: Callable[[SamplingParams], bool]
    aliases: tuple[str, ...] = ()
    keeps_largest: bool = False
    last_n: Callable[[SamplingParams], int] = _never
    is_last: bool = False

    @property
    def function(self) -> Callable[[Candidates, SamplingParams, SamplerState], Candidates]:
        """Computes it; imports NumPy."""
        from localkv.sampling import samplers

        function: Callable[..., Candidates] = getattr(samplers, self.name)
        return function


def _penalties_act(p: SamplingParams) -> bool:
    neutral = (p.repeat_penalty, p.frequency_penalty, p.presence_penalty) == (1, 0, 0)
    return p.repeat_last_n != 0 and not neutral


SAMPLERS = (
    SamplerEntry("penalties", "e", _penalties_act, last_n=lambda p: p.repeat_last_n),
    SamplerEntry(
        "dry",
        "d",
        lambda p: p.dry_multiplier != 0 and p.dry_penalty_last_n != 0,
        last_n=lambda p: p.dry_penalty_last_n,
    ),
    SamplerEntry(
        "top_n_sigma", "s", lambda p: p.top_n_sigma > 0, ("top-n-sigma",), keeps_largest=True
    ),
    SamplerEntry("top_k", "k", lambda p: p.top_k > 0, ("top-k",), keeps_largest=True),
    SamplerEntry("typ_p", "y", lambda p: p.typ_p < 1, ("typical-p", "typical", "typ-p", "typ")),
    SamplerEntry("top_p", "p", lambda p: p.top_p < 1, ("top-p", "nucleus"), keeps_largest=True),
    SamplerEntry("min_p", "m", lambda p: p.min_p > 0, ("min-p",), keeps_largest=True),
    SamplerEntry("xtc", "x", lambda p: p.xtc_probability > 0 and p.xtc_threshold <= 0.5),
    SamplerEntry(
        "temperature",
        "t",
        lambda p: p.temperature != 1 or p.dynatemp_range > 0,
        ("temp",),
        keeps_largest=True,
    ),
    SamplerEntry(
        "adaptive_p", "a", lambda p: p.adaptive_target >= 0, ("adaptive-p",), is_last=True
    ),
    SamplerEntry("mirostat", "", lambda p: p.mirostat > 0),
)
"""In the order of llama.cpp's default chain (`common_params_sampling::samplers`), which leaves out
adaptive_p: there `--adaptive-target` does nothing until `--samplers` names it as well."""

SAMPLER_ORDER = tuple(entry.name for entry in SAMPLERS if entry.letter)
SAMPLER_LETTERS = "".join(entry.letter for entry in SAMPLERS)


def active_samplers(params: SamplingParams) -> tuple[SamplerEntry, ...]:
    """The samplers that can change anything, in the order in which they run."""
    for entry in SAMPLERS:
        if not entry.letter and entry.acts(params):
            return (entry,)
    by_name = {entry.name: entry for entry in SAMPLERS}
    active = [by_name[name] for name in params.samplers if by_name[name].acts(params)]
    return tuple(sorted(active, key=lambda entry: entry.is_last))


_ALIASES = {alias: entry.name for entry in SAMPLERS for alias in entry.aliases}
_LETTERS = {entry.letter: entry.name for entry in SAMPLERS if entry.letter}


def parse_samplers(text: str) -> tuple[str, ...]:
    """A chain written as `--samplers` takes it: names with `;` between them.

    >>> parse_samplers("top-k;temp")
    ('top_k', 'temperature')
    """
    names = [name.strip() for name in text.split(";")]
    chain = tuple(_ALIASES.get(name, name) for name in names if name)
    for name in chain:
        if name not in SAMPLER_ORDER:
            raise unknown_name("unknown sampler", name, SAMPLER_ORDER)
    return chain


def parse_sampler_sequence(text: str) -> tuple[str, ...]:
    """A chain written as `--sampling-seq` takes it: one letter for each sampler.

    >>> parse_sampler_sequence("kt")
    ('top_k', 'temperature')
    """
    for letter in text:
        if letter not in _LETTERS:
            known = ", ".join(f"{letter} {name}" for letter, name in _LETTERS.items())
            raise UsageError(f"unknown sampler {letter!r} in {text!r}", f"samplers: {known}")
    return tuple(_LETTERS[letter] for letter in text)


class Range(NamedTuple):
    """The least and the most of a number, both included; integers for a whole number.

    Within the ranges no sampler turns finite logits into infinity or NaN, in any order of the
    chain: a float32 times or divided by a few of these stays far below 1e308.
    """

    least: Any
    most: Any

    def __str__(self) -> str:
        """The range in words, as in "from 0 to 1e+09"."""
        ends = (f"{end:g}" if isinstance(end, float) else str(end) for end in self)
        return "from " + " to ".join(ends)


@dataclass(frozen=True)
class Number:
    """What is known of a number in `SamplingParams`, beside its name and default.

    Attributes:
        range: the values that it may have.
        flags: spellings of its option on the command line; none if there is no option.
        help: the text of its option.
        llama_env: the part after `LLAMA_ARG_` of llama.cpp's variable.
        aliases: its other names in requests; in answers it has the first one, which is
            llama-server's.
    """

    range: Range
    flags: tuple[str, ...] = ()
    help: str = ""
    llama_env: str | None = None
    aliases: tuple[str, ...] = ()


def _number(default: float | None, range: Range, *flags: str, **more: Any) -> Any:
    """A field with a default, and the `Number` that describes it."""
    return field(default=default, metadata={"number": Number(range, flags, **more)})


_INT32 = 2**31 - 1
_SCALE = Range(-1e30, 1e30)
_SHARE = Range(0.0, 1.0)
_LAST_N = Range(-1, _INT32)
_COUNT = Range(0, _INT32)


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is drawn. Names and defaults are llama.cpp's (`common/common.h`).

    Attributes:
        seed: of the random generator; None or -1 draws one, which `Completion` reports.
        temperature: <= 0 is greedy: the token with the largest logit after the other samplers.
        dynatemp_range, dynatemp_exponent: entropy-dependent temperature in
            [temperature - range, temperature + range]; a range <= 0 turns it off.
        top_k: keep the k most likely; <= 0 keeps all.
        top_p, min_p, typ_p: nucleus, minimum relative probability, locally typical; 1, 0 and 1
            turn them off.
        top_n_sigma: keep logits within n standard deviations of the largest; <= 0 turns it off.
        xtc_probability, xtc_threshold: exclude top choices; a probability of 0 or a threshold above
            0.5 turns it off.
        min_keep: tokens that top_p, typ_p, min_p and xtc leave at least.
        repeat_last_n: tokens the penalties look back on; 0 none, -1 the whole context.
        repeat_penalty, frequency_penalty, presence_penalty: 1, 0 and 0 turn them off.
        dry_multiplier, dry_base, dry_allowed_length, dry_penalty_last_n, dry_sequence_breakers:
            the DRY repetition penalty; multiplier 0 turns it off, and so does a last_n of 0; a
            last_n of -1 is the whole context.
        adaptive_target, adaptive_decay: prefer tokens of about this probability, and the other way
            round as far as the last ones were off; a target below 0 turns it off.
        mirostat, mirostat_tau, mirostat_eta: 1 and 2 run the Mirostat of that version in place of
            the chain, after the temperature; 0 turns it off.
        logit_bias: token id -> added to its logit, before all samplers; -inf bans the token.
        samplers: the chain, in this order; a sampler left out does not run.

    Raises:
        UsageError: a value out of its range, or not a number.
    """

    seed: int | None = _number(None, Range(-1, 2**63 - 1))
    temperature: float = _number(
        0.8, _SCALE, "--temp", "--temperature", help="0 takes the likeliest token."
    )
    dynatemp_range: float = _number(
        0.0,
        _SCALE,
        "--dynatemp-range",
        help="Vary the temperature by N with the entropy, 0 for off.",
    )
    dynatemp_exponent: float = _number(
        1.0,
        Range(0.0, 1e30),
        "--dynatemp-exp",
        help="The exponent of the entropy in --dynatemp-range.",
    )
    top_k: int = _number(
        40,
        Range(-(2**31), _INT32),
        "--top-k",
        llama_env="TOP_K",
        help="Keep the N likeliest, 0 for all.",
    )
    top_p: float = _number(
        0.95,
        _SHARE,
        "--top-p",
        help="Keep the likeliest whose probabilities add up to N, 1 for all.",
    )
    min_p: float = _number(
        0.05, _SHARE, "--min-p", help="Keep those at least N times as likely as the likeliest."
    )
    top_n_sigma: float = _number(
        -1.0,
        _SCALE,
        "--top-nsigma",
        "--top-n-sigma",
        help="Keep logits within N standard deviations of the largest, -1 for off.",
    )
    xtc_probability: float = _number(
        0.0, _SHARE, "--xtc-probability", help="How often XTC runs, 0 for off."
    )
    xtc_threshold: float = _number(
        0.1,
        _SHARE,
        "--xtc-threshold",
        help="XTC drops all tokens above this probability but the least likely.",
    )
    typ_p: float = _number(
        1.0,
        _SHARE,
        "--typical",
        "--typical-p",
        help="Locally typical sampling, 1 for off.",
        aliases=("typical_p",),
    )
    repeat_last_n: int = _number(
        64,
        _LAST_N,
        "--repeat-last-n",
        help="Tokens that the penalties look back on, -1 for the whole context.",
    )
    repeat_penalty: float = _number(
        1.0,
        Range(1e-6, 1e6),
        "--repeat-penalty",
        help="Divide the logits of repeated tokens by N, 1 for off.",
    )
    presence_penalty: float = _number(
        0.0,
        _SCALE,
        "--presence-penalty",
        help="Subtract N from the logit of a token that came before.",
    )
    frequency_penalty: float = _number(
        0.0,
        _SCALE,
        "--frequency-penalty",
        help="Subtract N for each time that a token came before.",
    )
    dry_multiplier: float = _number(
        0.0, _SCALE, "--dry-multiplier", help="Penalise repeated sequences (DRY), 0 for off."
    )
    dry_base: float = _number(
        1.75,
        Range(1.0, 1e30),
        "--dry-base",
        help="DRY's penalty grows by this factor with each repeated token.",
    )
    dry_allowed_length: int = _number(
        2,
        _COUNT,
        "--dry-allowed-length",
        help="The longest repetition that DRY lets pass, in tokens.",
    )
    dry_penalty_last_n: int = _number(
        -1,
        _LAST_N,
        "--dry-penalty-last-n",
        help="Tokens that DRY looks back on, -1 for the whole context.",
    )
    adaptive_target: float = _number(
        -1.0,
        Range(-1.0, 1.0),
        "--adaptive-target",
        help="Prefer tokens of about this probability, after the other samplers; -1 for off.",
    )
    adaptive_decay: float = _number(
        0.9,
        Range(0.0, 0.99),
        "--adaptive-decay",
        help="How long --adaptive-target makes up for other tokens: some 1 / (1 - N) tokens.",
    )
    mirostat: int = _number(
        0,
        Range(0, 2),
        "--mirostat",
        help="1 or 2: Mirostat of that version, after --temp alone, in place of all other "
        "samplers; 0 for off.",
    )
    mirostat_tau: float = _number(
        5.0,
        Range(0.0, 1e6),
        "--mirostat-ent",
        "--mirostat-tau",
        help="The bits of surprise that Mirostat aims at.",
    )
    mirostat_eta: float = _number(
        0.1,
        Range(0.0, 1e6),
        "--mirostat-lr",
        "--mirostat-eta",
        help="How fast Mirostat corrects itself.",
    )
    min_keep: int = _number(0, Range(0, 4096))
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    samplers: tuple[str, ...] = SAMPLER_ORDER

    def __post_init__(self) -> None:
        for f in fields(self):
            value = getattr(self, f.name)
            if f.type == "int" and not isinstance(value, Integral):
                raise UsageError(f"{f.name} must be a whole number, not {value!r:.60}")
            if f.type == "float" and not isinstance(value, Real):
                raise UsageError(f"{f.name} must be a number, not {value!r:.60}")

        if self.seed is not None and not isinstance(self.seed, Integral):
            raise UsageError(f"seed must be a whole number, not {self.seed!r:.60}")
        for name, number in NUMBERS.items():
            value = getattr(self, name)
            if value is not None and not number.range.least <= value <= number.range.most:
                raise UsageError(f"{name} must be {number.range}, not {shown(value)}")
        if 0 < self.temperature < LEAST_TEMPERATURE:
            raise UsageError(
                f"temperature must be at least {LEAST_TEMPERATURE}, not {self.temperature}",
                hint="0 takes the most likely token",
            )
        self._check_bias()
        self._check_breakers()
        if isinstance(self.samplers, str) or not isinstance(self.samplers, Sequence):
            raise UsageError(f"samplers must be a list of names, not {shown(self.samplers)}")
        unknown = [name for name in self.samplers if name not in SAMPLER_ORDER]
        if unknown:
            raise unknown_name("unknown sampler", unknown[0], SAMPLER_ORDER)
        if len(set(self.samplers)) < len(self.samplers):
            twice = next(name for name in self.samplers if self.samplers.count(name) > 1)
            raise UsageError(f"samplers has {twice} more than once", hint="name each sampler once")

    def _check_bias(self) -> None:
        if not isinstance(self.logit_bias, Mapping):
            raise UsageError(f"logit_bias must be a dict, not {shown(self.logit_bias)}")
        for token, bias in self.logit_bias.items():
            if not (isinstance(token, Integral) and 0 <= token < 2**31):
                raise UsageError(f"logit_bias has {shown(token)} where a token id should be")
            is_number = isinstance(bias, Real) and (abs(bias) <= MOST_BIAS or bias == -math.inf)
            if not is_number:
                raise UsageError(
                    f"logit_bias of token {token} must be from {-MOST_BIAS:g} to {MOST_BIAS:g}, "
                    f"not {shown(bias)}",
                    hint="false in a request, or -inf in Python, bans a token",
                )

    def _check_breakers(self) -> None:
        breakers = self.dry_sequence_breakers
        if isinstance(breakers, str) or not isinstance(breakers, Sequence):
            raise UsageError(
                f"dry_sequence_breakers must be a tuple of strings, not {shown(breakers)}"
            )
        if len(breakers) > MOST_BREAKERS:
            raise UsageError(
                f"dry_sequence_breakers must be up to {MOST_BREAKERS} texts, not {len(breakers)}"
            )
        for breaker in breakers:
            if not isinstance(breaker, str):
                raise UsageError(f"dry_sequence_breakers has {shown(breaker)}, which is no text")
            if len(breaker) > LONGEST_BREAKER:
                raise UsageError(
                    f"dry_sequence_breakers: a text may have {LONGEST_BREAKER} characters, "
                    f"not {len(breaker)}"
                )


NUMBERS: dict[str, Number] = {
    one.name: one.metadata["number"] for one in fields(SamplingParams) if "number" in one.metadata
}
"""The numbers among the fields, in their order."""


class SamplingOptions(TypedDict, total=False):
    """The fields of `SamplingParams` as keyword arguments, for type checkers and editors.

    A test compares them: no type can be made of a dataclass's fields.
    """

    seed: int | None
    temperature: float
    dynatemp_range: float
    dynatemp_exponent: float
    top_k: int
    top_p: float
    min_p: float
    top_n_sigma: float
    xtc_probability: float
    xtc_threshold: float
    typ_p: float
    repeat_last_n: int
    repeat_penalty: float
    presence_penalty: float
    frequency_penalty: float
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_penalty_last_n: int
    adaptive_target: float
    adaptive_decay: float
    mirostat: int
    mirostat_tau: float
    mirostat_eta: float
    min_keep: int
    dry_sequence_breakers: tuple[str, ...]
    logit_bias: Mapping[int, float]
    samplers: tuple[str, ...]


def shown(value: object) -> str:
    """A value as an error shows it, however large it is."""
    if isinstance(value, int) and abs(value) >= 2**256:
        return "an integer of so many digits"  # which Python refuses to write
    return f"{value!r:.60}"
