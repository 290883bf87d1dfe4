"""Implementations are checked against the oracle, then measured: `dilated-attention bench`.

What is asked, and who: `setting`, `implementations` (with `baselines`). One measurement: `run`, `probes` (rows, memory,
kernels), `runners` (here or over ranks). A run: `suites` (the door), `session` (its steps), `pace`. What follows:
`conclude`. For people: `plots`, `page`; two runs side by side: `regress`; a file: `results`; its origin: `machine`.
"""
