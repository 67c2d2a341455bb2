"""`localspec acp`: a chat for editors that speak the Agent Client Protocol, on stdin and stdout.

agent.py  sessions and prompts; the only file that imports the protocol's library
"""
