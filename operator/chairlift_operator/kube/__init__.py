"""The operator on Kubernetes: what a pool is made of there, and how that is kept so."""
