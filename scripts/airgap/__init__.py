"""What scripts/bundle is made of: one archive that sets localspec up on a machine with no network."""
