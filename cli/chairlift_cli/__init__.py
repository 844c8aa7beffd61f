"""The `chairlift` command: local mode and models. Runs the operator's core without a cluster.

It knows no Kubernetes. Users call it; nothing imports it but its tests and the demo.
"""
