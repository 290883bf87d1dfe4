"""Implementations are checked against the oracle, then measured: `dilated-attention bench`.

What is asked and who is asked: `setting`, `subject`, `implementations` (with `baselines`, `multihead`, `over_ranks`).
One measurement: `run` (check, clock), `probes` (rows, memory, kernels), `runners` (here or over ranks), `compare` (all
of it in one setting). A run: `suites` (the door), `session` (what is known so far), `pace` (the time left), `plain`
(results that are kept). What follows: `recommend`, `claims`. For people: `series`, `plots`, `page`, `report`; two runs
side by side: `regress`; a file of results: `results`; where a number comes from: `machine`.
"""
