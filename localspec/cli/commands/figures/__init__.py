"""The commands that measure or add up, each in the file of its name.

stats  tokens, speed and time saved over days
bench  plain decoding beside speculation, on work of different kinds
"""
