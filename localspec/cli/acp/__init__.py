"""`localspec acp`: a chat for editors that support the Agent Client Protocol, on stdin and stdout.

agent.py  sessions and prompts; the only file that imports the protocol's library
"""
