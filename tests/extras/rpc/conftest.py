"""The tests of RPC load pairs in this process, as the engine's do."""

from tests.support.engines import contextual_files as contextual_files
from tests.support.engines import cycle_files as cycle_files
from tests.support.engines import models as models
