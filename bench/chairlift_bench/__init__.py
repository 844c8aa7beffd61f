"""Load that resembles production: arrivals, prompts, an open-loop generator, a demo.

A client like any other: it speaks OpenAI HTTP to the gateway and reads the journal; it knows
nothing of scheduling. Used by `make demo` and the benchmarks.
"""
