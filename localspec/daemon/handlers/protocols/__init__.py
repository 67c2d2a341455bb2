"""Endpoints of protocols that other clients speak, one module per protocol; each translates to
the one request there is, and back.

messages: Anthropic's
"""
