"""End-to-end tests' hands: kubectl, helm, watches, load. Knows clusters only by one named context.

These import nothing of Chairlift: what they see is what a user of the cluster sees. Only the
stand-ins (`fake_*`, `fleet`) do.
"""
