"""A loaded pair: its models and contexts, what passes cost, how it is placed.

load       `load_pair`: files opened, contexts made, passes measured; smaller where memory is short
pair       `Pair`, what `load_pair` makes: frozen; what moves is in its parts
models     models opened, compared with each other and tried before they are used; their contexts
lane       one target context with its slots, and how wide its passes are
reading    what reading prompts costs, by how deep in a text it is
exact      exact mode: a lane of its own with a width that passes the self-test
measuring  what passes take, and whether the machine was quiet
profile    what is kept between loads: costs, and what was learned of drafts
turns      the processors, shared with other pairs' workers
placement  what to try where memory does not hold what was planned

May import `cache`, `llama`, `sampling`, `speculation` and the sequence that a lane runs.
"""
