"""One sequence longer than memory: chunks in, outputs in the same chunks, exact.

A period is a run of tokens in which the segments of all branches begin and end together. Whole periods of a chunk are
one call of `dilated_attention`, where they lie. What is left over waits, by copy, until all that it sees has come. When
`causal` nothing waits. Earlier tokens leave only those K and V rows that later ones can see.
"""

from dilated_attention.streaming.chunks import stream

__all__ = ["stream"]
