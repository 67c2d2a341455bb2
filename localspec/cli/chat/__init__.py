"""`localspec chat`: lines, commands and the conversation."""
