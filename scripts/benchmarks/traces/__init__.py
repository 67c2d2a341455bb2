"""Depth policies replayed on what a pair once said.

trace      what the target wrote, and what the draft would have said at each place
simulated  a pair that a trace plays, on a clock that a cost profile moves
replay     `auto` beside fixed depths and a clairvoyant
"""
