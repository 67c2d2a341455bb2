"""Detection of this machine's hardware, and of the best way to build llama.cpp for it.

`scripts/setup` uses this package before anything is installed, so it needs the standard library alone.
`localspec doctor` uses it afterwards.
"""

from localspec.machine.build import BUILD_VARIABLES as BUILD_VARIABLES
from localspec.machine.build import CHECKOUT as CHECKOUT
from localspec.machine.build import Backend as Backend
from localspec.machine.build import BuildPlan as BuildPlan
from localspec.machine.build import BuildReason as BuildReason
from localspec.machine.build import build_jobs as build_jobs
from localspec.machine.build import installed_backend as installed_backend
from localspec.machine.build import plan_build as plan_build
from localspec.machine.build import rebuild_command as rebuild_command
from localspec.machine.build import wheel_key as wheel_key
from localspec.machine.gpu import architectures_run_on as architectures_run_on
from localspec.machine.gpu import driver_cuda_version as driver_cuda_version
from localspec.machine.gpu import find_cuda_toolkit as find_cuda_toolkit
from localspec.machine.gpu import gpus_are_hidden as gpus_are_hidden
from localspec.machine.gpu import nvidia_gpus as nvidia_gpus
from localspec.machine.gpu import nvidia_memory as nvidia_memory
from localspec.machine.host import AMX_PROBE as AMX_PROBE
from localspec.machine.host import NO_AMX as NO_AMX
from localspec.machine.host import CommandResult as CommandResult
from localspec.machine.host import Compiler as Compiler
from localspec.machine.host import Host as Host
from localspec.machine.host import available_bytes as available_bytes
from localspec.machine.host import detect_cpu as detect_cpu
from localspec.machine.host import find_compiler as find_compiler
from localspec.machine.host import install_hint as install_hint
from localspec.machine.host import is_on_battery as is_on_battery
from localspec.machine.host import memory_bytes as memory_bytes
from localspec.machine.host import read_text as read_text
from localspec.machine.host import run_command as run_command
