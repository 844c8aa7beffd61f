"""Reading Prometheus: one batch of queries for all pools, reduced to what each pool needs.

`asking` does I/O, everything else is pure. A sample counts by its own time, a pod only while it is
Ready.
"""
