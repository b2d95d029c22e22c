"""Random tensors of any format."""

from __future__ import annotations

import torch

from localkv.quant_formats import FORMATS
from localkv.quant_formats.packed_tensor import PackedTensor
from support.packed_rows import join_planes


def random_packed(name: str, *shape: int, seed: int = 0) -> PackedTensor:
    """Random codes with scales that are ordinary numbers."""
    fmt = FORMATS[name]
    generator = torch.Generator().manual_seed(seed)
    n_blocks = shape[-1] // fmt.block_size
    if fmt.block_size == 1:
        x = torch.randn(*shape, generator=generator)
        rows = join_planes(fmt.codec.encode(x.numpy()))
    else:
        planes = []
        for plane in fmt.planes:
            size = (*shape[:-1], n_blocks, plane.n_bytes)
            if plane.name in ("d", "m", "dmin") and plane.n_bytes == 2:
                values = torch.rand(*size[:-1], 1, generator=generator) * 0.1
                planes.append(values.half().view(torch.uint8).numpy())
            elif plane.name == "d":  # nvfp4's, from 1/32 to 1/2
                scales = torch.randint(8, 40, size, dtype=torch.uint8, generator=generator)
                planes.append(scales.numpy())
            elif plane.name == "e":
                exponents = torch.randint(122, 127, size, dtype=torch.uint8, generator=generator)
                planes.append(exponents.numpy())
            else:
                codes = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
                if name == "iq1_m" and plane.name == "scales":
                    codes[..., 1::2] &= 15  # the upper bits are fp16's
                    codes[..., 1::2] |= torch.tensor([0, 0, 8, 2]).to(torch.uint8) << 4
                planes.append(codes.numpy())
        rows = join_planes(planes)
    return PackedTensor(fmt, rows, shape)
