"""ggml's I-quants of one to three bits: codes select points of a grid.

A point is the 4 or 8 magnitudes (iq1: values) of neighbouring weights. A super block has 256 values
in groups, each with s, a scale of 3 or 4 bits:

    iq3_s    8 groups, `x = d (2 s + 1) grid[q]`; codes of 4 values have 9 bits, the upper one in
             `qh`; scales are nibbles
    iq3_xxs  8 groups, `x = d (2 s + 1) / 4 grid[q]`; a byte of `qs` selects 4 values; a word of
             `signs` is four times 7 bits of signs, and 4 bits of scale
    iq2_s    16 groups, `x = d (2 s + 1) / 8 grid[q]`; codes of 8 values have 10 bits, the upper 2
             in `qh`; scales are nibbles
    iq2_xs   as iq2_s, but a word is 9 bits of code and 7 of signs
    iq2_xxs  8 groups of 8 bytes each: four codes; then a word as iq3_xxs's of signs
    iq1_m    16 groups, `x = d (2 s + 1) (grid[q] +- 1/8)`; the lower 8 bits of codes are in `qs`. A
             nibble of `qh` has the upper 3 bits of one, and the sign of its shift. A word of
             `scales` holds four scales of 3 bits, and above them a quarter of d's bits
    iq1_s    8 groups, values as iq1_m's; a word of `qh` holds the upper 3 bits of four codes, then
             3 bits of the group's scale, then the sign of its shift

Of seven signs the eighth makes their number even.

Which points of the lattice are in a grid was chosen by ggml's authors, so these are tables
(`iq2xxs_grid` and its like in `ggml-common.h`). Read as a number whose digits are the levels, the
first one the least significant, ggml's entries ascend, so that small differences remain. They are
written here as bytes, 255 for that much and more to come, compressed, in base 85.
"""

from __future__ import annotations

import zlib
from base64 import b85decode
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace

import numpy as np
from numpy.typing import NDArray

from localkv.quant_formats.shared.bits import (
    EIGHTH,
    Bytes,
    Codes,
    Floats,
    bit_fields,
    half_times,
    reinterpret,
    scaled,
)
from localkv.quant_formats.shared.cpu.panel_layout import QS, SCALES, D, PanelPlane, planes

_CONTINUED = 255


@dataclass(frozen=True)
class Grid:
    """A list of points.

    Attributes:
        levels: the values that occur, ascending.
        n_values: of each point.
        differences: of successive points, as numbers of base `len(levels)`; see above.
    """

    levels: tuple[int, ...]
    n_values: int
    differences: str

    @cached_property
    def numbers(self) -> NDArray[np.int64]:
        """Each point as a number, whose digits are the places of its values in `levels`: [n]."""
        steps = np.frombuffer(zlib.decompress(b85decode(self.differences)), np.uint8)
        numbers: NDArray[np.int64] = np.cumsum(steps, dtype=np.int64)[steps != _CONTINUED]
        return numbers

    @cached_property
    def codes(self) -> NDArray[np.uint8]:
        """The places of the points' values in `levels`: uint8 [n, n_values]."""
        powers = len(self.levels) ** np.arange(self.n_values)
        return (self.numbers[:, None] // powers % len(self.levels)).astype(np.uint8)

    @cached_property
    def points(self) -> NDArray[np.int8]:
        """The values: int8 [n, n_values]."""
        return np.array(self.levels, np.int8)[self.codes]


IQ2_LEVELS = (8, 25, 43)

IQ2_XXS = Grid(
    IQ2_LEVELS,
    8,
    "c-kdTL2AQ53@l<18zD>(%d(hdF=h$I1Y=ANrudLU2*rmIaws|GB|Y{5eM{fc?<Cq*hmn{WG13eC6@n><MkizoXsW~vl50R"
    "JDl2m7l>-VONs5<?--j^MS$$Sm_mIWXNRx`}`lhW;fD&tS8uoyGYhkh@T$HQ2=<b2X&%=K(TB9K%(VAd`rG%Wfo|dbUX6g"
    ";ijfNs*4E1onKv;J@VY4jnC?R!o%H{)xuU|kHBlGdCd?C4My_4Pbw(9+Z?_MWIx1arY>(hFFY{n;%BpCw",
)
"""`iq2xxs_grid`: 256 entries of 8 values."""

IQ2_XS = Grid(
    IQ2_LEVELS,
    8,
    "c-mc%!D_=W42Fj=LI`7w5GD*0f+-=45K1XIj2?Q}X^fr6PCM<mXW1i9PS-4}!M3oZU!VUw*eti+xSS67FL`-Fv@MsA0bL-"
    "yX#&UF3Z@Jg9OUL##-WLLAqyp=3XYC%BydTt65=6PEV8>kIq+z*GW)c*p6E5X>FME0T6?4(7&|SEwM3XRcRrqMIwuW}zVW"
    "?-|Lj+~&14tJQUT`G52J~I9!I8xQ!ODXtTyR&V^FTvz_C448WI-5Jq}$WAE{)9uciu-SNIHV3@_rwx8vblsB8^L3!5<Z_V"
    "tJhWss=tq<zMi7!rLHB(5VvY&1Wsx_iWP599mLpSoRTrfI@r^qOTie5;y&d&C(g=;IGd78#)",
)
"""`iq2xs_grid`: 512 entries of 8 values."""

IQ2_S = Grid(
    IQ2_LEVELS,
    8,
    "c-nna!D_=W3>`)YVT=(bgiyjLVT4jf4<+QV<Gx|vutWd<1180>W2fl?O=U}cdhbbnGsOc>-w3cJF{L0LaJ@l_1s(v1b{Of"
    "w;)l5ecGzfFpcrGw9ZMQOKH>qzLJHPMXa~17hguKRt!t6Xo0X49k`I@iUy!UXFl5T7q>WOt%T?T34E|E85(q+qs7Rf}2t!"
    "WkbcRdE_su-?a^f*^J_%|3YF+P4b09QM0im3v$)1$>dX2D=f9ct?6)GTXL|aTQu6b8xy_eT~ym;$O{&AX3f0W*$UJaV_nX"
    "H;M^R>zA5k*#<*bA>SK>-qoJ%5YAm&TobK53l?U|K?4mZ#z^>~y*k+!9GT;z*5_&T)VvnXa8$;{ruIEM+exG)j1forhPTG"
    "Y=|vG6Ot<{t<PZM(o=GWs}}P7YW1Qk$)$?-<sZ710T&F)7KfH",
)
"""`iq2s_grid`: 1024 entries of 8 values."""

IQ3_XXS = Grid(
    (4, 12, 20, 28, 36, 44, 52, 62),
    4,
    "c-kF}K~ID*6ol>Y=mSb06<WIncY$3=(2yAM>`lE9|Np<Sc$j2nGWq5X$UzERK7x{E%D|>BQq5pcrG>PDxph7_HAr{vBYHv"
    "*cdV0O)CtUZJ2GE2q_ob^ZK1ZScNzajl$8UJ(A<+MzzJ!U^-L>Ga`ILG4HKV^$6)gVVbCMD!8Pq?(`jAzLmQUhji9F8H_G"
    "Yz%P^Zs!k$647z^#<AY<`zPTxiRU1f8S^LUw`_0KfFFR}rub!+w7=MPrG<OZ}~fB7vBnE",
)
"""`iq3xxs_grid`: 256 entries of 4 values."""

IQ3_S = Grid(
    (1, 3, 5, 7, 9, 11, 13, 15),
    4,
    "c-keA+fKtk3`E)SE%DwGn$m`XR8*u2-Vy)*XL!rgt}T1!*nUchkWvDWSOpXxff0=yCnjRBRTfQ*L=h6}D5^9m6AYw`3Z~5"
    "QRnqP#h<ZksOlWI2JTjHHhvu*f2Q<*EDI8gh)X)@8gF?y42SVs2mQ`~gRalT5AC>*iRB;)gg;$;aB{8HzdAv2IA}9_1=r|"
    "KO#Ng~P5Ai%&wPl^jh<7rXYsz(k_#1Crk>%Bfpp9)1TqnQ+VsVZjCftoB+-9)0Nri1yt`>dn^>DZbZob7N;cvFMM7K(W8$"
    "{TplNK2ae8Y22dx3xK>voo$b=Q!Lz7p36=J~3#i`J8*UZuoxikHuF!0#39cWm~!EcX8LtXXs_(tlcSv~S1D7k-%LC@8vE?"
    "syxQvvogHdx=w@znAOj{s-R}55W",
)
"""`iq3s_grid`: 512 entries of 4 values."""

IQ1 = Grid(
    (-1, 0, 1),
    8,
    "c-n1M*Mi$H3@e8yd1Umx|Nor@NGW!%)#YqagA<^CDTg(6ZJ|1H!iNh)l@?Bc)Bd&JA{v(QGvn*PW<<El3ojKJSWt+9xz^Z"
    ">Pl!)HmFi7gaoCSbtKUtiH;EyJ$%*4}w{CD6BgI|vq^7fCINL0yQ7i?#;D9g&48Ivj%cvY)({reVqvp-hTRgCfRV(+g!-Y"
    ">In6=a>b5UwCqs{o!p4T?CiYYhYw+=sjL^)UcNW%W4Xgy7*9`|9TW9wb}42KzW+ba`HK&9dm5pNfd@{)0)QlAq0T|$XsRH"
    "&HXqS?vfRTi<jGyWX71VgwhEW+4tHQKWR%%s6ICy^I$L)KOrZucsmUW(st07<4I6Q<K~KyQ{0YUIcwL6iH|_Bd^eRfTzo$"
    "HHV~)aRRd%+zD&lUZs;&aSJLl_Z?$OxgkzdYjOX3<%o!m&dZMg@!~YtHog6tUb1$dlZI}B3^bw3BJVq#LM(bKVm7(o3Y|>"
    ">L-`x#@3QJn?%L7NG0_@pXmsf5&Lph?vP#9<TG@cw<Xv*sT02Iw3*yT5hQ2kyhL_n<h_-5rKcpn>J;&B=!TIiF|4~d6ITY"
    "aR=u1$6TIP*lJ-bKA#HFJgn)%eI+Mh}+93|4+XKjZk?86dlT#nM%<@ycdXqjEf;4S*%q=e?z6O9#>QsWj-NkoPdm*%>0w{"
    "xy7L$)AGI8!k9c)%Ej|mj9-mRKg5lntGy~3iGN#ruv1Fr*UqnGeN%j_hvquWNpsNzlrT%AnEvzjnmV_mF8Psmk=B)TIzeE"
    "C4LBUWqGegEO$<3@6nFp|(imhX#kd^agTkL1jZEynZ;)zza?I(*F9;D-&~iiw~CjOhPxq`ody4+At?f{92D#NsRnfwZ%!d"
    "cs&X`aCXlEQhOoSTP(uaN9<GUQUAe@l~bkgO>D^mljRYD-D&w$JBo|#ovfNY<(=^&&<MX1hLq!Z-!w*lOzUgyCm`^XpS%I"
    "11&uUn}{CmaUJ=1`xnWK8KD",
)
"""`iq1s_grid`: 2048 entries of 8 values."""


def even_signs(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The eight signs that seven bits stand for (ggml's `ksigns_iq2xs`): uint8, same shape.

    Bit 7 makes the number of set bits even, so that one sign of eight is not stored.
    """
    parity = codes ^ (codes >> 4)
    parity ^= parity >> 2
    parity ^= parity >> 1
    return (codes | ((parity & 1) << 7)).astype(np.uint8)


def signs_and_factors(words: NDArray[np.uint32]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """What words of four times 7 bits of signs and 4 bits of scale mean.

    Args:
        words: [..., n_blocks, n].

    Returns:
        signs, uint8 [..., n_blocks, 4 n]; twice the scale plus 1, uint8 [..., n_blocks, n].
    """
    seven_bits = (words[..., None] >> np.array([0, 7, 14, 21], np.uint32)) & 127
    *lead, n = words.shape
    signs = even_signs(seven_bits.astype(np.uint8).reshape(*lead, 4 * n))
    return signs, (2 * (words >> 28) + 1).astype(np.uint8)


def signed_points(
    grid: Grid, entries: NDArray[np.integer], signs: NDArray[np.uint8]
) -> NDArray[np.int8]:
    """Points whose values are negative where a bit of `signs` is set.

    Args:
        entries: [..., n_blocks, n], places in the grid.
        signs: uint8 [..., n_blocks, n * n_values / 8], the first value's in the lowest bit.

    Returns:
        int8 [..., n_blocks, n * n_values].
    """
    *lead, n = entries.shape
    values = grid.points.take(entries, axis=0).reshape(*lead, n * grid.n_values)
    np.negative(values, out=values, where=np.unpackbits(signs, axis=-1, bitorder="little") != 0)
    return values


def grid_entries(lower: Bytes, upper: Codes) -> NDArray[np.uint16]:
    """Codes of 11 bits, whose upper 3 lie elsewhere: uint16 [..., n_blocks, 32]."""
    return (lower | (upper.reshape(lower.shape).astype(np.uint16) << 8)).astype(np.uint16)


def shifted_points(entries: NDArray[np.uint16], is_lower: Codes) -> NDArray[np.int8]:
    """`8 grid[q] + 1`, or `- 1` where `is_lower`: [..., n_blocks, n] -> int8 [..., 8 n]."""
    shifts = 1 - 2 * is_lower.astype(np.int8)
    points = 8 * IQ1.points.take(entries, axis=0) + shifts[..., None]
    return points.reshape(*entries.shape[:-1], entries.shape[-1] * IQ1.n_values)


def decode_iq3_s(planes: Sequence[Bytes]) -> Floats:
    """d (fp16), qs (64 bytes), qh (8), signs (32), scales (4) -> float32 [..., n_blocks * 256]."""
    d, qs, qh, signs, scales = planes
    entries = qs | (np.unpackbits(qh, axis=-1, bitorder="little").astype(np.uint16) << 8)
    factors = 2 * bit_fields(scales, n_bits=4, run=1) + 1
    return scaled(signed_points(IQ3_S, entries, signs), half_times(d, factors))


def decode_iq3_xxs(planes: Sequence[Bytes]) -> Floats:
    """d (fp16), qs (64 bytes), signs (8 words) -> float32 [..., n_blocks * 256]."""
    d, qs, signs = planes
    patterns, factors = signs_and_factors(reinterpret(signs, np.uint32))
    return scaled(signed_points(IQ3_XXS, qs, patterns), half_times(d, factors) * np.float32(0.25))


def decode_iq2_s(planes: Sequence[Bytes]) -> Floats:
    """d (fp16), qs, signs (32 bytes), qh, scales (8) -> float32 [..., n_blocks * 256]."""
    d, qs, signs, qh, scales = planes
    entries = qs | (bit_fields(qh, n_bits=2, run=1).astype(np.uint16) << 8)
    factors = 2 * bit_fields(scales, n_bits=4, run=1) + 1
    return scaled(signed_points(IQ2_S, entries, signs), half_times(d, factors) * EIGHTH)


def decode_iq2_xs(planes: Sequence[Bytes]) -> Floats:
    """d (fp16), qs (32 words), scales (8 bytes) -> float32 [..., n_blocks * 256]."""
    d, qs, scales = planes
    words = reinterpret(qs, np.uint16)
    signs = even_signs((words >> 9).astype(np.uint8))
    factors = 2 * bit_fields(scales, n_bits=4, run=1) + 1
    return scaled(signed_points(IQ2_XS, words & 511, signs), half_times(d, factors) * EIGHTH)


def decode_iq2_xxs(planes: Sequence[Bytes]) -> Floats:
    """d (fp16), qs (64 bytes) -> float32 [..., n_blocks * 256]."""
    d, qs = planes
    groups = qs.reshape(*qs.shape[:-1], 8, 8)
    entries = groups[..., :4].reshape(*qs.shape[:-1], 32)
    signs, factors = signs_and_factors(reinterpret(qs, np.uint32)[..., 1::2])
    return scaled(signed_points(IQ2_XXS, entries, signs), half_times(d, factors) * EIGHTH)


def scale_bytes(scales: Bytes) -> Bytes:
    """d (fp16), which is spread over four words: uint8 [..., 8] -> [..., 2]."""
    quarters = scales[..., 1::2] >> 4
    return (quarters[..., ::2] | (quarters[..., 1::2] << 4)).astype(np.uint8)


def decode_iq1_m(planes: Sequence[Bytes]) -> Floats:
    """qs (32 bytes), qh (16), scales (4 words) -> float32 [..., n_blocks * 256]."""
    qs, qh, scales = planes
    high = bit_fields(qh, n_bits=4, run=1)
    words = reinterpret(scales, np.uint16)
    factors = (words[..., None] >> np.array([0, 3, 6, 9], np.uint16)) & 7
    factors = 2 * factors.reshape(*words.shape[:-1], 16) + 1
    codes = shifted_points(grid_entries(qs, high & 7), high >> 3)
    return scaled(codes, half_times(scale_bytes(scales), factors) * EIGHTH)


def decode_iq1_s(planes: Sequence[Bytes]) -> Floats:
    """d (fp16), qs (32 bytes), qh (8 words) -> float32 [..., n_blocks * 256]."""
    d, qs, qh = planes
    words = reinterpret(qh, np.uint16)
    upper = (words[..., None] >> np.array([0, 3, 6, 9], np.uint16)) & 7
    is_lower = np.repeat(words >> 15, 4, axis=-1)
    codes = shifted_points(grid_entries(qs, upper), is_lower)
    return scaled(codes, half_times(d, 2 * ((words >> 12) & 7) + 1) * EIGHTH)


SIGNS, HIGH_BYTES, HIGH_WORDS = PanelPlane("signs", 4), PanelPlane("qh", 1), PanelPlane("qh", 2)
SCALE_WORDS = PanelPlane("scales", 2)
iq3_s = SimpleNamespace(
    LAYOUT=planes("iq3_s", QS, SIGNS, HIGH_BYTES, SCALES, D), decode=decode_iq3_s
)
iq3_xxs = SimpleNamespace(LAYOUT=planes("iq3_xxs", QS, SIGNS, D), decode=decode_iq3_xxs)
iq2_s = SimpleNamespace(
    LAYOUT=planes("iq2_s", QS, SIGNS, HIGH_BYTES, SCALES, D), decode=decode_iq2_s
)
iq2_xs = SimpleNamespace(LAYOUT=planes("iq2_xs", QS, SCALES, D), decode=decode_iq2_xs)
iq2_xxs = SimpleNamespace(LAYOUT=planes("iq2_xxs", QS, D), decode=decode_iq2_xxs)
iq1_m = SimpleNamespace(LAYOUT=planes("iq1_m", QS, HIGH_WORDS, SCALE_WORDS), decode=decode_iq1_m)
iq1_s = SimpleNamespace(LAYOUT=planes("iq1_s", QS, HIGH_WORDS, D), decode=decode_iq1_s)
