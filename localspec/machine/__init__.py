"""Detection of this machine's hardware, and of the best way to build llama.cpp for it.

`scripts/setup` uses this package before anything is installed, so it needs the standard library alone.
`localspec doctor` uses it afterwards.
"""

from localspec.machine.build import BUILD_VARIABLES as BUILD_VARIABLES
from localspec.machine.build import CHECKOUT as CHECKOUT
from localspec.machine.build import Backend as Backend
from localspec.machine.build import Plan as Plan
from localspec.machine.build import Reason as Reason
from localspec.machine.build import build_jobs as build_jobs
from localspec.machine.build import installed_backend as installed_backend
from localspec.machine.build import plan_build as plan_build
from localspec.machine.build import rebuild as rebuild
from localspec.machine.build import wheel_key as wheel_key
from localspec.machine.gpu import cuda_toolkit as cuda_toolkit
from localspec.machine.gpu import driver_cuda as driver_cuda
from localspec.machine.gpu import hidden as hidden
from localspec.machine.gpu import nvidia_gpus as nvidia_gpus
from localspec.machine.gpu import nvidia_memory as nvidia_memory
from localspec.machine.gpu import runs_on as runs_on
from localspec.machine.host import AMX_PROBE as AMX_PROBE
from localspec.machine.host import NO_AMX as NO_AMX
from localspec.machine.host import Compiler as Compiler
from localspec.machine.host import Host as Host
from localspec.machine.host import Ran as Ran
from localspec.machine.host import available_bytes as available_bytes
from localspec.machine.host import compiler as compiler
from localspec.machine.host import cpu as cpu
from localspec.machine.host import install_hint as install_hint
from localspec.machine.host import memory_bytes as memory_bytes
from localspec.machine.host import read_text as read_text
from localspec.machine.host import run_command as run_command
