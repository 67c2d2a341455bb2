"""From a row of logits to the next token, in llama.cpp's order and meaning.

settings      how a request is sampled: asked, over the model's file, over llama.cpp's defaults
sampler       one request's sampler: penalties, then a distribution, then a draw; log-probabilities
penalties     what makes repeats less likely, DRY among them
distribution  top-k, typical, top-p, min-p, temperature: candidates; draws that know no order
infill        llama.cpp's infill sampler: where a completion in the middle of a text ends
grammars/     the language of an answer: structured output, tool calls, forced tokens
guide         what says beside the logits which tokens may come: grammars, and
thoughts      the end of thoughts that may have only so many tokens
minimum       no end before an answer has so many tokens

May import `llama`, and nothing else of the engine.
"""
