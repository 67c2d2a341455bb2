"""`localspec bench`: whether speculation pays here, with this pair, for this work. A client as any other.

prompts/        what is asked
asking.py       one prompt to a server, ours or another, and what came back when
running.py      all prompts, plain and speculative in turns; what ends that early
summary.py      answers → what is said of each kind of work
statistics.py   speed-ups and their bootstrap intervals
distribution.py whether sampling gives the same both ways
theory.py       what the formula and a replay with measured costs say
verdict.py      a word for each kind of work, and the sentence for a person
report.py       all of that as data, which schema.json describes
learned.py      what the pair had learned before, which a bench leaves as it was
measured.py     the parts in their order
drafts.py       several drafts for one target
shown/          on a terminal, and as a page with plots
"""
