"""Implementations are checked against the oracle, then measured: `dilated-attention bench`.

What is asked and who is asked: `setting`, `implementations` (with `baselines`). One measurement: `run` (check, clock),
`probes` (rows, memory, kernels), `runners` (here or over ranks). A run: `suites` (the door), `session` (its steps and
results), `pace` (how far it is). What follows: `conclude`. For people: `plots`, `page` (the report); two runs side by
side: `regress`; a file of results: `results`; where a number comes from: `machine`.
"""
