"""Ollama's API as translations: its requests into ours, answers and pairs into its.

request: what is asked, as the chat or the completion that we have
answer: what is written, as lines of its stream or one object
models: pairs as its models
"""
