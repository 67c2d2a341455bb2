"""Kinds of drafts: a second model, lookup in the text so far, tokens a grammar forces."""
