"""Tenants' quotas on the operator's side: who may use what, by which keys, and what was used.

Pure but for `store`, which speaks to Redis. `kube` and the command line feed it.
"""
