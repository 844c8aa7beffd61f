"""The wire between operator, gateway and engine: names and shapes that outlive a release.

Admission rule: if one side shipped a year before the other, must they still agree on this? Only
then does it belong here. Standard library only. Names are append-only: an operator or gateway of
version N works with engines of N-1, so every reader tolerates absence. docs/protocol.md says it in
words.
"""
