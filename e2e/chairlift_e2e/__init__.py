"""End-to-end tests' hands: kubectl, helm, watches, load. Knows clusters only by one named context.

Imports nothing of Chairlift: what these tests see is what a user of the cluster sees.
"""
