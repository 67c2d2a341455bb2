"""The environment variables that localspec's own processes get, and their limits on memory and text.

The daemon has the environment of the shell or service that started it, with logins, keys and proxy
passwords. A worker reads downloaded files, a template process runs downloaded templates, and a grammar
process compiles what a client sends. So each of them gets a list of named variables and nothing else.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from pathlib import Path

# Python needs these to find the same packages and to format text and times in the same way.
_HELPER_VARIABLES = {
    *("HOME", "LANG", "LANGUAGE", "TZ", "TZDIR"),
    *("LC_ALL", "LC_COLLATE", "LC_CTYPE", "LC_MESSAGES", "LC_MONETARY", "LC_NUMERIC", "LC_TIME"),
    *("PYTHONHOME", "PYTHONPATH", "PYTHONPLATLIBDIR", "PYTHONUSERBASE", "PYTHONNOUSERSITE"),
    *("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX", "PYTHONSAFEPATH"),
    *("PYTHONCOERCECLOCALE", "PYTHONIOENCODING", "PYTHONUTF8"),
    *("VIRTUAL_ENV", "__PYVENV_LAUNCHER__"),
    *("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "DYLD_FALLBACK_LIBRARY_PATH"),
    *("COVERAGE_FILE", "COVERAGE_PROCESS_START", "COVERAGE_PROCESS_CONFIG"),
}
# The engine also needs these, for its folders, its memory and the dynamic loader.
_ENGINE_VARIABLES = _HELPER_VARIABLES | {
    *("PATH", "USER", "LOGNAME", "TMPDIR", "TEMP", "TMP", "LOCALSPEC_HOME"),
    *("XDG_CACHE_HOME", "XDG_CONFIG_DIRS", "XDG_CONFIG_HOME", "XDG_DATA_DIRS", "XDG_DATA_HOME"),
    *("XDG_RUNTIME_DIR", "XDG_STATE_HOME"),
    *("GLIBC_TUNABLES", "LD_PRELOAD", "DYLD_INSERT_LIBRARIES", "DYLD_FRAMEWORK_PATH"),
    *("PYTHONDEVMODE", "PYTHONFAULTHANDLER", "PYTHONHASHSEED", "PYTHONMALLOC", "PYTHONWARNINGS"),
    *("ASAN_OPTIONS", "LSAN_OPTIONS", "TSAN_OPTIONS", "UBSAN_OPTIONS"),
}
# Device drivers, thread and arithmetic libraries and llama.cpp read too many variables to list.
_ENGINE_PREFIXES = (
    *("GGML_", "LLAMA_"),
    *("GOMP_", "KMP_", "OMP_", "BLIS_", "MKL_", "OPENBLAS_", "VECLIB_", "GOTO_", "MALLOC_"),
    *("CUDA_", "CUBLAS_", "NVIDIA_", "GPU_", "AMD_", "HIP_", "HSA_", "ROCBLAS_", "ROCM_", "ROCR_"),
    *("VK_", "MESA_", "RADV_", "MTL_", "METAL_", "ONEAPI_", "SYCL_", "UR_", "ZE_"),
)
_SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH|LOGIN|COOKIE", re.IGNORECASE)
MAX_TEXT_CHARS = 8 << 20  # of a rendered prompt, and so of what files put into one
HUGE_PAGES = "glibc.malloc.hugetlb=1"  # a value of GLIBC_TUNABLES


def engine_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables of `environ` that a worker needs.

    The weights are placed in huge pages where glibc and the kernel support it, unless the user has set that
    tunable. A pass reads all weights, and with small pages address translation takes a tenth of its time.
    """
    environment = {
        name: value
        for name, value in environ.items()
        if name in _ENGINE_VARIABLES
        or (name.startswith(_ENGINE_PREFIXES) and not _SECRET_NAME.search(name))
    }
    tunables = environ.get("GLIBC_TUNABLES", "")
    if "glibc.malloc.hugetlb" not in tunables:
        environment["GLIBC_TUNABLES"] = f"{tunables}:{HUGE_PAGES}" if tunables else HUGE_PAGES
    return environment


def helper_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables that a process needs to render a chat template or compile a grammar."""
    return {name: value for name, value in environ.items() if name in _HELPER_VARIABLES}


def limit_memory(n_bytes: int) -> None:
    """Limit this process's address space to `n_bytes` more than it has now."""
    import resource

    try:
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[0]
        used = int(pages) * resource.getpagesize()
    except OSError:  # Not Linux: the limit then includes the memory used so far.
        used = 0
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = used + n_bytes if hard == resource.RLIM_INFINITY else min(used + n_bytes, hard)
    # macOS refuses the limit. The parent's time limit still applies.
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
