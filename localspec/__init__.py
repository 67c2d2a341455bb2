"""localspec: a local assistant that decodes speculatively and says what it did."""

__version__ = "0.2.0"

# Bumped when client and daemon of different releases can no longer talk to each other.
API_VERSION = 1
