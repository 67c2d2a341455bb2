"""Handle endpoints of protocols that other clients speak, one module per protocol.

Each module translates its requests into localspec's own and the answers back.

messages: Anthropic's Messages
responses: OpenAI's Responses
ollama: Ollama's API
"""
