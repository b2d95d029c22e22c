"""The footprints of the backends, by the backends' names."""

from __future__ import annotations

from localkv.kernels import reference_footprint
from localkv.kernels.cpu import footprint as cpu_footprint
from localkv.kernels.footprint import Footprint
from localkv.kernels.gpu import footprint as gpu_footprint

FOOTPRINTS: dict[str, Footprint] = {
    "cpu": cpu_footprint,
    "cuda": gpu_footprint,
    "reference": reference_footprint,
}
