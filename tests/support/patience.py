"""How long tests wait for what only a bug keeps from happening."""

from __future__ import annotations

# Seconds. Nothing here usually takes more than a tenth of it, so that a test fails because of a bug and never
# because other programs keep the machine busy. Below the time limit of a test in pyproject.toml, so that what
# did not happen is named.
PATIENCE = 300.0
