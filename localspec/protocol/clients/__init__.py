"""What clients of other protocols than OpenAI's and llama-server's send and get, one file a protocol.

anthropic: Messages
ollama: chats, texts and models
responses: OpenAI's Responses, in a room of its own
"""
