"""The engine worker: its process, what it holds, who may use it, how it ends."""
