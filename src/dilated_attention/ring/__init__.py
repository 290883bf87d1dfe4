"""Context parallelism: one sequence over a group of ranks, each with a contiguous shard of the tokens.

`shards`: where the tokens are. `parallel`: rows as bytes, and the steps of a call. `circulate`: keys of other ranks
come by while this one computes (ring, all-gather). `alltoall`: whole segments for a share of the heads. `counts` and
`cost`: what it costs. `run`: the ranks agree on a call, and it is one autograd node.
"""
