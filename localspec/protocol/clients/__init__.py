"""Requests and responses of other protocols than OpenAI's and llama-server's, one file per protocol.

anthropic.py   Messages
ollama.py      chats, texts and models
responses/     OpenAI's Responses
"""
