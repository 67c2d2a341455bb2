"""What crosses a process boundary: HTTP bodies and daemon ↔ worker frames. Imports nothing of ours."""
