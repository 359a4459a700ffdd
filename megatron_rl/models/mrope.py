"""Multimodal rotary positions (frame, row, column) of Qwen's vision-language models.

See arXiv 2409.12191, section 2.1.
"""

from collections.abc import Iterable, Sequence
from itertools import groupby

import torch

from megatron_rl.types import Image


def interleave_sections(sections: Sequence[int]) -> list[int]:
    """Return Megatron's mrope_section for interleaved multimodal rotary embeddings, as in Qwen3-VL.

    Rotary pair i uses the frame, row or column position if i % 3 is 0, 1 or 2, respectively. Once
    all pairs of the row or column section are assigned, the frame position is used instead
    (transformers 5.19, models/qwen3_vl, Qwen3VLTextRotaryEmbedding.recomposition_frequencies). The
    result contains three numbers per rotary pair: 1 for the position that the pair uses, and 0 for
    the other two positions.

    Example: interleave_sections((3, 1, 1)) == [1,0,0, 0,1,0, 0,0,1, 1,0,0, 1,0,0].
    """
    axes = [pair % 3 if pair < 3 * sections[pair % 3] else 0 for pair in range(sum(sections))]
    return [int(axis == turn) for axis in axes for turn in range(3)]


def mrope_positions(token_ids: Sequence[int], images: Iterable[Image], image_token_id: int) -> torch.Tensor:
    """Return rotary positions [3, L] (frame, row, column) of a sequence.

    For still images, the positions equal the results of the get_rope_index methods of Qwen2-VL,
    Qwen2.5-VL and Qwen3-VL in transformers 5.19. Text positions increase by one on all three axes.
    The positions of an image form a grid that starts at the next text position. The text after the
    image starts at the grid's first position plus the length of the grid's longer side. Raises
    ValueError if placeholders and grids do not match.
    """
    grids = [(image.grid[0], image.grid[1] // image.merge, image.grid[2] // image.merge) for image in images]
    parts, start, used = [], 0, 0
    for is_image, run in groupby(token_ids, key=lambda token: token == image_token_id):
        length = len(list(run))
        if not is_image:
            parts.append(torch.arange(start, start + length).expand(3, -1))
            start += length
            continue
        while length > 0:
            if used == len(grids) or grids[used][0] * grids[used][1] * grids[used][2] > length:
                raise ValueError(f"a run of {length} image placeholders does not match the images' grids {grids[used:]}")
            frames, rows, columns = grids[used]
            axes = (torch.arange(frames), torch.arange(rows), torch.arange(columns))
            parts.append(torch.stack(torch.meshgrid(*axes, indexing="ij")).flatten(1) + start)
            start += max(rows, columns)
            length -= frames * rows * columns
            used += 1
    if used != len(grids):
        raise ValueError(f"the sequence has {len(grids)} images, but placeholders for {used}")
    return torch.cat(parts, 1)
