"""`localspec bench`: measure whether speculation pays with this pair, on this machine, for this work.

It is a client like any other.

prompts/        the prompts
asking.py       send one prompt to our daemon or another server, and time what comes back
running.py      run all prompts alternately plain and with drafts, and stop early if necessary
summary.py      turn answers into figures for each kind of work
statistics.py   speed-ups and their bootstrap intervals
distribution.py test whether sampling with drafts gives the same distribution
theory.py       what the formula and a replay with measured costs predict
verdict.py      a verdict for each kind of work, and a sentence for people
report.py       all results as data, described by schema.json
learned.py      reset what the pair has learned during a bench
measured.py     the complete measurement
drafts.py       compare several drafts for one target
shown/          the report on a terminal, and as a page with plots
"""
