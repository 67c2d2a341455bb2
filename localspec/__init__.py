"""localspec: a local assistant that uses speculative decoding and reports what it did."""

__version__ = "0.2.0"

# Incremented when a client and a daemon of different releases can no longer talk to each other.
API_VERSION = 1
