"""Models that other programs keep on this disk, and what they could be to each other."""
