"""What a model wrote, taken apart: thoughts, text and tool calls."""
