"""The environment variables that processes of ours get.

The daemon has the environment of the shell or the service that started it: logins, keys, the passwords of
proxies. A worker reads files that somebody downloaded, a template's process runs what stands in them, and a
grammar's compiles what a client sends, so each gets by name what it needs, and nothing else.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

# What Python needs to find the same packages, and text and time to have the same form.
_HELPER = {
    *("HOME", "LANG", "LANGUAGE", "TZ", "TZDIR"),
    *("LC_ALL", "LC_COLLATE", "LC_CTYPE", "LC_MESSAGES", "LC_MONETARY", "LC_NUMERIC", "LC_TIME"),
    *("PYTHONHOME", "PYTHONPATH", "PYTHONPLATLIBDIR", "PYTHONUSERBASE", "PYTHONNOUSERSITE"),
    *("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX", "PYTHONSAFEPATH"),
    *("PYTHONCOERCECLOCALE", "PYTHONIOENCODING", "PYTHONUTF8"),
    *("VIRTUAL_ENV", "__PYVENV_LAUNCHER__"),
    *("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "DYLD_FALLBACK_LIBRARY_PATH"),
    *("COVERAGE_FILE", "COVERAGE_PROCESS_START", "COVERAGE_PROCESS_CONFIG"),
}
# What places, memory and the loader need besides.
_ENGINE = _HELPER | {
    *("PATH", "USER", "LOGNAME", "TMPDIR", "TEMP", "TMP", "LOCALSPEC_HOME"),
    *("XDG_CACHE_HOME", "XDG_CONFIG_DIRS", "XDG_CONFIG_HOME", "XDG_DATA_DIRS", "XDG_DATA_HOME"),
    *("XDG_RUNTIME_DIR", "XDG_STATE_HOME"),
    *("GLIBC_TUNABLES", "LD_PRELOAD", "DYLD_INSERT_LIBRARIES", "DYLD_FRAMEWORK_PATH"),
    *("PYTHONDEVMODE", "PYTHONFAULTHANDLER", "PYTHONHASHSEED", "PYTHONMALLOC", "PYTHONWARNINGS"),
    *("ASAN_OPTIONS", "LSAN_OPTIONS", "TSAN_OPTIONS", "UBSAN_OPTIONS"),
}
# Drivers of devices, libraries of threads and of arithmetic, and llama.cpp itself have many.
_ENGINE_PREFIXES = (
    *("GGML_", "LLAMA_"),
    *("GOMP_", "KMP_", "OMP_", "BLIS_", "MKL_", "OPENBLAS_", "VECLIB_", "GOTO_", "MALLOC_"),
    *("CUDA_", "CUBLAS_", "NVIDIA_", "GPU_", "AMD_", "HIP_", "HSA_", "ROCBLAS_", "ROCM_", "ROCR_"),
    *("VK_", "MESA_", "RADV_", "MTL_", "METAL_", "ONEAPI_", "SYCL_", "UR_", "ZE_"),
)
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH|LOGIN|COOKIE", re.IGNORECASE)
HUGE_PAGES = "glibc.malloc.hugetlb=1"  # a tunable of glibc


def engine_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables of `environ` that a worker needs.

    Weights are put into huge pages where glibc and the kernel can, unless the user has said how. A pass reads
    them all, and looking up where each of the small pages lies is a tenth of its time.
    """
    environment = {
        name: value
        for name, value in environ.items()
        if name in _ENGINE or (name.startswith(_ENGINE_PREFIXES) and not _SECRET.search(name))
    }
    tunables = environ.get("GLIBC_TUNABLES", "")
    if "glibc.malloc.hugetlb" not in tunables:
        environment["GLIBC_TUNABLES"] = f"{tunables}:{HUGE_PAGES}" if tunables else HUGE_PAGES
    return environment


def helper_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return what a process needs that renders a chat template or compiles a grammar."""
    return {name: value for name, value in environ.items() if name in _HELPER}
