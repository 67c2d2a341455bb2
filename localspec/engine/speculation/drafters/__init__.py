"""Kinds of drafts, a file each; each registers itself when it is imported here.

base         what a kind is: offer, propose, observe, probe, close; and tokens that a grammar forces
draft_model  a second model, which keeps its own KV cache of what it proposed
block        a sidecar that reads layers of the target and drafts a block in one pass: DFlash, DSpark
eagle        a sidecar that reads layers of the target: EAGLE-3
mtp          the target's heads: with a KV cache of their own, or, in a file beside it, with the target's
ngram        what followed the last tokens when they occurred before
"""

from localspec.engine.speculation.drafters import base as base
from localspec.engine.speculation.drafters import block as block
from localspec.engine.speculation.drafters import draft_model as draft_model
from localspec.engine.speculation.drafters import eagle as eagle
from localspec.engine.speculation.drafters import mtp as mtp
from localspec.engine.speculation.drafters import ngram as ngram
