"""Chairlift's operator: observe a pool, plan purely, apply thinly.

`plan` and everything below it know neither HTTP nor Kubernetes; a `Cluster` (local processes or
Kubernetes) stands on either side of it. `control_loop` joins the two every few seconds.
"""
