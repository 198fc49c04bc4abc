"""The order in which the C++ kernels keep a page: the bytes of `kv_formats.py`, moved so that vectors load in one go.

The scales stay where they are. The data of a page of 32 tokens lies, for D elements a head, as

| format               | keys                                   | values                                 |
|----------------------|----------------------------------------|----------------------------------------|
| f32, f16, fp8        | [D][32 tokens]                         | [32 tokens][D]                         |
| bf16, int8           | [D / 2][32 tokens][2 elements]         | [16][D][2 tokens]                      |
| int4                 | [D / 4][32 tokens][2], low nibble: the | [8][D][2], low nibble: the first two   |
|                      | first two elements of four, high: the  | tokens of four, high: the other two    |
|                      | other two                              |                                        |

Keys want the tokens side by side, since a lane is a token's score; values the elements, since a lane is an element of
the sum. bf16, int8 and int4 are multiplied in pairs, which stand together.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from plugins.paged_attention.kv_formats import KvFormat

PAGE = 32  # tokens


def to_cpu(form: KvFormat, cache: NDArray[np.uint8], head_size: int, *, key: bool) -> NDArray[np.uint8]:
    """Pages u8 [num_blocks, num_kv_heads, page bytes] in the order of `kv_formats.py` -> in the kernels' order."""
    codes = form._from_bytes(_data(form, cache, head_size), head_size)
    if form.dtype == "int4":
        codes = codes.view(np.uint8) & 0xF
    blocks = codes.shape[:2]
    if not key:
        if form.dtype in ("bf16", "int8"):
            codes = codes.reshape(*blocks, PAGE // 2, 2, head_size).swapaxes(-1, -2)
        elif form.dtype == "int4":
            fours = codes.reshape(*blocks, PAGE // 4, 2, 2, head_size)  # [nibble][token of the pair]
            codes = (fours[:, :, :, 0] | fours[:, :, :, 1] << 4).swapaxes(-1, -2)
    elif form.dtype in ("bf16", "int8"):
        codes = codes.reshape(*blocks, PAGE, head_size // 2, 2).swapaxes(2, 3)
    elif form.dtype == "int4":
        fours = codes.reshape(*blocks, PAGE, head_size // 4, 2, 2)
        codes = (fours[..., 0, :] | fours[..., 1, :] << 4).swapaxes(2, 3)
    else:
        codes = codes.swapaxes(2, 3)
    result = cache.copy()
    data = np.ascontiguousarray(codes).view(np.uint8).reshape(*blocks, -1)
    result[..., : data.shape[-1]] = data
    return result


def _data(form: KvFormat, cache: NDArray[np.uint8], head_size: int) -> NDArray[np.uint8]:
    end = PAGE * form.data_bytes(head_size)
    return cache[..., :end].reshape(*cache.shape[:2], PAGE, -1)
