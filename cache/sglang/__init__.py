"""SGLang's cache: a radix tree over token slots, and the allocators of slots.

Source: SGLang 0.5.9, ``python/sglang/srt/mem_cache/``.
"""
