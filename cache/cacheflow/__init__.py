"""The block manager of 2023: generations `cacheflow` and `v0_2`."""
