"""All that is drawn on a terminal."""
