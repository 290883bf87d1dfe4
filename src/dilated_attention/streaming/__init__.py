"""Sequences that come piece by piece: chunks of one longer than memory (`stream`), and tokens with a `KVCache`."""
