"""From tokens to the text that is shown."""
