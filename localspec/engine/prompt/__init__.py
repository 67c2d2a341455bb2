"""From a request as it was asked to tokens, in threads beside the step loop.

prepare         a request → TokenizedRequest: tokens, sampler, compiled grammar
preparers       the two threads that do so, whatever is loaded
infill          what stands around an editor's cursor → tokens
template        a chat → text, by the template in the model's own file; what that wants of messages
wordings        a conversation as a template can say it, so that nothing is lost
marks           what opens and closes thoughts, seen in what a template makes of some
special_tokens  which tokens are special, and a rendered prompt as tokens: only the template's are
provenance      which characters of a prompt the template wrote, found while it is rendered
spellings       a search for many texts at once
template_child  the process that runs the template, and is ended where that takes too long

May import `pair`, `cache`, `sampling`, `speculation.drafters`, `llama` and the sequence.
"""
