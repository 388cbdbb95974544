"""Which bytes of packed weights a part writes."""

import numpy as np
from numpy.typing import NDArray

from gemm_tuner.abi import KernelLibrary
from gemm_tuner.arrays.weights import StoredWeights
from gemm_tuner.machine.memory import address_of, allocate_aligned


def written_by(
    library: KernelLibrary, weights: StoredWeights, part: int, parts: int
) -> tuple[NDArray[np.bool_], NDArray[np.uint8]]:
    """Return which bytes one part writes, and the packed weights that it leaves."""
    memories = []
    for before in (0, 255):
        memory = allocate_aligned(library.packed_weight_bytes)
        memory.fill(before)
        library.pack_weights(weights.struct, address_of(memory), part=part, parts=parts)
        memories.append(memory)
    return memories[0] == memories[1], memories[0]


def check_parts(library: KernelLibrary, weights: StoredWeights, parts: int) -> None:
    """Check that parts write what one writes, each byte once."""
    whole, expected = written_by(library, weights, 0, 1)
    times = np.zeros(len(expected), np.int64)
    for part in range(parts):
        written, packed = written_by(library, weights, part, parts)
        assert (packed[written] == expected[written]).all(), f"part {part} of {parts}"
        times += written
    assert (times == whole).all(), f"{parts} parts"
