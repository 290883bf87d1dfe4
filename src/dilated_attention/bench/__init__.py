"""Every implementation held against the oracle, then timed: `python -m dilated_attention.bench`."""
