"""The kinds of drafts, one file each. Each registers itself when it is imported here.

base          the interface of a kind: offer, propose, observe, probe, close
grammar       tokens that a grammar forces
model         a second model with a KV cache of its own
mtp           the target's MTP heads: in its file with a KV cache of their own, or in a sidecar that reads
              the target's
ngram         what followed the last tokens when they occurred before
ngram_index   where the last tokens occurred before
ngram_memory  what earlier requests have read and written
ngram_prior   how often n-gram drafts are accepted with any pair
ngram_trail   following a text through the changes that an answer makes to it
shared        the tokens that target and draft model share, where their vocabularies differ
"""

from localspec.engine.speculation.drafters import base as base
from localspec.engine.speculation.drafters import draft_model as draft_model
from localspec.engine.speculation.drafters import mtp as mtp
from localspec.engine.speculation.drafters import ngram as ngram
