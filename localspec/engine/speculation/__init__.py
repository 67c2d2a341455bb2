"""Speculative decoding: what to draft and how deep, and what of it the target keeps.

verification  which drafts are kept, and what is drawn in place of a rejected one
controller    what all sequences of the next pass draft: `next`, `observe`, `probe`
step          what one sequence brings to a pass, and how it drafts as long as its request runs
depth         how deep to draft: the best rate of tokens, by cost and acceptance
cost          what a pass costs on this machine, by width
attention     and by what is before it in the text
acceptance    how often drafts are accepted: of a pair, and of one text
warm_start    what is expected of a draft model that nobody has seen at work
drafters      the kinds of drafts, behind one interface

Nothing here knows a request's sequence, its lane or its pair: they are above.
"""
