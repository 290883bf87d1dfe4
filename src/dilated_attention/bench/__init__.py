"""Every implementation checked against the oracle, then measured: `dilated-attention bench`.

What is asked and who is asked: `setting`, `subject`, `implementations` (with `baselines`, `multihead`, `over_ranks`).
One measurement: `run` (check, clock), `memory`, `probes`, `runners` (here or over ranks), `compare` (all of it in one
setting). A run: `suites`, `steps` (what is known so far), `session` (the door). What follows: `recommend`, `claims`.
For people: `series`, `plots`, `page`, `report`; two runs side by side: `regress`; where a number comes from: `machine`.
"""
