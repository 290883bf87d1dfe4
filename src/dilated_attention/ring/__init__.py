"""Context parallelism: one sequence over a group of ranks, each with a contiguous shard of the tokens.

`shards`: where the tokens are. `messages`: rows as bytes. `parallel`: one call over the ranks; `circulate`: keys of
other ranks come by while this one computes (ring, all-gather); `alltoall`: whole segments for a share of the heads.
`counts` and `cost`: what it costs. `run`: the ranks agree on a call, and it is one autograd node.
"""
