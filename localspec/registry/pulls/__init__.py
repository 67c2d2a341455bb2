"""Pulls: what is wanted, decided, under way and unfinished."""
