"""The engine's tests share loaded pairs."""

from tests.support.engines import contextual as contextual
from tests.support.engines import contextual_files as contextual_files
from tests.support.engines import cycle as cycle
from tests.support.engines import cycle_files as cycle_files
from tests.support.engines import load as load
from tests.support.engines import log_lines as log_lines
from tests.support.engines import models as models
