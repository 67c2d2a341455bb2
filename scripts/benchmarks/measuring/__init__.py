"""The engine measured in this process.

interleaved  every setting on every text, in turns
driven       an engine stepped by hand, which the tests step theirs with too
runner       one setting on one text, timed token by token
runs         settings, and what one run gave
workloads    the synthetic pairs and texts that are decoded
report       from runs to figures, verdicts and tables
agreement    `localspec bench` beside an engine that is stepped here
soak         does memory grow with the rounds?
"""
