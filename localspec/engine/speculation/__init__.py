"""Speculative decoding: what to draft and how deep, and which drafts the target keeps.

verification  which drafts are kept, and what is drawn in place of a rejected one
controller    what all sequences of the next pass draft: `next`, `observe`, `probe`
step          one sequence's part of a pass, and how it drafts while its request runs
depth         how deep to draft: the best rate of tokens, given costs and acceptance
cost          the cost of a pass on this machine, by its width
attention     the cost of a pass, by how much text is before it
acceptance    how often drafts are accepted: of a pair, and of one text
warm_start    the acceptance expected of a draft model that was never used
drafters      the kinds of drafts, behind one interface

Nothing here knows sequences, lanes or pairs, which are built on top of it.
"""
