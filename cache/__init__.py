"""Which request holds which KV block: blocks, queues, hashing and block managers.

Knows no clock, no random numbers and no requests beyond the `PagedRequest` role.
"""
