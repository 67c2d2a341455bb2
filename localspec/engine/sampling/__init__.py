"""From logits to a sampled token."""
