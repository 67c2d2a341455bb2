"""Translate Ollama's API: its requests into localspec's, answers and pairs into its formats.

request: turns its requests into a chat or a completion
answer: formats answers as lines of a stream or as one object
models: formats pairs as its models
"""
