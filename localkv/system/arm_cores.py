"""Names of ARM's cores, which Linux knows by number only."""

from __future__ import annotations

_MAKERS = {"0x41": "ARM", "0x4e": "NVIDIA", "0x51": "Qualcomm", "0x61": "Apple", "0xc0": "Ampere"}
"""By the field "CPU implementer" of /proc/cpuinfo."""

_CORES = {
    ("0x41", "0xd03"): "Cortex-A53",
    ("0x41", "0xd05"): "Cortex-A55",
    ("0x41", "0xd08"): "Cortex-A72",
    ("0x41", "0xd0b"): "Cortex-A76",
    ("0x41", "0xd0c"): "Neoverse N1",
    ("0x41", "0xd40"): "Neoverse V1",
    ("0x41", "0xd49"): "Neoverse N2",
    ("0x41", "0xd4f"): "Neoverse V2",
    ("0x41", "0xd81"): "Cortex-A720",
    ("0x41", "0xd83"): "Neoverse V3AE",
    ("0x41", "0xd84"): "Neoverse V3",
    ("0x41", "0xd85"): "Cortex-X925",
    ("0x41", "0xd87"): "Cortex-A725",
    ("0x41", "0xd8e"): "Neoverse N3",
    ("0x51", "0x001"): "Oryon",
    ("0xc0", "0xac3"): "AmpereOne",
}
"""By implementer and "CPU part", as Linux lists them (arch/arm64/include/asm/cputype.h)."""


def arm_cores(cpuinfo: list[str]) -> str:
    """The kinds of cores that lines of /proc/cpuinfo tell of, each once; "" without any."""
    kinds, maker = list[str](), ""
    for line in cpuinfo:
        name, _, value = (part.strip() for part in line.partition(":"))
        if name == "CPU implementer":
            maker = value
        elif name == "CPU part" and maker:
            known = _CORES.get((maker, value), f"core {value}")
            kinds.append(f"{_MAKERS.get(maker, maker)} {known}")
    return " and ".join(dict.fromkeys(kinds))
