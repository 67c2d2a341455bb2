"""Conversations that clients asked to keep."""
