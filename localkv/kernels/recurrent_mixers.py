"""The recurrent mixers, composed, for a backend's table."""

from __future__ import annotations

from functools import partial

from localkv.arch.spec import DeltaNetSpec, Mamba2Spec, Mixer, ShortConvSpec
from localkv.kernels.backend import Mix
from localkv.kernels.delta_net import delta_net
from localkv.kernels.mamba2 import mamba2
from localkv.kernels.recurrence import Recurrence
from localkv.kernels.short_conv import short_conv


def recurrent_mixers(operations: Recurrence) -> dict[type[Mixer], Mix]:
    """See `Backend.mixers`."""
    return {
        DeltaNetSpec: partial(delta_net, operations),
        ShortConvSpec: partial(short_conv, operations),
        Mamba2Spec: partial(mamba2, operations),
    }
