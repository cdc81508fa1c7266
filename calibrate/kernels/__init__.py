"""Kernels that calibration times: Triton, CUDA C++ and plain torch.

Nothing here is imported by ``kvsim run``. The modules ``triton_*`` import triton and
torch when they are imported, `cuda_library` only torch's tensors' addresses, and none
of them needs a GPU to be imported.

Layouts
-------
A KV pool is one allocation, ``(num_layers, 2, num_blocks, block_size, num_kv_heads,
head_dim)``; index 0 of the second axis holds keys, index 1 values::

    layer 0   K | block 0 | block 1 | ... | block num_blocks - 1 |
              V | block 0 | block 1 | ... | block num_blocks - 1 |
    layer 1   K | ...
                      |
                      +-- token 0   | head 0: head_dim | head 1 | ... |
                          token 1   | head 0           | head 1 | ... |
                          ...
                          token block_size - 1

The key cache of a layer is ``pool[layer, 0]`` and the value cache ``pool[layer, 1]``,
each ``(num_blocks, block_size, num_kv_heads, head_dim)``. A *page* is what a single
copy moves: ``block_size * num_kv_heads * head_dim`` elements of one layer's keys or
values, contiguous. A block of tokens is ``2 * num_layers`` pages, far apart from each
other.

A block table row names the blocks of a sequence in logical order::

    block_tables[s] = [7, 2, 9, ...]   token t: block block_tables[s][t // block_size],
                                       slot t % block_size

Entries at and beyond ``ceil(context_len / block_size)`` are never read.

Sources of the semantics: vLLM 0.7 (``swap_blocks``, ``copy_blocks``,
``paged_attention`` of its custom operations) for the first generation, vLLM 0.11 (paged
KV cache of the flash attention backends, ``NHD``) for the second; the PagedAttention
paper (Kwon et al., SOSP 2023, section 4); FlashDecoding for the split over keys.
"""
