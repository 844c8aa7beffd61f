"""Tenants' quotas: the law, its home in Redis, and what holds while Redis is away.

`law` says what is admitted and what is charged; `quota.lua` is the same law inside Redis.
`keeper` is what the proxy calls.
"""
