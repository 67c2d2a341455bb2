"""Real texts: what people ask, what a model answers, and drafts looked up in that.

tasks     twelve tasks to measure on, and others to learn from
answers   what a model writes, as tokens, recorded once
history   commits and pages as answers
replay    the engine writing recorded answers, its passes costing what a table says
measure   the tasks for real, beside llama-server
"""
