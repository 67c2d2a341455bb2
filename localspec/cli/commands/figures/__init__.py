"""The commands that measure or sum up, in files of the same names.

stats  tokens, speed and time saved over days
bench  plain decoding compared with speculation, for several kinds of work
"""
