"""A loaded pair: its models and contexts, the cost of passes, and its placement.

load       `load_pair`: opens files, makes contexts, measures passes; tries again smaller if memory is short
pair       `Pair`, the result of `load_pair`: frozen, only its parts change
models     opening models, comparing and checking them before they are used, and their contexts
lane       one target context with its slots, and the width of its passes
reading    the cost of reading prompts, by the position in the text
exact      exact mode: a lane of its own with a width that passes the self-test
measuring  the times of passes, and whether the machine was quiet
profile    what is kept between loads: costs, and what was learned of drafts
turns      the lock with which workers of several pairs share the processors
placement  what to try if memory does not hold what was planned

May import `cache`, `llama`, `sampling`, `speculation` and the sequence that a lane runs.
"""
