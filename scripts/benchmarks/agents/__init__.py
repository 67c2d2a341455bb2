"""`scripts/bench agents`: what is read of what coding agents send.

sessions  recorded requests, and events that are derived from them
prompts   what a model reads for them
ledger    what was read, beside what is new or stands behind a change
command   the command line, a daemon that gets the requests, and the report
"""

from benchmarks.agents.command import main as main
