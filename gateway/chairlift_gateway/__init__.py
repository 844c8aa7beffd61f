"""The gateway: one address for a pool's clients, in front of all its engine replicas.

It decides a request's class, counts it before anything may refuse it, picks the least waiting
replica, and relays the answer. It keeps no queue beyond a bounded hold while no replica is ready:
the engine orders. Start reading at `proxy.Proxy.serve`.
"""
