"""The generations over `BlockSpaceManager`: the spring of 2023, and vLLM 0.2.7."""
