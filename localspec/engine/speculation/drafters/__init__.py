"""Kinds of drafts, one file each; each registers itself when it is imported here.

base          what a kind is: offer, propose, observe, probe, close
grammar       tokens that a grammar forces
model         a second model, which keeps its own KV cache of what it proposed
mtp           the target's heads: with a KV cache of their own, or, in a file beside it, with the target's
ngram         what followed the last tokens when they occurred before
ngram_index   where they did
ngram_memory  what earlier requests have read and written
ngram_prior   how often such drafts are accepted, of any pair
ngram_trail   following a text through the changes that an answer makes to it
shared        the tokens that target and draft model share, where they do not share all
"""

from localspec.engine.speculation.drafters import grammar as grammar
from localspec.engine.speculation.drafters import model as model
from localspec.engine.speculation.drafters import mtp as mtp
from localspec.engine.speculation.drafters import ngram as ngram
