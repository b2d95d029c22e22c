"""The processor's name where the system has none for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from localkv.system import processor

CORE = "processor\t: {}\nCPU implementer\t: {}\nCPU part\t: {}\n\n"


@pytest.mark.parametrize(
    ("cores", "name"),
    [
        ([("0x41", "0xd4f")] * 4, "ARM Neoverse V2"),
        ([("0x41", "0xd87")] * 10 + [("0x41", "0xd85")], "ARM Cortex-A725 and ARM Cortex-X925"),
        ([("0x61", "0x022")], "Apple core 0x022"),
        ([("0x99", "0x001")], "0x99 core 0x001"),
    ],
)
def test_arm_processors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: list[tuple[str, str]], name: str
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("".join(CORE.format(i, *core) for i, core in enumerate(cores)))
    monkeypatch.setattr(processor, "CPUINFO", cpuinfo)
    assert processor.processor_name() == name
